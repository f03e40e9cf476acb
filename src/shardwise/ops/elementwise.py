"""Norms, residual additions and dropout: operators bound by memory traffic."""

from __future__ import annotations

from shardwise.ledger.number import X
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import NormKind
from shardwise.ops.layout import Layout, memory_op


def norm_weights(name: str, D: int, width: X, kind: NormKind) -> tuple[Weight[X], ...]:
    """Return a norm's weights: D for RMSNorm and bias-free LayerNorm, 2 D for LayerNorm."""
    if kind == "none":
        return ()
    copies = 2 if kind == "layernorm" else 1
    return (Weight(name=f"{name}.weight", elements=copies * width, whole=0 * width + copies * D, kind="vector"),)


def norm_saves(y: Layout[X], name: str, region: str, D: int, kind: NormKind, source: Tensor[X]) -> tuple[Tensor[X], ...]:
    """Return what a norm keeps for its backward pass.

    Fused norms keep the input and fp32 statistics (one value a token for RMSNorm, two for LayerNorm; apex and Transformer
    Engine). Transformers' RMSNorm keeps the fp32 copy of the input (the input itself in fp32), the normalised values and the
    reciprocal deviation: checked to the byte with saved-tensor hooks on torch 2.13.0, transformers 5.23.0.
    """
    R, width = y.residual_tokens, y.residual_width(D)
    eager = y.stack.norm == "eager" and kind == "rmsnorm"
    statistics = Tensor(name=f"{name}.statistics", size_bytes=(4 if kind in ("rmsnorm", "none") else 8) * R, born=region)
    if not eager:
        return (source, statistics)
    copy = source if y.a == 4 else Tensor(name=f"{name}.fp32", size_bytes=4 * R * width, born=region)
    return (copy, Tensor(name=f"{name}.normalised", size_bytes=y.a * R * width, born=region), statistics)


def norm(y: Layout[X], name: str, D: int, kind: NormKind, source: Tensor[X], region: str | None = None) -> Op[X]:
    """Return a norm over the residual stream; a hidden dimension that is split needs two statistics reduced.

    Forward reads and writes the stream once; backward reads input and gradient and writes a gradient. Unfused RMSNorm makes
    about six passes in fp32 (cast, square, mean, scale, cast, weight).
    """
    where = name if region is None else region
    stream = y.a * y.residual_tokens * y.residual_width(D)
    passes = 8 if y.stack.norm == "eager" and kind == "rmsnorm" else 2
    sums: tuple[Collective[X], ...] = ()
    if y.choices.layout == "summa":
        sums = (Collective(axis="tp", verb="all_reduce", size_bytes=4 * y.residual_tokens, count=2, tensor="statistics"),)
    return memory_op(
        y, name, where, (passes * stream, (passes + 1) * stream),
        weights=norm_weights(name, D, y.residual_width(D), kind), reads=(source,),
        saves=norm_saves(y, name, where, D, kind, source), forward=sums, backward=sums, kernels=6 if passes == 8 else 1,
        output_bytes=stream,
    )  # fmt: skip


def residual_add(y: Layout[X], name: str, D: int, region: str) -> Op[X]:
    """Return the addition of a branch to the residual stream, with its dropout when the model has one.

    Reads two streams and writes one; dropout keeps a mask of one byte an element (Megatron-LM fused_bias_dropout.py).
    """
    R, width = y.residual_tokens, y.residual_width(D)
    stream = y.a * R * width
    if not y.work.dropout:
        return memory_op(y, name, region, (3 * stream, 0 * stream), output_bytes=stream)
    mask = Tensor(name=f"{name}.mask", size_bytes=y.stack.dropout_mask_bytes * R * width, born=region)
    return memory_op(y, name, region, (3 * stream + mask.size_bytes, 2 * stream + mask.size_bytes), saves=(mask,), output_bytes=stream)
