"""Plans (how a model is laid out over devices), jobs (what is asked), stacks (what runs it) and the laws of plans."""

from shardwise.plans._attention import ATTENTION, attention_problems, with_attention
from shardwise.plans._bases import BaseFormat, base_names, find_base
from shardwise.plans._capabilities import DIVISORS, JOB_WORDS, SETTING_WORDS, Capabilities
from shardwise.plans._carried import carried
from shardwise.plans._experts import MLP_NAMES
from shardwise.plans._frameworks import (
    default_stack,
    filling,
    fine_tuners,
    patched,
    proposed_for,
    sharding_stack,
    vendor_stack,
)
from shardwise.plans._jobs import (
    OBJECTIVES,
    PHASES,
    REFERENCES,
    TUNINGS,
    Effort,
    Objective,
    Serving,
    Training,
    density_of,
    objective_named,
    objective_problems,
    reference_of,
)
from shardwise.plans._laws import divisors, one_of
from shardwise.plans._liger import fused_layers, with_loss_layers
from shardwise.plans._limits import Limit
from shardwise.plans._optimizers import OPTIMIZERS, PAGED_ELEMENTS, Moments, Optimizer, find_optimizer
from shardwise.plans._placement import (
    WholeNumbers,
    degrees,
    dense_group_shapes,
    expert_groups,
    group_shapes,
    groups,
    named_groups,
    shard_of,
    splits_replicas,
    with_groups,
)
from shardwise.plans._plan import (
    AXES,
    CONTEXT_KINDS,
    DEGREES,
    LAYOUTS,
    OFFLOADS,
    RECOMPUTES,
    SHARDINGS,
    STAGE_AXES,
    Axis,
    ContextKind,
    LayoutKind,
    Plan,
    Recompute,
    Sharding,
    ShardingRules,
    alike,
    distinct_shardings,
    find_sharding,
    in_groups,
)
from shardwise.plans._precision import (
    DTYPES,
    SCALINGS,
    NarrowScaling,
    Precision,
    Widths,
    find_precision,
    find_scaling,
    precision_names,
    precision_to_toml,
)
from shardwise.plans._settings import (
    CHECKPOINT_POLICIES,
    LOSSES,
    PIECED_LOSSES,
    UNSPLIT_LOSSES,
    WHOLE_LOSSES,
    WIDENED_LOSSES,
    CheckpointPolicy,
    LossKernel,
    Settings,
)
from shardwise.plans._stack import Dispatch, Stack, find_stack, stack_names
from shardwise.plans._tuned_types import trained_recipe
from shardwise.plans._tuning import (
    ADAPTERS,
    DROPPING,
    LORA,
    OFT_BLOCK,
    USUAL_TARGETS,
    VIRTUAL,
    Tuning,
    layers_of,
    rank_of,
    tuning_of,
    tuning_problems,
    usual_recompute,
)
from shardwise.plans._workload import (
    METRICS,
    MOST_REQUESTS,
    QUANTILES,
    Arrivals,
    Length,
    Metric,
    RequestClass,
    Workload,
)
from shardwise.plans.partition import (
    PARTITIONS,
    SHIFTS,
    PartitionRule,
    balanced_layers,
    listed,
    split_layers,
    with_stage_layers,
)
from shardwise.plans.schedules import SCHEDULES, Schedule, ScheduleRules, find_rules, schedule_for
