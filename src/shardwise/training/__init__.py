"""Training: memory at the moments of a step, seconds of the step, and the report of a plan.

The report of messages is loaded when it is first asked for: no other answer needs its tables.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.training._case import TrainingCase, stages_of
from shardwise.training._changes import Change
from shardwise.training._evaluate import Evaluation, evaluate
from shardwise.training._headlines import Verdict
from shardwise.training._report import TrainingOptions, TrainReport, train
from shardwise.training._savers import MemorySaver, leaner
from shardwise.training._sizes import PlanSizes, sizes_of, sizes_of_columns

if TYPE_CHECKING:
    from shardwise.training._comm import CommReport, comm


def __getattr__(name: str) -> Any:
    if name not in ("CommReport", "comm"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}._comm"), name)
