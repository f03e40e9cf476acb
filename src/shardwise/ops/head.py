"""What stands before and after the blocks: embeddings, the output head and the loss.

Letters: T tokens, D hidden, V vocabulary (padded by the trainer).
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from shardwise.ledger.number import X, ceil, divide
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import Model
from shardwise.ops.elementwise import norm, norm_weights
from shardwise.ops.layout import Layout, Shape, memory_op


def padded_vocab(V: int, multiple: int, tp: X) -> X:
    """Return the vocabulary padded to a multiple of `multiple` * tp (Megatron-LM training/tokenizer, 128 by default).

    >>> padded_vocab(50257, 128, 1), padded_vocab(32000, 1, 1)
    (50304, 32000)
    """
    if multiple == 1:
        return V + 0 * tp
    return ceil(divide(cast(X, V), multiple * tp)) * multiple * tp


def embedding(y: Layout[X], m: Model) -> tuple[Op[X], ...]:
    """Return the input embedding: a lookup of rows split by vocabulary, with learned positions and its norm when there are any.

    Only the rows of the tokens are read; the table's gradient is a scatter of the same rows.
    """
    if not m.embedding:
        return _input_projections(y, m)
    V = padded_vocab(m.vocab, y.stack.vocab_multiple if y.work.phase == "train" else 1, y.vocab_ranks)
    width = m.embedding_width or m.hidden
    T, zero = y.tokens, 0 * y.tokens
    shards = y.vocab_ranks * (y.degrees.tp2 if y.choices.layout == "summa" else 1)
    # The count of the model leaves the trainer's padding out; memory has it.
    weights = [Weight(name="embedding.weight", elements=divide(V * width, shards), whole=zero + m.vocab * width, kind="embedding")]
    if m.extra_embedding:
        weights.append(Weight(name="embedding.extra", elements=divide(zero + m.extra_embedding, shards), whole=zero + m.extra_embedding, kind="embedding"))
    rows = (m.positions + m.token_types) * m.hidden
    if rows:
        weights.append(Weight(name="positions.weight", elements=zero + rows, whole=zero + rows, kind="embedding"))
    if m.extra_vectors:
        weights.append(Weight(name="extra.vectors", elements=zero + m.extra_vectors, whole=zero + m.extra_vectors, kind="vector"))
    stream = y.a * T * width
    sp = y.choices.sequence_parallel
    message: Collective[X] = Collective(axis="tp", verb="reduce_scatter" if sp else "all_reduce", size_bytes=stream, tensor="embedding output")
    back: Collective[X] = Collective(axis="tp", verb="all_gather", size_bytes=stream, tensor="embedding gradient")
    saves = [Tensor(name="ids", size_bytes=8 * T, born="")]
    if y.work.dropout:
        R = y.residual_tokens
        saves.append(Tensor(name="embedding.mask", size_bytes=y.stack.dropout_mask_bytes * R * m.hidden, born="embedding"))
    ops = [memory_op(y, "embedding", "embedding", (2 * stream, 2 * stream), weights=tuple(weights), saves=tuple(saves), forward=(message,) if y.stack.vocab_parallel else (),
                     backward=(back,) if sp and y.stack.vocab_parallel else (), output_bytes=stream)]  # fmt: skip
    if m.embedding_norm:
        ops.append(norm(y, "embedding_norm", m.hidden, m.norm, y.residual("embedding.output", m.hidden, "embedding"), "embedding"))
    return (*ops, *_input_projections(y, m))


def _input_projections(y: Layout[X], m: Model) -> tuple[Op[X], ...]:
    """Return the model's projections outside its blocks (patches of a vision transformer, OPT-350m's two)."""
    zero = 0 * y.tokens
    source = Tensor(name="projection.input", size_bytes=zero, born="")
    return tuple(
        y.whole(p.name, "embedding", Shape(inputs=zero + p.inputs, outputs=zero + p.outputs, whole_inputs=p.inputs, whole_outputs=p.outputs, bias=p.bias),
                Tensor(name=f"{p.name}.input", size_bytes=y.a * y.residual_tokens * p.inputs, born=source.born))
        for p in m.extras
    )  # fmt: skip


def final_norm(y: Layout[X], m: Model) -> tuple[Op[X], ...]:
    """Return the norm after the last block, if the model has one."""
    if not m.final_norm:
        return ()
    return (norm(y, "final_norm", m.hidden, m.norm, y.residual("final.input", m.hidden, ""), "head"),)


def head(y: Layout[X], m: Model, tokens: X | None = None) -> tuple[Op[X], ...]:
    """Return the output head: a product with the vocabulary split over tp; it owns no weights when tied.

    Inference needs the last token of each sequence alone: `tokens` then counts those.
    """
    if not m.head:
        return ()
    width = m.embedding_width or m.hidden
    V = divide(padded_vocab(m.vocab, y.stack.vocab_multiple if y.work.phase == "train" else 1, y.vocab_ranks), y.vocab_ranks)
    source = y.residual("head.input", width, "head")
    zero = 0 * V
    shape = Shape(inputs=width + zero, outputs=V, whole_inputs=width, whole_outputs=m.vocab, bias=m.head_bias, kind="head", owned=not m.tied)
    op = y.column("head", "head", shape, source)
    if m.tied and m.head_bias:
        op = replace(op, weights=(Weight(name="head.bias", elements=V, whole=zero + m.vocab, kind="vector"),))
    if not y.stack.vocab_parallel:
        op = replace(op, forward=(), backward=())
    if tokens is None:
        return (op,)
    flops = 2 * tokens * V * width
    moved = y.a * tokens * (V + width) + y.work.weight_bytes * V * width
    return (replace(op, flops=flops, rows=tokens, forward_bytes=moved, model_flops=flops, forward=(), output_bytes=y.a * tokens * V),)


def loss(y: Layout[X], m: Model) -> tuple[Op[X], ...]:
    """Return the cross entropy over logits of T tokens and V / tp entries.

    "eager" (cross_entropy(logits.float()) of transformers): keeps 4 T V for the log-softmax, and backward starts with 8 T V more,
    12 T V in all: checked to the byte with torch 2.13.0's memory tracker. "vocab-parallel" (Megatron-LM
    core/tensor_parallel/cross_entropy.py): 16-bit logits, their fp32 copy turned softmax in place, then the 16-bit gradient beside an fp32 one.
    "fused" keeps one fp32 copy.
    """
    if not m.head:
        return ()
    T = y.tokens
    V = divide(padded_vocab(m.vocab, y.stack.vocab_multiple, y.vocab_ranks), y.vocab_ranks)
    kept = Tensor(name="loss.softmax", size_bytes=4 * T * V, born="loss")
    extra = {"eager": 8, "vocab-parallel": y.a + 4, "fused": 0}[y.stack.loss] * T * V
    traffic = {"eager": 20, "vocab-parallel": 16, "fused": 8}[y.stack.loss] * T * V
    small: Collective[X] = Collective(axis="tp", verb="all_reduce", size_bytes=4 * T, count=3, tensor="maximum, target, sum")
    return (memory_op(y, "loss", "loss", (traffic, traffic / 2), saves=(kept,), transient_bytes=extra, forward=(small,) if y.stack.vocab_parallel else (), kernels=5),)


def mtp_ops(y: Layout[X], m: Model) -> tuple[Op[X], ...]:
    """Return what one multi-token-prediction layer has beside its block: norms and the projection of two streams to one.

    Source: arXiv:2412.19437 section 2.2; embedding and head are shared with the model.
    """
    D, zero = m.hidden, 0 * y.tokens
    norms = tuple(norm(y, f"mtp.norm{i + 1}", D, m.norm, y.residual(f"mtp.input{i + 1}", D, ""), "mtp") for i in range(m.mtp_norms))
    shape = Shape(inputs=2 * D + zero, outputs=D + zero, whole_inputs=2 * D, whole_outputs=D)
    return (*norms, y.whole("mtp.projection", "mtp", shape, y.residual("mtp.joined", 2 * D, "mtp")))


__all__ = ["embedding", "final_norm", "head", "loss", "mtp_ops", "norm_weights", "padded_vocab"]
