"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1): expanded in training, absorbed in decode.

Letters: T tokens, N heads on the rank, ql and kv the low ranks, n and r the widths of a head without and with rotary,
vd of a value, D hidden. Prefill expands too.
"""

from __future__ import annotations

from shardwise.ledger.number import X
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import Attention, LatentAttention
from shardwise.ops.attention import REGION, gated, merged, rotary
from shardwise.ops.core import (
    CORE,
    AttentionCore,
    AttentionMask,
    attended_pairs,
    core_output,
    read_tokens,
    share,
)
from shardwise.ops.core_kernels import attention_core
from shardwise.ops.indexer import ROLES, down, indexer_ops, small_norm
from shardwise.ops.layout import Layout, LinearShape, memory_op
from shardwise.records import replace

UP = "attention.up"


def gathered(y: Layout[X], op: Op[X], width: int) -> Op[X]:
    """Return a norm whose output, made on sequence-parallel tokens, is gathered for a split up-projection.

    Source: Megatron-LM core/transformer/multi_latent_attention.py.
    """
    if not y.choices.sequence_parallel:
        return op
    full, at = y.a * y.tokens * width, (y.tokens, width)
    ahead: Collective[X] = Collective(axis="tp", verb="all_gather", size_bytes=full, tensor="latent", shape=at)
    back = replace(ahead, verb="reduce_scatter", tensor="latent gradient")
    return replace(op, forward=(*op.forward, ahead), backward=(*op.backward, back))


def up(y: Layout[X], name: str, rank: int, width: int, heads: int, source: Tensor[X]) -> Op[X]:
    """Return an up-projection to `width` elements a head from a latent that is whole on every rank."""
    local = y.split(heads)
    shape = LinearShape(inputs=rank + 0 * local, outputs=local * width, whole_inputs=rank, whole_outputs=heads * width,
                  role=ROLES.get(name, "other"))  # fmt: skip
    op = y.column(name, UP, shape, source)
    # One dimension: the latent was gathered by its norm, and its gradient is reduced there.
    return op if y.choices.layout == "summa" else replace(op, forward=(), backward=_whole_gradient(y, rank))


def _whole_gradient(y: Layout[X], rank: int) -> tuple[Collective[X], ...]:
    if y.choices.sequence_parallel:
        return ()
    return (
        Collective(
            axis="tp",
            verb="all_reduce",
            size_bytes=y.a * y.tokens * rank,
            hides="compute",
            tensor="latent gradient",
            shape=(y.tokens, rank),
            read_for="input",
        ),
    )


def _latent(y: Layout[X], name: str, rank: int) -> Tensor[X]:
    return Tensor(name=name, size_bytes=y.a * y.residual_tokens * y.residual_width(rank), born=REGION)


def _normed(y: Layout[X], mixer: LatentAttention, op: Op[X], sizes: tuple[str, int, int]) -> list[Op[X]]:
    """Return a down-projection and the norm of its latent, whose result is gathered; without a norm its own is.

    `sizes` are the name of the latent, its width, and the width of what stands beside it.
    """
    name, width, extra = sizes
    if mixer.latent_norm == "none":
        return [gathered(y, op, width + extra)]
    return [op, gathered(y, small_norm(y, f"{name}_norm", REGION, width, mixer.latent_norm, extra), width + extra)]


def _query(y: Layout[X], mixer: LatentAttention, D: int, source: Tensor[X]) -> list[Op[X]]:
    if not mixer.q_lora_rank:
        heads = y.split(mixer.heads)
        shape = LinearShape(inputs=D + 0 * heads, outputs=heads * mixer.qk_head_dim, whole_inputs=D,
                      whole_outputs=mixer.heads * mixer.qk_head_dim)  # fmt: skip
        return [y.column("q", REGION, shape, source)]
    ql = mixer.q_lora_rank
    return [
        *_normed(y, mixer, down(y, "q_down", REGION, (D, ql), source, mixer.bias), ("q", ql, 0)),
        up(y, "q_up", ql, mixer.qk_head_dim, mixer.heads, _latent(y, "q_norm.output", ql)),
    ]


def _key_value(y: Layout[X], mixer: LatentAttention, D: int, source: Tensor[X]) -> list[Op[X]]:
    kv, wide = mixer.kv_lora_rank, mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return [
        *_normed(y, mixer, down(y, "kv_down", REGION, (D, wide), source, mixer.bias), ("kv", kv, wide - kv)),
        up(y, "kv_up", kv, mixer.qk_nope_head_dim + mixer.v_head_dim, mixer.heads, _latent(y, "kv_norm.output", kv)),
    ]


def _selecting(y: Layout[X], mixer: LatentAttention, D: int, source: Tensor[X]) -> list[Op[X]]:
    """The operators of its indexer, whose queries are made of the latent where there is one."""
    if mixer.indexer is None:
        return []
    rank = mixer.q_lora_rank
    queries = (_latent(y, "q_norm.output", rank), rank) if rank else (source, D)
    return indexer_ops(y, mixer.indexer, AttentionMask(causal=mixer.causal), queries, (source, D))


def _mask(mixer: LatentAttention) -> AttentionMask:
    """A query of sparse attention sees `top_k` keys at most, whichever they are: as many as a window of that size."""
    return AttentionMask(window=mixer.indexer.top_k if mixer.indexer else 0, causal=mixer.causal)


def _expanded(y: Layout[X], mixer: LatentAttention) -> list[Op[X]]:
    """Attention over expanded keys and values; the values are a view of the up-projection's output, kept whole."""
    heads = y.split(mixer.heads)
    values = y.activation("kv_up.output", heads * (mixer.qk_nope_head_dim + mixer.v_head_dim), UP)
    if y.stack.attention == "eager":
        # A batched GEMM needs them in one piece.
        values = y.activation("attention.values", heads * mixer.v_head_dim, CORE)
    inputs = (
        y.activation("attention.queries", heads * mixer.qk_head_dim, UP),
        y.activation("attention.keys", heads * mixer.qk_head_dim, UP),
        values,
    )
    core = _core(y, mixer)
    return [rotary(y, (heads + 1) * mixer.qk_rope_head_dim), *_joined(y, mixer), *attention_core(y, core, inputs)]


def _joined(y: Layout[X], mixer: LatentAttention) -> list[Op[X]]:
    """Return what cuts the up-projection into keys and values and joins keys with their rotary part, in training.

    Fused, one kernel each way reads the up-projection's output and writes keys and values, backward the other way about
    (Megatron-LM core/fusions/fused_mla_yarn_rope_apply.py, fused_apply_mla_rope_for_kv; queries stay in place). Else
    kernels over strided views turn a part of the queries and concatenate (core/transformer/multi_latent_attention.py).
    """
    if y.work.phase != "train":
        return []
    plain, turned, values = mixer.qk_nope_head_dim, mixer.qk_rope_head_dim, mixer.v_head_dim
    stream = y.a * y.tokens * y.split(mixer.heads)
    if y.stack.latent_fusion:
        width = 2 * (plain + values) + turned
        return [memory_op(y, "keys and values", UP, (stream * width, stream * width))]
    # Pairs are sorted before they are turned, in eight passes more than one kernel where `rotary` counts one; queries
    # and keys are joined; backward the gradients of all parts are joined.
    steps = (10 if y.stack.activation == "fused" else 2) * turned
    ahead, back = steps + 4 * plain + 3 * turned, steps + 4 * plain + 3 * turned + 2 * values
    return [memory_op(y, "parts.joined", UP, (stream * ahead, stream * back), kernels=6, role="steps")]


def _core(y: Layout[X], mixer: LatentAttention) -> AttentionCore[X]:
    heads = y.split(mixer.heads)
    return AttentionCore(
        heads=heads, kv_heads=heads, key_dim=mixer.qk_head_dim, value_dim=mixer.v_head_dim, mask=_mask(mixer)
    )


def _absorbed(y: Layout[X], mixer: LatentAttention) -> list[Op[X]]:
    """Attention over the cached latent, read once for all heads, with the up-projection absorbed into its ends.

    A pair costs 2 (kv + r) + 2 kv FLOPs a head, a token 2 n kv + 2 kv vd a head (arXiv:2405.04434 section 2.1.2).
    """
    T, kv, r = y.tokens, mixer.kv_lora_rank, mixer.qk_rope_head_dim
    heads, zero = y.split(mixer.heads), 0 * y.tokens
    width = kv * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    flops = 2 * heads * (2 * kv + r) * y.work.B * attended_pairs(y, _mask(mixer)) * share(y)
    read = y.work.B * read_tokens(y, _mask(mixer)) * share(y)
    return [
        Op(name="absorb", kind="matmul", region=UP, flops=2 * T * heads * width, rows=T, columns=zero + kv,
           forward_bytes=y.work.weight_bytes * heads * width + 2 * y.a * T * heads * (kv + mixer.v_head_dim),
           inner=zero + mixer.qk_nope_head_dim, batch=heads, kernels=2, model_flops=2 * T * heads * width,
           dtype=y.work.dtype,
           weights=(
               Weight(name="kv_up.weight", elements=heads * width, whole=zero + mixer.heads * width, role="kv_up"),
           ),
           backward_flops=zero, backward_bytes=zero, weight_flops=zero, weight_bytes=zero),
        Op(name="attention", kind="attention", region=CORE, flops=flops, rows=T,
           columns=zero + read_tokens(y, _mask(mixer)),
           forward_bytes=y.work.cache_bytes * read * (kv + r) + y.a * T * heads * (2 * kv + r), inner=zero + 2 * kv + r,
           batch=heads, model_flops=flops, dtype=y.work.dtype, backward_flops=zero, backward_bytes=zero,
           weight_flops=zero, weight_bytes=zero, role="attention"),
    ]  # fmt: skip


def latent_attention(y: Layout[X], mixer: LatentAttention, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one latent attention layer, from its normed input to the residual stream.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("deepseek-v3"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = latent_attention(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    187107328
    """
    heads = y.split(mixer.heads)
    ops = _query(y, mixer, D, source) + _key_value(y, mixer, D, source) + _selecting(y, mixer, D, source)
    if y.work.phase == "decode":
        ops = [op for op in ops if op.role != "kv_up"] + _absorbed(y, mixer)
    else:
        ops += _expanded(y, mixer)
    expanded = Attention(
        heads=mixer.heads, kv_heads=mixer.heads, head_dim=mixer.v_head_dim, head_gate=mixer.head_gate,
        output_gate=mixer.output_gate,
    )  # fmt: skip
    if mixer.output_gate:
        width = mixer.heads * mixer.v_head_dim
        shape = LinearShape(inputs=D + 0 * heads, outputs=heads * mixer.v_head_dim, whole_inputs=D, whole_outputs=width)
        ops.append(y.column("gate", REGION, shape, source))
    gates, entry = gated(y, expanded, D, source, core_output(y, _core(y, mixer)))
    if not gates:
        # Queries and keys are concatenated, so the output comes by heads and transformers copies it to merge them.
        entry = merged(entry, y.stack.norm == "eager")
    out = LinearShape(inputs=heads * mixer.v_head_dim, outputs=D + 0 * heads,
                whole_inputs=mixer.heads * mixer.v_head_dim, whole_outputs=D, bias=mixer.bias, role="out",
                modules=("o",))  # fmt: skip
    return (*ops, *gates, y.row("out", REGION, out, entry))


def joined_down(ops: tuple[Op[X], ...]) -> tuple[Op[X], ...]:
    """Return operators with both down-projections of latent attention, which read the same input, as one GEMM.

    vLLM fused_qkv_a_proj, SGLang fused_qkv_a_proj_with_mqa, TensorRT-LLM kv_a_proj_with_mqa (2025).
    """
    both = [op for op in ops if op.role in ("q_down", "kv_down")]
    if len(both) != 2:
        return ops
    first, second = both
    one = replace(
        first,
        name="down",
        columns=first.columns + second.columns,
        flops=first.flops + second.flops,
        model_flops=first.model_flops + second.model_flops,
        forward_bytes=first.forward_bytes + second.forward_bytes - 2 * first.rows * first.inner,
        output_bytes=first.output_bytes + second.output_bytes,
        weights=(*first.weights, *second.weights),
    )
    return tuple(one if op is first else op for op in ops if op is not second)
