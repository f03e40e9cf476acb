"""Linear attention and other recurrences.

Gated delta rule, lightning attention, short convolution, RG-LRU, RWKV-4 and the matrix LSTM.

Letters: T tokens on the rank, D hidden, dk and dv key and value widths of a head. Each is split by heads or channels
over the tensor-parallel ranks, as the state-space mixers are.
"""

from __future__ import annotations

from shardwise.ledger.number import X, minimum
from shardwise.ledger.op import Op, Tensor
from shardwise.models import (
    GatedDelta,
    LightningAttention,
    Mlstm,
    NormKind,
    RecurrentGate,
    Rwkv,
    ShortConv,
    StreamConvs,
)
from shardwise.ops.elementwise import Norm, norm_op, only_weights, vector
from shardwise.ops.layout import Layout, LinearShape, memory_op
from shardwise.ops.ssm import REGION, Scan, convolution, exchanges, inward, kept_tensor, outward, scan_op
from shardwise.records import replace

SCAN = f"{REGION}.scan"
DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta kernels (fla-org/flash-linear-attention, ops/gated_delta_rule/chunk.py)."""


def gated_delta(y: Layout[X], mixer: GatedDelta, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of a gated-delta layer: projections, convolution, chunked delta rule, gated norm, output.

    The chunked kernel keeps q, k, v, decay, step and the inverse of each chunk (fla-org/flash-linear-attention
    ops/gated_delta_rule/chunk.py, save_for_backward), with q and k repeated to the value heads.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("qwen3-next-80b-a3b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = gated_delta(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    33718464
    """
    keys, values = y.split(mixer.key_heads * mixer.key_dim), y.split(mixer.value_heads * mixer.value_dim)
    heads = y.split(mixer.value_heads)
    repeated = heads * mixer.key_dim
    kept = (
        kept_tensor(y, "queries and keys", 2 * repeated, f"{REGION}.conv"),
        kept_tensor(y, "values", values, f"{REGION}.conv"),
        Tensor(name="ssm.query and key norms", size_bytes=8 * y.tokens * heads, born=SCAN),
        Tensor(name="ssm.decay", size_bytes=4 * y.tokens * heads * mixer.decays, born=SCAN),
        kept_tensor(y, "step", heads, SCAN),
        kept_tensor(y, "chunk inverses", heads * DELTA_CHUNK, SCAN),
    )
    bias = vector("ssm.dt_bias", heads * mixer.decays, mixer.value_heads * mixer.decays)
    parameters = (bias, vector("ssm.A", heads, mixer.value_heads))
    scanned, product = kept_tensor(y, "scanned", values, SCAN), kept_tensor(y, "gated", values)
    channels = 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
    conv = convolution(y, 2 * keys + values, channels, mixer.conv)
    return (
        *_delta_inputs(y, mixer, D, source),
        # Megatron-LM counts this convolution (training.py, gdn_layer_flops), unlike that of Mamba.
        replace(conv, model_flops=conv.flops),
        only_weights(y, "ssm.parameters", SCAN, parameters),
        scan_op(y, "scan", _delta_rule(y, mixer), kept, kept[:2]),
        *_delta_output(y, mixer, scanned),
        exchanges(y, outward(y, D, (values, mixer.value_heads * mixer.value_dim), product), values, "output"),
    )


def _delta_inputs(y: Layout[X], mixer: GatedDelta, D: int, source: Tensor[X]) -> list[Op[X]]:
    """One projection to all inputs; in KDA decay and output gate go through a rank of `value_dim`."""
    k, v, heads = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim, mixer.value_heads
    decays = heads * mixer.decays
    widths = {"q": k, "k": k, "v": v, "z": v, "g": v, "b": heads, "a": decays, "f": decays}
    sizes = {name: sum(widths[letter] for letter in name.rpartition("_")[2]) for name in mixer.linear_layers}
    whole = sum(sizes.values())
    layers = {name: y.split(size) for name, size in sizes.items()}
    own = inward(y, D, (y.split(whole), whole), source, layers=layers)
    ops = [exchanges(y, own, y.split(whole), "inputs of the delta rule")]
    for name, short, width in (("decay", "f", decays), ("gate", "g", v)) if mixer.style == "kda" else ():
        if any(layer.rpartition("_")[2] == short for layer in mixer.linear_layers):
            continue
        zero = 0 * y.tokens
        low = LinearShape(inputs=D + zero, outputs=mixer.value_dim + zero, whole_inputs=D,
                          whole_outputs=mixer.value_dim, modules=(f"{short}_a",))  # fmt: skip
        high = LinearShape(inputs=mixer.value_dim + zero, outputs=y.split(width), whole_inputs=mixer.value_dim,
                           whole_outputs=width, modules=(f"{short}_b",))  # fmt: skip
        entry = Tensor(name=f"ssm.{name} latent", size_bytes=y.a * y.residual_tokens * mixer.value_dim, born=REGION)
        ops += [y.whole(f"{name}_down", REGION, low, source), y.column(f"{name}_up", REGION, high, entry)]
    return ops


def _delta_rule(y: Layout[X], mixer: GatedDelta) -> Scan[X]:
    """Read the state by key, update it, read it by query: 8 dk dv FLOPs a head and token (Megatron-LM training.py)."""
    heads = y.split(mixer.value_heads)
    state = heads * mixer.key_dim * mixer.value_dim
    flops = 8 * y.tokens * state
    moved = y.a * y.tokens * heads * (2 * mixer.key_dim + 2 * mixer.value_dim)
    return Scan(flops=flops, model_flops=flops, moved=moved, state=state, float_state=mixer.float_state,
                chunked=_delta_passes(y, mixer), kernels=7, chunk=DELTA_CHUNK)  # fmt: skip


def _delta_passes(y: Layout[X], mixer: GatedDelta) -> tuple[X, X]:
    """Return the bytes of the chunked kernels, dk and dv a head and token, 64 of a chunk, dk dv / 64 of its state.

    Forward: norms of q and k (4 dk), GEMMs of keys (dk + 128), their inverse (192), w and u (2 dk + 2 dv + 64),
    states (2 dk + 2 dv and one state), output (2 dk + 2 dv and one state). Backward makes w, u and states again and
    reads them in a kernel each for values, states, queries with keys and decay, and w with u; then the norms: two and
    a half times as much. Source: fla-org/flash-linear-attention ops/gated_delta_rule/chunk.py,
    chunk_gated_delta_rule_fwd and chunk_gated_delta_rule_bwd.
    """
    dk, dv, chunk = mixer.key_dim, mixer.value_dim, DELTA_CHUNK
    width = 11 * dk + 6 * dv + 6 * chunk + 2 * dk * dv / chunk
    forward = y.a * y.tokens * y.split(mixer.value_heads) * width
    return forward, 2.5 * forward


def _delta_output(y: Layout[X], mixer: GatedDelta, source: Tensor[X]) -> list[Op[X]]:
    """The norm of every head with one shared weight, and the gate that is kept with it."""
    heads = y.split(mixer.value_heads)
    width = heads * mixer.value_dim
    n = Norm(name="gated_norm", region=REGION, kind="rmsnorm", rows=y.tokens * heads, elements=y.tokens * width,
             width=mixer.value_dim + 0 * heads, whole=mixer.value_dim)  # fmt: skip
    gate = kept_tensor(y, "gate", width)
    moved = (3 * gate.size_bytes, 5 * gate.size_bytes)
    return [
        norm_op(y, n, source),
        memory_op(y, "output_gate", REGION, moved, saves=(gate,), kernels=1, output_bytes=gate.size_bytes),
    ]


def lightning_attention(y: Layout[X], mixer: LightningAttention, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of lightning attention: queries, keys, values through an activation, blocks, norm and gate.

    A token and head take 2 H FLOPs to read the state and 2 H to update it for each of H channels, and 4 H for each
    token of its block, whose products are made whole (arXiv:2401.04658 algorithm 1; transformers 5.23.0
    models/minimax, MiniMaxLightningAttention). The norm is over all heads.

    >>> from shardwise.models import LightningAttention
    >>> from shardwise.ops.count import whole_layout
    >>> y = whole_layout(1, 64)
    >>> ops = lightning_attention(y, LightningAttention(heads=64, head_dim=128), 6144, y.residual("x", 6144, "norm1"))
    >>> sum(w.whole for op in ops for w in op.weights)
    251666432
    """
    heads, T, H = y.split(mixer.heads), y.tokens, mixer.head_dim
    width, whole = heads * H, mixer.heads * H
    entry, streams = kept_tensor(y, "in.output", 3 * width), kept_tensor(y, "queries, keys and values", 3 * width)
    scanned, gate = kept_tensor(y, "scanned", width, SCAN), kept_tensor(y, "gate", width)
    state = 4 * T * width * H
    steps = Scan(flops=state + 4 * T * width * _block(y, mixer), model_flops=state, moved=y.a * T * 4 * width,
                 state=width * H)  # fmt: skip
    n = Norm(name="head_norm", region=REGION, kind="rmsnorm", rows=T, elements=T * width, width=width, whole=whole)
    product = kept_tensor(y, "gated", width)
    moved = (3 * product.size_bytes, 5 * product.size_bytes)
    return (
        exchanges(y, inward(y, D, (4 * width, 4 * whole), source, layers={"qkv": 3 * width, "output_gate": width}),
                  4 * width, "queries, keys, values, gate"),
        memory_op(y, "activation", REGION, (2 * entry.size_bytes, 3 * entry.size_bytes), saves=(entry,),
                  output_bytes=entry.size_bytes),
        scan_op(y, "scan", steps, (streams,), (streams,)),
        norm_op(y, n, scanned),
        memory_op(y, "output_gate", REGION, moved, saves=(gate,), kernels=2, output_bytes=product.size_bytes),
        exchanges(y, outward(y, D, (width, whole), product), width, "output"),
    )  # fmt: skip


def _block(y: Layout[X], mixer: LightningAttention) -> X:
    """Return the tokens of a block; in decode the state alone is read and updated."""
    return 0 * y.tokens if y.work.phase == "decode" else minimum(mixer.block + 0 * y.tokens, y.work.S)


def short_conv(y: Layout[X], mixer: ShortConv, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of LFM2's layer: three streams in, one gated before and one after a convolution.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("lfm2-1.2b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = short_conv(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    16783360
    """
    width = y.split(mixer.width)
    streams, mixed = kept_tensor(y, "in.output", 3 * width), kept_tensor(y, "convolved", width, f"{REGION}.conv")
    entry, product = kept_tensor(y, "conv input", width), kept_tensor(y, "gated", width)
    moved = (6 * width * y.a * y.tokens, 8 * width * y.a * y.tokens)
    return (
        exchanges(y, inward(y, D, (3 * width, 3 * mixer.width), source, bias=mixer.bias), 3 * width, "three streams"),
        convolution(y, width, mixer.width, mixer.conv, mixer.bias),
        memory_op(y, "gates", REGION, moved, saves=(streams, entry, mixed), kernels=2, output_bytes=product.size_bytes),
        exchanges(y, outward(y, D, (width, mixer.width), product, mixer.bias), width, "output"),
    )


def stream_convs(y: Layout[X], mixer: StreamConvs, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the convolutions around attention: of keys and values, and of two branches as wide as the stream.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("inkling-small"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = stream_convs(y, model.layers[0].mixers[1], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    40960
    """
    heads, zero = y.kv_heads(mixer.kv_heads), 0 * y.tokens
    both = convolution(y, 2 * heads * mixer.head_dim, 2 * mixer.kv_heads * mixer.head_dim, mixer.conv)
    stream = convolution(y, 2 * mixer.width + zero, 2 * mixer.width, mixer.conv)
    weights = tuple(replace(weight, name=f"stream.{weight.name}") for weight in stream.weights)
    return (replace(both, kernels=2), replace(stream, name="stream_conv", kernels=2, weights=weights))


def recurrent_gate(y: Layout[X], mixer: RecurrentGate, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of Griffin's recurrent block (arXiv:2402.19427 section 2.3-2.4).

    A GELU branch beside a convolution and a real-gated linear recurrence, whose two gates are block-diagonal GEMMs.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("recurrentgemma-2b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = recurrent_gate(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    20999680
    """
    width, one = y.split(mixer.width), mixer.width // mixer.heads
    T, flops = y.tokens, 4 * y.tokens * width * one
    parameters = (
        vector("rglru.gates", 2 * width * one, 2 * mixer.width * one),
        vector("rglru.biases", 2 * width, 2 * mixer.width),
        vector("rglru.decay", width, mixer.width),
    )
    kept = (
        kept_tensor(y, "in.output", 2 * width),
        kept_tensor(y, "convolved", width, f"{REGION}.conv"),
        kept_tensor(y, "gates", 2 * width, SCAN),
        Tensor(name="ssm.states", size_bytes=4 * T * width, born=SCAN),
    )
    gates = Scan(flops=flops + 10 * T * width, model_flops=flops, moved=y.a * T * 4 * width, state=width,
                 float_state=mixer.float_state)  # fmt: skip
    product = kept_tensor(y, "gated", width)
    moved = (3 * product.size_bytes, 5 * product.size_bytes)
    return (
        exchanges(
            y,
            inward(
                y, D, (2 * width, 2 * mixer.width), source, bias=True, layers={"linear_y": width, "linear_x": width}
            ),
            2 * width,
            "two branches",
        ),
        convolution(y, width, mixer.width, mixer.conv, bias=True),
        only_weights(y, "rglru.parameters", SCAN, parameters),
        scan_op(y, "scan", gates, kept, kept[:2]),
        memory_op(y, "output_gate", REGION, moved, kernels=2, output_bytes=product.size_bytes),
        exchanges(y, outward(y, D, (width, mixer.width), product, bias=True), width, "output"),
    )


def rwkv(y: Layout[X], mixer: Rwkv, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of RWKV-4 time mixing (arXiv:2305.13048 equations 11 to 18).

    Three mixes over time enter three projections; a channel's weighted sum takes about 12 FLOPs a token.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("rwkv-4-169m"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = rwkv(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    2363136
    """
    width, stream = y.split(mixer.width), y.residual_width(D)
    mixes = (vector("mixes", 3 * stream, 3 * D),)
    parameters = (vector("wkv.decay and bonus", 2 * width, 2 * mixer.width),)
    kept = (kept_tensor(y, "in.output", 3 * width), kept_tensor(y, "scanned", width, SCAN))
    steps = Scan(flops=12 * y.tokens * width, model_flops=0 * y.tokens, moved=4 * y.a * y.tokens * width,
                 state=3 * width, float_state=mixer.float_state)  # fmt: skip
    mixed = (6 * source.size_bytes, 9 * source.size_bytes)
    entries = tuple(y.residual(f"ssm.mixed {part}", D, REGION) for part in ("keys", "values"))
    return (
        memory_op(y, "mixes", REGION, mixed, weights=mixes, saves=(source, *entries), kernels=3,
                  output_bytes=3 * source.size_bytes),
        inward(y, D, (3 * width, 3 * mixer.width), y.residual("ssm.mixed receptances", D, REGION),
               layers={"k": width, "v": width, "receptance": width}),
        only_weights(y, "wkv.parameters", SCAN, parameters),
        scan_op(y, "scan", steps, kept, kept[:1]),
        outward(y, D, (width, mixer.width), kept_tensor(y, "gated", width)),
    )  # fmt: skip


def mlstm(y: Layout[X], mixer: Mlstm, D: int, source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of a matrix LSTM (arXiv:2405.04517 section 2.3, kernels arXiv:2503.14376).

    Queries, keys, values and output gate in one projection, input and forget gates with biases in another; the state
    of a head is dk by dv with a normaliser of dk. Chunked kernels take 4 dk dv FLOPs a head and token beside the
    chunk's own square.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("xlstm-7b"), whole_layout(1, 64)
    >>> source = y.residual("norm1.output", model.hidden, "norm1")
    >>> ops = mlstm(y, model.layers[0].mixers[0], model.hidden, source)
    >>> sum(w.whole for op in ops for w in op.weights)
    67178512
    """
    heads, T = y.split(mixer.heads), y.tokens
    whole, values = mixer.heads * (2 * mixer.qk_dim + 2 * mixer.v_dim), heads * mixer.v_dim
    keys = heads * mixer.qk_dim
    layers = {"q": keys, "k": keys, "v": values, "ogate_preact": values}
    gates = LinearShape(inputs=D + 0 * heads, outputs=2 * heads, whole_inputs=D, whole_outputs=2 * mixer.heads,
                        bias=True, parts=(heads, heads), modules=("igate_preact", "fgate_preact"))  # fmt: skip
    entry, scanned = kept_tensor(y, "in.output", y.split(whole)), kept_tensor(y, "scanned", values, SCAN)
    normalisers = Tensor(name="ssm.normalisers", size_bytes=8 * T * heads, born=SCAN)
    state = heads * mixer.qk_dim * (mixer.v_dim + 1)
    flops = 4 * T * heads * mixer.qk_dim * mixer.v_dim
    steps = Scan(
        flops=flops, model_flops=flops, moved=y.a * T * heads * (2 * mixer.qk_dim + 2 * mixer.v_dim), state=state,
        float_state=mixer.float_state,
    )  # fmt: skip
    kind: NormKind = "layernorm" if mixer.bias else "layernorm-no-bias"
    n = Norm(name="head_norm", region=REGION, kind=kind, rows=T * heads,
                      elements=T * values, width=values, whole=mixer.heads * mixer.v_dim)  # fmt: skip
    product = kept_tensor(y, "gated", values)
    moved = (3 * product.size_bytes, 5 * product.size_bytes)
    return (
        exchanges(
            y,
            inward(y, D, (y.split(whole), whole), source, bias=mixer.bias, layers=layers),
            y.split(whole),
            "queries, keys, values, gate",
        ),
        y.column("gates", REGION, gates, source),
        scan_op(y, "scan", steps, (entry, scanned, normalisers), (entry,)),
        norm_op(y, n, scanned),
        memory_op(y, "output_gate", REGION, moved, saves=(product,), kernels=2, output_bytes=product.size_bytes),
        exchanges(y, outward(y, D, (values, mixer.heads * mixer.v_dim), product, mixer.bias), values, "output"),
    )
