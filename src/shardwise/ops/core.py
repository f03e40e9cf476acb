"""The core of softmax attention: who sees whom, fused and unfused kernels, and the messages of a split sequence.

Letters: B sequences, S new tokens a sequence, T tokens on the rank, N query and K key-value heads on the rank, H key
dim, Hv value dim. Sources: PaLM appendix B (arXiv:2204.02311) for FLOPs, arXiv:2205.14135 and arXiv:2307.08691 for
flash attention.
"""

from __future__ import annotations

from typing import Generic

from shardwise.ledger.number import X, above, ceil, divide, is_plain, maximum, minimum
from shardwise.ledger.op import Collective, GroupAxis, Op, Tensor
from shardwise.ops.layout import Layout, memory_op
from shardwise.records import dataclass, replace

CORE = "attention.core"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMask:
    """Which keys a query sees: itself and all before it, the last `window`, or those of its own `chunk`."""

    window: int = 0
    chunk: int = 0
    causal: bool = True

    @property
    def limit(self) -> int:
        """The most keys that a query sees, 0 where nothing limits them."""
        return self.window or self.chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCore(Generic[X]):
    """The sizes of one attention core on a rank; `repeats` is how many query heads of the model share a key-value head.

    `caps` marks scores that go through a tanh (Gemma 2), `sinks` a learnt score beside those of a row (gpt-oss). One
    head of keys may be a view for all (`viewed_keys`), a mask made though all is causal (`masked`), the softmax in the
    type of the scores (`narrow`).
    """

    heads: X
    kv_heads: X
    key_dim: int
    value_dim: int
    repeats: int = 1
    mask: AttentionMask = AttentionMask()
    caps: bool = False
    sinks: bool = False
    viewed_keys: bool = False
    masked: bool = False
    narrow: bool = False

    @property
    def dims(self) -> int:
        """Elements of one key and one value together."""
        return self.key_dim + self.value_dim


def pairs_of_first(n: X, mask: AttentionMask) -> X:
    """Return how many (query, key) pairs the first n queries of a sequence have in all.

    Causal n (n + 1) / 2; a window W stops growing at W; chunks of C start over every C tokens.

    >>> [pairs_of_first(4, mask) for mask in (AttentionMask(), AttentionMask(window=2), AttentionMask(chunk=3))]
    [10, 7, 7]
    """
    if mask.chunk:
        C = mask.chunk
        whole = whole_chunks(n, C)
        rest = n - C * whole
        return whole * (C * (C + 1) // 2) + divide(rest * (rest + 1), 2)
    grown = minimum(n, mask.window) if mask.window else n
    ramp: X = divide(grown * (grown + 1), 2)
    return ramp + (n - grown) * mask.window if mask.window else ramp


def whole_chunks(n: X, size: int) -> X:
    """Return how many whole chunks n tokens fill, for whole n.

    >>> whole_chunks(7, 3), whole_chunks(2, 3)
    (2, 0)
    """
    return ceil(divide(n - (size - 1), size))


def attended_pairs(y: Layout[X], mask: AttentionMask) -> X:
    """Return how many (query, key) pairs of one sequence are computed, over all context-parallel ranks.

    Coverage "masked" counts what the mask leaves of S queries behind `context` cached tokens; "full" the whole
    rectangle S * (S + context), as PyTorch's FLOP counter and PaLM appendix B do. Packed documents leave `density` of
    what the mask leaves.
    """
    S, past = y.work.S, y.work.context
    if y.work.coverage == "full":
        return S * (S + past)
    if not mask.causal:
        # A window reaches so far to both sides, and both count a token itself.
        pairs = 2 * pairs_of_first(S, mask) - S if mask.window else S * (S + past)
    else:
        pairs = pairs_of_first(S + past, mask) - pairs_of_first(past, mask)
    return pairs if y.work.density == 1 else pairs * y.work.density


def read_tokens(y: Layout[X], mask: AttentionMask) -> X:
    """Return how many tokens of keys and values the new tokens of one sequence read together.

    All that there are, or from the first key in the window or chunk of the first new token.

    >>> from shardwise.ops.count import whole_layout
    >>> read_tokens(whole_layout(1, 4), AttentionMask())
    4
    """
    S, past = y.work.S, y.work.context
    if mask.chunk:
        return S + past - mask.chunk * whole_chunks(past, mask.chunk)
    return minimum(S + past, S + (mask.window - 1)) if mask.window else S + past


def keys_together(y: Layout[X], mask: AttentionMask) -> X:
    """Return the tokens that a kernel cuts into blocks as one: those read of a sequence, of packed documents one's.

    Documents of n tokens each leave (n + 1) / (S + 1) of what the mask leaves.

    >>> from shardwise.ops.count import whole_layout
    >>> keys_together(whole_layout(1, 4), AttentionMask())
    4
    """
    tokens = read_tokens(y, mask)
    return tokens if y.work.density == 1 else tokens * y.work.density


def share(y: Layout[X]) -> X:
    """Return the tokens of one sequence on this rank over those of the whole sequence: 1 / cp where cp splits it.

    Context parallelism deals 2 * cp chunks in a zigzag, so that causal work is equal (Megatron-LM, context_parallel).

    >>> from shardwise.ops.count import whole_layout
    >>> share(whole_layout(1, 4))
    1
    """
    return divide(y.tokens, y.work.B * y.work.S)


def core_flops(y: Layout[X], core: AttentionCore[X]) -> X:
    """Return forward FLOPs of QK^T and PV on a rank: 2 (H + Hv) a head and pair.

    >>> from shardwise.ops.count import whole_layout
    >>> core_flops(whole_layout(1, 4), AttentionCore(heads=2, kv_heads=1, key_dim=8, value_dim=8))
    1024
    """
    pairs = y.work.B * attended_pairs(y, core.mask)
    return 2 * core.heads * core.dims * divide(pairs * y.tokens, y.work.B * y.work.S)


def cache_traffic(y: Layout[X], core: AttentionCore[X]) -> X:
    """Return bytes of keys and values that the core reads: those of new tokens in training, of the cache in serving."""
    if y.work.phase == "train":
        return y.a * y.tokens * core.kv_heads * core.dims
    return y.work.cache_bytes * core.kv_heads * core.dims * y.work.B * read_tokens(y, core.mask) * share(y)


def context_messages(
    y: Layout[X], core: AttentionCore[X]
) -> tuple[tuple[Collective[X], ...], tuple[Collective[X], ...]]:
    """Return the messages of a sequence split over ranks: forward, backward.

    Ring: cp - 1 steps of keys and values, twice that backward (arXiv:2310.01889). All-gather: of K and V, again
    backward, and a reduce-scatter of their gradients (arXiv:2407.21783 section 3.3.2). All-to-all: q, k, v in and the
    output out (arXiv:2309.14509). PyTorch gathers or rotates K and V beside a kernel a chunk, and rotates gradients in
    fp32. SUMMA's sequence axis gathers K and V.
    """
    heads = sent_heads(y, core)
    size = y.a * y.tokens * heads * core.dims
    at = (y.tokens, heads * core.dims)
    ahead, back = _gathered("tp2", size, y.degrees.tp2, at) if y.choices.layout == "summa" else ((), ())
    if merges_chunks(y):
        more, more_back = _rotated(y, size, at)
    elif y.choices.cp_kind == "all-gather":
        more, more_back = _gathered("cp", size, y.degrees.cp, at)
    elif y.choices.cp_kind == "ring":
        more, more_back = _ring(size, y.degrees.cp - 1, at)
    else:
        more = more_back = _exchanged(y, core)
    return (*ahead, *more), (*back, *more_back)


def _gathered(
    axis: GroupAxis, size: X, ranks: X, at: tuple[X, X]
) -> tuple[tuple[Collective[X], ...], tuple[Collective[X], ...]]:
    gather: Collective[X] = Collective(
        axis=axis, verb="all_gather", size_bytes=size * ranks, tensor="keys and values", shape=(at[0] * ranks, at[1])
    )
    return (gather,), (gather, replace(gather, verb="reduce_scatter", tensor="their gradients"))


def _ring(size: X, steps: X, at: tuple[X, X]) -> tuple[tuple[Collective[X], ...], tuple[Collective[X], ...]]:
    one: Collective[X] = Collective(
        axis="cp", verb="send", size_bytes=size, count=steps, hides="ring", tensor="keys and values", shape=at
    )
    both = (at[0], 2 * at[1])
    return (one,), (replace(one, size_bytes=2 * size, tensor="keys, values, gradients", shape=both),)


def merges_chunks(y: Layout[X]) -> bool:
    """Return whether attention over a split sequence is a kernel a chunk of keys, whose outputs are merged."""
    split = y.choices.cp_kind != "all-to-all" and not is_plain(y.degrees.cp, 1)
    return split and y.stack.merges_chunks and y.work.phase == "train"


def sent_heads(y: Layout[X], core: AttentionCore[X]) -> X:
    """Return the heads of keys and values that a split sequence sends: those of queries where they are repeated."""
    repeats = merges_chunks(y) and y.stack.repeats_kv
    return above(y.degrees.cp, 1, core.heads, core.kv_heads) if repeats else core.kv_heads


def _rotated(y: Layout[X], size: X, at: tuple[X, X]) -> tuple[tuple[Collective[X], ...], tuple[Collective[X], ...]]:
    """Return the messages of PyTorch's rings: keys and values beside the first chunk or step by step, in both passes.

    Gradients in fp32 follow the keys around, and a last step home that nothing covers. Source: torch
    distributed/tensor/experimental/_attention.py, _AllGatherRotater and _templated_ring_attention_backward.
    """
    cp = y.degrees.cp
    steps = cp - 1
    (one,), _ = _ring(size, steps, at)
    wide = replace(one, size_bytes=size * 4 / y.a, tensor="their gradients")
    gathers = y.choices.cp_kind == "all-gather"
    whole = replace(one, verb="all_gather", size_bytes=size * cp, count=1, blocks=cp, shape=(at[0] * cp, at[1]))
    keys = whole if gathers else one
    return (keys,), (keys, wide, replace(wide, count=minimum(steps, 1), hides="exposed"))


def exchanged_heads(y: Layout[X], core: AttentionCore[X]) -> X:
    """Return the heads of keys and values that an all-to-all sends: repeated until every rank gets one.

    DeepSpeed runtime/sequence_parallel/ulysses_sp.py kv_replication_factor; verl models/transformers/monkey_patch.py.
    """
    return maximum(core.kv_heads, y.degrees.cp)


def _exchanged(y: Layout[X], core: AttentionCore[X]) -> tuple[Collective[X], ...]:
    sides = (
        ("queries, keys, values", core.heads * core.key_dim + exchanged_heads(y, core) * core.dims),
        ("output", core.heads * core.value_dim),
    )
    return tuple(
        Collective(
            axis="cp", verb="all_to_all", size_bytes=y.a * y.tokens * width, tensor=tensor, shape=(y.tokens, width)
        )
        for tensor, width in sides
    )


def exchange_copies(y: Layout[X], core: AttentionCore[X]) -> tuple[Op[X], ...]:
    """Return the copies around an all-to-all of context parallelism: its heads are sorted by rank, its chunks in order.

    Each tensor is read and written on both sides of its message (TransformerEngine attention/dot_product_attention/
    context_parallel.py flash_attn_a2a_communicate; DeepSpeed sequence/layer.py single_all_to_all).
    """
    if y.choices.cp_kind != "all-to-all" or y.choices.layout == "summa" or y.work.phase != "train":
        return ()
    sent = y.a * y.tokens * (core.heads * (core.key_dim + core.value_dim) + exchanged_heads(y, core) * core.dims)
    moved, copies = (above(y.degrees.cp, 1, n + 0 * sent, 0 * sent) for n in (4 * sent, 8))
    return (memory_op(y, "exchange", CORE, (moved, moved), kernels=copies),)


def merged_outputs(y: Layout[X], core: AttentionCore[X]) -> tuple[Op[X], ...]:
    """Return what merges the outputs of the kernels of chunks, and adds up their gradients, in fp32 kernel by kernel.

    An output is widened once and narrowed once. For each further chunk: the next one is widened, subtracted from the
    last (12 bytes an element), scaled (8) and added (12). Keys and values are joined for every message (4 elements of
    16 bits). Gradients are zeroed, added up (8 and the kernel's own), those of keys into a half that is joined with the
    other again, and joined for every message (8). Source: torch distributed/tensor/experimental/_attention.py,
    _SDPAMerger, _partial_update; the rank with the most whole chunks decides.
    """
    if not merges_chunks(y) or y.choices.layout == "summa":
        return ()
    a, cp = y.a, y.degrees.cp
    more = cp - 1
    out, queries = (y.tokens * core.heads * width for width in (core.value_dim, core.key_dim))
    keys = y.tokens * sent_heads(y, core) * core.dims
    ahead = out * (2 * (a + 4) + more * (a + 4 + 32)) + keys * 2 * a * cp
    of_queries = 4 + (8 + a) * cp + 4 + a
    of_keys = 4 + (8 + a) + more * ((8 + a) / 2 + 8) + 8 * cp + 2 * a * more + 4 + a
    moved = (above(cp, 1, n, 0 * n) for n in (ahead, queries * of_queries + keys * of_keys))
    # Forward: 2 casts, 2 copies that join, 4 kernels of outputs, 4 of their normalisers; backward about as many.
    most = above(cp, 1, chunks_at_once(y, core), 0 * ahead)
    return (memory_op(y, "chunks", CORE, tuple(moved), kernels=12 * more, role="steps",  # type: ignore[arg-type]
                      late_bytes=most),)  # fmt: skip


def chunks_at_once(y: Layout[X], core: AttentionCore[X]) -> X:
    """Return the bytes that a ring of PyTorch holds at once beside what the kernel keeps.

    Forward: keys and values joined, those of all ranks where they are gathered, else the ones that arrive and the last;
    the merged output and a chunk's in fp32, its own, a product and the new one. Backward: the output's gradient, those
    of queries in fp32, a chunk's and the kernel's own in fp32 (aten native/transformers/cuda/flash_attn/flash_api.cpp
    mha_bwd, which also writes keys' and values' for each head of queries), and those of keys and values: first in fp32
    beside a whole chunk's, later summed, sent and received in fp32 beside half a chunk's.
    Source: torch distributed/tensor/experimental/_attention.py _SDPAMerger, _templated_ring_attention_backward.
    """
    a, sent, gathers = y.a, sent_heads(y, core), y.choices.cp_kind == "all-gather"
    out, queries = (y.tokens * core.heads * width for width in (core.value_dim, core.key_dim))
    keys = y.tokens * sent * core.dims
    each = a * (keys + above(core.heads, sent, y.tokens * core.heads * core.dims, 0 * keys))
    joined = a * keys * (1 + (y.degrees.cp if gathers else 1))
    later = joined if gathers else joined + a * keys
    back = maximum(joined + 4 * keys + each, later + 3 * 4 * keys + each / 2)
    return maximum(later + (4 + 4 + a + 4 + 4 - a) * out, a * out + (4 + a + 4) * queries + back)


def core_output(y: Layout[X], core: AttentionCore[X]) -> Tensor[X]:
    """Return the output of the core."""
    return y.activation("attention.out", core.heads * core.value_dim, CORE)


def fused(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> Op[X]:
    """One kernel: keeps q, k, v, its output and a logsumexp; backward runs 5/2 of forward (arXiv:2205.14135)."""
    T, flops = y.tokens, core_flops(y, core)
    out = core_output(y, core)
    logsumexp = Tensor(name="attention.logsumexp", size_bytes=4 * T * core.heads, born=CORE)
    ahead, back = context_messages(y, core)
    moved = y.a * T * core.heads * core.dims + cache_traffic(y, core)
    zero = 0 * flops
    kept = (*inputs, out, logsumexp, *_before_exchange(y, out))
    return Op(
        name="attention", kind="attention", region=CORE, flops=flops, forward_bytes=moved, backward_flops=2.5 * flops,
        backward_bytes=2 * moved, weight_flops=zero, weight_bytes=zero, rows=T,
        columns=zero + keys_together(y, core.mask), inner=zero + core.dims, batch=core.heads, reads=inputs, saves=kept,
        forward=ahead, backward=back, model_flops=flops, dtype=y.work.dtype, output_bytes=out.size_bytes,
        role="attention", context=y.work.S + y.work.context,
    )  # fmt: skip


def _before_exchange(y: Layout[X], out: Tensor[X]) -> tuple[Tensor[X], ...]:
    """Return the output that an all-to-all sends on: the kernel keeps it beside what the next GEMM keeps.

    Transformer Engine pytorch/attention/dot_product_attention/context_parallel.py since 2.8.
    """
    if y.choices.cp_kind != "all-to-all":
        return ()
    size = above(y.degrees.cp, 1, out.size_bytes, 0 * out.size_bytes)
    return (Tensor(name="attention.out before exchange", size_bytes=size, born=CORE),)
