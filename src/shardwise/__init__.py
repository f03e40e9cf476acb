"""Know before you launch: does a model fit, how fast does it train or serve, what does it cost, and why.

    import shardwise as sw

    model = sw.Model.load("llama-3.1-70b")
    cluster = sw.Cluster.parse("64xh100-sxm-80gb")
    report = sw.train(model, cluster, sw.Plan(tp=8, pp=4, dp=0), sw.Training(seq_len=8192, global_batch=128))
    report.fits, report.step_seconds, report.mfu

Names are loaded when they are first used, so that the import itself takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise._version import __version__

if TYPE_CHECKING:
    from shardwise.answers import Counting, CountReport, Energy, Roofline, count, energy, plot, plot_timeline, roofline
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
        plan_training,
        runners_up,
        strong_scaling,
    )
    from shardwise.serving import InferReport, ServingOptions, infer
    from shardwise.serving.load import LoadOptions, ServeReport, serve
    from shardwise.training import CommReport, TrainingOptions, TrainReport, comm, train
    from shardwise.user_catalogue import use_catalogue

_HOMES = {
    "Arrivals": "plans",
    "Cluster": "hardware",
    "CommReport": "training",
    "CountReport": "answers",
    "Counting": "answers",
    "Device": "hardware",
    "Efficiencies": "cost",
    "Energy": "answers",
    "Frame": "frames",
    "Imported": "formats",
    "InferReport": "serving",
    "InputError": "errors",
    "Length": "plans",
    "Limit": "plans",
    "LoadOptions": "serving.load",
    "Model": "models",
    "TrainingOptions": "training",
    "Plan": "plans",
    "Problem": "errors",
    "Roofline": "answers",
    "SearchOptions": "search",
    "SearchSpace": "search",
    "ServeReport": "serving.load",
    "Serving": "plans",
    "ServingOptions": "serving",
    "LoadResult": "search",
    "LoadSpace": "search",
    "ServingResult": "search",
    "ServingSpace": "search",
    "Settings": "plans",
    "Stack": "plans",
    "Tier": "hardware",
    "TrainReport": "training",
    "Training": "plans",
    "TrainingResult": "search",
    "IntRanges": "search",
    "Workload": "plans",
    "comm": "training",
    "count": "answers",
    "device_names": "hardware",
    "energy": "answers",
    "find_device": "hardware",
    "find_stack": "plans",
    "frame": "search",
    "from_megatron_args": "formats",
    "import_file": "formats",
    "infer": "serving",
    "load_device": "hardware",
    "load_model": "models",
    "model_names": "models",
    "plan_serve": "search",
    "plan_serving": "search",
    "plan_training": "search",
    "plot": "answers",
    "plot_timeline": "answers",
    "roofline": "answers",
    "runners_up": "search",
    "serve": "serving.load",
    "stack_names": "plans",
    "strong_scaling": "search",
    "train": "training",
    "use_catalogue": "user_catalogue",
}

__all__ = [
    "Arrivals",
    "Cluster",
    "CommReport",
    "CountReport",
    "Counting",
    "Device",
    "Efficiencies",
    "Energy",
    "Frame",
    "Imported",
    "InferReport",
    "InputError",
    "IntRanges",
    "Length",
    "Limit",
    "LoadOptions",
    "LoadResult",
    "LoadSpace",
    "Model",
    "Plan",
    "Problem",
    "Roofline",
    "SearchOptions",
    "SearchSpace",
    "ServeReport",
    "Serving",
    "ServingOptions",
    "ServingResult",
    "ServingSpace",
    "Settings",
    "Stack",
    "Tier",
    "TrainReport",
    "Training",
    "TrainingOptions",
    "TrainingResult",
    "Workload",
    "__version__",
    "comm",
    "count",
    "device_names",
    "energy",
    "find_device",
    "find_stack",
    "frame",
    "from_megatron_args",
    "import_file",
    "infer",
    "load_device",
    "load_model",
    "model_names",
    "plan_serve",
    "plan_serving",
    "plan_training",
    "plot",
    "plot_timeline",
    "roofline",
    "runners_up",
    "serve",
    "stack_names",
    "strong_scaling",
    "train",
    "use_catalogue",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
