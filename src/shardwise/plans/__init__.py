"""Plans (how a model is laid out over devices), jobs (what is asked), stacks (what runs it) and the laws of plans."""

from shardwise.plans._dtypes import DTYPES, Widths
from shardwise.plans._jobs import Serving, Training, density_of
from shardwise.plans._placement import degrees, groups, spans
from shardwise.plans._plan import (
    AXES,
    CONTEXT_KINDS,
    LAYOUTS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    Axis,
    ContextKind,
    LayoutKind,
    Plan,
    Recompute,
    Schedule,
    Sharding,
)
from shardwise.plans._precision import (
    OPTIMIZERS,
    Optimizer,
    Precision,
    find_optimizer,
    find_precision,
    precision_names,
    precision_to_toml,
)
from shardwise.plans._settings import Settings
from shardwise.plans._stack import Stack, default_stack, find_stack, stack_names

__all__ = [
    "AXES",
    "CONTEXT_KINDS",
    "DTYPES",
    "LAYOUTS",
    "OPTIMIZERS",
    "RECOMPUTES",
    "SCHEDULES",
    "SHARDINGS",
    "Axis",
    "ContextKind",
    "LayoutKind",
    "Optimizer",
    "Plan",
    "Precision",
    "Recompute",
    "Schedule",
    "Serving",
    "Settings",
    "Sharding",
    "Stack",
    "Training",
    "Widths",
    "default_stack",
    "degrees",
    "density_of",
    "find_optimizer",
    "find_precision",
    "find_stack",
    "groups",
    "precision_names",
    "precision_to_toml",
    "spans",
    "stack_names",
]
