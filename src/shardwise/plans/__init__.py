"""Plans (how a model is laid out over devices), jobs (what is asked), stacks (what runs it) and the laws of plans."""

from shardwise.plans._capabilities import Capabilities, alike
from shardwise.plans._dtypes import DTYPES, Widths
from shardwise.plans._jobs import Serving, Training, density_of
from shardwise.plans._optimizers import OPTIMIZERS, Moments, Optimizer, find_optimizer
from shardwise.plans._placement import (
    Whole,
    degrees,
    dense_spans,
    groups,
    named_groups,
    shard_of,
    spans,
    splits_replicas,
    with_groups,
)
from shardwise.plans._plan import (
    AXES,
    CONTEXT_KINDS,
    LAYOUTS,
    OFFLOADS,
    RECOMPUTES,
    SHARDINGS,
    Axis,
    ContextKind,
    LayoutKind,
    Plan,
    Recompute,
    Sharding,
)
from shardwise.plans._precision import Precision, find_precision, precision_names, precision_to_toml
from shardwise.plans._settings import LOSSES, LossKernel, Settings
from shardwise.plans._stack import Stack, default_stack, find_stack, stack_names
from shardwise.plans._values import divisors, one_of
from shardwise.plans._workload import METRICS, MOST_REQUESTS, QUANTILES, Arrivals, Length, Limit, Workload
from shardwise.plans.partition import PARTITIONS, Partition, listed, split_layers, with_stage_layers
from shardwise.plans.schedules import SCHEDULES, Schedule, ScheduleRules, find_rules, schedule_for

__all__ = [
    "AXES",
    "CONTEXT_KINDS",
    "DTYPES",
    "LAYOUTS",
    "LOSSES",
    "METRICS",
    "MOST_REQUESTS",
    "OFFLOADS",
    "OPTIMIZERS",
    "PARTITIONS",
    "QUANTILES",
    "RECOMPUTES",
    "SCHEDULES",
    "SHARDINGS",
    "Arrivals",
    "Axis",
    "Capabilities",
    "ContextKind",
    "LayoutKind",
    "Length",
    "Limit",
    "LossKernel",
    "Moments",
    "Optimizer",
    "Partition",
    "Plan",
    "Precision",
    "Recompute",
    "Schedule",
    "ScheduleRules",
    "Serving",
    "Settings",
    "Sharding",
    "Stack",
    "Training",
    "Whole",
    "Widths",
    "Workload",
    "alike",
    "default_stack",
    "degrees",
    "dense_spans",
    "density_of",
    "divisors",
    "find_optimizer",
    "find_precision",
    "find_rules",
    "find_stack",
    "groups",
    "listed",
    "named_groups",
    "one_of",
    "precision_names",
    "precision_to_toml",
    "schedule_for",
    "shard_of",
    "spans",
    "split_layers",
    "splits_replicas",
    "stack_names",
    "with_groups",
    "with_stage_layers",
]
