"""Softmax attention with grouped key-value heads: projections, norms of queries and keys, rotary, core, gates.

Letters: T tokens on the rank, N query and K key-value heads on the rank, H head dim, Hv value dim, D hidden.
"""

from __future__ import annotations

from shardwise.ledger.number import X, total
from shardwise.ledger.op import Op, Tensor
from shardwise.models import Attention, NormKind
from shardwise.ops.adapters import prefix
from shardwise.ops.core import CORE, AttentionCore, AttentionMask, attention_core, core_output
from shardwise.ops.elementwise import Norm, norm_op, only_weights, vector
from shardwise.ops.layout import Layout, LinearShape, memory_op
from shardwise.records import replace

REGION = "attention"
STREAMS = ("attention.queries", "attention.keys", "attention.values")
"""What the projections of attention make."""


def head_norm(y: Layout[X], name: str, heads: tuple[X, int], dim: int, rule: tuple[str, NormKind]) -> Op[X]:
    """Return the norm of queries, keys or values of so many (local, whole) heads.

    `rule` is the kind of `Attention.qk_norm` and of norm: "head" has weights of one head, "heads" of all heads, both
    normalise each head; "full" normalises the whole projection.
    """
    local, whole = heads
    how, kind = rule
    elements = y.tokens * local * dim
    rows = y.tokens if how == "full" else y.tokens * local
    width = dim + 0 * local if how == "head" else local * dim
    n = Norm(name=name, region=REGION, kind=kind, rows=rows, elements=elements, width=width,
             whole=dim if how == "head" else whole * dim)  # fmt: skip
    op = norm_op(y, n, Tensor(name=f"{name}.input", size_bytes=y.a * elements, born=REGION))
    stream = f"attention.{name.rpartition('.')[2]}"
    return replace(op, takes=(stream,), makes=(stream,)) if stream in STREAMS else op


def head_norms(y: Layout[X], m: Attention) -> list[Op[X]]:
    """Return the norms of queries, keys and values; a layer without keys of its own norms queries alone."""
    ops: list[Op[X]] = []
    queries, keys = (y.split(m.heads), m.heads), (y.kv_heads(m.kv_heads), m.kv_heads)
    if m.qk_norm != "none":
        rule = (m.qk_norm, m.qk_norm_kind)
        ops.append(head_norm(y, "qk_norm.queries", queries, m.head_dim, rule))
        if not m.kv_from_earlier:
            ops.append(head_norm(y, "qk_norm.keys", keys, m.head_dim, rule))
    if m.v_norm and not m.kv_from_earlier:
        ops.append(head_norm(y, "v_norm", keys, m.value_dim, ("head", "rmsnorm-no-weight")))
    return ops


def rotary(y: Layout[X], width: X) -> Op[X]:
    """Return rotary embedding of `width` elements a token: one read and one write each way; it keeps nothing per layer.

    The cosines and sines are made once a step for all layers. PyTorch's versions are eight kernels or more, which move
    the stream as often as `Stack.rotary_passes` says.
    """
    stream = y.a * y.tokens * width
    kernels, (ahead, back) = (1, (2, 2)) if y.stack.activation == "fused" else (8, y.stack.rotary_passes)
    return memory_op(y, "rotary", REGION, (ahead * stream, back * stream), kernels=kernels, output_bytes=stream,
                     role="rotary", makes=())  # fmt: skip


def projections(y: Layout[X], m: Attention, D: int) -> LinearShape[X]:
    """Return the linear layer that makes queries (and their gate), keys and values.

    Key-value heads below one a rank are replicated; layers that read an earlier cache have queries alone; one
    projection may serve as key and value.
    """
    heads, kv, inputs = y.split(m.heads), y.kv_heads(m.kv_heads), m.input_width or D
    per_query = m.head_dim + (m.value_dim if m.output_gate else 0)
    per_key = 0 if m.kv_from_earlier else m.head_dim + (0 if m.shared_key_value else m.value_dim)
    per_value = max(per_key - m.head_dim, 0)
    parts = tuple(n for n, each in ((heads * per_query, 1), (kv * (per_key - per_value), per_key),
                                    (kv * per_value, per_value)) if each)  # fmt: skip
    return LinearShape(
        inputs=inputs + 0 * heads, outputs=heads * per_query + kv * per_key, whole_inputs=inputs,
        whole_outputs=m.heads * per_query + m.kv_heads * per_key, bias=m.qkv_bias,
        kernels=1 if y.stack.activation == "fused" else len(parts), parts=parts, role="qkv",
        modules=("qkv",) if m.fused_projection else ("q", "k", "v")[: len(parts)],
    )  # fmt: skip


def core_of(y: Layout[X], m: Attention) -> AttentionCore[X]:
    """Return the sizes of the core of an attention layer."""
    return AttentionCore(
        heads=y.split(m.heads), kv_heads=y.kv_heads(m.kv_heads), key_dim=m.head_dim, value_dim=m.value_dim,
        repeats=m.heads // m.kv_heads, mask=AttentionMask(window=m.window, chunk=m.chunk, causal=m.causal),
        caps=m.softcap,
    )  # fmt: skip


def gated(y: Layout[X], m: Attention, D: int, source: Tensor[X], out: Tensor[X]) -> tuple[list[Op[X]], Tensor[X]]:
    """Return the operators of a gate on the attention output and what enters the output projection.

    An output gate (Qwen3-Next) came with the queries; a head gate has its own small projection. The sigmoid of the
    gate and the ungated output are kept.
    """
    heads = y.split(m.heads)
    ops: list[Op[X]] = []
    if not (m.output_gate or m.head_gate):
        return ops, out
    width = heads * m.value_dim if m.output_gate else heads
    if m.head_gate:
        shape = LinearShape(inputs=D + 0 * heads, outputs=heads, whole_inputs=D, whole_outputs=m.heads)
        ops.append(y.column("head_gate", REGION, shape, source))
    gate, product = (
        y.activation("attention.gate", width, REGION),
        y.activation("attention.gated", heads * m.value_dim, REGION),
    )
    moved = (2 * product.size_bytes + gate.size_bytes, 3 * product.size_bytes + 2 * gate.size_bytes)
    ops.append(
        memory_op(y, "output_gate", REGION, moved, saves=(gate, out), kernels=2, output_bytes=product.size_bytes)
    )
    return ops, product


def merged(out: Tensor[X], copies: bool) -> Tensor[X]:
    """Return the attention output as the output projection keeps it: a copy where merging the heads moves them."""
    return Tensor(name="attention.merged", size_bytes=out.size_bytes, born=REGION) if copies else out


def _split(y: Layout[X], inputs: tuple[Tensor[X], ...]) -> Op[X]:
    """Return what a joint projection costs: a copy of the queries out of it, and the gradients joined again.

    Megatron-LM core/transformer/attention.py, get_query_key_value_tensors: the reshape of the queries copies them, and
    backward concatenates. Engines read the joint tensor.
    """
    queries = inputs[0].size_bytes
    joined = total((t.size_bytes for t in inputs), 0 * queries)
    trains = 1 if y.work.phase == "train" else 0
    return memory_op(y, "split", REGION, (trains * 2 * queries, trains * 2 * joined), kernels=trains)


def attention(y: Layout[X], m: Attention, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one attention layer, from its normed input to the residual stream.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("llama-3.1-8b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = attention(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    41943040
    """
    heads, kv = y.split(m.heads), y.kv_heads(m.kv_heads)
    if m.input_width:
        source = y.residual("attention.input", m.input_width, "norm1")
    # Rotated queries and keys are new tensors; values stay a view of a fused projection, which is kept whole.
    by_modules = y.stack.norm == "eager" and y.stack.attention == "flash"
    viewed = by_modules and m.fused_projection and m.rotary
    stored = projections(y, m, D).outputs if viewed else kv * m.value_dim
    inputs = (
        y.activation("attention.queries", heads * m.head_dim, REGION),
        y.activation("attention.keys", kv * m.head_dim, REGION),
        y.activation("attention.values", stored, REGION),
    )
    core = core_of(y, m)
    ops = [y.column("qkv", REGION, projections(y, m, D), source, makes=STREAMS), *head_norms(y, m)]
    if (tuning := y.choices.tuning) is not None and tuning.prefix_tokens:
        ops.append(prefix(y, tuning, ops[0], (kv, m.head_dim + m.value_dim)))
    if m.rotary:
        turned = rotary(y, (heads + (0 if m.kv_from_earlier else kv)) * m.head_dim)
        ops.append(replace(turned, takes=STREAMS[:2]))
    if (m.fused_projection and m.rotary) or y.stack.activation == "fused":
        ops.append(_split(y, inputs))
    ops += attention_core(y, core, inputs)
    if m.sinks:
        ops.append(only_weights(y, "sinks", CORE, (vector("sinks", heads, m.heads),)))
    gates, product = gated(y, m, D, source, core_output(y, core))
    if not gates:
        copies = y.stack.attention == "eager" or y.stack.merged_attention_copy or (by_modules and m.joined_rotary)
        product = merged(product, copies)
    out = LinearShape(
        inputs=heads * m.value_dim,
        outputs=D + 0 * heads,
        whole_inputs=m.heads * m.value_dim,
        whole_outputs=D,
        bias=m.out_bias,
        role="out",
        modules=("o",),
    )
    return (*ops, *gates, y.row("out", REGION, out, product))
