"""Softmax attention with grouped key-value heads: projections, core, windows, context parallelism.

Letters: B sequences, S new tokens a sequence, T tokens on the rank, N query and K key-value heads on the rank, H head dim,
Hv value dim. Sources: PaLM appendix B (arXiv:2204.02311) for FLOPs, arXiv:2205.05198 for what unfused attention keeps,
arXiv:2205.14135 and arXiv:2307.08691 for flash attention.
"""

from __future__ import annotations

from shardwise.ledger.number import X, divide, maximum, minimum
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import Attention
from shardwise.ops.layout import Layout, Shape, memory_op

CORE = "attention.core"


def attended_pairs(y: Layout[X], window: int = 0, chunk: int = 0, causal: bool = True) -> X:
    """Return how many (query, key) pairs of one sequence the mask leaves, over all context-parallel ranks.

    Causal S * (S + 1) / 2, plus S * context cached tokens; a window W leaves W * S - W * (W - 1) / 2; chunks of C leave
    about S * (C + 1) / 2. Coverage "full" counts S * (S + context), as PyTorch's FLOP counter and PaLM do.
    """
    S, past = y.work.S, y.work.context
    if y.work.coverage == "full":
        return S * (S + past)
    density = y.work.density
    if not causal:
        return S * (S + past) * density
    limit = window or chunk
    if not limit:
        return (S * past + S * (S + 1) / 2) * density
    if chunk:
        # A query sees its own chunk: (C + 1) / 2 keys on average, and no more than there are.
        short = minimum(S + past, chunk)
        return above_single(y, S * (short + 1) / 2, minimum(past + 1, chunk)) * density
    W = minimum(S + past, window)
    grown = minimum(past, W)
    # The first W - past queries see fewer than W keys, the others W.
    ramp = maximum(minimum(W - grown, S), 0)
    return (ramp * grown + ramp * (ramp + 1) / 2 + (S - ramp) * W) * density


def above_single(y: Layout[X], many: X, single: X) -> X:
    """Return the decode form for one new token, the sequence form otherwise."""
    return single if y.work.phase == "decode" else many


def core_flops(y: Layout[X], heads: X, dims: int, pairs: X) -> X:
    """Return forward FLOPs of QK^T and PV on a rank: 2 * B * N * (H + Hv) a pair, pairs shared by the ranks that split S.

    Context parallelism assigns 2c zigzag chunks, so that the ranks' causal work is equal (Megatron-LM context_parallel).
    """
    return 2 * y.work.B * heads * dims * divide(pairs * y.tokens, y.work.B * y.work.S)


def cached_tokens(y: Layout[X], window: int, chunk: int) -> X:
    """Return how many tokens of keys and values one query of a sequence may read: the context, or the window."""
    seen = y.work.S + y.work.context
    limit = window or chunk
    return minimum(seen, limit) if limit else seen


def context_messages(y: Layout[X], heads: X, kv: X, dims: int) -> tuple[tuple[Collective[X], ...], tuple[Collective[X], ...]]:
    """Return the messages of a sequence split over ranks: forward, backward.

    Ring: c - 1 steps of keys and values, twice that backward (arXiv:2310.01889). All-gather: of K and V, again backward, and
    a reduce-scatter of their gradients (arXiv:2407.21783 section 3.3.2). All-to-all: q, k, v in and out out (arXiv:2309.14509).
    SUMMA's sequence axis gathers K and V.
    """
    kv_bytes = y.a * y.tokens * kv * dims
    forward: list[Collective[X]] = []
    backward: list[Collective[X]] = []

    def gathered(axis: str, ranks: X) -> None:
        full = kv_bytes * ranks
        forward.append(Collective(axis=axis, verb="all_gather", size_bytes=full, tensor="keys and values"))  # type: ignore[arg-type]
        backward.append(Collective(axis=axis, verb="all_gather", size_bytes=full, tensor="keys and values"))  # type: ignore[arg-type]
        backward.append(Collective(axis=axis, verb="reduce_scatter", size_bytes=full, tensor="their gradients"))  # type: ignore[arg-type]

    if y.choices.layout == "summa":
        gathered("tp2", y.degrees.tp2)
    if y.choices.cp_kind == "all-gather":
        gathered("cp", y.degrees.cp)
    elif y.choices.cp_kind == "ring":
        steps = y.degrees.cp - 1
        forward.append(Collective(axis="cp", verb="send", size_bytes=kv_bytes, count=steps, hides="ring", tensor="keys and values"))
        backward.append(Collective(axis="cp", verb="send", size_bytes=2 * kv_bytes, count=steps, hides="ring", tensor="keys, values, gradients"))
    else:
        sides = (y.a * y.tokens * (heads + kv) * dims, y.a * y.tokens * heads * dims)
        for side, tensor in zip(sides, ("queries, keys, values", "output"), strict=True):
            message = Collective(axis="cp", verb="all_to_all", size_bytes=side, tensor=tensor)
            forward.append(message)
            backward.append(message)
    return tuple(forward), tuple(backward)


def _flash(y: Layout[X], m: Attention, heads: X, kv: X, inputs: tuple[Tensor[X], ...]) -> tuple[Op[X], ...]:
    """One fused kernel: keeps q, k, v, its output and a logsumexp; its backward runs 5/2 of its forward (arXiv:2205.14135)."""
    T, dims = y.tokens, m.head_dim + m.value_dim
    pairs = attended_pairs(y, m.window, m.chunk, m.causal)
    flops = core_flops(y, heads, dims, pairs)
    out = y.activation("attention.out", heads * m.value_dim, CORE)
    lse = Tensor(name="attention.logsumexp", size_bytes=4 * T * heads, born=CORE)
    forward, backward = context_messages(y, heads, kv, dims)
    seen = y.work.B * cached_tokens(y, m.window, m.chunk)
    # Decoding reads the cache once; in training keys and values are those of the new tokens.
    kv_read = y.work.cache_bytes * seen * kv * dims if y.work.phase != "train" else y.a * T * kv * dims
    moved = y.a * T * heads * dims + kv_read
    zero = 0 * flops
    factor = 2.0 if y.work.coverage == "full" else 2.5
    return (
        Op(name="attention", kind="attention", region=CORE, flops=flops, forward_bytes=moved, backward_flops=factor * flops,
           backward_bytes=2 * moved, weight_flops=zero, weight_bytes=zero, rows=T, columns=seen / y.work.B, inner=zero + dims,
           batch=heads, reads=inputs, saves=(*inputs, out, lse), forward=forward, backward=backward, model_flops=flops,
           dtype=y.work.dtype, output_bytes=out.size_bytes),
    )  # fmt: skip


def _scores(y: Layout[X], m: Attention, heads: X, kv: X, inputs: tuple[Tensor[X], ...]) -> tuple[Op[X], ...]:
    """Unfused attention: two batched products around a softmax over the whole score matrix, which is kept.

    "scores": softmax output, dropout mask and dropped copy (5 bytes a score with dropout, arXiv:2205.05198 section 4.1).
    "eager" (transformers): softmax in fp32 and its 16-bit copy; keys and values repeated to the query heads, and the merged
    copy of the output; checked to the byte with saved-tensor hooks on torch 2.13.0.
    """
    T, S = y.tokens, y.work.S + y.work.context
    scores = T * heads * S
    eager = y.stack.attention == "eager"
    forward, backward = context_messages(y, heads, kv, m.head_dim + m.value_dim)
    queries, keys, values = inputs
    if eager:
        groups = heads / kv
        keys = Tensor(name="attention.repeated keys", size_bytes=keys.size_bytes * groups, born=CORE)
        values = Tensor(name="attention.repeated values", size_bytes=values.size_bytes * groups, born=CORE)
    kept = [Tensor(name="attention.softmax", size_bytes=(4 if eager else y.a) * scores, born=CORE)]
    dropped = y.work.dropout and not eager
    if dropped:
        kept.append(Tensor(name="attention.softmax mask", size_bytes=y.stack.dropout_mask_bytes * scores, born=CORE))
    probabilities = kept[0]
    if dropped or (eager and y.a == 2):
        probabilities = Tensor(name="attention.probabilities", size_bytes=y.a * scores, born=CORE)
    out = y.activation("attention.out", heads * m.value_dim, CORE)
    traffic = (4 * y.a + (2 * y.a + 1 if dropped else 0)) * scores
    return (
        _product(y, "attention.scores", (T, S, m.head_dim + 0 * T), heads, (queries, keys), forward=forward, backward=backward),
        memory_op(y, "attention.softmax", CORE, (traffic, traffic), saves=tuple(kept), kernels=4 if eager else 1 + dropped,
                  output_bytes=y.a * scores),
        _product(y, "attention.context", (T, m.value_dim + 0 * T, S), heads, (probabilities, values), output_bytes=out.size_bytes),
    )  # fmt: skip


def _product(y: Layout[X], name: str, mnk: tuple[X, X, X], batch: X, inputs: tuple[Tensor[X], ...], **more: object) -> Op[X]:
    """Return a batched product of two activations: both operands get a gradient, so backward is twice forward."""
    m, n, k = mnk
    flops = 2 * m * n * k * batch
    moved = y.a * batch * (m * k + m * n) + y.a * batch * k * n * divide(m, y.work.S)
    zero = 0 * flops
    more.setdefault("output_bytes", y.a * m * n * batch)
    return Op(name=name, kind="matmul", region=CORE, flops=flops, forward_bytes=moved, backward_flops=2 * flops, backward_bytes=2 * moved,
              weight_flops=zero, weight_bytes=zero, rows=m, columns=n, inner=k, batch=batch, reads=inputs, saves=inputs,
              model_flops=flops, dtype=y.work.dtype, **more)  # type: ignore[arg-type]  # fmt: skip


def qk_norms(y: Layout[X], m: Attention, heads: X, kv: X) -> tuple[Op[X], ...]:
    """Return the norms of queries and keys: weights per head dim, or over the whole projection."""
    if m.qk_norm == "none":
        return ()
    T, width = y.tokens, (heads + kv) * m.head_dim
    whole = m.head_dim * (2 if m.qk_norm == "head" else m.heads + m.kv_heads)
    elements = 0 * width + 2 * m.head_dim if m.qk_norm == "head" else width
    copies = 2 if m.qk_norm_kind == "layernorm" else 1
    rows = T * (heads + kv) if m.qk_norm == "head" else 2 * T
    eager = y.stack.norm == "eager" and m.qk_norm_kind == "rmsnorm"
    kept = [Tensor(name="qk_norm.input", size_bytes=(4 if eager else y.a) * T * width, born="attention"),
            Tensor(name="qk_norm.statistics", size_bytes=4 * rows, born="attention")]  # fmt: skip
    if eager:
        kept.append(Tensor(name="qk_norm.normalised", size_bytes=y.a * T * width, born="attention"))
    stream = y.a * T * width
    weight = Weight(name="qk_norm.weight", elements=copies * elements, whole=0 * width + copies * whole, kind="vector")
    return (memory_op(y, "qk_norm", "attention", ((8 if eager else 2) * stream, (9 if eager else 3) * stream), weights=(weight,),
                      saves=tuple(kept), kernels=12 if eager else 2, output_bytes=stream),)  # fmt: skip


def rotary(y: Layout[X], heads: X, kv: X, dim: int) -> Op[X]:
    """Return rotary embedding of queries and keys: one read and one write each way; it keeps nothing per layer."""
    stream = y.a * y.tokens * (heads + kv) * dim
    return memory_op(y, "rotary", "attention", (2 * stream, 2 * stream), kernels=1 if y.stack.activation == "fused" else 8, output_bytes=stream)


def attention(y: Layout[X], m: Attention, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one attention layer, from its normed input to the residual stream.

    The output gate (Qwen3-Next) is a second query-sized projection whose sigmoid multiplies the output.
    """
    heads, kv = y.split(m.heads), y.kv_heads(m.kv_heads)
    width = m.input_width or D
    owned = 0 if m.kv_from_earlier else (1 if m.shared_key_value else 2)
    queries = heads * m.head_dim * (2 if m.output_gate else 1)
    whole_q = m.heads * m.head_dim * (2 if m.output_gate else 1)
    kv_dims = {0: 0, 1: m.head_dim, 2: m.head_dim + m.value_dim}[owned]
    qkv = Shape(inputs=width + 0 * heads, outputs=queries + kv * kv_dims, whole_inputs=width,
                whole_outputs=whole_q + m.kv_heads * kv_dims, bias=m.qkv_bias, kernels=1 if y.stack.activation == "fused" else 3)  # fmt: skip
    out = Shape(inputs=heads * m.value_dim, outputs=D + 0 * heads, whole_inputs=m.heads * m.value_dim, whole_outputs=D, bias=m.out_bias)
    inputs = (y.activation("attention.queries", heads * m.head_dim, "attention"), y.activation("attention.keys", kv * m.head_dim, "attention"),
              y.activation("attention.values", kv * m.value_dim, "attention"))  # fmt: skip
    core = _flash(y, m, heads, kv, inputs) if y.stack.attention == "flash" else _scores(y, m, heads, kv, inputs)
    merged = y.activation("attention.merged" if y.stack.attention == "eager" else "attention.out", heads * m.value_dim,
                          "attention" if y.stack.attention == "eager" else CORE)  # fmt: skip
    ops = [y.column("qkv", "attention", qkv, source), *qk_norms(y, m, heads, kv), rotary(y, heads, kv, m.head_dim), *core]
    if m.sinks:
        weight = Weight(name="sinks", elements=heads, whole=0 * heads + m.heads, kind="vector")
        ops.append(memory_op(y, "sinks", CORE, (0 * heads, 0 * heads), weights=(weight,), kernels=0))
    if m.output_gate:
        gate = y.activation("attention.gate", heads * m.value_dim, "attention")
        gated = y.activation("attention.gated", heads * m.value_dim, "attention")
        ops.append(memory_op(y, "output_gate", "attention", (3 * gate.size_bytes, 5 * gate.size_bytes), saves=(gate, merged), output_bytes=gate.size_bytes))
        merged = gated
    ops.append(y.row("out", "attention", out, merged))
    return tuple(ops)
