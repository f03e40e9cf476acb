"""DeepSeek-V4's compressed attention: one shared key-value head, a window, and past tokens compressed beside it.

Sources: the model classes of transformers 5.23.0 (models/deepseek_v4) and of its main branch of 2026-09
(models/deepseek_v41). Letters: T tokens, N heads on the rank, H head dim, ql the query rank, D hidden.
"""

from __future__ import annotations

from shardwise.ledger.number import X, divide, minimum
from shardwise.ledger.op import Op, Tensor, Weight
from shardwise.models import CompressedAttention
from shardwise.ops.attention import REGION, head_norm, rotary
from shardwise.ops.core import CORE, AttentionCore, AttentionMask, core_output, whole_chunks
from shardwise.ops.core_kernels import attention_core
from shardwise.ops.elementwise import only_weights, vector
from shardwise.ops.indexer import down, scoring, small_norm
from shardwise.ops.latent import gathered, up
from shardwise.ops.layout import Layout, LinearShape, matmul_flops
from shardwise.records import replace

COMPRESSOR = "attention.compressor"


def compressed_keys(y: Layout[X], mixer: CompressedAttention) -> X:
    """Return how many compressed entries a sequence has by the end of the new tokens."""
    return whole_chunks(y.work.S + y.work.context, mixer.rate) if mixer.rate else 0 * y.work.S


def picked_pairs(y: Layout[X], mixer: CompressedAttention) -> X:
    """Return (query, compressed entry) pairs of one sequence: all entries behind a query, at most the indexer's picks.

    A query at position p sees (p + 1) / rate entries; the sum over positions is taken as its integral.
    """
    if not mixer.rate:
        return 0 * y.work.S
    if y.work.coverage == "full":
        keys = compressed_keys(y, mixer)
        return y.work.S * (minimum(keys, mixer.indexer.top_k) if mixer.indexer else keys)
    return _behind(y.work.S + y.work.context, mixer) - _behind(y.work.context, mixer)


def _behind(n: X, mixer: CompressedAttention) -> X:
    most = mixer.indexer.top_k * mixer.rate if mixer.indexer else 0
    grown = minimum(n, most) if most else n
    triangle: X = divide(grown * grown, 2 * mixer.rate)
    return triangle + (n - grown) * most / mixer.rate if most else triangle


def _compressor(y: Layout[X], mixer: CompressedAttention, D: int, source: Tensor[X]) -> list[Op[X]]:
    """Values, gates and their learned positions, softmax-pooled over windows; indexed layers keep two series.

    A source pools without positions, and not at all where all tokens have an entry; its latents make index keys.
    """
    if not mixer.rate:
        return []
    x, own = mixer.indexer, mixer.entries == "own"
    ops = _latents(y, mixer, D, source) if mixer.entries == "source" else []
    ops += _pooling(y, "compressor", mixer, (D, mixer.head_dim), source) if own else []
    if x is None or x.shared:
        return ops
    queries = Tensor(
        name="q_norm.output", size_bytes=y.a * y.residual_tokens * y.residual_width(mixer.q_lora_rank), born=REGION
    )
    return [
        *ops,
        *(_pooling(y, "indexer", mixer, (D, x.head_dim), source) if own else ()),
        down(y, "indexer.q", COMPRESSOR, (mixer.q_lora_rank, x.heads * x.head_dim), queries),
        down(y, "indexer.weights", COMPRESSOR, (D, x.heads), source),
        # The indexer scores every compressed entry, not only those it picks.
        scoring(y, x, COMPRESSOR, picked_pairs(y, replace(mixer, indexer=None)), compressed_keys(y, mixer)),
    ]


def _latents(y: Layout[X], mixer: CompressedAttention, D: int, source: Tensor[X]) -> list[Op[X]]:
    """What a source makes of the stream: values, their gates where it pools, and of both the keys of the indexer."""
    H = mixer.head_dim
    ops = [down(y, "compressor.kv", COMPRESSOR, (D, H), source)]
    ops += [down(y, "compressor.gate", COMPRESSOR, (D, H), source)] if mixer.rate > 1 else []
    ops.append(small_norm(y, "compressor.norm", COMPRESSOR, H))
    if mixer.indexer is None or mixer.indexer.shared:
        return ops
    size = y.a * y.residual_tokens * y.residual_width(H)
    latent = Tensor(name="compressor.norm.output", size_bytes=size, born=COMPRESSOR)
    keys = down(y, "indexer.k", COMPRESSOR, (H, mixer.indexer.head_dim), latent)
    return [*ops, keys, small_norm(y, "indexer.k_norm", COMPRESSOR, mixer.indexer.head_dim)]


def _pooling(
    y: Layout[X], name: str, mixer: CompressedAttention, sizes: tuple[int, int], source: Tensor[X]
) -> list[Op[X]]:
    D, width = sizes
    series = 2 if mixer.indexer else 1
    zero = 0 * y.tokens
    positions = mixer.rate * series * width
    return [
        down(y, f"{name}.kv", COMPRESSOR, (D, series * width), source),
        down(y, f"{name}.gate", COMPRESSOR, (D, series * width), source),
        only_weights(y, f"{name}.positions", COMPRESSOR, (vector(f"{name}.positions", zero + positions, positions),)),
        small_norm(y, f"{name}.norm", COMPRESSOR, width),
    ]


def _core(y: Layout[X], mixer: CompressedAttention) -> tuple[Op[X], ...]:
    """The window's attention with the compressed entries beside it; every head reads the one shared key-value head."""
    heads, one = y.split(mixer.heads), 1 + 0 * y.tokens
    H = mixer.head_dim
    core = AttentionCore(
        heads=heads, kv_heads=one, key_dim=H, value_dim=H, repeats=mixer.heads, mask=AttentionMask(window=mixer.window)
    )
    keys = y.activation("attention.keys", H * one, REGION)
    queries = y.activation("attention.queries", heads * H, REGION)
    ops = attention_core(y, core, (queries, keys, keys))
    picked = y.work.B * divide(picked_pairs(y, mixer) * y.tokens, y.work.B * y.work.S)
    entries = (
        minimum(compressed_keys(y, mixer), mixer.indexer.top_k * y.work.S)
        if mixer.indexer
        else compressed_keys(y, mixer)
    )
    moved = y.work.cache_bytes * y.work.B * entries * H
    first = ops[0]
    more = 4 * heads * H * picked
    wide = replace(
        first, flops=first.flops + more, model_flops=first.model_flops + more,
        forward_bytes=first.forward_bytes + moved,
        backward_flops=first.backward_flops + 2.5 * more, backward_bytes=first.backward_bytes + 2 * moved,
    )  # fmt: skip
    return (wide, *ops[1:])


def _outputs(y: Layout[X], mixer: CompressedAttention, D: int) -> list[Op[X]]:
    """The grouped low-rank map of the heads, then the map back to the residual stream."""
    heads = y.split(mixer.heads)
    T, groups = y.tokens, y.split(mixer.out_groups)
    wide = mixer.heads * mixer.head_dim // mixer.out_groups
    core = AttentionCore(heads=heads, kv_heads=heads, key_dim=mixer.head_dim, value_dim=mixer.head_dim)
    out = core_output(y, core)
    elements = groups * wide * mixer.out_lora_rank
    flops = matmul_flops(T, groups * mixer.out_lora_rank, wide + 0 * T)
    weight = Weight(
        name="out_groups.weight",
        elements=elements,
        whole=0 * heads + mixer.heads * mixer.head_dim * mixer.out_lora_rank,
    )
    edges = y.a * T * groups * (wide + mixer.out_lora_rank)
    moved = edges + y.work.weight_bytes * elements
    grouped = Op(
        name="out_groups", kind="matmul", region=REGION, flops=flops, forward_bytes=moved, backward_flops=flops,
        backward_bytes=moved, weight_flops=flops, weight_bytes=edges + 2 * y.work.gradient_bytes * elements, rows=T,
        columns=0 * T + mixer.out_lora_rank, inner=0 * T + wide, batch=groups, weights=(weight,),
        parts=(groups * mixer.out_lora_rank,), modules=("o_a",), reads=(out,),
        saves=(replace(out, read_for="weight"),), model_flops=flops, dtype=y.work.dtype,
        output_bytes=y.a * T * groups * mixer.out_lora_rank,
    )  # fmt: skip
    ranks = mixer.out_groups * mixer.out_lora_rank
    entry = y.activation("out_groups.output", groups * mixer.out_lora_rank, REGION)
    shape = LinearShape(inputs=groups * mixer.out_lora_rank, outputs=D + 0 * heads, whole_inputs=ranks, whole_outputs=D)
    return [grouped, y.row("out", REGION, shape, entry)]


def compressed_attention(y: Layout[X], mixer: CompressedAttention, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one compressed attention layer, from its normed input to the residual stream.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("deepseek-v4-flash"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = compressed_attention(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    106956352
    """
    heads, ql = y.split(mixer.heads), mixer.q_lora_rank
    latent = Tensor(name="q_norm.output", size_bytes=y.a * y.residual_tokens * y.residual_width(ql), born=REGION)
    return (
        down(y, "q_down", REGION, (D, ql), source),
        gathered(y, small_norm(y, "q_norm", REGION, ql), ql),
        up(y, "q_up", ql, mixer.head_dim, mixer.heads, latent),
        *(
            (head_norm(y, "head_norm", (heads, mixer.heads), mixer.head_dim, ("head", "rmsnorm-no-weight")),)
            if mixer.query_norm
            else ()
        ),
        down(y, "kv", REGION, (D, mixer.head_dim), source),
        small_norm(y, "kv_norm", REGION, mixer.head_dim),
        *_compressor(y, mixer, D, source),
        rotary(y, (2 * heads + 1) * mixer.head_dim),
        *_core(y, mixer),
        only_weights(y, "sinks", CORE, (vector("sinks", heads, mixer.heads),)),
        *_outputs(y, mixer, D),
    )
