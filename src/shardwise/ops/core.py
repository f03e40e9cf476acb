"""The core of softmax attention: who sees whom, fused and unfused kernels, and the messages of a split sequence.

Letters: B sequences, S new tokens a sequence, T tokens on the rank, N query and K key-value heads on the rank, H key
dim, Hv value dim. Sources: PaLM appendix B (arXiv:2204.02311) for FLOPs, arXiv:2205.05198 for what unfused attention
keeps, arXiv:2205.14135 and arXiv:2307.08691 for flash attention.
"""

from __future__ import annotations

from typing import Generic

from shardwise.ledger.number import X, above, ceil, divide, is_plain, minimum
from shardwise.ledger.op import Collective, GroupAxis, Op, Tensor
from shardwise.ops.layout import Layout, memory_op
from shardwise.records import dataclass, replace

CORE = "attention.core"
# Bytes that tensor cores load at once (NVIDIA, Matrix Multiplication Background User's Guide, section 2.1).
LOADED_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMask:
    """Which keys a query sees: itself and all before it, the last `window`, or those of its own `chunk`."""

    window: int = 0
    chunk: int = 0
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCore(Generic[X]):
    """The sizes of one attention core on a rank; `repeats` is how many query heads of the model share a key-value head.

    `caps` marks scores that go through a tanh (Gemma 2).
    """

    heads: X
    kv_heads: X
    key_dim: int
    value_dim: int
    repeats: int = 1
    mask: AttentionMask = AttentionMask()
    caps: bool = False

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


def _exchanged(y: Layout[X], core: AttentionCore[X]) -> tuple[Collective[X], ...]:
    sides = (
        ("queries, keys, values", core.heads * core.key_dim + core.kv_heads * core.dims),
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
    sent = y.a * y.tokens * (core.heads * (core.key_dim + core.value_dim) + core.kv_heads * core.dims)
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
    return (memory_op(y, "chunks", CORE, tuple(moved), kernels=12 * more, role="steps"),)  # type: ignore[arg-type]


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
        role="attention",
    )  # fmt: skip


def _before_exchange(y: Layout[X], out: Tensor[X]) -> tuple[Tensor[X], ...]:
    """Return the output that an all-to-all sends on: the kernel keeps it beside what the next GEMM keeps.

    Transformer Engine pytorch/attention/dot_product_attention/context_parallel.py since 2.8.
    """
    if y.choices.cp_kind != "all-to-all":
        return ()
    size = above(y.degrees.cp, 1, out.size_bytes, 0 * out.size_bytes)
    return (Tensor(name="attention.out before exchange", size_bytes=size, born=CORE),)


def _repeated(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> tuple[Tensor[X], ...]:
    """Transformers' eager attention repeats keys and values to the query heads and keeps the copies."""
    if y.stack.attention != "eager" or core.repeats == 1:
        return inputs
    queries, *shared = inputs
    groups = core.heads / core.kv_heads
    copies = (
        Tensor(name=f"attention.repeated {name}", size_bytes=t.size_bytes * groups, born=CORE)
        for name, t in zip(("keys", "values"), shared, strict=True)
    )
    return (queries, *copies)


def unfused(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> tuple[Op[X], ...]:
    """Two batched GEMMs around a softmax over the whole score matrix, which is kept.

    "scores": softmax output, dropout mask and dropped copy (5 bytes a score with dropout, arXiv:2205.05198 section
    4.1). "eager" (transformers): softmax in fp32 and its 16-bit copy, the tanh of capped scores; checked to the byte
    with saved-tensor hooks on torch 2.13.0, transformers 5.23.0.
    """
    queries, keys, values = _repeated(y, core, inputs)
    # Each operand of a GEMM is read for the gradient of the other.
    queries, keys, values = (
        replace(t, read_for=other)
        for t, other in ((queries, inputs[1].name), (keys, inputs[0].name), (values, "attention.softmax"))
    )
    T, keys_seen = y.tokens, y.work.S + y.work.context
    scores = T * core.heads * keys_seen
    ahead, back = context_messages(y, core)
    kept, probabilities, kernels = _softmax(y, core, scores)
    # Each kernel reads and writes the whole matrix: softmax, then dropout with its mask where there is one; backward
    # reads a gradient and what was kept, and writes a gradient, for each.
    forward = 2 * y.a * scores + sum((2 * y.a * scores + t.size_bytes for t in kept[1:]), 0 * scores)
    backward = (
        2 * y.a * scores + sum((2 * y.a * scores + t.size_bytes for t in kept[1:]), 0 * scores) + kept[0].size_bytes
    )
    first = _product(y, "attention.scores", (T, keys_seen, core.key_dim + 0 * T), core.heads, (queries, keys))
    last = _product(y, "attention.context", (T, core.value_dim + 0 * T, keys_seen), core.heads, (probabilities, values))
    softmax = memory_op(
        y, "attention.softmax", CORE, (forward, backward), saves=kept, kernels=kernels, output_bytes=y.a * scores,
        role="softmax",
    )  # fmt: skip
    first = replace(
        first, forward=ahead, backward=back, vector_units=is_unaligned(y, core.key_dim), role="scores",
        takes=(inputs[0].name, inputs[1].name),
    )  # fmt: skip
    takes = ("attention.softmax", inputs[2].name)
    return first, softmax, replace(last, vector_units=is_unaligned(y, core.value_dim), role="context", takes=takes)


def _softmax(y: Layout[X], core: AttentionCore[X], scores: X) -> tuple[tuple[Tensor[X], ...], Tensor[X], int]:
    """Return what the softmax keeps, the probabilities that multiply the values, and its kernels."""
    eager = y.stack.attention == "eager"

    def score_tensor(name: str, width: int) -> Tensor[X]:
        return Tensor(name=f"attention.{name}", size_bytes=width * scores, born=CORE)

    softmax = score_tensor("softmax", 4 if eager else y.a)
    kept, probabilities, kernels = [softmax], softmax, 4 if eager else 1
    if y.drops("softmax") and not eager:
        kept.append(score_tensor("softmax mask", y.stack.dropout_mask_bytes))
        probabilities, kernels = score_tensor("probabilities", y.a), 2
    elif eager and y.a < 4:
        probabilities = score_tensor("probabilities", y.a)
    if core.caps:
        kept.append(score_tensor("capped scores", y.a))
        kernels += 3
    return tuple(kept), probabilities, kernels


def is_unaligned(y: Layout[X], dims: int) -> bool:
    """Return whether heads of so many values start between the loads of tensor cores, where no kernel pads them.

    Transformers' eager path runs on cuBLAS of CUDA 12, which loads in smaller pieces.
    """
    return y.stack.attention == "scores" and dims * y.a % LOADED_BYTES != 0


def _product(y: Layout[X], name: str, mnk: tuple[X, X, X], batch: X, inputs: tuple[Tensor[X], ...]) -> Op[X]:
    """Return a batched GEMM of two activations: both operands get a gradient, so backward is twice forward."""
    m, n, k = mnk
    flops = 2 * m * n * k * batch
    # The smaller operand is that of one sequence: it is read once for the S rows that meet it.
    moved = y.a * batch * (m * k + m * n) + y.a * batch * k * n * divide(m, y.work.S)
    zero = 0 * flops
    return Op(
        name=name, kind="matmul", region=CORE, flops=flops, forward_bytes=moved, backward_flops=2 * flops,
        backward_bytes=2 * moved, weight_flops=zero, weight_bytes=zero, rows=m, columns=n, inner=k, batch=batch,
        reads=inputs, saves=inputs, model_flops=flops, dtype=y.work.dtype, output_bytes=y.a * m * n * batch,
    )  # fmt: skip
