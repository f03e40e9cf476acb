"""State-space mixers: Mamba and Mamba-2, split by channels or heads over the tensor-parallel ranks.

Letters: T tokens on the rank, D hidden, I inner width and n state on the rank's channels, R rank of the time step, G
groups, h heads, kc convolution. Sources: arXiv:2312.00752, arXiv:2405.21060, Megatron-LM core/ssm,
state-spaces/mamba.
"""

from __future__ import annotations

from typing import Any, Generic

from shardwise.ledger.number import X, ceil, divide, maximum, minimum
from shardwise.ledger.op import Collective, Op, OpRole, Tensor, Weight
from shardwise.models import Mamba1, Mamba2
from shardwise.ops.elementwise import Norm, norm_op, only_weights, vector
from shardwise.ops.layout import Layout, LinearShape, linear_weights, matmul, memory_op
from shardwise.records import dataclass, replace

REGION = "ssm"
STATE_BYTES = 4
"""Kernels of training hand on states and products of chunks in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan(Generic[X]):
    """A recurrence on one rank: FLOPs of its kernel and by convention, bytes in and out a pass, its state in elements.

    `state` is of one sequence; serving reads it once a step whatever was seen before and writes it, in fp32 where it is
    `float_state` and in the engine's type else. `chunked` are the
    bytes that the kernels of training and of prompts move forward and backward where they hand on states and products
    of chunks through memory, in so many kernels; engines run a prompt by the same ones (vLLM 0.33
    model_executor/layers/fla/ops/chunk.py and mamba/ops/ssd_combined.py; SGLang 0.5.9 srt/layers/attention/fla/chunk.py
    and mamba/ops/ssd_combined.py), a token by one that keeps the state to itself. `chunk` are the tokens of a chunk
    where one kernel takes the chunks of a sequence one after another, as each hands its state on to the next.
    """

    flops: X
    model_flops: X
    moved: X
    state: X
    float_state: bool = False
    chunked: tuple[X, X] | None = None
    kernels: int = 1
    chunk: int = 0


def state_bytes(y: Layout[X], float_state: bool) -> float:
    """Return bytes of an element of a recurrence between steps."""
    return STATE_BYTES if float_state else y.work.state_bytes


def scan_op(
    y: Layout[X], name: str, s: Scan[X], saves: tuple[Tensor[X], ...], reads: tuple[Tensor[X], ...] = ()
) -> Op[X]:
    """Return the operator of a recurrence; backward makes the states again (arXiv:2312.00752 section 3.3.2).

    Its `inner` are the chunks of a sequence that a prompt's kernel takes one after another, 1 where it does not.
    """
    zero = 0 * s.flops
    train, chunks = y.work.phase == "train", y.work.phase != "decode"
    # A step that verifies guesses writes a state after each of its tokens.
    written = y.work.S if y.work.phase == "decode" else 1
    kept = 0 * s.moved if train else (1 + written) * state_bytes(y, s.float_state) * y.work.B * s.state
    role: OpRole = "other" if train else "state"
    links = maximum(y.work.S / s.chunk, 1) if s.chunk and chunks and not train else 1
    ahead, back = s.chunked if s.chunked is not None and chunks else (s.moved, 3 * s.moved)
    return Op(
        name=name, kind="scan", region=f"{REGION}.scan", flops=s.flops, forward_bytes=ahead + kept,
        kernels=s.kernels if chunks else 1, backward_flops=3 * s.flops, backward_bytes=back, weight_flops=zero,
        weight_bytes=zero, rows=y.tokens,
        columns=zero + 1, inner=zero + links, reads=reads, saves=saves, model_flops=s.model_flops, dtype=y.work.dtype,
        output_bytes=s.moved / 2, role="scan" if train and s.chunked is not None else role,
    )  # fmt: skip


def convolution(y: Layout[X], channels: X, whole: int, size: int, bias: bool = False) -> Op[X]:
    """Return a causal convolution over `size` tokens of every channel; its neighbours keep its input and output.

    2 * kc FLOPs a channel and token; serving keeps the last kc - 1 inputs of a sequence.
    """
    stream = y.a * y.tokens * channels
    weights = [Weight(name="conv.weight", elements=channels * size, whole=0 * channels + whole * size, kind="vector")]
    if bias:
        weights.append(vector("conv.bias", channels, whole))
    train = y.work.phase == "train"
    state = 0 * stream if train else 2 * y.a * y.work.B * channels * (size - 1)
    op = memory_op(y, "conv", f"{REGION}.conv", (2 * stream + state, 3 * stream), weights=tuple(weights),
                   output_bytes=stream, role="other" if train else "state")  # fmt: skip
    flops = 2 * size * y.tokens * channels
    return replace(op, flops=flops, backward_flops=flops, weight_flops=flops)


def exchanges(y: Layout[X], op: Op[X], width: X, tensor: str) -> Op[X]:
    """Return an operator with the exchange of a split sequence for heads (Megatron-LM mamba_context_parallel.py)."""
    size = y.a * y.tokens * width
    hop: Collective[X] = Collective(
        axis="cp", verb="all_to_all", size_bytes=size, tensor=tensor, shape=(y.tokens, width)
    )
    return replace(op, forward=(*op.forward, hop), backward=(*op.backward, hop))


def inward(y: Layout[X], D: int, outputs: tuple[X, int], source: Tensor[X], **more: Any) -> Op[X]:
    """Return the projection from the residual stream to everything a mixer works on, split by heads.

    `layers` are the linear layers that it stands for by name, and the features out of each on the rank.
    """
    local, whole = outputs
    layers: dict[str, X] = more.pop("layers", {})
    kernels = 1 if y.stack.activation == "fused" else max(len(layers), 1)
    shape = LinearShape(inputs=D + 0 * local, outputs=local, whole_inputs=D, whole_outputs=whole, kernels=kernels,
                        parts=tuple(layers.values()), modules=tuple(layers), **more)  # fmt: skip
    return y.column("in", REGION, shape, source)


def outward(y: Layout[X], D: int, inputs: tuple[X, int], source: Tensor[X], bias: bool = False) -> Op[X]:
    """Return the projection back to the residual stream."""
    local, whole = inputs
    shape = LinearShape(inputs=local, outputs=D + 0 * local, whole_inputs=whole, whole_outputs=D, bias=bias)
    return y.row("out", REGION, shape, source)


def kept_tensor(y: Layout[X], name: str, width: X, born: str = REGION) -> Tensor[X]:
    """Return a tensor of a mixer, `width` elements a token."""
    return y.activation(f"ssm.{name}", width, born)


def mamba1(y: Layout[X], mixer: Mamba1, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of a Mamba layer: gate and stream in, convolution, selective scan, gated output.

    The fused kernel keeps its input, dt, B and C before and after their layout changes, the scan's output and states,
    and makes the convolution and the time step again (state-spaces/mamba ops/selective_scan_interface.py,
    MambaInnerFn). The scan is 7 FLOPs a state element and token: two products and an exponential to discretise, two
    to update, two to read.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("mamba-2.8b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = mamba1(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    41241600
    """
    inner, n, R = y.split(mixer.inner), mixer.state, mixer.dt_rank
    T, low = y.tokens, R + 2 * n
    zero = 0 * inner
    entry = kept_tensor(y, "in.output", 2 * inner)
    parameters = (vector("ssm.A", inner * n, mixer.inner * n), vector("ssm.D", inner, mixer.inner))
    small = LinearShape(inputs=inner, outputs=low + zero, whole_inputs=mixer.inner, whole_outputs=low)
    step = LinearShape(inputs=R + zero, outputs=inner, whole_inputs=R, whole_outputs=mixer.inner, bias=True)
    selected, scanned = kept_tensor(y, "selected", low + zero), kept_tensor(y, "scanned", inner, f"{REGION}.scan")
    steps = Scan(flops=7 * T * inner * n, model_flops=7 * T * inner * n, moved=y.a * T * (4 * inner + 2 * n),
                 state=inner * n)  # fmt: skip
    states = Tensor(name="ssm.states", size_bytes=8 * inner * n * y.work.B * ceil(divide(y.work.S, 2048)),
                    born=f"{REGION}.scan")  # fmt: skip
    reads = (entry, selected)
    return (
        exchanges(
            y, inward(y, D, (2 * inner, 2 * mixer.inner), source, bias=mixer.proj_bias), 2 * inner, "stream and gate"
        ),
        convolution(y, inner, mixer.inner, mixer.conv, mixer.conv_bias),
        _reduced(y, _product(y, "select", small, reads=(entry,)), low),
        *_selected_norms(y, mixer, selected),
        _product(y, "time_step", step, reads=(selected,)),
        only_weights(y, "ssm.parameters", f"{REGION}.scan", parameters),
        scan_op(y, "scan", steps, (*reads, kept_tensor(y, "B and C", 2 * n + zero), scanned, states), reads),
        exchanges(
            y, outward(y, D, (inner, mixer.inner), kept_tensor(y, "gated", inner), mixer.proj_bias), inner, "output"
        ),
    )


def _product(y: Layout[X], name: str, shape: LinearShape[X], reads: tuple[Tensor[X], ...]) -> Op[X]:
    """Return a small product within the mixer, whose operands the fused kernel makes again."""
    weights = linear_weights(name, shape, (shape.outputs, shape.inputs))
    op = matmul(y, name, f"{REGION}.scan", (y.tokens, shape.outputs, shape.inputs), weights, reads[0])
    return replace(op, reads=reads, saves=())


def _reduced(y: Layout[X], op: Op[X], width: int) -> Op[X]:
    """The time step, B and C come from all channels: summed over ranks forward, and their gradient backward."""
    size = y.a * y.tokens * width
    total: Collective[X] = Collective(axis="tp", verb="all_reduce", size_bytes=size, tensor="time step, B, C",
                                      shape=(y.tokens, width))  # fmt: skip
    return replace(op, forward=(total,), backward=(replace(total, tensor="their gradients"),))


def _selected_norms(y: Layout[X], mixer: Mamba1, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Jamba norms the time step, B and C (arXiv:2403.19887)."""
    if not mixer.norms:
        return ()
    zero = 0 * y.tokens
    sizes = (("dt_norm", mixer.dt_rank), ("B_norm", mixer.state), ("C_norm", mixer.state))
    return tuple(
        norm_op(y, Norm(name=name, region=f"{REGION}.scan", kind="rmsnorm", rows=y.tokens, elements=y.tokens * width,
                        width=zero + width, whole=width), source)
        for name, width in sizes
    )  # fmt: skip


def mamba2(y: Layout[X], mixer: Mamba2, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of a Mamba-2 layer: projection in, convolution, chunked scan, gated norm, projection out.

    The fused kernel keeps its input and the scan's output and makes the convolution again (state-spaces/mamba
    ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn).

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("mamba2-2.7b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = mamba2(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    40214000
    """
    heads, inner = y.split(mixer.heads), y.split(mixer.inner)
    groups = y.kv_heads(mixer.groups)
    wide = 2 * inner + 2 * groups * mixer.state + heads
    whole = 2 * mixer.inner + 2 * mixer.groups * mixer.state + mixer.heads
    channels = inner + 2 * groups * mixer.state
    entry, scanned = kept_tensor(y, "in.output", wide), kept_tensor(y, "scanned", inner, f"{REGION}.scan")
    product = kept_tensor(y, "gated", inner) if mixer.gated_norm else scanned
    return (
        exchanges(y, inward(y, D, (wide, whole), source, bias=mixer.proj_bias), wide, "stream, gate, B, C, time step"),
        convolution(y, channels, mixer.inner + 2 * mixer.groups * mixer.state, mixer.conv, mixer.conv_bias),
        only_weights(y, "ssm.parameters", f"{REGION}.scan", (vector("ssm.A, D, dt", 3 * heads, 3 * mixer.heads),)),
        scan_op(y, "scan", _dual(y, mixer), (entry, scanned), (entry,)),
        *_gated_norm(y, mixer, groups, scanned),
        exchanges(y, outward(y, D, (inner, mixer.inner), product, mixer.out_bias), inner, "output"),
    )


def _dual(y: Layout[X], mixer: Mamba2) -> Scan[X]:
    """Chunks of Q tokens as products, states between them (arXiv:2405.21060 section 6); one token as a recurrence.

    A token costs 2 Q G n for C B^T, 2 Q I for its product with the stream, 4 n I for the chunk's state in and out.
    Megatron-LM counts 7 I n (training.py, mamba_layer_flops), which is also what the recurrence takes.
    """
    T, inner, n = y.tokens, y.split(mixer.inner), mixer.state
    groups = y.kv_heads(mixer.groups)
    moved = y.a * T * (2 * inner + 2 * groups * n + inner)
    recurrent = 7 * T * inner * n
    chunk = minimum(y.work.S, mixer.chunk)
    chunked = 2 * T * (chunk * (groups * n + inner) + 2 * n * inner)
    flops = recurrent if y.work.phase == "decode" else chunked
    return Scan(flops=flops, model_flops=recurrent, moved=moved, state=inner * n, chunked=_passes(y, mixer), kernels=6)


def _passes(y: Layout[X], mixer: Mamba2) -> tuple[X, X]:
    """Return the bytes of the chunked kernels: streams of I, fp32 states of I n / Q and fp32 products of G Q a token.

    Forward: the stream is read for the states and for the output, which is written; states are written, passed on and
    read, C B^T written and read. Backward makes both again, then reads stream, gradient and states in a kernel each for
    the gradients of states, stream, B, C, C B^T and decay: 11 streams, 10 states, 4 products; the convolution runs
    again before. Source: state-spaces/mamba ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_fwd and _bwd.
    """
    T, inner, groups = y.tokens, y.split(mixer.inner), y.kv_heads(mixer.groups)
    chunk = minimum(y.work.S, mixer.chunk)
    stream, states, products = y.a * inner, STATE_BYTES * inner * mixer.state / chunk, STATE_BYTES * groups * chunk
    edges = 2 * y.a * groups * mixer.state
    backward = 2 * (stream + edges)
    forward = 3 * stream + 4 * states + 2 * products + 2 * edges
    return T * forward, T * (11 * stream + 10 * states + 4 * products + 6 * edges + backward)


def _gated_norm(y: Layout[X], mixer: Mamba2, groups: X, source: Tensor[X]) -> tuple[Op[X], ...]:
    """The norm of the gated output, one row a group; gate and output are kept already."""
    if not mixer.gated_norm:
        return ()
    inner = y.split(mixer.inner)
    n = Norm(name="gated_norm", region=REGION, kind="rmsnorm", rows=y.tokens * groups, elements=y.tokens * inner,
             width=inner, whole=mixer.inner)  # fmt: skip
    op = norm_op(y, n, source)
    statistics = Tensor(name="gated_norm.statistics", size_bytes=4 * n.rows, born=REGION)
    return (replace(op, saves=(source, statistics)),)
