"""The selector of sparse attention (DeepSeek-V3.2): small heads score past tokens, and attention reads those it picks.

Letters: T tokens, D hidden.
"""

from __future__ import annotations

from shardwise.ledger.number import X, divide
from shardwise.ledger.op import Op, OpRole, Tensor
from shardwise.models import Indexer, NormKind
from shardwise.ops.core import AttentionMask, attended_pairs
from shardwise.ops.elementwise import Norm, norm_op, only_weights, vector, with_statistics
from shardwise.ops.layout import Layout, LinearShape

REGION = "attention.indexer"


def small_norm(y: Layout[X], name: str, region: str, width: int, kind: NormKind = "rmsnorm", extra: int = 0) -> Op[X]:
    """Return the norm of a small projection of the residual stream, such as a latent, from "<name>.input".

    The latent may be a view of a tensor with `extra` more elements a token, which is then kept whole by transformers.
    """
    local = y.residual_width(width)
    elements = y.residual_tokens * local
    n = Norm(name=name, region=region, kind=kind, rows=y.residual_tokens, elements=elements, width=local, whole=width)
    views = y.stack.norm == "eager"
    stored = elements + y.residual_tokens * y.residual_width(extra) if views else elements
    op = norm_op(y, n, Tensor(name=f"{name}.input", size_bytes=y.a * stored, born=region))
    return with_statistics(op, y.residual_tokens) if y.choices.layout == "summa" else op


ROLES: dict[str, OpRole] = {"q_down": "q_down", "kv_down": "kv_down", "q_up": "q_up", "kv_up": "kv_up"}
"""What latent projections are in the ledger, by name."""


def down(y: Layout[X], name: str, region: str, sizes: tuple[int, int], source: Tensor[X], bias: bool = False) -> Op[X]:
    """Return a small projection whose weights are whole on every tensor-parallel rank."""
    inputs, outputs = sizes
    zero = 0 * y.tokens
    shape = LinearShape(
        inputs=inputs + zero,
        outputs=outputs + zero,
        whole_inputs=inputs,
        whole_outputs=outputs,
        bias=bias,
        role=ROLES.get(name, "other"),
    )
    return y.whole(name, region, shape, source)


def indexer_ops(
    y: Layout[X], x: Indexer, mask: AttentionMask, queries: tuple[Tensor[X], int], source: tuple[Tensor[X], int]
) -> list[Op[X]]:
    """Return the operators of an indexer: what its queries and its one key are made of, with their widths.

    Sources: deepseek-ai/DeepSeek-V3.2-Exp inference/model.py, class Indexer; transformers 5.24.0
    models/minimax_m3_vl, MiniMaxM3VLIndexer, models/glm5_next, Glm5NextTextIndexer, and
    models/qwen4_exp, Qwen4ExpTextQSAIndexer. Weights are whole on every
    rank, but for queries that pick for each key-value head, which are split with those heads
    (github.com/vllm-project/vllm, vllm/models/minimax_m3).
    """
    if x.shared:
        return []
    stream, D = source
    made = (queries[1], x.heads * x.head_dim)
    ops = [
        _by_group(y, x, made, queries[0]) if x.style == "groups" else down(y, "indexer.q", REGION, made, queries[0]),
        down(y, "indexer.k", REGION, (D, x.head_dim), stream),
    ]
    if not x.style:
        ops.append(down(y, "indexer.weights", REGION, (D, x.heads), stream))
    else:
        ops.append(_query_norm(y, x))
    kind: NormKind = "rmsnorm-offset" if x.style else "layernorm"
    ops.append(small_norm(y, "indexer.k_norm", REGION, x.head_dim, kind))
    if x.pool and not x.style:
        positions = x.pool * x.head_dim + 0 * y.tokens
        ops += [
            down(y, "indexer.gate", REGION, (D, x.head_dim), stream),
            only_weights(y, "indexer.positions", REGION, (vector("positions", positions, x.pool * x.head_dim),)),
        ]
    pairs, keys, pool = attended_pairs(y, mask), y.work.S + y.work.context, x.pool or 1
    return [*ops, scoring(y, x, REGION, divide(pairs, pool), divide(keys, pool))]


def _by_group(y: Layout[X], x: Indexer, sizes: tuple[int, int], source: Tensor[X]) -> Op[X]:
    """Queries that are split as key-value heads are."""
    inputs, outputs = sizes
    shape = LinearShape(
        inputs=inputs + 0 * y.tokens, outputs=y.kv_heads(x.heads) * x.head_dim, whole_inputs=inputs,
        whole_outputs=outputs,
    )  # fmt: skip
    return y.column("indexer.q", REGION, shape, source)


def _scored(y: Layout[X], x: Indexer) -> tuple[X, X]:
    """Tokens and heads that a rank scores: all heads for its tokens of the residual stream, or its heads for all."""
    if x.style == "groups":
        return y.tokens, y.kv_heads(x.heads)
    return y.residual_tokens, x.heads + 0 * y.tokens


def _query_norm(y: Layout[X], x: Indexer) -> Op[X]:
    """The norm of each head's queries."""
    (tokens, heads), width = _scored(y, x), x.head_dim
    rows = tokens * heads
    n = Norm(name="indexer.q_norm", region=REGION, kind="rmsnorm-offset", rows=rows, elements=rows * width,
             width=width + 0 * heads, whole=width)  # fmt: skip
    return norm_op(y, n, Tensor(name="indexer.q_norm.input", size_bytes=y.a * rows * width, born=REGION))


def scoring(y: Layout[X], x: Indexer, region: str, pairs: X, keys: X) -> Op[X]:
    """Return the scores of an indexer: one GEMM of `head_dim` a head and pair, over so many keys of a sequence."""
    rows, heads = _scored(y, x)
    width = heads * x.head_dim
    flops = 2 * width * divide(y.work.B * pairs * rows, y.work.B * y.work.S)
    moved = y.a * rows * width + y.work.cache_bytes * y.work.B * keys * x.head_dim
    zero = 0 * flops
    return Op(
        name="indexer.scores", kind="attention", region=region, flops=flops, forward_bytes=moved,
        backward_flops=2 * flops, backward_bytes=2 * moved, weight_flops=zero, weight_bytes=zero, rows=rows,
        columns=zero + keys, inner=zero + x.head_dim, batch=zero + heads, model_flops=flops, dtype=y.work.dtype,
        role="indexer",
    )  # fmt: skip
