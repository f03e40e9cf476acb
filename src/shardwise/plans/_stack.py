"""The framework that runs a plan: what its operators save, which buffers it holds, what it overlaps.

Two stacks with the same plan keep different bytes. Each stack is one table of `stacks.toml`, with the source of every
entry.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeAlias

from shardwise.errors import InputError, Problem
from shardwise.plans._settings import Settings

Kernel: TypeAlias = Literal["eager", "fused"]
NormKernel: TypeAlias = Literal["eager", "native", "widened", "fused"]
AttentionKernel: TypeAlias = Literal["eager", "flash", "scores"]
LossKernel: TypeAlias = Literal[
    "eager",
    "eager-shifted",
    "chunked",
    "compiled",
    "fused",
    "vocab-parallel",
    "vocab-parallel-copied",
    "vocab-parallel-compiled",
    "vocab-parallel-in-place",
    "vocab-parallel-narrow",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One framework in one version.

    `norm` "widened" is one kernel over fp32 copies of its rows. `loss` is a cross entropy of `ops.head.loss`.
    `attention` "scores" keeps the score matrix as unfused Megatron does, "eager" as transformers' eager path.
    `gradients` "persistent" is a contiguous buffer that lives through the step, "transient" are tensors freed by
    `zero_grad`. `vocab_parallel` splits the tables over tp. `optimizer_step` says which temporaries the update makes.
    `overlap_*` says what runs beside compute, `overlap_sends` under which schedules; `overlap_input_gradients` says
    whether what reduces an input gradient runs beside the weight gradient, `scattered_sends` splits a boundary message
    over the tensor-parallel ranks; `reduces_apart` all-reduces input gradients of q, k, v, gate and up one by one where
    a sequence is not split. `dispatch` "deduplicated" sends a token once to each node with one of its experts.
    `narrow_expert_seconds` is what the host takes to quantise the rows of one expert in fewer than 16 bits and to
    launch one product of it. `latent_fusion` turns queries and keys of latent attention and joins their parts in one
    kernel each. `layernorm_statistics_bytes` is the width of the mean and of the deviation that LayerNorm keeps for a
    row of 16-bit input. `attention_kernel` and `experts_kernel` are the fused kernels whose rates apply ("" the best of
    the device, and grouped products of libraries). `gather_copy_bytes` and `scatter_copy_bytes` are what gathering
    weights and scattering gradients moves in device memory, a parameter. `buffer_passes` is how often a step reads or
    writes the whole gradient buffer beside its products and its reduction, `update_copy_bytes` what an update moves a
    parameter of the shard beside the optimizer itself. `checkpoint_stops_early` ends recompute at the last saved
    tensor, `bias_gradients_apart` sums the gradient of a bias in a kernel of its own, `gradients_apart` makes the
    gradient of a weight before it is added to the buffer, `scatter_bytes` is the width in which sharded gradients are
    reduced (0: that of the gradients), `gather_bytes` that in which sharded weights are gathered (0: that of compute's
    input), `metric_logit_bytes` what metrics of training read and write a logit beside the loss. `reduces_whole` gives
    every replica the whole sum of the gradients though it updates a shard, `broadcasts_weights` sends new weights from
    each owner in turn, not by one gather. `blas_workspace` and `library_workspace` are the scratch of a cuBLAS handle,
    of which `blas_handles` exist, and of the library's own products, by family of devices ("other" for the rest), and
    `grouped_streams` run grouped products, each with its own. `expandable_segments` is an allocator that can lengthen
    its segments. `gradient_stand_ins` keeps an empty tensor in the place of each shape of weight gradient, where
    gradients are added up in the buffer, `keeps_gathered` the buffer of a gathered sequence. `micro_gradients` adds the
    16-bit gradients of a backward pass to wider ones when all are there, `gathers_tensors` gathers sharded weights one
    by one, not by layers. `widens_gradients` keeps 16-bit gradients in fp32 too from a step to the next.
    `pipeline_keeps_gathered` keeps sharded weights of a stage gathered and its gradients whole between micro-batches.
    `bucket_elements` is a bucket of gradients and one of weights where its user sets none. `apart_pools` allocates
    gathered weights and sharded gradients on streams of their own, whose memory others cannot use. `stage_buffers`
    makes the buffers of a stage's messages for every micro-batch of a step at once. `buffered_stages` holds so many
    micro-batches a stage of the pipeline before each stage but the last, whatever the schedule needs (0: that).
    `accumulates_whole` keeps gradients whole between micro-batches though they are sharded (FSDP.no_sync). `settings`
    are what its user set.
    """

    name: str
    title: str
    norm: NormKernel
    attention: AttentionKernel
    activation: Kernel
    loss: LossKernel
    experts: Literal["grouped-mm", "permuted"]
    dispatch: Literal["all-to-all", "deduplicated"]
    gradients: Literal["persistent", "transient"]
    optimizer_step: Literal["single", "foreach", "fused"]
    precision: str
    vocab_multiple: int
    vocab_parallel: bool
    dropout_mask_bytes: int
    layernorm_statistics_bytes: int
    merged_attention_copy: bool
    overlap_gradients: bool
    overlap_parameters: bool
    reduces_whole: bool
    broadcasts_weights: bool
    overlap_sends: tuple[str, ...]
    scattered_sends: bool
    reduces_apart: bool
    overlap_tensor: bool
    overlap_input_gradients: bool
    overlap_experts: Literal["never", "between nodes", "always"]
    eager_launch_seconds: float
    step_overhead_seconds: float
    narrow_expert_seconds: float
    latent_fusion: bool
    attention_kernel: str
    experts_kernel: str
    gather_copy_bytes: float
    scatter_copy_bytes: float
    buffer_passes: float
    update_copy_bytes: float
    checkpoint_stops_early: bool
    bias_gradients_apart: bool
    gradients_apart: bool
    scatter_bytes: float
    gather_bytes: float
    metric_logit_bytes: float
    context_bytes: float
    communicator_bytes: float
    reserved_over_allocated: float
    expandable_segments: bool
    blas_handles: int
    blas_workspace: tuple[tuple[str, float], ...]
    library_workspace: tuple[tuple[str, float], ...]
    grouped_streams: int
    gradient_stand_ins: bool
    keeps_gathered: bool
    micro_gradients: bool
    gathers_tensors: bool
    widens_gradients: bool
    pipeline_keeps_gathered: bool
    bucket_elements: float
    apart_pools: bool
    stage_buffers: bool
    buffered_stages: float
    accumulates_whole: bool
    sources: tuple[tuple[str, str], ...]
    settings: Settings = Settings()  # noqa: RUF009 (frozen)

    def workspace_bytes(self, family: str, grouped: bool = False) -> float:
        """Return the bytes of scratch that products, grouped ones too, hold for the whole run on a device of a family.

        >>> find_stack("megatron-2023").workspace_bytes("hopper") / 2**20
        64.0
        """
        blas, library = dict(self.blas_workspace), dict(self.library_workspace)
        one = self.settings.blas_workspace_bytes or blas.get(family, blas["other"])
        streams = 1 + (self.grouped_streams if grouped else 0)
        return self.blas_handles * one + streams * library.get(family, library["other"])


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("shardwise.plans").joinpath("stacks.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def stack_names() -> tuple[str, ...]:
    """Return the names of the stacks that are known.

    >>> "megatron" in stack_names()
    True
    """
    return tuple(_table())


def _extended(table: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the table of a stack with what it takes from the one it extends, sources too."""
    row = table[name]
    if "extends" not in row:
        return row
    base = _extended(table, row["extends"])
    return {**base, **row, "sources": {**base["sources"], **row["sources"]}}


def default_stack(sharding: str) -> str:
    """Return the framework a sharding is native to, for plans that name none.

    >>> default_stack("fsdp"), default_stack("zero3"), default_stack("distributed-optimizer")
    ('fsdp2', 'deepspeed', 'megatron')
    """
    return {"fsdp": "fsdp2", "hsdp": "fsdp2", "zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}.get(
        sharding, "megatron"
    )


@cache
def find_stack(name: str) -> Stack:
    """Return the named stack; raises `InputError` naming the known ones.

    >>> find_stack("transformers").norm
    'eager'
    """
    table = _table()
    if name not in table:
        raise InputError([Problem("stack", name, "is not a known framework", "use one of " + ", ".join(table))])
    row = _extended(table, name)
    values = {f.name: row[f.name] for f in fields(Stack) if f.name not in ("name", "sources", "settings")}
    values["overlap_sends"] = tuple(values["overlap_sends"])
    values |= {name: tuple(row[name].items()) for name in ("blas_workspace", "library_workspace")}
    return Stack(name=name, sources=tuple(row["sources"].items()), **values)
