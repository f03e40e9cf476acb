"""Training: memory at the moments of a step, seconds of the step, and the report of a plan.

The reports of messages and of the timeline are loaded when they are first asked for: no other answer needs them.
"""

from typing import TYPE_CHECKING

from shardwise._lazy import lazily
from shardwise.training._assumed import EQUAL_ROLLOUTS, ROLLOUTS_LEFT_OUT, stated
from shardwise.training._blocks import BlockCost, ColumnPrices, KnownPrices, checkpoints
from shardwise.training._case import TrainingCase, TrainingOptions, stages_of
from shardwise.training._changes import Change
from shardwise.training._communicators import outside_bytes
from shardwise.training._evaluate import (
    Evaluation,
    PricedBlocks,
    Tables,
    evaluate,
    hosted_of,
    machine_of,
    memory_of,
    paged_of,
    paging_seconds,
    peak_of,
    reserved_of,
    send_of,
    step_job,
    step_of,
    tables_apart,
)
from shardwise.training._framework_bytes import device_bytes, moved_pages, reserved_bytes, resident_pages
from shardwise.training._fsdp_units import padded
from shardwise.training._headlines import Generation, Phase, Verdict, with_values
from shardwise.training._ledger import PartLedger, ledger_of
from shardwise.training._overlap import paired_blocks
from shardwise.training._parts import MEMORY_CATEGORIES, ModelBlocks, SharedWeights, StageMemory, category_of
from shardwise.training._report import CATEGORIES, TrainReport, report_of, train
from shardwise.training._resolve import (
    Question,
    job_problems,
    placed_problems,
    question_problems,
    update_problems,
)
from shardwise.training._savers import MemorySaver, flags_of, leaner, split_changes
from shardwise.training._sizes import PlanSizes, sizes_of, sizes_of_columns
from shardwise.training._stages import Stages, stage_layers
from shardwise.training._step import (
    StageSeconds,
    axis_seconds,
    least_piped_seconds,
    piped_seconds,
    runs_of_seconds,
    slowest_stage,
    stage_seconds,
    update_seconds,
    weighted,
    with_update,
)
from shardwise.training._targets import split_targets
from shardwise.training._tuning import TuningSummary, fine_tuning_problems, tuning_summary
from shardwise.training._weights import FrozenWeights, ParameterCounts

if TYPE_CHECKING:
    from shardwise.training._comm import AxisMessages, CommReport, comm
    from shardwise.training._layer_tables import LayerRow, LayerTable
    from shardwise.training._lifetimes import MemoryBlock, levels, lifetimes
    from shardwise.training._timeline import Span, StepTimeline
    from shardwise.training._traffic import Flow, Message
    from shardwise.training._traffic_map import NodeTraffic

__getattr__ = lazily(
    __name__,
    {
        "_comm": "AxisMessages CommReport comm",
        "_layer_tables": "LayerRow LayerTable",
        "_lifetimes": "MemoryBlock levels lifetimes",
        "_timeline": "Span StepTimeline",
        "_traffic": "Flow Message",
        "_traffic_map": "NodeTraffic",
    },
)
