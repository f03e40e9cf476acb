"""Search: every legal plan of a space evaluated, the best ranked, and the reasons for the others."""

from shardwise.search._engine import Engine, Here, Processes
from shardwise.search._rank import OBJECTIVES
from shardwise.search._search import Found, Rejection, Wish, plan_training, searched, work_of
from shardwise.search._space import Space, Wholes, upto

__all__ = [
    "OBJECTIVES",
    "Engine",
    "Found",
    "Here",
    "Processes",
    "Rejection",
    "Space",
    "Wholes",
    "Wish",
    "plan_training",
    "searched",
    "upto",
    "work_of",
]
