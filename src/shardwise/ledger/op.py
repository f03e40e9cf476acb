"""The ledger's lines: an operator as one rank runs it, and what it says of weights, saved tensors and messages.

Letters of this project: B sequences, S tokens a sequence, T tokens, D hidden, F ffn, N query heads, K key-value
heads, H head dim, V vocabulary, L layers, E experts, k experts a token.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeAlias

from shardwise.ledger.number import X
from shardwise.records import dataclass

Verb: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send"]
GroupAxis: TypeAlias = Literal["tp", "tp2", "cp", "ep", "etp", "pp", "dp_cp", "edp"]
Gradient: TypeAlias = str
"""Whose gradient reads something: "input", "weight", "either", "later" (an operator of another block), or the name of a
tensor that must need one."""
Hiding: TypeAlias = Literal["exposed", "compute", "late", "ring", "panels", "copied", "sharded"]
OpKind: TypeAlias = Literal["matmul", "grouped", "attention", "memory", "scan", "none"]
WeightKind: TypeAlias = Literal["matrix", "vector", "embedding", "head"]
Module: TypeAlias = Literal["", "attention", "recurrent", "shared", "latent"]
"""The module of a layer that a weight belongs to, where formats tell it from others: a mixer that attends or one that
keeps a state, experts that all tokens pass, the maps into their latent and out of it."""
OpRole: TypeAlias = Literal[
    "embedding", "ngrams", "norm", "add", "head", "loss", "sampling",
    "qkv", "q_down", "q_up", "kv_down", "kv_up", "out",
    "rotary", "attention", "indexer", "scores", "softmax", "context", "cache_write",
    "up", "activation", "down", "feed_forward", "shared_gate", "router", "dispatch", "combine",
    "scan", "state", "steps", "other",
]  # fmt: skip
"""What an operator does, and so which of them a rule means; its name is for people.

"ngrams" are tables beside that of tokens, "up" and "down" GEMMs of a feed-forward or of its experts, "shared_gate" the
map to the one value that scales what shared experts give, "feed_forward" its other maps, "scores" and "context" the two
GEMMs of unfused attention, "scan" a recurrence over chunks in kernels of its own, "state" what moves the recurrent
state of each sequence that is served, "steps" element-wise kernels that run one by one whatever is fused.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight(Generic[X]):
    """Parameters of an operator: `elements` on this rank, `whole` in the model.

    `expert` weights follow the expert axes. `shape` is that of the tensor on this rank, () for a vector. `role` is that
    of the operator that multiplies by it, "embedding" of the table of token embeddings and "ngrams" of those beside it.
    `stored_bytes` are those of a frozen weight, in its own format, of which `apart_bytes` lie beside the tensor, so
    that nothing shards or moves them; those of an `adapter` have a type of their own. A `packed` one is stored in fewer
    than 16 bits.
    """

    name: str
    elements: X
    whole: X
    kind: WeightKind = "matrix"
    expert: bool = False
    trainable: bool = True
    shape: tuple[X | float, ...] = ()
    role: OpRole = "other"
    stored_bytes: X | float = 0
    apart_bytes: X | float = 0
    adapter: bool = False
    packed: bool = False
    module: Module = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor(Generic[X]):
    """A tensor that backward reads. The name is its identity in a block: what two operators keep is counted once.

    `born` is the region that produces it ("" for the input of the block), so a recomputed region keeps what it reads
    from outside and drops what is born within. `product` marks what the last GEMM of a feed-forward keeps.
    `read_for` says which gradient of the operator that keeps it reads it. A copy in fewer bits is `made_in` the region
    of the GEMM that made it, and `born` with what it was made of.
    """

    name: str
    size_bytes: X
    born: str
    product: bool = False
    read_for: Gradient = "either"
    fleeting: bool = False
    """Freed with its graph before the operator ends: autograd saves it, and nothing reads it in backward."""
    remade: bool = False
    """Made again in backward by the function that makes it, whatever recompute does: it exists there alone."""
    made_in: str = ""
    stream: bool = False
    """Has the type of the residual stream, which may be wider than what GEMMs take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective(Generic[X]):
    """A message pattern over the groups of an axis. `size_bytes` is the full (gathered) tensor; for `send` one message.

    `hides`: "compute" runs beside this operator's own compute, "late" beside its weight gradient alone, "ring" is one
    step behind each block of attention, "panels" is pipelined behind panels of a GEMM, "copied" too but by copy
    engines, "exposed" waits, "sharded" too, but is sent where weights are sharded alone. `count` repeats the message;
    of a ring, `blocks` are the blocks of attention of which one covers it, `count` and one more where it is None.
    `fanout` is set where copies of a token for one domain travel to it once: how many a token has, each of
    `copy_bytes`, with which `beside_bytes` go where a domain has all experts; `queued` copies pass through queues of
    messages on both sides. `shape` is that of the tensor, rows first. In backward it is sent for the gradient that it
    is `read_for`.
    """

    axis: GroupAxis
    verb: Verb
    size_bytes: X
    count: X | float = 1
    hides: Hiding = "exposed"
    blocks: X | None = None
    tensor: str = ""
    fanout: int = 0
    copy_bytes: X | float = 0
    beside_bytes: X | float = 0
    queued: bool = False
    shape: tuple[X | float, ...] = ()
    read_for: Gradient = "either"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op(Generic[X]):
    """One operator on one rank.

    `flops` and `forward_bytes` are of the forward pass; `backward_flops` and `backward_bytes` of the input gradient,
    and `weight_flops`, `weight_bytes` of the weight gradient (0 where there is none). `rows`, `columns`, `inner` are
    the m, n and k of a GEMM. `region` is a path such as "attention.core"; `reads` are the tensors it needs
    again when its region is recomputed; `kernels` how many launches an unfused implementation makes. `finish_bytes`
    is what kernels behind the weight gradient move: the sum of the gradient of a bias, the addition to a buffer.
    `parts` are the columns of the GEMMs that a joint one stands for, in their order. `host_seconds` is what the
    host needs to launch the kernels of one pass: they never take less. `vector_units` says that a GEMM runs without
    matrix units: its rows do not start at multiples of 16 bytes, or it is of fp32. `unaligned` is 1 where rows of a
    16-bit GEMM do not, on devices whose older kernels have matrix units, else 0. `apart` is how often kernels read
    or write the input gradient to add up those of `parts` that run as products of their own, 0 where one product
    stands for them. `takes` and `makes` are the names of the tensors that it reads and writes where `reads` and its
    own name do not say (`ledger.flow`); one that makes none works in place. `without` are the gradients that nothing
    asks for. `modules` are the linear layers, by the names that models give them, that it stands for, and `split` the
    side of them that tensor parallelism splits; ranks gather so many `gathered_parts` of the rows before the pass that
    takes whole ones, forward where outputs are split, backward where inputs are. `widened_bytes` are moved before a
    pass to make 16 bits of weights that are stored in fewer, beside which `decoding_flops` run on vector units.
    `row_blocks` are blocks of threads that a pass starts, one for each row of a norm, however short; 0 where kernels
    share them out otherwise. `context` are the tokens of a sequence, those that a window leaves out among them. `casts`
    are the passes of a narrow GEMM before which a kernel of its own casts what enters it. `late_bytes` are those that
    are held at once when what operators behind it alone keep is freed, `transient_bytes` whatever is kept.
    """

    name: str
    kind: OpKind
    region: str
    flops: X
    forward_bytes: X
    backward_flops: X
    backward_bytes: X
    weight_flops: X
    weight_bytes: X
    rows: X
    columns: X
    inner: X
    weights: tuple[Weight[X], ...] = ()
    reads: tuple[Tensor[X], ...] = ()
    saves: tuple[Tensor[X], ...] = ()
    forward: tuple[Collective[X], ...] = ()
    backward: tuple[Collective[X], ...] = ()
    kernels: float = 1
    takes: tuple[str, ...] = ()
    makes: tuple[str, ...] | None = None
    without: tuple[Gradient, ...] = ()
    casts: tuple[str, ...] = ("forward", "input")
    modules: tuple[str, ...] = ()
    split: Literal["", "inputs", "outputs"] = ""
    gathered_parts: X | float = 1
    widened_bytes: X | float = 0
    decoding_flops: X | float = 0
    dtype: str = ""
    transient_bytes: X | float = 0
    late_bytes: X | float = 0
    batch: X | float = 1
    context: X | float = 0
    model_flops: X | float = 0
    output_bytes: X | float = 0
    finish_bytes: X | float = 0
    shapes: tuple[tuple[str, tuple[X | float, ...]], ...] = ()
    parts: tuple[X, ...] = ()
    host_seconds: X | float = 0
    vector_units: bool = False
    unaligned: X | float = 0
    apart: int = 0
    row_blocks: X | float = 0
    role: OpRole = "other"

    @property
    def launches(self) -> float:
        """Kernels that one pass launches."""
        return 0.0 if self.kind == "none" else self.kernels * (len(self.parts) if self.apart else 1)


def within(path: str, region: str) -> bool:
    """Return whether a path lies in a region; the region "" is the whole block.

    >>> within("attention.core", "attention"), within("attention", "attention.core"), within("mlp", "")
    (True, False, True)
    """
    return region == "" or path == region or path.startswith(region + ".")
