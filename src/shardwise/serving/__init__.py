"""Inference: what a served batch takes of memory and time, and what its tokens cost."""

from shardwise.serving._batch import decode_steps, evaluate, prefill_steps, request_seconds
from shardwise.serving._capacity import Capacity, even_waves, held_tokens_of
from shardwise.serving._captured import decode_rows
from shardwise.serving._case import (
    ServingCase,
    ServingQuestion,
    complete,
    complete_plan,
)
from shardwise.serving._cost_model import EngineCostModel, engine_cost_model, op_seconds
from shardwise.serving._draft import draft_case, draft_ledger, draft_sizes, uses_heads
from shardwise.serving._engine import Engine, engine_names, find_engine, launched_engine
from shardwise.serving._formats import (
    WeightFormat,
    cache_bytes,
    cache_names,
    checkpoint_format,
    find_format,
    format_names,
)
from shardwise.serving._jobs import job_problems
from shardwise.serving._kernels import EngineKernels
from shardwise.serving._layout import TOGETHER, stages_together
from shardwise.serving._ledger import EngineStep, StepLedger, step_ledger
from shardwise.serving._memory import StageBytes
from shardwise.serving._options import ServingOptions
from shardwise.serving._policy import step_tokens_of
from shardwise.serving._releases import (
    STATED,
    engine_of_release,
    engine_on,
    not_taken,
    release,
    release_notes,
    release_table,
    released,
)
from shardwise.serving._report import InferReport, beside_cache_band, conditions_of, infer, time_tree
from shardwise.serving._routers import RouterKernel
from shardwise.serving._sizes import ServingSizes, sizes_of_columns, take_rows
from shardwise.serving._speculation import tokens_per_step, tokens_per_whole_step
from shardwise.serving._stated_cache import overstated, overstates
from shardwise.serving._step import StepCost
from shardwise.serving._unified import KeyTiles, UnifiedKernel
