"""Search: every legal plan of a space evaluated, the best ranked, and the reasons for the others."""

from shardwise.search._executor import Executor, ProcessExecutor, SerialExecutor
from shardwise.search._options import OBJECTIVES, SERVING_OBJECTIVES, TRAIN_LIMITS, SearchOptions
from shardwise.search._remedy import Remedy
from shardwise.search._result import Rejection, SearchResult
from shardwise.search._scaling import ScalingRow, doubling, scaled_result, scaled_rows, scaled_task, strong_scaling
from shardwise.search._sensitivity import RunnerUp, Sensitivity, runners_up
from shardwise.search._serving import ServingResult, plan_serving, tokens_per_second_per_gpu
from shardwise.search._serving_space import ServingSpace
from shardwise.search._space import SearchSpace, Wholes, part_of, upto
from shardwise.search._training import SearchTask, TrainingResult, plan_training, searched, work_of

__all__ = [
    "OBJECTIVES",
    "SERVING_OBJECTIVES",
    "TRAIN_LIMITS",
    "Executor",
    "ProcessExecutor",
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
    "TrainingResult",
    "Wholes",
    "doubling",
    "part_of",
    "plan_serving",
    "plan_training",
    "runners_up",
    "scaled_result",
    "scaled_rows",
    "scaled_task",
    "searched",
    "strong_scaling",
    "tokens_per_second_per_gpu",
    "upto",
    "work_of",
]
