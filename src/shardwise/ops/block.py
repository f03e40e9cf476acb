"""A block as a list of operators: the ledger of one layer on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardwise.ledger.number import X, divide, maximum
from shardwise.ledger.op import Op, Tensor
from shardwise.models import (
    Attention,
    Block,
    CompressedAttention,
    FeedForward,
    GatedDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mixer,
    Mlstm,
    Model,
    MoE,
    Projection,
    RecurrentGate,
    Rwkv,
    ShortConv,
    StreamConvs,
)
from shardwise.ops.adapter_parts import NO_LAYER, matches, modules_of
from shardwise.ops.adapters import prefix_table
from shardwise.ops.attention import attention
from shardwise.ops.compressed import compressed_attention
from shardwise.ops.elementwise import branch_scale, mixed_streams, norm, only_weights, residual_add, vector
from shardwise.ops.experts import moe
from shardwise.ops.feed_forward import mlp
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.latent import latent_attention
from shardwise.ops.layout import Layout, LinearShape, belonging, lay_out, matmul
from shardwise.ops.narrow import quantised, quantised_inputs
from shardwise.ops.peft_adapters import SHARED, shared
from shardwise.ops.recurrent import (
    gated_delta,
    lightning_attention,
    mlstm,
    recurrent_gate,
    rwkv,
    short_conv,
    stream_convs,
)
from shardwise.ops.ssm import mamba1, mamba2
from shardwise.ops.tuning import tuned
from shardwise.records import replace

# The one place that knows which operators a kind of mixer has; each takes (layout, mixer, hidden, its normed input).
_MIXERS: dict[type, Callable[..., tuple[Op[Any], ...]]] = {
    Attention: attention,
    LatentAttention: latent_attention,
    CompressedAttention: compressed_attention,
    Mamba1: mamba1,
    Mamba2: mamba2,
    GatedDelta: gated_delta,
    LightningAttention: lightning_attention,
    ShortConv: short_conv,
    StreamConvs: stream_convs,
    RecurrentGate: recurrent_gate,
    Rwkv: rwkv,
    Mlstm: mlstm,
}
_ATTENDS = (Attention, LatentAttention, CompressedAttention)


def mixer(y: Layout[X], mixer: Mixer, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one mixer."""
    ops = _MIXERS[type(mixer)](y, mixer, D, source)
    return (
        ops if y.work.phase == "train" else belonging(ops, "attention" if isinstance(mixer, _ATTENDS) else "recurrent")
    )


def feed_forward(y: Layout[X], m: FeedForward, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of one feed-forward, with what it keeps quantised where the user asks for it."""
    ops = moe(y, m, D, source) if isinstance(m, MoE) else mlp(y, m, D, source)
    return quantised(y, ops, source) if y.stack.settings.quantises else ops


def projection(y: Layout[X], p: Projection, region: str) -> Op[X]:
    """Return a linear map outside the standard operators, on the residual stream's own tokens, with its own input.

    One of a sequence runs on a token of each, whole on every rank.
    """
    zero = 0 * y.tokens
    shape = LinearShape(
        inputs=zero + p.inputs, outputs=zero + p.outputs, whole_inputs=p.inputs, whole_outputs=p.outputs, bias=p.bias,
        modules=() if p.linear else NO_LAYER,
    )  # fmt: skip
    rows = y.work.B if p.of_sequence else y.residual_tokens
    if p.besides:
        rows = divide(rows * maximum(y.work.S - p.besides, 0), y.work.S)
    source = Tensor(name=f"{p.name}.input", size_bytes=y.a * rows * y.residual_width(p.inputs), born=region)
    op = y.whole(p.name, region, shape, source)
    if not (p.of_sequence or p.besides):
        return op
    sizes = (zero + rows, shape.outputs, shape.inputs)
    return matmul(y, p.name, region, sizes, op.weights, source, modules=shape.modules)


def block_ops(y: Layout[X], block: Block, D: int) -> tuple[Op[X], ...]:
    """Return the ledger of one block: norm, mixers, addition, norm, feed-forward, addition.

    Pre-norm blocks norm the input of each branch; models with four norms norm the branch's output too. A parallel
    block adds both branches to one input. Regions are "norm1", "attention" or "ssm", "norm2", "mlp" and "extras".
    Blocks inside this one follow with their tensors named apart, and the weights of those that never run.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("gpt2"), whole_layout(1, 64)
    >>> [op.name for op in block_ops(y, model.layers[0], model.hidden)][:3]
    ['norm1', 'qkv', 'attention']
    """
    own = tuned(y, [*_mixing(y, block, D), *_feeding(y, block, D), *_extras(y, block, D)])
    ops = [*quantised_inputs(y, own), *_idle_adapters(y, block, own)]
    for index, other in enumerate(block.also, start=1):
        ops += (_apart(op, f"also{index}") for op in block_ops(y, other, D))
    for other in block.idle:
        ops += (only_weights(y, op.name, op.region, op.weights) for op in block_ops(y, other, D) if op.weights)
    return tuple(ops)


def _idle_adapters(y: Layout[X], block: Block, own: Iterable[Op[X]]) -> Iterator[Op[X]]:
    """Yield the adapters beside copies of projections that a layer holds and does not run: no gradient reaches them."""
    tuning, copies = y.choices.tuning, {p.name: p.instances - 1 for p in block.extras if p.instances > 1}
    for op in own if tuning is not None and copies else ():
        more = copies.get(op.modules[0], 0) if op.modules else 0
        if more and tuning is not None:
            idle = (replace(w, name=f"{w.name}.idle", elements=more * w.elements, whole=more * w.whole, trainable=False,
                            stored_bytes=more * (w.stored_bytes or tuning.width * w.elements))
                    for w in op.weights if w.adapter)  # fmt: skip
            yield only_weights(y, f"{op.name}.idle", op.region, tuple(idle))


def _mixing(y: Layout[X], block: Block, D: int) -> list[Op[X]]:
    """The first branch: its norm, its mixers side by side, their norm where the block has four, their addition."""
    if not block.mixers:
        return []
    entry = y.residual("input", D, "")
    ops: list[Op[X]] = []
    normed = entry
    if block.norms:
        ops.append(norm(y, "norm1", D, block.norm, entry))
        normed = y.residual("norm1.output", D, "norm1")
    for one in block.mixers:
        ops += mixer(y, one, D, normed)
    if block.norms > 3:
        ops.append(norm(y, "post_norm1", D, block.norm, _made(y, "mixer.output", D, "attention"), "attention"))
    if block.branch_scale:
        ops.append(branch_scale(y, "scale1", D, "attention", y.residual("mixer.scaled", D, "attention")))
    if not block.parallel:
        ops.append(residual_add(y, "add1", D, "attention"))
    return ops


def _feeding(y: Layout[X], block: Block, D: int) -> list[Op[X]]:
    """The second branch, from the stream behind the mixers, or from their input in a parallel block."""
    m = block.feed_forward
    if m is None:
        return []
    middle, ops = _stream(y, block, D), []
    source, own_norm = middle, block.norms > (1 if block.mixers else 0)
    if own_norm:
        ops.append(norm(y, "norm2", D, block.norm, middle))
        source = y.residual("norm2.output", D, "norm2")
    elif block.norms:
        source = y.residual("norm1.output", D, "norm1")
    ops += feed_forward(y, m, D, source)
    if block.norms > 3:
        ops.append(norm(y, "post_norm2", D, block.norm, _made(y, "mlp.output", D, "mlp"), "mlp"))
    if block.branch_scale:
        ops.append(branch_scale(y, "scale2", D, "mlp", y.residual("mlp.scaled", D, "mlp")))
    ops.append(residual_add(y, "add2", D, "mlp"))
    return ops


def _made(y: Layout[X], name: str, D: int, region: str) -> Tensor[X]:
    """What the last GEMM of a branch makes, in the type of GEMMs."""
    size = y.a * y.residual_tokens * y.residual_width(D)
    return Tensor(name=name, size_bytes=size, born=region)


def _stream(y: Layout[X], block: Block, D: int) -> Tensor[X]:
    """What the feed-forward's branch starts from."""
    if block.parallel or not block.mixers:
        return y.residual("input", D, "")
    return y.residual("middle", D, "attention")


def _extras(y: Layout[X], block: Block, D: int) -> list[Op[X]]:
    """Projections, norms and vectors that the family has beside the standard operators."""
    region = "extras"
    ops = [projection(y, p, region) for p in block.extras]
    ops += [mixed_streams(y, p.name, D, region, p.streams) for p in block.extras if p.streams > 1]
    for i in range(1, block.extra_norms + 1):
        source = y.residual(f"extra_norm{i}.input", D, region)
        if i == 1 and block.experts is not None and block.experts.router_norm:
            source = _stream(y, block, D)  # the norm ahead of Gemma 4's experts, beside the dense part's
        ops.append(norm(y, f"extra_norm{i}", D, block.norm, source, region))
    if block.extra_vectors:
        values = 0 * y.tokens + block.extra_vectors
        ops.append(only_weights(y, "vectors", region, (vector("vectors", values, block.extra_vectors),)))
    return ops


def _apart(op: Op[X], prefix: str) -> Op[X]:
    """Return the operator of an inner block under its own names; its input is born in the outer block."""

    def renamed(tensors: tuple[Tensor[X], ...]) -> tuple[Tensor[X], ...]:
        return tuple(replace(t, name=f"{prefix}.{t.name}", born=t.born or "mlp") for t in tensors)

    weights = tuple(replace(w, name=f"{prefix}.{w.name}") for w in op.weights)
    return replace(op, name=f"{prefix}.{op.name}", reads=renamed(op.reads), saves=renamed(op.saves), weights=weights)


def shared_adapter(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return the operator that holds what the adapters of all layers share; none where they share nothing."""
    t = y.choices.tuning
    if t is not None and t.prefix_tokens:
        return (prefix_table(y, t, model),)
    if t is None or t.adapter not in SHARED:
        return ()
    whole: ParallelSizes[float] = ParallelSizes(tp=1, tp2=1, cp=1, ep=1, etp=1, panels=1)
    plain: Layout[float] = lay_out(
        whole, TokenBatch(B=1, S=1, context=0, coverage="full"), LayoutOptions(stack=y.stack)
    )
    targets = {
        (module.short, op.inner, module.columns)
        for block in model.kinds
        for op in block_ops(plain, block, model.hidden)
        if op.kind == "matmul" and not op.region.endswith("core")
        for module in modules_of(t, op)
        if matches(t, op, module.short)
    }
    return (shared(y, t, [(int(m), int(n)) for _, m, n in targets]),)
