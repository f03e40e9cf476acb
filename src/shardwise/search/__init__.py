"""Search: every legal plan of a space evaluated, the best ranked, and the reasons for the others."""

from shardwise.search._engine import Engine, Here, Processes
from shardwise.search._limits import TRAIN_LIMITS, Wish, plan_training, work_of
from shardwise.search._rank import OBJECTIVES
from shardwise.search._remedies import Remedies
from shardwise.search._remedy import Remedy
from shardwise.search._rivals import Rival, Swap, rivals
from shardwise.search._scaling import ScalingRow, doubling, scaled_found, scaled_rows, scaled_work, strong_scaling
from shardwise.search._search import Found, Rejection, Work, part_of, searched
from shardwise.search._serve_found import ServingFound, plan_serving, tokens_per_second_per_gpu
from shardwise.search._serve_space import SERVING_OBJECTIVES, ServingSpace, ServingWish
from shardwise.search._space import Space, Wholes, upto

__all__ = [
    "OBJECTIVES",
    "SERVING_OBJECTIVES",
    "TRAIN_LIMITS",
    "Engine",
    "Found",
    "Here",
    "Processes",
    "Rejection",
    "Remedies",
    "Remedy",
    "Rival",
    "ScalingRow",
    "ServingFound",
    "ServingSpace",
    "ServingWish",
    "Space",
    "Swap",
    "Wholes",
    "Wish",
    "Work",
    "doubling",
    "part_of",
    "plan_serving",
    "plan_training",
    "rivals",
    "scaled_found",
    "scaled_rows",
    "scaled_work",
    "searched",
    "strong_scaling",
    "tokens_per_second_per_gpu",
    "upto",
    "work_of",
]
