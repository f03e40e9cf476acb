"""Norms, residual additions and dropout: operators bound by memory traffic.

Letters: T tokens, R tokens of the residual stream on the rank, D hidden.
"""

from __future__ import annotations

from typing import Generic

from shardwise.ledger.number import X
from shardwise.ledger.op import Collective, Gradient, Op, Tensor, Weight
from shardwise.models import NormKind
from shardwise.ops.layout import Layout, memory_op
from shardwise.records import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm(Generic[X]):
    """A norm on one rank: `rows` rows of `elements` elements in all, `width` learned values of `whole` in the model."""

    name: str
    region: str
    kind: NormKind
    rows: X
    elements: X
    width: X
    whole: int

    @property
    def by_modules(self) -> bool:
        """Whether transformers writes it in Python."""
        return written_in_python(self.kind)


def written_in_python(kind: NormKind) -> bool:
    """Return whether transformers writes a norm in Python; LayerNorm is a native operator there but for Cohere's.

    >>> written_in_python("rmsnorm"), written_in_python("layernorm")
    (True, False)
    """
    return kind.startswith("rmsnorm") or kind == "layernorm-float"


def learned(kind: NormKind) -> int:
    """Return how many weight vectors a norm has: a scale, and for LayerNorm a shift.

    >>> learned("rmsnorm"), learned("layernorm"), learned("rmsnorm-no-weight")
    (1, 2, 0)
    """
    if kind == "none" or kind.endswith("no-weight"):
        return 0
    return 2 if kind == "layernorm" else 1


def vector(name: str, elements: X, whole: int) -> Weight[X]:
    """Return a learned vector, `elements` of its `whole` values on the rank."""
    return Weight(name=name, elements=elements, whole=0 * elements + whole, kind="vector")


def only_weights(y: Layout[X], name: str, region: str, weights: tuple[Weight[X], ...]) -> Op[X]:
    """Return an operator whose weights count and whose cost is within that of its neighbours."""
    zero = 0 * y.tokens
    return memory_op(y, name, region, (zero, zero), weights=weights, kernels=0)


def norm_weights(n: Norm[X]) -> tuple[Weight[X], ...]:
    """Return a norm's learned values as one vector, none where it has no weights."""
    copies = learned(n.kind)
    return (vector(f"{n.name}.weight", copies * n.width, copies * n.whole),) if copies else ()


def norm_saves(y: Layout[X], n: Norm[X], source: Tensor[X]) -> tuple[Tensor[X], ...]:
    """Return what a norm keeps for its backward pass.

    Native and fused norms keep the input and statistics: one value a row for RMSNorm, two for LayerNorm. Transformers'
    own classes keep what their steps do: checked to the byte with saved-tensor hooks on torch 2.13.0, transformers
    5.23.0.
    """
    if y.stack.norm == "eager" and n.by_modules:
        return _module_saves(y, n, source)
    if _casts_around(y, n):
        wide = Tensor(name=f"{n.name}.fp32", size_bytes=4 * n.elements, born=n.region)
        return source if y.a == 4 else wide, Tensor(name=f"{n.name}.statistics", size_bytes=8 * n.rows, born=n.region)
    one_value = n.kind.startswith("rmsnorm") or n.kind == "none"
    width = 4 if y.a == 4 or one_value or y.choices.autocast else y.stack.layernorm_statistics_bytes
    size = width * n.rows * (1 if one_value else 2)
    if y.stack.settings.norm_bytes not in (0, y.a):
        # The copy in the norm's own width is what its backward reads.
        copy_bytes = y.stack.settings.norm_bytes * n.elements
        source = Tensor(name=f"{n.name}.wide input", size_bytes=copy_bytes, born=n.region)
    return source, Tensor(name=f"{n.name}.statistics", size_bytes=size, born=n.region)


def _casts_around(y: Layout[X], n: Norm[X]) -> bool:
    """Whether a LayerNorm runs on an fp32 copy: transformers 5.24.0 models/olmo/modeling_olmo.py OlmoLayerNorm."""
    return y.stack.norm == "eager" and n.kind == "layernorm-wide-no-weight"


def _module_saves(y: Layout[X], n: Norm[X], source: Tensor[X]) -> tuple[Tensor[X], ...]:
    """What transformers keeps: an fp32 copy of the input, the reciprocal deviation, and what meets the weight.

    In fp32 the input is its own copy. Weights that are applied in fp32 meet fp32 values; an offset from one is added to
    make a vector that is kept; a power keeps what it is of. Cohere's LayerNorm keeps the centred input twice, for the
    variance and for the output.
    """

    def made(part: str, size: X, read_for: Gradient = "input") -> Tensor[X]:
        return Tensor(name=f"{n.name}.{part}", size_bytes=size, born=n.region, read_for=read_for)

    statistics, four = made("statistics", 4 * n.rows), 4 * n.elements
    if n.kind == "layernorm-float":
        kept = [made("centred", four), made("centred again", four), made("normalised", four, "weight"), statistics]
        return (*kept, *(() if y.a == 4 else (made("fp32 weight", 4 * n.width),)))
    wide = y.stream_width if source.stream else y.a
    kept = [replace(source, read_for="input") if wide == 4 else made("fp32", four), statistics]
    if n.kind.startswith("rmsnorm-power"):
        kept.append(made("mean squares", 4 * n.rows))
    if n.kind == "rmsnorm":
        kept.append(made("normalised", wide * n.elements, "weight"))
    elif n.kind == "rmsnorm-float":
        kept.append(made("normalised", four, "weight"))
    elif n.kind == "rmsnorm-power":
        kept += [made("normalised", four, "weight"), *(() if y.a == 4 else (made("fp32 weight", 4 * n.width),))]
    elif n.kind == "rmsnorm-offset":
        kept += [made("normalised", four, "weight"), made("shifted weight", 4 * n.width)]
    return tuple(kept)


# How often the steps of an unfused RMSNorm read or write the stream, forward and backward: in 16 bits, and in fp32.
_UNFUSED, _UNFUSED_WIDE = (18, 36), (7, 14)
# LayerNorm between a cast to fp32 and one back: 20 bytes an element of 16 bits, and 24 back.
_CAST_AROUND = (10, 12)
# The same of one kernel over rows that are cast to fp32 before it: 12 bytes an element, and 22 back.
_WIDENED = (6, 11)


def norm_op(y: Layout[X], n: Norm[X], source: Tensor[X]) -> Op[X]:
    """Return the operator of a norm.

    Forward reads and writes the stream once; backward reads input and gradient and writes a gradient. Unfused RMSNorm
    casts, squares, takes the mean, scales, casts and applies the weight one by one, in fp32: 36 bytes an element of 16
    bits forward, 72 backward, where each step's derivative reads and writes its own. Widened, a cast and a norm of
    fp32 rows run, and back the two gradients of the norm and that of the cast.
    """
    stream = y.a * n.elements
    unfused = y.stack.norm == "eager" and n.by_modules
    # PyTorch's own norms read input and gradient again for the gradients of their weights.
    again = 2 if y.stack.norm == "native" and learned(n.kind) else 0
    widened = y.stack.norm == "widened" and y.a < 4
    fused = _WIDENED if widened else (2, 3 + again)
    passes = (_UNFUSED if y.a < 4 else _UNFUSED_WIDE) if unfused else fused
    if _casts_around(y, n) and y.a < 4:
        passes, widened = _CAST_AROUND, True
    moved = (passes[0] * stream, passes[1] * stream)
    if y.stack.settings.norm_bytes not in (0, y.a) and not unfused:
        width = y.stack.settings.norm_bytes
        moved = (moved[0] + width * n.elements, moved[1] + (width - y.a) * n.elements)
    return memory_op(
        y, n.name, n.region, moved, weights=norm_weights(n), reads=(source,),
        saves=norm_saves(y, n, source), kernels=6 if unfused else 1 + widened, output_bytes=stream, role="norm",
    )  # fmt: skip


def module_norm(y: Layout[X], n: Norm[X], source: Tensor[X]) -> Op[X]:
    """Return the operator of a norm that is a module of its own, whose kernel of PyTorch starts a block for each row.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu, blocks(M) forward and for the gradient of the input. Kernels
    of inductor, and of those who wrote norms for heads, take several rows a block.
    """
    own = y.stack.norm == "native" and y.stack.activation == "eager"
    return replace(norm_op(y, n, source), row_blocks=n.rows if own else 0)


def norm(y: Layout[X], name: str, D: int, kind: NormKind, source: Tensor[X], region: str | None = None) -> Op[X]:
    """Return a norm over the residual stream; a hidden dimension that is split needs two statistics reduced.

    >>> from shardwise.ops.count import whole_layout
    >>> y = whole_layout(1, 4)
    >>> norm(y, "norm1", 8, "layernorm", y.residual("input", 8, "")).weights[0].whole
    16
    """
    R, width = y.residual_tokens, y.residual_width(D)
    n = Norm(name=name, region=name if region is None else region, kind=kind, rows=R, elements=R * width, width=width,
             whole=D)  # fmt: skip
    op = with_replica_sums(y, n, module_norm(y, n, source))
    return with_statistics(op, R) if y.choices.layout == "summa" else op


def with_replica_sums(y: Layout[X], n: Norm[X], op: Op[X]) -> Op[X]:
    """Return a norm whose weights every tensor-parallel rank holds, each with the gradient of its own rows.

    Where weights are sharded DTensors, each gradient is reduced over tp before it is scattered: torch 2.13.0
    distributed/fsdp/_fully_shard/_fsdp_param.py, _get_grad_inner_tensor.
    """
    if not (y.stack.reduces_apart and y.choices.sequence_parallel and learned(n.kind)):
        return op
    whole, at = y.a * n.width, (0 * n.width + 1, n.width)
    sums: Collective[X] = Collective(axis="tp", verb="all_reduce", size_bytes=whole, count=learned(n.kind), shape=at,
                                     hides="sharded", tensor="weight gradient", read_for="weight")  # fmt: skip
    return replace(op, backward=(*op.backward, sums))


def with_statistics(op: Op[X], rows: X) -> Op[X]:
    """Return a norm whose rows are split over tp: two fp32 sums a row are reduced each way."""
    sums: Collective[X] = Collective(axis="tp", verb="all_reduce", size_bytes=4 * rows, count=2, tensor="statistics",
                                     shape=(rows, 1))  # fmt: skip
    return replace(op, forward=(sums,), backward=(sums,))


def branch_scale(y: Layout[X], name: str, D: int, region: str, source: Tensor[X]) -> Op[X]:
    """Return the product of a branch's output with one learned value a channel (arXiv:2103.17239 section 3).

    Backward reads the output for the gradient of the values, the values and the gradient for that of the output.

    >>> from shardwise.ops.count import whole_layout
    >>> y = whole_layout(1, 4)
    >>> branch_scale(y, "scale1", 8, "attention", y.residual("mixer.output", 8, "attention")).weights[0].whole
    8
    """
    stream, weight = source.size_bytes, vector(f"{name}.weight", y.residual_width(D), D)
    moved = (2 * stream, 4 * stream)
    return memory_op(y, name, region, moved, weights=(weight,), saves=(source,), output_bytes=stream)


def residual_add(y: Layout[X], name: str, D: int, region: str) -> Op[X]:
    """Return the addition of a branch to the residual stream, with its dropout when the model has one.

    Reads two streams and writes one; backward adds the gradients of the branch and of the stream, as many
    (torch/csrc/autograd/input_buffer.cpp). Dropout keeps a mask (arXiv:2205.05198 section 4.1; Megatron-LM
    fused_bias_dropout.py).

    >>> from shardwise.ops.count import whole_layout
    >>> residual_add(whole_layout(1, 4), "add1", 8, "mlp").forward_bytes
    192
    """
    elements = y.residual_tokens * y.residual_width(D)
    stream = y.a * elements
    if not y.drops("attention" if region == "attention" else "hidden"):
        return memory_op(y, name, region, (3 * stream, 3 * stream), output_bytes=stream, role="add")
    mask = Tensor(name=f"{name}.mask", size_bytes=y.stack.dropout_mask_bytes * elements, born=region)
    moved = (3 * stream + mask.size_bytes, 5 * stream + mask.size_bytes)
    return memory_op(y, name, region, moved, saves=(mask,), output_bytes=stream, role="add")


def mixed_streams(y: Layout[X], name: str, D: int, region: str, streams: int) -> Op[X]:
    """Return what n residual streams move around a branch, beside the projection of all and the addition of one.

    Forward a weighted sum reads n and writes one, and the branch's output is spread over n that are mixed: it and n
    are read, n written. Backward two kernels read n gradients each, one of them n streams and the output too, and write
    n + 1; the sum's reads n + 1 and writes n; then the three gradients of the streams are added (Megatron-LM of
    2026-08, branch dev, core/fusions/fused_mhc_kernels.py and core/transformer/hyper_connection.py fused_add_3; forward
    as much in vLLM and SGLang). The mixing itself waits on no memory.

    >>> from shardwise.ops.count import whole_layout
    >>> op = mixed_streams(whole_layout(1, 4), "hyper_connection_mlp", 8, "extras", 4)
    >>> op.forward_bytes / 64, op.backward_bytes / 64
    (11.0, 40.0)
    """
    one, n = y.a * y.residual_tokens * y.residual_width(D), streams
    output = Tensor(name=f"{name}.branch", size_bytes=one, born=region)
    added = 3  # streams that `residual_add` moves either way
    moved = ((3 * n + 2 - added) * one, (10 * n + 3 - added) * one)
    return memory_op(y, f"{name}.streams", region, moved, saves=(output,), output_bytes=n * one, role="add")
