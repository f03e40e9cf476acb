"""How the operators of a block are split over ranks: 1D tensor parallelism, SUMMA and context parallelism.

Attention, feed-forwards and heads are written once against `Layout`. It owns the sizes on one rank (each divided
once) and makes the linear layers with their messages. Sources: 1D arXiv:1909.08053, sequence parallelism
arXiv:2205.05198 section 4.2, SUMMA arXiv:2104.05343 and arXiv:2410.00273 (transformer-perf-estimates), with the
collectives of FORMULAS in docs/formulas.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Generic, Literal, cast

from shardwise.cost import WIDE_DTYPES
from shardwise.ledger.number import X, divide, maximum
from shardwise.ledger.op import Collective, Gradient, Hiding, Module, Op, OpRole, Tensor, Weight
from shardwise.ops.autocast import casts
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.plans import Stack, find_scaling
from shardwise.records import dataclass, replace


@dataclass(frozen=True)
class Layout(Generic[X]):
    """The sizes of one block on one rank, and its linear layers. Build one with `lay_out`."""

    degrees: ParallelSizes[X]
    work: TokenBatch[X]
    choices: LayoutOptions

    @property
    def stack(self) -> Stack:
        """The framework whose operators these are."""
        return self.choices.stack

    @property
    def a(self) -> int:
        """Bytes of one activation element."""
        return self.work.activation_bytes

    def drops(self, what: Literal["softmax", "attention", "hidden"]) -> bool:
        """Return whether dropout keeps a mask of attention probabilities, of what attention adds, or of the rest."""
        own: bool | None = getattr(self.work, f"{what}_dropout")
        return self.work.dropout if own is None else own

    @cached_property
    def tokens(self) -> X:
        """Tokens on this rank inside a split layer: T = B * S over the axes that split the sequence."""
        return divide(self.work.B * self.work.S, self.degrees.cp)

    @property
    def residual_tokens(self) -> X:
        """Tokens of the residual stream on this rank."""
        return self.tokens

    def residual_width(self, D: int) -> X:
        """Width of the residual stream on this rank."""
        return D + 0 * self.tokens

    def split(self, size: int) -> X:
        """Return a size divided over the tensor-parallel ranks."""
        return divide(cast(X, size), self.degrees.tp)

    def kv_heads(self, K: int) -> X:
        """Key-value heads on a rank: never below one, they are replicated when tp exceeds K."""
        return maximum(divide(cast(X, K), self.degrees.tp), 1)

    @property
    def vocab_ranks(self) -> X:
        """Ranks that split the vocabulary: the tensor-parallel ones.

        Or one where the framework replicates the tables.
        """
        return self.degrees.tp if self.stack.vocabulary == "split" else 0 * self.degrees.tp + 1

    def residual(self, name: str, D: int, born: str) -> Tensor[X]:
        """A tensor of the residual stream."""
        each = self.stream_width * self.residual_tokens
        return Tensor(name=name, size_bytes=each * self.residual_width(D), born=born, stream=True)

    @property
    def stream_width(self) -> int:
        """Bytes of an element of the residual stream: 4 where the embedding is in fp32 and GEMMs are not."""
        # Autocast adds 16-bit results to it (peft utils/other.py prepare_model_for_kbit_training).
        tuning = self.choices.tuning
        return 4 if self.choices.autocast or (tuning is not None and tuning.wide_stream) else self.a

    def activation(self, name: str, width: X, born: str) -> Tensor[X]:
        """A tensor inside a split layer, `width` elements a token."""
        return Tensor(name=name, size_bytes=self.a * self.tokens * width, born=born)

    def column(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], **more: object) -> Op[X]:
        """A linear layer whose outputs are split; `source` is its input, saved for the weight gradient."""
        raise NotImplementedError

    def row(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], **more: object) -> Op[X]:
        """A linear layer whose inputs are split and whose output returns to the residual stream."""
        raise NotImplementedError

    def whole(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X]) -> Op[X]:
        """A linear layer on the residual stream's own tokens with weights replicated over the tensor-parallel ranks."""
        weights = linear_weights(name, shape, (shape.outputs, shape.inputs))
        sizes = (self.residual_tokens, shape.outputs, shape.inputs)
        return matmul(self, name, region, sizes, weights, source, role=shape.role, modules=shape.modules)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape(Generic[X]):
    """A linear layer: features in and out on one rank where split, and `whole_*` in the model; `kernels` launches.

    `parts` are the features out of the layers that a joint one stands for, `modules` the names that models give them.
    """

    inputs: X
    outputs: X
    whole_inputs: int
    whole_outputs: int
    bias: bool = False
    kernels: float = 1
    kind: Literal["matrix", "head"] = "matrix"
    owned: bool = True
    parts: tuple[X, ...] = ()
    role: OpRole = "other"
    modules: tuple[str, ...] = ()


def linear_weights(name: str, shape: LinearShape[X], sides: tuple[X, X]) -> tuple[Weight[X], ...]:
    """Return the weights of a linear layer: a matrix of (outputs, inputs) on the rank and, if it has one, the bias."""
    if not shape.owned:
        return ()
    outputs, inputs = sides
    elements = inputs * outputs
    zero = 0 * elements
    weights = [
        Weight(
            name=f"{name}.weight",
            elements=elements,
            whole=zero + shape.whole_inputs * shape.whole_outputs,
            kind=shape.kind,
            shape=sides,
            role=shape.role,
        )
    ]
    if shape.bias:
        weights.append(Weight(name=f"{name}.bias", elements=outputs, whole=zero + shape.whole_outputs, kind="vector"))
    return tuple(weights)


def matmul_flops(m: X, n: X, k: X) -> X:
    """Return the FLOPs of an (m, k) by (k, n) GEMM: a multiply and an add for each of m * n * k.

    >>> matmul_flops(2, 3, 4)
    48
    """
    return 2 * m * n * k


def matmul(
    y: Layout[X],
    name: str,
    region: str,
    mnk: tuple[X, X, X],
    weights: tuple[Weight[X], ...],
    source: Tensor[X],
    **more: object,
) -> Op[X]:
    """Return the operator of a linear layer: each operand is moved once per GEMM.

    Forward reads the input and the weight and writes the output; the input gradient reads the output gradient and the
    weight; the weight gradient reads input and output gradient, and reads and writes the accumulated gradient.
    """
    m, n, k = mnk
    flops = matmul_flops(m, n, k)
    edges, weight = y.a * (m * k + m * n), n * k
    kernels = more.pop("kernels", 1)
    modules: Any = more.pop("modules", ()) or (name.rpartition(".")[2],)
    kept = [replace(t, read_for="weight") for t in cast(Any, more.pop("saves", (source,)))]
    own = casts(name, region, kept, (y.a * m * k, y.a * n * k), len(modules)) if y.choices.autocast else kept
    biased = y.stack.bias_gradients_apart and any(w.kind == "vector" for w in weights)
    apart = y.stack.gradients_apart == "always" or y.stack.settings.separate_weight_gradients
    behind: X | float = 0
    if biased or apart:
        # The sum of the gradient of a bias reads that of the output; a gradient that is made before it is added is read
        # beside the buffer, which is read and written.
        behind = biased * y.a * m * n + apart * (y.a + 2 * y.work.gradient_bytes) * n * k
    return Op(
        name=name,
        kind="matmul",
        region=region,
        flops=flops,
        forward_bytes=edges + y.work.weight_bytes * weight,
        backward_flops=flops,
        backward_bytes=edges + y.work.weight_bytes * weight,
        weight_flops=flops,
        weight_bytes=edges + 2 * y.work.gradient_bytes * weight,
        rows=m,
        columns=n,
        inner=k,
        weights=weights,
        reads=(source,),
        saves=tuple(own),
        modules=modules,
        dtype=y.work.dtype,
        model_flops=flops,
        output_bytes=y.a * m * n,
        finish_bytes=behind,
        kernels=cast(float, kernels),
        **more,  # type: ignore[arg-type]
    )


def widened(y: Layout[X]) -> Layout[X]:
    """Return a layout whose products stay in 16 bits where they have fewer."""
    wide = y.work.dtype in ("fp32", "tf32", *WIDE_DTYPES)
    return y if wide else replace(y, work=replace(y.work, dtype=WIDE_DTYPES[0]))


def memory_op(y: Layout[X], name: str, region: str, moved: tuple[X, X], **more: object) -> Op[X]:
    """Return an operator bound by memory that moves so many bytes forward and backward."""
    zero = 0 * moved[0]
    return Op(
        name=name,
        kind="memory",
        region=region,
        flops=zero,
        forward_bytes=moved[0],
        backward_flops=zero,
        backward_bytes=moved[1],
        weight_flops=zero,
        weight_bytes=zero,
        rows=zero,
        columns=zero,
        inner=zero,
        **more,  # type: ignore[arg-type]
    )


class OneD(Layout[X]):
    """Megatron's tensor parallelism, with or without sequence parallelism, times context parallelism."""

    @cached_property
    def residual_tokens(self) -> X:
        """Tokens of the residual stream: divided by tp under sequence parallelism."""
        return divide(self.tokens, self.degrees.tp) if self.choices.sequence_parallel else self.tokens

    def column(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], **more: object) -> Op[X]:
        """Enter a split layer: all-gather forward under sequence parallelism, reduction of the input gradient backward.

        Megatron saves the shard of the input, so the weight gradient gathers it again beside the input gradient's
        GEMM, whose result is reduced beside the weight gradient's (Megatron-LM core/tensor_parallel/layers.py,
        LinearWithGradAccumulationAndAsyncCommunication), or behind it. DTensor saves the gathered input.
        """
        full, at = self.a * self.tokens * shape.inputs, (self.tokens, shape.inputs)
        last: Hiding = "late" if self.stack.overlap_input_gradients else "exposed"
        if self.choices.sequence_parallel:
            gather = Collective(axis="tp", verb="all_gather", size_bytes=full, tensor="input", shape=at)
            regathered = (replace(gather, hides="compute", read_for="weight"),) if self.stack.regathers_inputs else ()
            scatter = replace(gather, verb="reduce_scatter", hides=last, tensor="input gradient", read_for="input")
            back = (*regathered, scatter)
            forward: tuple[Collective[X], ...] = (self._pipelined(gather),)
            kept = Tensor(name=f"{region}: gathered {source.name}", size_bytes=full, born=region)
            more |= {} if regathered else {"saves": (kept,)}
        else:
            forward = ()
            # Products that run apart reduce their input gradients apart: q, k, v, gate and up (DTensor's column plan).
            times = shape.kernels if self.stack.reduces_apart else 1
            back = (
                Collective(axis="tp", verb="all_reduce", size_bytes=full, hides=last, tensor="input gradient",
                           count=times, shape=at, read_for="input"),
            )  # fmt: skip
        more |= {"apart": self._adding_passes(region, len(shape.parts))}
        return self._product(name, region, shape, source, forward=forward, backward=back, split="outputs", **more)

    def _adding_passes(self, region: str, products: int) -> int:
        """Return how often the input gradient is read or written to add up those of GEMMs that run apart.

        One kernel reads all and writes the sum (torch.compile), or each addition reads two and writes one (autograd).
        """
        joint = {"none": (region,), "feed-forward": ("attention",), "all": ()}[self.stack.projections_apart]
        if region in joint or products < 2 or self.work.phase != "train":
            return 0
        return products + 1 if self.stack.activation == "fused" else 3 * (products - 1)

    def row(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], **more: object) -> Op[X]:
        """Leave a split layer: reduce-scatter under sequence parallelism, else all-reduce; mirrored backward."""
        full, at = self.a * self.tokens * shape.outputs, (self.tokens, shape.outputs)
        out = Collective(axis="tp", verb="all_reduce", size_bytes=full, tensor="output", shape=at)
        forward: tuple[Collective[X], ...] = (out,)
        back: tuple[Collective[X], ...] = ()
        if self.choices.sequence_parallel:
            forward = (self._pipelined(replace(out, verb="reduce_scatter")),)
            back = (self._pipelined(replace(out, verb="all_gather", tensor="output gradient")),)
        return self._product(name, region, shape, source, forward=forward, backward=back, split="inputs", **more)

    def _pipelined(self, collective: Collective[X]) -> Collective[X]:
        """Return a message that goes a rank's part at a time beside the GEMM of the part before, if the stack can.

        Transformer Engine's user buffers: a ring of tp parts by copy engines (pytorch/module/base.py, use_ce).
        """
        tp, scaling = self.degrees.tp, find_scaling(self.work.dtype, self.stack.settings.fp8_recipe)
        if not self.stack.overlap_tensor or (scaling and self.stack.saves_quantised and not scaling.user_buffers):
            return collective
        shape = (divide(collective.shape[0], tp), *collective.shape[1:])
        return replace(collective, size_bytes=divide(collective.size_bytes, tp), count=tp, shape=shape, hides="copied")

    def _product(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], **more: object) -> Op[X]:
        weights = linear_weights(name, shape, (shape.outputs, shape.inputs))
        sizes = (self.tokens, shape.outputs, shape.inputs)
        more |= {"kernels": shape.kernels, "parts": shape.parts, "role": shape.role, "modules": shape.modules}
        more |= {"gathered_parts": self.degrees.tp} if self.choices.sequence_parallel else {}
        return matmul(self, name, region, sizes, weights, source, **more)


class Summa(Layout[X]):
    """Two-dimensional linear layers (SUMMA) on a tp x tp2 grid; attention splits heads over tp, the sequence over tp2.

    X is (T/tp2, D/tp), W is (D/tp2, F/tp), Y is (T/tp2, F/tp). Panels of X travel along tp, panels of W along tp2;
    backward the GEMMs dX and dW reduce along the same axes (docs/formulas.md, two-dimensional layouts).
    """

    @cached_property
    def tokens(self) -> X:
        """Tokens on this rank: the sequence is split over cp and tp2."""
        return divide(self.work.B * self.work.S, self.degrees.cp * self.degrees.tp2)

    def residual_width(self, D: int) -> X:
        """The residual stream is split in width over tp."""
        return divide(cast(X, D), self.degrees.tp)

    def column(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], **more: object) -> Op[X]:
        """A GEMM by panels; the saved input is the rank's own tile."""
        return self._panels(name, region, shape, source, shape.inputs, shape.outputs, **more)

    def row(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], **more: object) -> Op[X]:
        """The same GEMM: SUMMA does not distinguish entering from leaving."""
        tp = self.degrees.tp
        return self._panels(name, region, shape, source, shape.inputs * tp, divide(shape.outputs, tp), **more)

    def _panels(
        self, name: str, region: str, shape: LinearShape[X], source: Tensor[X], inner: X, outputs: X, **more: object
    ) -> Op[X]:
        w, nb, m = self.work.weight_bytes, self.degrees.panels, self.tokens
        left, right = self.a * m * inner, w * inner * outputs
        thin = inner / nb

        def panel(
            axis: Literal["tp", "tp2"],
            verb: Literal["broadcast", "reduce"],
            size: X,
            tensor: str,
            of: Gradient = "either",
        ) -> Collective[X]:
            at = (m, thin) if axis == "tp" else (thin, outputs)
            return Collective(
                axis=axis,
                verb=verb,
                size_bytes=size / nb,
                count=nb,
                hides="panels",
                tensor=tensor,
                shape=at,
                read_for=of,
            )

        forward = (panel("tp", "broadcast", left, "input"), panel("tp2", "broadcast", right, "weight"))
        back = (
            panel("tp2", "broadcast", right, "weight", "input"),
            panel("tp", "reduce", left, "input gradient", "input"),
            panel("tp", "broadcast", left, "input", "weight"),
            panel("tp2", "reduce", right, "weight gradient", "weight"),
        )
        weights = linear_weights(name, shape, (outputs, divide(inner, self.degrees.tp2)))
        return matmul(
            self,
            name,
            region,
            (m, outputs, inner),
            weights,
            source,
            forward=forward,
            backward=back,
            kernels=shape.kernels * nb,
            role=shape.role,
            **more,
        )

    def whole(self, name: str, region: str, shape: LinearShape[X], source: Tensor[X]) -> Op[X]:
        """Small layers are GEMMs by panels too: nothing is replicated."""
        return self._panels(name, region, shape, source, shape.inputs, self.split(shape.whole_outputs))


def belonging(ops: Iterable[Op[X]], module: Module) -> tuple[Op[X], ...]:
    """Return operators whose weights belong to a module."""
    return tuple(replace(op, weights=tuple(replace(w, module=module) for w in op.weights)) for op in ops)


def lay_out(degrees: ParallelSizes[X], work: TokenBatch[X], choices: LayoutOptions) -> Layout[X]:
    """Return the layout that the choices name."""
    return (Summa if choices.layout == "summa" else OneD)(degrees, work, choices)
