"""Know before you launch: does a model fit, how fast does it train or serve, what does it cost, and why.

    import shardwise as sw

    model = sw.Model.load("llama-3.1-70b")
    cluster = sw.Cluster.parse("64xh100-sxm-80gb")
    report = sw.train(model, cluster, sw.Plan(tp=8, pp=4, dp=0), sw.Training(seq_len=8192, global_batch=128))
    report.fits, report.step_seconds, report.mfu

Names are loaded when they are first used, so that the import itself takes milliseconds.
"""

from shardwise._lazy import lazily, provide
from shardwise._version import __version__

# As `typing` has it, which takes most of the time before a command can answer an interrupt.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from shardwise.answers import (
        Counting,
        CountReport,
        Energy,
        Roofline,
        count,
        energy,
        plan_training,
        plot,
        plot_timeline,
        roofline,
        train,
    )
    from shardwise.cost import Efficiencies
    from shardwise.errors import InputError, Problem
    from shardwise.formats import Imported, from_megatron_args, import_file
    from shardwise.frames import Frame
    from shardwise.hardware import Cluster, Device, Tier, device_names, find_device, load_device
    from shardwise.models import Model, load_model, model_names
    from shardwise.plans import (
        Arrivals,
        Length,
        Limit,
        Plan,
        Serving,
        Settings,
        Stack,
        Training,
        Workload,
        find_stack,
        stack_names,
    )
    from shardwise.search import (
        IntRanges,
        LoadResult,
        LoadSpace,
        SearchOptions,
        SearchSpace,
        ServingResult,
        ServingSpace,
        TrainingResult,
        frame,
        plan_serve,
        plan_serving,
        runners_up,
        strong_scaling,
    )
    from shardwise.serving import InferReport, ServingOptions, infer
    from shardwise.serving.load import LoadOptions, ServeReport, serve
    from shardwise.training import CommReport, TrainingOptions, TrainReport, comm
    from shardwise.user_catalogue import use_catalogue

__getattr__ = lazily(
    __name__,
    {
        "answers": "CountReport Counting Energy Roofline count energy plan_training plot plot_timeline roofline train",
        "cost": "Efficiencies",
        "errors": "InputError Problem",
        "formats": "Imported from_megatron_args import_file",
        "frames": "Frame",
        "hardware": "Cluster Device Tier device_names find_device load_device",
        "models": "Model load_model model_names",
        "plans": "Arrivals Length Limit Plan Serving Settings Stack Training Workload find_stack stack_names",
        "search": (
            "IntRanges LoadResult LoadSpace SearchOptions SearchSpace ServingResult ServingSpace "
            "TrainingResult frame plan_serve plan_serving runners_up strong_scaling"
        ),
        "serving": "InferReport ServingOptions infer",
        "serving.load": "LoadOptions ServeReport serve",
        "training": "CommReport TrainReport TrainingOptions comm",
        "user_catalogue": "use_catalogue",
    },
)

# What an answer's `to_dict` returns is made above the answer.
provide("values_of", "shardwise.answers")

__all__ = [
    "Arrivals", "Cluster", "CommReport", "CountReport", "Counting", "Device", "Efficiencies", "Energy", "Frame",
    "Imported", "InferReport", "InputError", "IntRanges", "Length", "Limit", "LoadOptions", "LoadResult", "LoadSpace",
    "Model", "Plan", "Problem", "Roofline", "SearchOptions", "SearchSpace", "ServeReport", "Serving",
    "ServingOptions", "ServingResult", "ServingSpace", "Settings", "Stack", "Tier", "TrainReport", "Training",
    "TrainingOptions", "TrainingResult", "Workload", "__version__", "comm", "count", "device_names", "energy",
    "find_device", "find_stack", "frame", "from_megatron_args", "import_file", "infer", "load_device", "load_model",
    "model_names", "plan_serve", "plan_serving", "plan_training", "plot", "plot_timeline", "roofline", "runners_up",
    "serve", "stack_names", "strong_scaling", "train", "use_catalogue",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
