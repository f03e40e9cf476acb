"""Records of the stored constants, which `_tables` reads: a key too many, and one too few, is an error there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeAlias

from shardwise.cost._shared import SharedConstants, WeightGradientRate
from shardwise.records import dataclass

ConstantChanges: TypeAlias = Mapping[str, Any]
"""Fields of a record that hold for a part of what it speaks of: an engine, a kernel, a type."""
Pair: TypeAlias = tuple[float, float]
PROMPT_PARTS = ("start", "visited", "exponentials", "pairs", "waves", "edges", "cache", "beyond_cache", "longest_tile",
                "longest_tile_exponentials", "masked", "tokens", "swapped")  # fmt: skip
"""Parts of attention of a prompt, as `prompt_parts` returns them."""
DECODE_PARTS = (
    "start", "cache", "edges", "products", "waves", "first_1k_tokens", "first_16k_tokens", "floor", "beyond_cache",
    "item_on_a_core", "unshared", "ungrouped", "swapped", "sequences")  # fmt: skip
"""Parts of attention over a cache, as `decode_parts` returns them."""
# A field of which each entry is `Changes` to the record that it stands in, and one that takes the keys left over.
PARTIAL, REST = {"partial": True}, {"rest": True}


def partial() -> Any:
    """Return a field whose entries each change some fields of the record that it stands in."""
    return field(default_factory=dict, metadata=PARTIAL)


def by_name() -> Any:
    """Return a field of values by a name, of a device for example; empty where none is stated."""
    return field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantise:
    """Quantising the input of a GEMM: its start, and the share of the bandwidth that it streams at."""

    start_seconds: float
    efficiency: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """GEMMs of one data type: shares of the datasheet's dense peak and bandwidth, seconds a kernel."""

    compute: float
    memory: float
    start_seconds: float
    sharpness: float
    depth: float
    """Length of k that each tile loses to its prologue."""
    balance: float
    """FLOPs that loading a byte from the cache costs a core."""
    split_seconds: float
    """Seconds to join the parts of a GEMM that was cut along k."""
    chain_seconds: float = 0.0
    """Seconds that a tile waits for the loads of one k."""
    join_share: float = 0.0
    """Passes over the memory for each part that is joined."""
    vector_wait_share: float = 1.0
    """Share of the waiting of a chain that a GEMM of one row keeps, where vectors have a kernel of their own."""
    ramp_seconds: float = 0.0
    """Seconds in which pipelines of loads fill and drain."""
    ramp_traffic: float = 1.0
    """Bytes at which half of `ramp_seconds` is lost."""
    write_share: float = 0.0
    """Share of the output's time in the memory that comes after the arithmetic."""
    burst_share: float = 0.0
    """By how much arithmetic is faster until power limits the clock."""
    burst_seconds: Any = 1.0
    """Seconds of arithmetic at which half of that is lost."""
    burst_left: float = 1.0
    """Share of `burst_share` that long replays lose."""
    unset_left: float = 1.0
    """`burst_left` of tables whose operands are zeros."""
    cached_share: float = 1.0
    """Time of an operand that the last cache holds over that of one from the memory."""
    unaligned: float = 1.0
    """Time of a GEMM with rows that start between multiples of 16 bytes over that of one whose rows do not."""
    steady_state_share: float = 1.0
    """What lasting runs keep of `compute` when power limits the clock, as a second laboratory measured it."""
    steady_state_by_device: Mapping[str, float] = by_name()
    steady_state_by_library: Mapping[str, float] = by_name()
    """`steady_state_share` under releases of the library other than the measured one, or of forward passes alone."""
    node_derate: float = 1.0
    """What a device keeps when all of its node are busy, where the others were measured on one alone."""
    node_derate_by_device: Mapping[str, float] = by_name()
    by_device: Mapping[str, float] = by_name()
    """What one device of the family reaches of the others."""
    memory_by_device: Mapping[str, float] = by_name()
    """The same of the memory."""
    start_by_device: Mapping[str, float] = by_name()
    watts_per_flops: float = 0.0
    """Watts over the 16-bit peak of the device that was measured."""
    persistent_blocks: float = 0.0
    """Blocks that a kernel starts once, one on a core, and that stay there; 0 of kernels with a block a tile."""
    whole: bool = False
    """Whether nothing is cut into tiles."""
    launches: Any = None
    """Replays of a table, before power limits the clock; None in lasting runs."""
    engines: Mapping[str, ConstantChanges] = partial()
    """What differs in engines with a library of their own."""
    quantise: Mapping[str, Quantise] = by_name()
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFit:
    """Attention of training: shares of the peak, and how a CPU cuts it into blocks."""

    forward: float
    backward: float
    start_seconds: float
    pair_dims: float = 0.0
    """Values of a head whose products cost as much as the exponential of a pair."""
    node_derate: float = 1.0
    node_derate_by_device: Mapping[str, float] = by_name()
    steady_state_by_device: Mapping[str, float] = by_name()
    block_keys: float = 0.0
    forward_rows: float = 0.0
    backward_rows: float = 0.0
    cached_compute: float = 0.0
    cached_memory: float = 0.0
    cached_start_seconds: float = 0.0
    kernels: Mapping[str, ConstantChanges] = partial()
    by_type: Mapping[str, ConstantChanges] = partial()
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedGemm:
    """Grouped GEMMs of experts in training: shares of the peak, gradients over forward, starts."""

    compute: float
    input_gradient: float
    weight_gradient: float
    start_seconds: float
    each_seconds: float = 0.0
    measured_on: str = ""
    in_turn: bool = False
    """Whether experts run one after the other."""
    kernels: Mapping[str, ConstantChanges] = partial()
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryKernels:
    """Kernels that only move bytes: the share of the bandwidth, starts, and what the last cache serves."""

    efficiency: float
    start_seconds: float
    replayed_start_seconds: float = 0.0
    """Start from a captured graph; 0 where it was not measured."""
    cached_bytes: float = 0.0
    cached_bytes_per_second_per_core: float = 0.0
    rows_per_second_per_core: float = 0.0
    """Rows that norms of PyTorch's own take on a core, a block of threads each (0: not measured)."""
    keeps_outputs: bool = False
    kinds: Mapping[str, Pair] = by_name()
    """Shares of the streaming rate by kind of operator: forward, backward."""
    kinds_by_type: Mapping[str, Mapping[str, Pair]] = by_name()
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveFit:
    """One collective of a kind of link: NCCL's protocols (`low_`, `long_`), tree, hops inside nodes, a lone rank."""

    efficiency: float
    start_seconds: float
    step_seconds: float
    half_bytes: float = 0.0
    own_share: float = 0.0
    crowding: float = 0.0
    low_efficiency: float = 0.0
    long_step_seconds: float = 0.0
    inner_step_share: float = 0.0
    inner_low_share: float = 0.0
    measured_efficiency: float = 0.0
    measured_on: str = ""
    lone_share: float = 1.0
    tree_step_seconds: float = 0.0
    tree_long_ratio: float = 0.0
    tree_rate_share: float = 1.0
    tree_chunk_bytes: float = 0.0
    tree_chunk_efficiency: float = 1.0
    copied_efficiency: float = 0.0
    copied_rank_seconds: float = 0.0
    queued_seconds: float = 0.0
    trees_efficiency: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceFit:
    """Constants of an engine's all-reduce: a kernel that reads all peers at once, and a ring at full rate.

    `direct` and `efficiency` are shares of the link's rate; `crowding` is that of devices on one host bridge.
    """

    start_seconds: float
    step_seconds: float
    direct: float
    ring_start_seconds: float
    ring_step_seconds: float
    efficiency: float
    half_bytes: float
    crowding: float = 0.0
    link: str = ""
    """The kind of link that was measured."""
    copy_efficiency: float = 1.0
    """Share of the bandwidth at which an eager call copies its tensor in and out."""
    host_seconds: float = 0.0
    """Seconds of the host for an eager call."""
    grace_host_seconds: float = 0.0
    """The same where the host is Grace; 0 where it was not measured."""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsFit:
    """Constants of the two fused GEMMs of experts."""

    memory: float
    compute: float
    start_seconds: float
    sharpness: float
    pad_rows: float
    """Rows by which those of an expert are padded in the mean."""
    empty_rows: float = 0.0
    """Rows that run beside those of tokens for each expert of the rank, whether it got a token or not."""
    expert_seconds: float
    """Seconds for each expert that got a token."""
    walk_seconds: float = 0.0
    """Seconds for each expert of the rank, whether it got a token or not."""
    mapped_seconds: float = 0.0
    """Seconds for each expert of a rank of several, which looks for its own among all."""
    chain_share: float = 1.0
    """Share of the time of one tile that ends the kernel."""
    row_traffic: float = 0.0
    """How often a row is moved beside the GEMMs: gathered, quantised, activated, added up."""
    others_traffic: float = 0.0
    """How often a row of other ranks' experts is."""
    tile_steps: tuple[float, ...] = ()
    """Tokens beyond which tiles have twice the rows, 16 at first."""
    tile_reads: float = 0.0
    """The share of an expert's weights that one more tile reads again."""
    rows: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """A compiled attention kernel: which of the costs of each part it takes, by its head size."""

    heads: Mapping[str, Mapping[str, int]]
    packs: str = "none"
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTable:
    """Attention kernels of a family: the costs of parts that they share, and the kernels by engine and type."""

    costs: Mapping[str, tuple[float, ...]]
    by_device: Mapping[str, float] = by_name()
    engines: Mapping[str, Mapping[str, AttentionKernel]] = field(default_factory=dict, metadata=REST)

    def __post_init__(self) -> None:
        """Refuse costs of parts that no kernel has."""
        if unknown := sorted(self.costs.keys() - {*PROMPT_PARTS, *DECODE_PARTS}):
            raise ValueError(f"{', '.join(unknown)}: no part of attention kernels")


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """How products of a device that was idle, or moved bytes, are faster until power limits its clock."""

    share: float
    """By how much products are faster than at the clock that lasts."""
    full_seconds: float
    """Seconds of work that run so."""
    gone_seconds: float
    """Seconds of work after which none is left of it; between both it falls in proportion."""
    recovery: float
    """Seconds of work that a second without any takes back."""
    devices: tuple[str, ...]
    """Devices of the family that were measured; others have none, since their watts leave their chip another clock."""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFamily:
    """Constants of one family of devices."""

    devices: tuple[str, ...] = ()
    extends: str = ""
    note: str = ""
    matmul: Mapping[str, Gemm]
    attention: AttentionFit
    grouped: GroupedGemm
    memory: MemoryKernels
    fast: Mapping[str, CollectiveFit]
    weight_gradient: WeightGradientRate | None = None
    all_reduce: Mapping[str, ReduceFit] = by_name()
    experts: Mapping[str, Mapping[str, Mapping[str, ExpertsFit]]] = by_name()
    """By engine, type of the weights and kernel."""
    matrix_rate_by_device: Mapping[str, float] = by_name()
    """FLOP/s of matrix units a core and clock over those of the devices that kernels were measured on."""
    matrix_best_share: float = 1.0
    """Share of their peak that slower matrix units reach where nothing else is waited for."""
    matrix_rate_source: str = ""
    burst: Burst | None = None
    prefill_kernels: AttentionTable | None = None
    decode_kernels: AttentionTable | None = None
    latent_prefill_kernels: AttentionTable | None = None
    latent_decode_kernels: AttentionTable | None = None

    def attention_table(self, kind: str) -> AttentionTable | None:
        """Return the attention kernels of a kind: prefill, decode, latent_prefill or latent_decode."""
        kernels: AttentionTable | None = getattr(self, f"{kind}_kernels")
        return kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Every stored constant: by family of devices, of networks by collective, and rules for all."""

    families: Mapping[str, DeviceFamily]
    network: Mapping[str, CollectiveFit]
    rules: SharedConstants
