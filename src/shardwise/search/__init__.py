"""Search: every legal plan of a space evaluated, the best ranked, and the reasons for the others."""

from shardwise.search._engine import Engine, Here, Processes
from shardwise.search._limits import TRAIN_LIMITS, Wish, plan_training, work_of
from shardwise.search._rank import OBJECTIVES
from shardwise.search._remedy import Remedy
from shardwise.search._search import Found, Rejection, part_of, searched
from shardwise.search._serve_found import ServingFound, plan_serving
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
    "Remedy",
    "ServingFound",
    "ServingSpace",
    "ServingWish",
    "Space",
    "Wholes",
    "Wish",
    "part_of",
    "plan_serving",
    "plan_training",
    "searched",
    "upto",
    "work_of",
]
