"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1): expanded in training and prefill, absorbed in decode.

Letters: T tokens, N heads on the rank, ql and kv the low ranks, n and r the widths of a head without and with rotary, vd of a value.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.ledger.number import X, divide
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import Attention, LatentAttention
from shardwise.ops import attention as softmax
from shardwise.ops.elementwise import norm_weights
from shardwise.ops.layout import Layout, Shape, memory_op


def _low_rank_norm(y: Layout[X], name: str, rank: int, source: Tensor[X]) -> Op[X]:
    """Return the RMSNorm of a latent: it runs on the residual stream's own tokens."""
    R = y.residual_tokens
    zero = 0 * R
    stream = y.a * R * rank
    eager = y.stack.norm == "eager"
    statistics = Tensor(name=f"{name}.statistics", size_bytes=4 * R, born="attention")
    kept = [source, statistics]
    if eager and y.a == 2:
        kept = [Tensor(name=f"{name}.fp32", size_bytes=4 * R * rank, born="attention"), statistics]
    if eager:
        kept.append(Tensor(name=f"{name}.normalised", size_bytes=stream, born="attention"))
    return memory_op(y, name, "attention", (2 * stream, 3 * stream), weights=norm_weights(name, rank, zero + rank, "rmsnorm"),
                     saves=tuple(kept), kernels=6 if eager else 1, output_bytes=stream)  # fmt: skip


def _gathered(y: Layout[X], op: Op[X], width: int) -> Op[X]:
    """A latent made on sequence-parallel tokens is gathered for the split up-projection (Megatron-LM multi_latent_attention.py)."""
    if not y.choices.sequence_parallel:
        return op
    full = y.a * y.tokens * width
    return replace(op, forward=(Collective(axis="tp", verb="all_gather", size_bytes=full, tensor="latent"),),
                   backward=(Collective(axis="tp", verb="reduce_scatter", size_bytes=full, tensor="latent gradient"),))  # fmt: skip


def _up(y: Layout[X], name: str, rank: int, heads: tuple[X, int], width: int, source: Tensor[X]) -> Op[X]:
    """Return an up-projection from a latent that is whole on every rank: its input gradient is reduced with the latent."""
    local, N = heads
    shape = Shape(inputs=rank + 0 * local, outputs=local * width, whole_inputs=rank, whole_outputs=N * width)
    return replace(y.column(name, "attention.up", shape, source), forward=(), backward=())


def _query(y: Layout[X], m: LatentAttention, D: int, heads: X, source: Tensor[X]) -> list[Op[X]]:
    zero = 0 * heads
    if not m.q_lora_rank:
        shape = Shape(inputs=D + zero, outputs=heads * m.qk_head_dim, whole_inputs=D, whole_outputs=m.heads * m.qk_head_dim)
        return [y.column("q", "attention", shape, source)]
    ql = m.q_lora_rank
    down = Shape(inputs=D + zero, outputs=ql + zero, whole_inputs=D, whole_outputs=ql, bias=m.bias)
    latent = Tensor(name="q_latent", size_bytes=y.a * y.residual_tokens * ql, born="attention")
    normed = Tensor(name="q_latent.normed", size_bytes=y.a * y.residual_tokens * ql, born="attention")
    return [y.whole("q_down", "attention", down, source), _gathered(y, _low_rank_norm(y, "q_norm", ql, latent), ql),
            _up(y, "q_up", ql, (heads, m.heads), m.qk_head_dim, normed)]  # fmt: skip


def _key_value(y: Layout[X], m: LatentAttention, D: int, heads: X, source: Tensor[X]) -> list[Op[X]]:
    zero, kv = 0 * heads, m.kv_lora_rank
    wide = kv + m.qk_rope_head_dim
    down = Shape(inputs=D + zero, outputs=wide + zero, whole_inputs=D, whole_outputs=wide, bias=m.bias)
    latent = Tensor(name="kv_latent", size_bytes=y.a * y.residual_tokens * kv, born="attention")
    normed = Tensor(name="kv_latent.normed", size_bytes=y.a * y.residual_tokens * kv, born="attention")
    return [y.whole("kv_down", "attention", down, source), _gathered(y, _low_rank_norm(y, "kv_norm", kv, latent), wide),
            _up(y, "kv_up", kv, (heads, m.heads), m.qk_nope_head_dim + m.v_head_dim, normed)]  # fmt: skip


def indexer(y: Layout[X], m: LatentAttention, D: int, source: Tensor[X]) -> list[Op[X]]:
    """Return the operators of the sparse selector (DeepSeek-V3.2): it scores every past token with small heads."""
    if m.indexer is None:
        return []
    x = m.indexer
    zero, region = 0 * y.tokens, "attention.indexer"
    q_in = m.q_lora_rank or D
    width = x.heads * x.head_dim
    shapes = (("indexer.q", q_in, width), ("indexer.k", D, x.head_dim), ("indexer.weights", D, x.heads))
    ops = [y.whole(n, region, Shape(inputs=i + zero, outputs=o + zero, whole_inputs=i, whole_outputs=o), source) for n, i, o in shapes]
    stream = y.a * y.residual_tokens * x.head_dim
    ops.append(memory_op(y, "indexer.k_norm", region, (2 * stream, 3 * stream), weights=norm_weights("indexer.k_norm", x.head_dim, zero + x.head_dim, "layernorm")))
    pairs = softmax.attended_pairs(y, causal=m.causal)
    flops = 2 * y.work.B * width * divide(pairs * y.residual_tokens, y.work.B * y.work.S)
    moved = y.a * y.residual_tokens * width + y.work.B * (y.work.S + y.work.context) * x.head_dim
    ops.append(Op(name="indexer.scores", kind="attention", region=region, flops=flops, forward_bytes=moved, backward_flops=2 * flops,
                  backward_bytes=2 * moved, weight_flops=zero, weight_bytes=zero, rows=y.residual_tokens, columns=zero + 1, inner=zero + x.head_dim,
                  model_flops=flops, dtype=y.work.dtype))  # fmt: skip
    return ops


def _sparse(m: LatentAttention) -> int:
    return m.indexer.top_k if m.indexer else 0


def _expanded_core(y: Layout[X], m: LatentAttention, heads: X) -> list[Op[X]]:
    """Attention over expanded keys and values: the up-projection's output is kept whole since the values are a view of it."""
    T = y.tokens
    keys = Tensor(name="kv_up.output", size_bytes=y.a * T * heads * (m.qk_nope_head_dim + m.v_head_dim), born="attention.up")
    inputs = (y.activation("attention.queries", heads * m.qk_head_dim, "attention.up"), y.activation("attention.keys", heads * m.qk_head_dim, "attention.up"), keys)
    as_heads = Attention(heads=m.heads, kv_heads=m.heads, head_dim=m.qk_head_dim, v_head_dim=m.v_head_dim, causal=m.causal, window=_sparse(m))
    if y.stack.attention == "flash":
        core = softmax._flash(y, as_heads, heads, heads, inputs)
    else:
        core = softmax._scores(y, as_heads, heads, heads, inputs)
    return list(core)


def _absorbed_core(y: Layout[X], m: LatentAttention, heads: X) -> list[Op[X]]:
    """Attention over the cached latent, read once for all heads; the up-projection is absorbed into queries and outputs.

    A pair costs 2 (kv + r) + 2 kv FLOPs a head, a token 2 n kv + 2 kv vd a head (arXiv:2405.04434 section 2.1.2).
    """
    T, kv, r = y.tokens, m.kv_lora_rank, m.qk_rope_head_dim
    zero = 0 * T
    pairs = softmax.attended_pairs(y, _sparse(m), causal=m.causal)
    seen = y.work.B * softmax.cached_tokens(y, _sparse(m), 0)
    flops = 2 * y.work.B * heads * (2 * kv + r) * divide(pairs * y.tokens, y.work.B * y.work.S)
    moved = y.work.cache_bytes * seen * (kv + r) + y.a * T * heads * (2 * kv + r)
    absorb = 2 * T * heads * kv * (m.qk_nope_head_dim + m.v_head_dim)
    weight = y.work.weight_bytes * heads * kv * (m.qk_nope_head_dim + m.v_head_dim)
    return [
        Op(name="absorb", kind="matmul", region="attention.up", flops=absorb, forward_bytes=weight + 2 * y.a * T * heads * (kv + m.v_head_dim),
           rows=T, columns=zero + kv, inner=zero + m.qk_nope_head_dim, batch=heads, kernels=2, model_flops=absorb,
           weights=(_absorbed_weight(m, heads),), dtype=y.work.dtype, backward_flops=zero, backward_bytes=zero, weight_flops=zero, weight_bytes=zero),
        Op(name="attention", kind="attention", region=softmax.CORE, flops=flops, forward_bytes=moved, rows=T, columns=seen / y.work.B,
           inner=zero + 2 * kv + r, batch=heads, model_flops=flops, dtype=y.work.dtype,
           backward_flops=zero, backward_bytes=zero, weight_flops=zero, weight_bytes=zero),
    ]  # fmt: skip


def _absorbed_weight(m: LatentAttention, heads: X) -> Weight[X]:
    width = m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim)
    return Weight(name="kv_up.weight", elements=heads * width, whole=0 * heads + m.heads * width)


def latent_attention(y: Layout[X], m: LatentAttention, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one latent attention layer, from its normed input to the residual stream."""
    heads = y.split(m.heads)
    ops = _query(y, m, D, heads, source) + _key_value(y, m, D, heads, source) + indexer(y, m, D, source)
    if y.work.phase == "decode":
        ops = [o for o in ops if o.name != "kv_up"] + _absorbed_core(y, m, heads)
    else:
        ops += [softmax.rotary(y, heads, heads, m.qk_rope_head_dim), *_expanded_core(y, m, heads)]
    merged = y.activation("attention.merged", heads * m.v_head_dim, "attention") if y.stack.norm == "eager" \
        else y.activation("attention.out", heads * m.v_head_dim, softmax.CORE)  # fmt: skip
    out = Shape(inputs=heads * m.v_head_dim, outputs=D + 0 * heads, whole_inputs=m.heads * m.v_head_dim, whole_outputs=D, bias=m.bias)
    return (*ops, y.row("out", "attention", out, merged))
