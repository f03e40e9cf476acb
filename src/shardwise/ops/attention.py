"""Softmax attention with grouped key-value heads: projections, norms of queries and keys, rotary, core, gates.

Letters: T tokens on the rank, N query and K key-value heads on the rank, H head dim, Hv value dim, D hidden.
"""

from __future__ import annotations

from shardwise.ledger.number import X, above, total
from shardwise.ledger.op import Op, Tensor
from shardwise.models import Attention, Model, NormKind, attention_limits
from shardwise.ops.adapters import prefix
from shardwise.ops.core import CORE, AttentionCore, AttentionMask, core_output
from shardwise.ops.core_kernels import attention_core, is_masked, with_scores, without_sdpa
from shardwise.ops.elementwise import Norm, module_norm, only_weights, vector, with_replica_sums
from shardwise.ops.indexer import indexer_ops
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
    op = module_norm(y, n, Tensor(name=f"{name}.input", size_bytes=y.a * elements, born=REGION))
    op = with_replica_sums(y, n, op) if how == "head" else op
    stream = f"attention.{name.rpartition('.')[2]}"
    return replace(op, takes=(stream,), makes=(stream,)) if stream in STREAMS else op


def head_norms(y: Layout[X], mixer: Attention) -> list[Op[X]]:
    """Return the norms of queries, keys and values; a layer without keys of its own norms queries alone."""
    ops: list[Op[X]] = []
    queries, keys = (y.split(mixer.heads), mixer.heads), (y.kv_heads(mixer.kv_heads), mixer.kv_heads)
    if mixer.qk_norm != "none":
        rule = (mixer.qk_norm, mixer.qk_norm_kind)
        ops.append(head_norm(y, "qk_norm.queries", queries, mixer.head_dim, rule))
        if not mixer.kv_from_earlier:
            ops.append(head_norm(y, "qk_norm.keys", keys, mixer.head_dim, rule))
    if mixer.v_norm and not mixer.kv_from_earlier:
        ops.append(head_norm(y, "v_norm", keys, mixer.value_dim, ("head", "rmsnorm-power-no-weight")))
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


def projections(y: Layout[X], mixer: Attention, D: int) -> LinearShape[X]:
    """Return the linear layer that makes queries (and their gate), keys and values.

    Key-value heads below one a rank are replicated; layers that read an earlier cache have queries alone; one
    projection may serve as key and value.
    """
    heads, kv, inputs = y.split(mixer.heads), y.kv_heads(mixer.kv_heads), mixer.input_width or D
    gate = mixer.value_dim if mixer.output_gate else 0
    per_query = mixer.head_dim + gate
    per_key = 0 if mixer.kv_from_earlier else mixer.head_dim + (0 if mixer.shared_key_value else mixer.value_dim)
    per_value = max(per_key - mixer.head_dim, 0)
    gate_apart = gate if mixer.gate_apart else 0
    parts = tuple(n for n, each in ((heads * (per_query - gate_apart), 1), (kv * (per_key - per_value), per_key),
                                    (kv * per_value, per_value)) if each)  # fmt: skip
    names, gates = ("q", "k", "v")[: len(parts)], ((heads * gate_apart,), ("gate",)) if gate_apart else ((), ())
    return LinearShape(
        inputs=inputs + 0 * heads, outputs=heads * per_query + kv * per_key, whole_inputs=inputs,
        whole_outputs=mixer.heads * per_query + mixer.kv_heads * per_key, bias=mixer.qkv_bias,
        kernels=1 if y.stack.activation == "fused" else len(parts + gates[0]), parts=parts + gates[0], role="qkv",
        modules=("qkv",) if mixer.fused_projection else names + gates[1],
    )  # fmt: skip


def core_of(y: Layout[X], mixer: Attention) -> AttentionCore[X]:
    """Return the sizes of the core of an attention layer."""
    return AttentionCore(
        heads=y.split(mixer.heads), kv_heads=y.kv_heads(mixer.kv_heads), key_dim=mixer.head_dim,
        value_dim=mixer.value_dim, repeats=mixer.heads // mixer.kv_heads, caps=mixer.softcap, sinks=mixer.sinks,
        viewed_keys=mixer.viewed_keys, masked=mixer.masked, narrow=mixer.narrow_softmax,
        mask=AttentionMask(window=mixer.window or _picked(mixer), chunk=mixer.chunk, causal=mixer.causal),
    )  # fmt: skip


def _picked(mixer: Attention) -> int:
    """The keys that a query sees where an indexer picks them, whichever they are: as many as a window of that size."""
    return mixer.indexer.top_k if mixer.indexer else 0


def repeated(
    y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]
) -> tuple[tuple[Op[X], ...], tuple[Tensor[X], ...]]:
    """Return what repeats keys and values to the query heads, and what the kernel then reads and keeps.

    Kernel by kernel alone: a compiled layer (activation "fused") repeats them anew in backward. Where a window is a
    mask they are repeated from the length on from which it is.
    """
    by_steps = y.stack.repeats_kv and y.stack.activation == "eager" and y.stack.attention == "flash"
    masked = is_masked(y, core)
    if not (by_steps or masked) or core.repeats == 1 or y.work.phase != "train":
        return (), inputs
    queries, keys, values = inputs

    def where(then: X, other: X) -> X:
        return then if by_steps else above(y.work.S, core.mask.limit - 1, then, other)

    keys, values = (
        replace(
            t, name=f"attention.repeated {name}", size_bytes=where(y.a * y.tokens * core.heads * width, t.size_bytes)
        )
        for t, name, width in ((keys, "keys", core.key_dim), (values, "values", core.value_dim))
    )
    moved = where(y.a * y.tokens * (core.heads + core.kv_heads) * core.dims, 0 * y.tokens)
    op = memory_op(y, "repeat", REGION, (moved, moved), kernels=where(2 + 0 * y.tokens, 0 * y.tokens),
                   output_bytes=keys.size_bytes + values.size_bytes,
                   role="steps", takes=STREAMS[1:], makes=())  # fmt: skip
    return (op,), (queries, keys, values)


def attention_masks(y: Layout[X], model: Model) -> X:
    """Return the bytes of masks that all layers share: what comes with the data, and what transformers makes of it.

    One a kind of layer: a byte a pair for SDPA where a window is reached, numbers for eager attention (transformers
    5.24.0 masking_utils.py sdpa_mask and eager_mask).

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> y = whole_layout(1, 8192, stack="transformers")
    >>> [attention_masks(y, Model.load(name)) / 8192**2 for name in ("llama-3.1-8b", "gemma-3-4b", "gpt-oss-20b")]
    [0.0, 1.0, 4.0]
    """
    pairs = y.tokens * y.work.S
    if y.stack.settings.attention_mask:
        return pairs
    if y.work.phase != "train" or not (y.stack.calls_sdpa or y.stack.attention == "eager"):
        return 0 * pairs
    fused = y.stack.attention == "flash"
    kinds = attention_limits(model, fused and y.stack.loads_sinks_kernel)
    eager = {limit for limit, more in kinds if more or not fused}
    masked = {limit for limit, more in kinds if limit and not more and fused}
    return y.a * len(eager) * pairs + total((above(y.work.S, n - 1, pairs, 0 * pairs) for n in masked), 0 * pairs)


def gated(y: Layout[X], mixer: Attention, D: int, source: Tensor[X], out: Tensor[X]) -> tuple[list[Op[X]], Tensor[X]]:
    """Return the operators of a gate on the attention output and what enters the output projection.

    An output gate (Qwen3-Next) came with the queries; a head gate has its own small projection. The sigmoid of the
    gate and the ungated output are kept.
    """
    heads = y.split(mixer.heads)
    ops: list[Op[X]] = []
    if not (mixer.output_gate or mixer.head_gate):
        return ops, out
    width = heads * mixer.value_dim if mixer.output_gate else heads
    if mixer.head_gate:
        shape = LinearShape(inputs=D + 0 * heads, outputs=heads, whole_inputs=D, whole_outputs=mixer.heads)
        ops.append(y.column("head_gate", REGION, shape, source))
    gate, product = (
        y.activation("attention.gate", width, REGION),
        y.activation("attention.gated", heads * mixer.value_dim, REGION),
    )
    moved = (2 * product.size_bytes + gate.size_bytes, 3 * product.size_bytes + 2 * gate.size_bytes)
    ops.append(
        memory_op(y, "output_gate", REGION, moved, saves=(gate, out), kernels=2, output_bytes=product.size_bytes)
    )
    return ops, product


def merged(out: Tensor[X], copies: bool) -> Tensor[X]:
    """Return the attention output as the output projection keeps it: a copy where merging the heads moves them."""
    return Tensor(name="attention.merged", size_bytes=out.size_bytes, born=REGION) if copies else out


def _without_keys(op: Op[X]) -> Op[X]:
    """Return an operator that keeps no keys and values as they came: the earlier layer that made them does."""
    return replace(op, saves=tuple(t for t in op.saves if t.name not in STREAMS[1:]))


def _split(y: Layout[X], inputs: tuple[Tensor[X], ...]) -> Op[X]:
    """Return what a joint projection costs: a copy of the queries out of it, and the gradients joined again.

    Megatron-LM core/transformer/attention.py, get_query_key_value_tensors: the reshape of the queries copies them, and
    backward concatenates. Engines read the joint tensor.
    """
    queries = inputs[0].size_bytes
    joined = total((t.size_bytes for t in inputs), 0 * queries)
    trains = 1 if y.work.phase == "train" else 0
    return memory_op(y, "split", REGION, (trains * 2 * queries, trains * 2 * joined), kernels=trains)


def attention(y: Layout[X], mixer: Attention, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one attention layer, from its normed input to the residual stream.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("llama-3.1-8b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = attention(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    41943040
    """
    y = without_sdpa(y, core_of(y, mixer))
    heads, kv = y.split(mixer.heads), y.kv_heads(mixer.kv_heads)
    if mixer.input_width:
        source = y.residual("attention.input", mixer.input_width, "norm1")
    # Rotated queries and keys are new tensors; values stay a view of a fused projection, which is kept whole.
    by_modules = y.stack.norm == "eager" and y.stack.attention == "flash"
    viewed = by_modules and mixer.fused_projection and mixer.rotary
    stored = projections(y, mixer, D).outputs if viewed else kv * mixer.value_dim
    inputs = (
        y.activation("attention.queries", heads * mixer.head_dim, REGION),
        y.activation("attention.keys", kv * mixer.head_dim, REGION),
        y.activation("attention.values", stored, REGION),
    )
    core = core_of(y, mixer)
    ops = [y.column("qkv", REGION, projections(y, mixer, D), source, makes=STREAMS), *head_norms(y, mixer)]
    if (tuning := y.choices.tuning) is not None and tuning.prefix_tokens and not mixer.kv_from_earlier:
        ops.append(prefix(y, tuning, ops[0], (kv, mixer.head_dim + mixer.value_dim)))
    if mixer.rotary:
        turned = rotary(y, (heads + (0 if mixer.kv_from_earlier else kv)) * mixer.head_dim)
        ops.append(replace(turned, takes=STREAMS[:2]))
    if (mixer.fused_projection and mixer.rotary) or y.stack.activation == "fused":
        ops.append(_split(y, inputs))
    if mixer.indexer is not None:
        ops += indexer_ops(y, mixer.indexer, AttentionMask(causal=mixer.causal), (source, D), (source, D))
    # One head of keys serves all as a view.
    copied, read = repeated(y, core, inputs) if mixer.kv_heads > 1 else ((), inputs)
    inner = attention_core(with_scores(y, mixer.head_dim), core, read)
    ops += (*copied, *(map(_without_keys, inner) if mixer.kv_from_earlier and y.stack.attention == "flash" else inner))
    if mixer.sinks:
        ops.append(only_weights(y, "sinks", CORE, (vector("sinks", heads, mixer.heads),)))
    gates, product = gated(y, mixer, D, source, core_output(y, core))
    if not gates:
        copies = y.stack.attention == "eager" or y.stack.merged_attention_copy or (by_modules and mixer.joined_rotary)
        product = merged(product, copies)
    out = LinearShape(
        inputs=heads * mixer.value_dim,
        outputs=D + 0 * heads,
        whole_inputs=mixer.heads * mixer.value_dim,
        whole_outputs=D,
        bias=mixer.out_bias,
        role="out",
        modules=("o",),
    )
    return (*ops, *gates, y.row("out", REGION, out, product))
