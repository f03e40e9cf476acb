"""How a device cuts work: tiles of GEMMs, blocks of attention, and what kinds of kernels reach.

A CPU computes what a GPU hides behind memory: exponentials and roots cost as much as streaming, and attention runs
block by block, so that its rate depends on the length (constants: cost/cpu.toml).
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

from shardwise.cost._records import AttentionFit, Gemm, MemoryKernels
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, minimum
from shardwise.ledger.op import Op
from shardwise.records import dataclass

# The tiles of cuBLAS and CUTLASS GEMMs (rows, columns); the thin ones stand for split and skinny kernels.
TILES = ((16, 64), (32, 128), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128))
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a device cuts a GEMM into tiles that its cores share; no cores means that nothing is cut."""

    cores: int
    depth: float
    """Length of k that each tile loses to its prologue."""
    chain_flops: float = 0.0
    """FLOPs of the device in the time that a tile waits for the loads of one k."""
    vector_wait_share: float = 1.0
    """Share of that time that a GEMM of one row waits, where vectors have a kernel of their own."""
    split_flops: float = 0.0
    """FLOPs that it costs to join the parts of a GEMM that was cut along k."""
    join_flops: float = 0.0
    """The same for each element of the output and each part."""
    tiles: tuple[tuple[int, int, float], ...] = ()
    """Tiles to choose from: (rows, columns, FLOPs charged for one k of a wave of such tiles)."""

    def __str__(self) -> str:
        return "tiles"


def tiling_of(device: Device, dtype: str, row: Gemm, flops: float) -> Tiling:
    """Return how a device that reaches `flops` cuts GEMMs; nothing is cut where the cores are not known.

    A tile of a by b needs 2 a b FLOPs and a + b elements for each k, whose loads from the cache cost `balance` FLOPs a
    byte: the largest tile is charged what it computes, smaller ones more.
    """
    if row.whole:
        return Tiling(0, row.depth)
    if not device.knows("num_cores"):
        return Tiling(0, 0.0)
    cores = int(device.num_cores)
    loads = row.balance * ELEMENT_BYTES[dtype]
    rows, columns = TILES[-1]
    share = 1 / (1 + loads * (rows + columns) / (2 * rows * columns))
    tiles = tuple((a, b, cores * share * (2.0 * a * b + loads * (a + b))) for a, b in TILES)
    join = 2.0 * row.join_share / device.memory_bytes_per_second
    return Tiling(
        cores=cores,
        depth=row.depth,
        chain_flops=row.chain_seconds * flops,
        vector_wait_share=row.vector_wait_share,
        split_flops=row.split_seconds * flops,
        join_flops=join * flops,
        tiles=tiles,
    )


# Kernels of tables as accuracy/measuring names them -> (kind of operator, kernels that the ledger counts in it).
MEASURED_KERNELS = {
    "rms_norm": ("norm in steps", 6),
    "layer_norm": ("norm", 1),
    "swiglu": ("gated activation", 2),
    "gelu": ("activation", 1),
    "add": ("add", 1),
    "rotary": ("rotary", 4),
    "cross_entropy": ("loss", 5),
    "embedding": ("embedding", 1),
    "adamw_fused": ("adam", 1),
    "sgd_fused": ("sgd", 1),
    "copy_d2d": ("other", 1),
}


def kind_of(op: Op[X]) -> str:
    """Return what an operator that moves bytes does; norms written out in steps and gated activations apart.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> from shardwise.ops.head import final_norm
    >>> kind_of(final_norm(whole_layout(1, 64), Model.load("gpt2"))[0])
    'norm'
    """
    if op.role == "norm":
        return "norm" if op.kernels == 1 else "norm in steps"
    if op.role == "activation":
        return "activation" if op.kernels == 1 else "gated activation"
    if op.role == "rotary":
        return "rotary" if op.kernels == 1 else "rotary in steps"
    return _BY_ROLE.get(op.role, "other")


_BY_ROLE: dict[str, str] = {name: name for name in ("loss", "embedding", "add")}
_BY_ROLE |= {"dispatch": "permute", "combine": "permute", "steps": "eager", "scan": "scan"}


# What a norm written out in steps moves in kernels of two types or of broadcast operands: its casts (6 and 6 bytes an
# element of 16 bits), the products with the deviation of a row (8) and with the weight (4), of 36 bytes; the square and
# its mean are the rest. Source: transformers models/llama/modeling_llama.py LlamaRMSNorm.forward.
_NORM_CASTS = 24 / 36


@dataclass(frozen=True)
class BandwidthShares:
    """Shares of the streaming rate by kind of operator: (kind, forward, backward); one where a kind is not listed."""

    shares: tuple[tuple[str, float, float], ...] = ()

    @classmethod
    def stated(cls, memory: MemoryKernels, dtype: str) -> BandwidthShares:
        """Return the shares that a family states for a data type, and those of all types."""
        kinds = {**memory.kinds_by_type.get(dtype, {}), **memory.kinds}
        return cls(tuple((name, ahead, back) for name, (ahead, back) in kinds.items()))

    @cached_property
    def _pairs(self) -> dict[str, tuple[float, float]]:
        """The shares of (forward, backward) by kind."""
        return {name: (ahead, back) for name, ahead, back in self.shares}

    def rate(self, streaming: X, kind: str, backward: bool = False) -> X:
        """Return the bytes/s of a kind of operator in one pass, of those that plain streaming reaches."""
        return streaming * self.share(kind, backward) if self.shares else streaming

    def share(self, kind: str, backward: bool = False) -> float:
        """Return the share of a kind in one pass.

        >>> BandwidthShares((("add", 0.9, 0.8),)).share("add", backward=True), BandwidthShares().share("add")
        (0.8, 1.0)
        """
        pair = self._pairs.get(kind) or self._derived(kind)
        return pair[backward]

    def _derived(self, kind: str) -> tuple[float, float]:
        """Return the shares of a kind that no table has, by those of others."""
        plain = (1.0, 1.0)
        other, eager = self._pairs.get("other", plain), self._pairs.get("eager")
        if kind == "rotary in steps":
            # It casts, multiplies with broadcast cosines and writes halves of rows; tables of this kind measured those.
            return self._pairs.get("rotary") or eager or other
        if kind == "norm in steps" and eager is not None:
            return (1 / (_NORM_CASTS / eager[0] + 1 - _NORM_CASTS), 1 / (_NORM_CASTS / eager[1] + 1 - _NORM_CASTS))
        return other if kind in ("permute", "eager") else plain


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """How attention is cut: blocks of `keys` whole keys, and what packing them costs beside a row of queries.

    `forward_rows` and `backward_rows` are that cost in rows of a block. No keys means that nothing is cut. One query
    over a cache reaches `cached_compute` of the peak and `cached_memory` of the bandwidth, one after the other.
    """

    keys: float = 0.0
    forward_rows: float = 0.0
    backward_rows: float = 0.0
    cached_compute: float = 0.0
    cached_memory: float = 0.0
    cached_start_seconds: float = 0.0

    @classmethod
    def stated(cls, attention: AttentionFit) -> AttentionBlocks:
        """Return the blocks that a family's attention states, none where it has no such kernel."""
        return cls(attention.block_keys, *(getattr(attention, f.name) for f in fields(cls)[1:]))


def block_rows(keys: X) -> X:
    """Return the queries of a block: 256 from 768 tokens, 64 from 192, else 32.

    github.com/pytorch/pytorch v2.13 aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, flash_attention_kernel_impl.

    >>> block_rows(100), block_rows(512), block_rows(2048)
    (32, 64, 256)
    """
    return above(keys, 767, 256 + 0 * keys, above(keys, 191, 64 + 0 * keys, 32 + 0 * keys))


def blocked_flops(b: AttentionBlocks, flops: X, seen: tuple[X, X], backward: bool) -> X:
    """Return FLOPs that attention in blocks is charged: whole blocks of keys, and what each block of queries packs.

    `seen` is the keys of a sequence, S, and how many of them a query meets in the mean: (S + 1) / 2 where it sees all
    before it, so that whole blocks of b are (S + min(S, b)) / 2. A window leaves fewer, and a block wastes as many.

    >>> blocked_flops(AttentionBlocks(512, 0, 0), 1.0, (511, 256), False)
    1.99609375
    >>> blocked_flops(AttentionBlocks(513, 0, 0), 1.0, (4096, 128), False)
    3.0
    """
    if not b.keys:
        return flops
    keys, met = seen
    rows = b.backward_rows if backward else b.forward_rows
    return flops * (1 + (minimum(keys, b.keys) - 1) / (2 * met)) * (1 + rows / block_rows(keys))


def one_query_seconds(b: AttentionBlocks, flops: X, cache_bytes: X, peaks: tuple[X, X]) -> X:
    """Return seconds of one new query a sequence over a cache; `peaks` are FLOP/s and bytes/s of the device.

    >>> one_query_seconds(AttentionBlocks(512, 0, 0, 0.5, 0.5, 1.0), 2.0, 3.0, (4.0, 6.0))
    3.0
    """
    return flops / (b.cached_compute * peaks[0]) + cache_bytes / (b.cached_memory * peaks[1]) + b.cached_start_seconds
