"""Search: every legal plan of a space evaluated, the best ranked, and the reasons for the others.

Names are loaded when they are first asked for: a search of training plans does not load what serves, nor the reverse.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.search._every_plan import frame
    from shardwise.search._executor import Executor, ProcessExecutor, RayExecutor, SerialExecutor
    from shardwise.search._load import LoadRemedy, LoadResult, load_remedies, plan_serve
    from shardwise.search._load_groups import FrontPoint, LoadSpace
    from shardwise.search._options import OBJECTIVES, SERVING_OBJECTIVES, TRAIN_LIMITS, SearchOptions
    from shardwise.search._result import PlanGroup, Rejection, Remedy, SearchResult, TiedPlan
    from shardwise.search._scaling import ScalingRow, doubling, scaled_result, scaled_rows, scaled_task, strong_scaling
    from shardwise.search._sensitivity import CONSTANTS, RunnerUp, Sensitivity, constant_band, runners_up, with_constant
    from shardwise.search._serving import ServingResult, plan_serving, tokens_per_second_per_gpu
    from shardwise.search._serving_space import ServingSpace
    from shardwise.search._space import IntRanges, SearchSpace, upto
    from shardwise.search._study import StudyFolder, StudyQuestion, StudyResult, StudyTask, run_study
    from shardwise.search._training import SearchTask, TrainingResult, plan_training, searched, work_of
    from shardwise.search._tuning import TuningRecipe, longest_sequence, tuning_recipes

_HOMES = {
    "CONSTANTS": "_sensitivity",
    "Executor": "_executor",
    "PlanGroup": "_result",
    "OBJECTIVES": "_options",
    "ProcessExecutor": "_executor",
    "StudyQuestion": "_study",
    "RayExecutor": "_executor",
    "Rejection": "_result",
    "Remedy": "_result",
    "RunnerUp": "_sensitivity",
    "SERVING_OBJECTIVES": "_options",
    "ScalingRow": "_scaling",
    "SearchOptions": "_options",
    "SearchResult": "_result",
    "SearchSpace": "_space",
    "SearchTask": "_training",
    "Sensitivity": "_sensitivity",
    "SerialExecutor": "_executor",
    "FrontPoint": "_load_groups",
    "LoadRemedy": "_load",
    "LoadResult": "_load",
    "LoadSpace": "_load_groups",
    "ServingResult": "_serving",
    "load_remedies": "_load",
    "plan_serve": "_load",
    "ServingSpace": "_serving_space",
    "StudyFolder": "_study",
    "StudyResult": "_study",
    "StudyTask": "_study",
    "TRAIN_LIMITS": "_options",
    "TiedPlan": "_result",
    "TrainingResult": "_training",
    "TuningRecipe": "_tuning",
    "IntRanges": "_space",
    "constant_band": "_sensitivity",
    "doubling": "_scaling",
    "longest_sequence": "_tuning",
    "frame": "_every_plan",
    "plan_serving": "_serving",
    "plan_training": "_training",
    "run_study": "_study",
    "runners_up": "_sensitivity",
    "scaled_result": "_scaling",
    "scaled_rows": "_scaling",
    "scaled_task": "_scaling",
    "searched": "_training",
    "strong_scaling": "_scaling",
    "tokens_per_second_per_gpu": "_serving",
    "tuning_recipes": "_tuning",
    "upto": "_space",
    "with_constant": "_sensitivity",
    "work_of": "_training",
}

__all__ = [
    "CONSTANTS",
    "OBJECTIVES",
    "SERVING_OBJECTIVES",
    "TRAIN_LIMITS",
    "Executor",
    "FrontPoint",
    "IntRanges",
    "LoadRemedy",
    "LoadResult",
    "LoadSpace",
    "PlanGroup",
    "ProcessExecutor",
    "RayExecutor",
    "Rejection",
    "Remedy",
    "RunnerUp",
    "ScalingRow",
    "SearchOptions",
    "SearchResult",
    "SearchSpace",
    "SearchTask",
    "Sensitivity",
    "SerialExecutor",
    "ServingResult",
    "ServingSpace",
    "StudyFolder",
    "StudyQuestion",
    "StudyResult",
    "StudyTask",
    "TiedPlan",
    "TrainingResult",
    "TuningRecipe",
    "constant_band",
    "doubling",
    "frame",
    "load_remedies",
    "longest_sequence",
    "plan_serve",
    "plan_serving",
    "plan_training",
    "run_study",
    "runners_up",
    "scaled_result",
    "scaled_rows",
    "scaled_task",
    "searched",
    "strong_scaling",
    "tokens_per_second_per_gpu",
    "tuning_recipes",
    "upto",
    "with_constant",
    "work_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
