"""Training: memory at the moments of a step, seconds of the step, and the report of a plan."""

from shardwise.training._case import TrainingCase, stages_of
from shardwise.training._changes import Change
from shardwise.training._comm import CommReport, comm
from shardwise.training._evaluate import Evaluation, evaluate
from shardwise.training._intervals import conditions
from shardwise.training._report import Options, TrainReport, Verdict, train
from shardwise.training._savers import Saver
from shardwise.training._sizes import PlanSizes, sizes_of, sizes_of_columns

__all__ = [
    "Change",
    "CommReport",
    "Evaluation",
    "Options",
    "PlanSizes",
    "Saver",
    "TrainReport",
    "TrainingCase",
    "Verdict",
    "comm",
    "conditions",
    "evaluate",
    "sizes_of",
    "sizes_of_columns",
    "stages_of",
    "train",
]
