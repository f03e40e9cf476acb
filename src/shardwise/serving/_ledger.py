"""The operators of one phase as an engine runs them: formats of weights, cache writes, messages of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from shardwise.ledger.number import X, above, ceil, total
from shardwise.ledger.op import Collective, Op, Weight, within
from shardwise.models import Block, Model
from shardwise.ops import blocks as ledgers
from shardwise.ops.experts import SHARED, routed_tokens
from shardwise.ops.layout import Layout, memory_op
from shardwise.serving._cache import block_caches, keeps_tokens
from shardwise.serving._quantization import Format


@dataclass(frozen=True, kw_only=True)
class Views(Generic[X]):
    """One phase laid out twice: with the format's bytes and type of products, and with those of the rest."""

    wide: Layout[X]
    narrow: Layout[X]
    format: Format

    def of(self, wide: tuple[Op[X], ...], narrow: tuple[Op[X], ...]) -> tuple[Op[X], ...]:
        """Return each operator in the format of its own weights."""
        return tuple(n if any(map(self.format.holds, w.weights)) else w for w, n in zip(wide, narrow, strict=True))


def _cache_write(y: Layout[X], block: Block, kept: bool) -> tuple[Op[X], ...]:
    """Return the kernel that puts new keys and values in the cache: it reads them once and writes them once."""
    if not kept or not keeps_tokens(block):
        return ()
    new = y.tokens * total((c.token_bytes for c in block_caches(y, block)), 0 * y.tokens)
    read = new * (y.a / y.work.cache_bytes)
    return (memory_op(y, "cache_write", "attention", (read + new, 0 * new), role="cache_write"),)


def _served(y: Layout[X], op: Op[X], D: int) -> Op[X]:
    """Return an operator of a mixture with the messages of an engine instead of a trainer's.

    Inside a tensor-parallel group every rank has all tokens: nothing is dispatched, and one all-reduce adds the
    outputs of all experts, shared ones too (vLLM fused_moe/layer.py, reduce_results). Where experts span several
    groups, ranks share the tokens of theirs, exchange them all-to-all and gather the outputs
    (arXiv:2412.19437 section 3.4). Where each expert is split over several groups, their tokens are gathered, once
    each, and the outputs reduced and scattered (vLLM distributed/device_communicators/all2all.py, naive).
    """
    if op.role in ("dispatch", "combine"):
        spread = y.degrees.ep * y.degrees.etp
        hops = [c for c in op.forward if c.verb == "all_to_all"]
        forward = [replace(c, size_bytes=above(spread, y.degrees.tp, c.size_bytes, 0 * c.size_bytes)) for c in hops]
        tokens = y.a * routed_tokens(y) * y.degrees.etp * D
        split = above(spread, y.degrees.tp, tokens, 0 * tokens)
        forward += [replace(c, size_bytes=split) for c in op.forward if c.axis == "etp"]
        if op.role == "combine":
            full = y.a * y.tokens * D
            nothing = 0 * full
            joined = above(spread, y.degrees.tp, nothing, full)
            shared = above(spread, y.degrees.tp, full, nothing)
            forward.append(Collective(axis="tp", verb="all_reduce", size_bytes=joined, tensor="expert outputs"))
            forward.append(Collective(axis="tp", verb="all_gather", size_bytes=shared, tensor="expert outputs"))
        return replace(op, forward=tuple(forward))
    if op.role == "down" and within(op.region, SHARED):
        return replace(op, forward=())
    return op


def joined_down(ops: tuple[Op[X], ...]) -> tuple[Op[X], ...]:
    """Return operators with both down-projections of latent attention, which read the same input, as one product.

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


def layer_ops(v: Views[X], block: Block, D: int, caches: bool = True, summed: bool = False) -> tuple[Op[X], ...]:
    """Return the operators of one layer, with the write to the cache where there is one.

    Where both branches of a parallel block are `summed` before they are reduced, attention sends nothing.
    """
    ops = joined_down(v.of(ledgers.block_ops(v.wide, block, D), ledgers.block_ops(v.narrow, block, D)))
    if summed and block.parallel:
        ops = tuple(replace(op, forward=()) if op.role == "out" else op for op in ops)
    return (*(_served(v.wide, op, D) for op in ops), *_cache_write(v.wide, block, caches))


def embedding_ops(v: Views[X], model: Model) -> tuple[Op[X], ...]:
    """Return the operators before the layers; a lookup reads the rows of its tokens, never the table."""
    wide = ledgers.embedding(v.wide, model)
    return v.of(wide, ledgers.embedding(v.narrow, model)) or ledgers.nothing(v.wide)


def head_ops(v: Views[X], model: Model, sampling_bytes: float) -> tuple[Op[X], ...]:
    """Return the operators after the layers: norm, head on the last token of each sequence, gather, sampling.

    A head of a model that does not generate (masked words) runs on every token, and nothing is sampled; sampling moves
    `sampling_bytes` a logit.
    """
    y = v.wide
    tokens = y.work.B if model.generates else y.work.B * y.work.S
    norm = ledgers.final_norm(y, model)
    if not model.head:
        return norm or ledgers.nothing(y)
    heads = v.of(ledgers.head(y, model, tokens), ledgers.head(v.narrow, model, tokens))
    logits = y.a * tokens * model.vocab
    gather: Collective[X] = Collective(axis="tp", verb="all_gather", size_bytes=logits, tensor="logits")
    moved = sampling_bytes * tokens * model.vocab
    sampling = memory_op(y, "sampling", "head", (moved, 0 * moved), kernels=3, role="sampling")
    gathered = tuple(replace(op, forward=(gather,)) for op in heads)
    return (*norm, *gathered, sampling) if model.generates else (*norm, *gathered)


def weight_bytes(ops: tuple[Op[X], ...], form: Format, zero: X) -> X:
    """Return bytes of the weights of some operators on one rank, scales included."""
    return total((w.elements * form.element_bytes(w) * padding(form, w) for o in ops for w in o.weights), zero)


def padding(form: Format, weight: Weight[X]) -> X | float:
    """Return by what an engine lengthens a weight of experts to give its sides whole tiles, 1 where it does not."""
    if not form.expert_pads or not weight.expert or not form.holds(weight):
        return 1.0
    first, second = form.expert_pads[:2] if weight.role == "up" else form.expert_pads[2:]
    *_, outer, inner = weight.shape
    return ceil(inner / first) * first / inner * (ceil(outer / second) * second / outer)


def table_bytes(ops: tuple[Op[X], ...], form: Format, zero: X) -> X:
    """Return bytes of the table of token embeddings among some operators on one rank."""
    tables = (w for o in ops for w in o.weights if w.role == "embedding")
    return total((w.elements * form.element_bytes(w) for w in tables), zero)


def live_bytes(op: Op[X]) -> X:
    """Return bytes alive while an operator runs: what it reads of activations and what it writes.

    What training would keep of an operator is what it reads, and for all but products what it writes too.
    """
    held = total((t.size_bytes for t in op.saves), 0 * op.forward_bytes)
    return held + op.output_bytes if op.kind in ("matmul", "grouped") else held
