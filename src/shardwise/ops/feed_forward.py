"""Feed-forwards: dense, gated or not, and mixtures of experts over expert-parallel ranks.

Letters: T tokens, D hidden, F ffn, E experts, k experts a token, Fe expert ffn. Sources: arXiv:2002.05202 (gated),
arXiv:2101.03961 and arXiv:2401.06066 (experts), Megatron-LM core/transformer/moe for the dispatch.
"""

from __future__ import annotations

from typing import cast

from shardwise.ledger.number import X, divide, maximum, minimum, raised
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import MLP, MoE
from shardwise.ops.layout import Layout, Shape, memory_op


def activation_op(y: Layout[X], name: str, region: str, width: X, m: MLP | MoE, rows: X | None = None) -> tuple[Op[X], Tensor[X]]:
    """Return the activation function and its output tensor, for `width` elements a row.

    Gated: fused kernels keep gate and up (2 F) and the product (F, as the next layer's input); PyTorch's separate kernels
    keep silu(gate) too. Ungated: input and output. Checked to the byte for SwiGLU and GELU with saved-tensor hooks.
    """
    T = y.tokens if rows is None else rows
    one = y.a * T * width
    out = Tensor(name=f"{name}.product", size_bytes=one, born=region)
    entry = Tensor(name=f"{name}.up", size_bytes=one * (2 if m.gated else 1), born=region.removesuffix(".act"))
    fused = y.stack.activation == "fused"
    kept: tuple[Tensor[X], ...] = (entry,)
    if m.gated and not fused:
        kept = (entry, Tensor(name=f"{name}.activated", size_bytes=one, born=region))
    inputs = 2 if m.gated else 1
    forward = (inputs + 1) * one if fused or not m.gated else 5 * one
    backward = (2 * inputs + 1) * one if fused or not m.gated else 8 * one
    op = memory_op(y, f"{name}.activation", region, (forward, backward), reads=(entry,), saves=(*kept, out),
                   kernels=1 if fused or not m.gated else 2, output_bytes=one)  # fmt: skip
    return op, out


def mlp(y: Layout[X], m: MLP, D: int, source: Tensor[X], name: str = "mlp") -> tuple[Op[X], ...]:
    """Return the operators of a dense feed-forward: up (with gate), activation, down; RWKV's has a receptance too."""
    F, sides = y.split(m.ffn), 2 if m.gated else 1
    region = name
    up = Shape(inputs=D + 0 * F, outputs=sides * F, whole_inputs=D, whole_outputs=sides * m.ffn, bias=m.bias,
               kernels=1 if y.stack.activation == "fused" else sides)  # fmt: skip
    down = Shape(inputs=F, outputs=D + 0 * F, whole_inputs=m.ffn, whole_outputs=D, bias=m.bias)
    act, product = activation_op(y, name, f"{region}.act", F, m)
    return (y.column(f"{name}.up", region, up, source), act, y.row(f"{name}.down", region, down, product))


def distinct_experts(local: X, experts: int, top_k: int, tokens: X) -> X:
    """Return the expected number of local experts that get at least one of `tokens` tokens routed at random.

    local * (1 - (1 - k / E)^T); at one token exactly k of all E, never more than there are.

    >>> distinct_experts(8, 8, 2, 1)
    2.0
    """
    miss = 1 - top_k / experts
    if miss <= 0:
        return local
    return local * (1 - raised(miss, tokens))


def routed_tokens(y: Layout[X]) -> X:
    """Return the tokens one rank routes: each tensor-parallel rank routes its own share of the sequence."""
    return divide(y.tokens, y.degrees.tp) if y.choices.layout == "1d" else y.tokens


def _experts(y: Layout[X], m: MoE, width: int, name: str) -> tuple[Op[X], ...]:
    """Return the two grouped products of the local experts and the activation between them.

    Rows are the tokens that arrive: T * k a rank on average over the expert-parallel group, times the imbalance; each expert
    rank reads the weights of the experts that got a token. `model_flops` leaves the imbalance out.
    """
    T, ep, etp = routed_tokens(y), y.degrees.ep, y.degrees.etp
    local, F = divide(cast(X, m.experts), ep), divide(cast(X, m.ffn), etp)
    D = width + 0 * T
    rows = T * m.top_k * etp * y.work.imbalance
    fair = T * m.top_k * etp
    hit = minimum(distinct_experts(local, m.experts, m.top_k, T * ep * etp), local)
    sides, region = 2 if m.gated else 1, f"{name}.experts"
    copied = "grouped-mm" == y.stack.experts
    permuted = Tensor(name=f"{name}.permuted", size_bytes=y.a * fair * D, born=name)
    act, product = activation_op(y, region, f"{region}.act", F, m, fair)
    zero = 0 * rows

    def grouped(part: str, k: X, n: X, whole: int, source: Tensor[X]) -> Op[X]:
        flops, weight = 2 * rows * n * k, y.work.weight_bytes * hit * n * k
        edges = y.a * rows * (n + k)
        weights = [Weight(name=f"{region}.{part}.weight", elements=local * n * k, whole=zero + m.experts * whole, expert=True)]
        if m.bias:
            full = {"up": sides * m.ffn, "down": whole // m.ffn}[part]
            weights.append(Weight(name=f"{region}.{part}.bias", elements=local * n, whole=zero + m.experts * full, kind="vector", expert=True))
        gradient = 2 * y.work.gradient_bytes * local * n * k
        return Op(name=f"{region}.{part}", kind="grouped", region=region, flops=flops, forward_bytes=edges + weight, backward_flops=flops,
                  backward_bytes=edges + weight, weight_flops=flops, weight_bytes=edges + gradient, rows=rows / maximum(hit, 1), columns=n, inner=k,
                  batch=hit, weights=tuple(weights), reads=(source,), saves=(source,), model_flops=2 * fair * n * k, dtype=y.work.dtype,
                  output_bytes=y.a * rows * n)  # fmt: skip

    up = grouped("up", D, sides * F, width * sides * m.ffn, permuted)
    down = grouped("down", F, D, width * m.ffn, product)
    scaled = Tensor(name=f"{name}.unscaled output", size_bytes=y.a * fair * D, born=region)
    return (up, act, _with_saves(down, scaled) if copied else down)


def _with_saves(op: Op[X], tensor: Tensor[X]) -> Op[X]:
    from dataclasses import replace

    return replace(op, saves=(*op.saves, tensor))


def moe(y: Layout[X], m: MoE, D: int, source: Tensor[X], name: str = "mlp") -> tuple[Op[X], ...]:
    """Return the operators of a mixture of experts: router, dispatch, experts, combine, and shared experts beside them.

    Dispatch sends T * k rows of D over the expert-parallel ranks and gathers over the expert-tensor ranks; combine mirrors it
    (Megatron-LM core/transformer/moe/token_dispatcher.py, all-to-all).
    """
    T = routed_tokens(y)
    rows, width = T * m.top_k, m.latent or D
    zero = 0 * T
    router_weights = [Weight(name=f"{name}.router.weight", elements=zero + D * (m.experts + m.zero_experts), whole=zero + D * (m.experts + m.zero_experts))]
    if m.router_bias:
        router_weights.append(Weight(name=f"{name}.router.bias", elements=zero + m.experts, whole=zero + m.experts, kind="vector"))
    logits = Tensor(name=f"{name}.router.probabilities", size_bytes=4 * T * m.experts, born=f"{name}.router")
    flops, moved = 2 * T * D * m.experts, y.a * T * D + 4 * T * m.experts
    router = Op(name=f"{name}.router", kind="matmul", region=f"{name}.router", flops=flops, forward_bytes=moved, backward_flops=flops,
                backward_bytes=moved, weight_flops=flops, weight_bytes=moved, rows=T, columns=zero + m.experts, inner=zero + D,
                weights=tuple(router_weights), reads=(source,), saves=(source, logits), model_flops=flops, dtype=y.work.dtype,
                kernels=4, output_bytes=4 * T * m.experts)  # fmt: skip
    hop = Collective(axis="ep", verb="all_to_all", size_bytes=y.a * rows * width, tensor="routed tokens",
                     fanout=m.top_k if y.stack.dispatch == "deduplicated" else 0)
    arrived = y.a * rows * y.degrees.etp * width
    gather = Collective(axis="etp", verb="all_gather", size_bytes=arrived, tensor="routed tokens")
    scatter = Collective(axis="etp", verb="reduce_scatter", size_bytes=arrived, tensor="expert outputs")
    dispatch = memory_op(y, f"{name}.dispatch", name, (2 * y.a * rows * width, 2 * y.a * rows * width), forward=(hop, gather),
                         backward=(scatter, hop), kernels=2, output_bytes=arrived)  # fmt: skip
    combine = memory_op(y, f"{name}.combine", name, (2 * y.a * rows * width, 2 * y.a * rows * width), forward=(scatter, hop),
                        backward=(hop, gather), kernels=2, output_bytes=y.a * T * width)  # fmt: skip
    ops: list[Op[X]] = [router]
    if m.latent:
        ops.append(y.whole(f"{name}.latent_down", name, Shape(inputs=zero + D, outputs=zero + m.latent, whole_inputs=D, whole_outputs=m.latent), source))
    ops += [dispatch, *_experts(y, m, width, name), combine]
    if m.latent:
        entry = Tensor(name=f"{name}.latent", size_bytes=y.a * T * m.latent, born=name)
        ops.append(y.whole(f"{name}.latent_up", name, Shape(inputs=zero + m.latent, outputs=zero + D, whole_inputs=m.latent, whole_outputs=D), entry))
    if m.shared is not None:
        ops += mlp(y, m.shared, D, source, f"{name}.shared")
    if m.shared_gate:
        ops.append(y.whole(f"{name}.shared_gate", f"{name}.shared", Shape(inputs=zero + D, outputs=zero + 1, whole_inputs=D, whole_outputs=1), source))
    return tuple(ops)
