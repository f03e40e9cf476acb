"""Seconds of operators where they run: on the device, on the processor of its host, and on the way between.

llama.cpp keeps the first layers, or their routed experts alone, on the host's processor where it is told to (-ngl,
--n-cpu-moe), and runs them there: github.com/ggml-org/llama.cpp src/llama-model.cpp, load_tensors, and common/arg.cpp.
Steps of 32 tokens or more run on the device all the same, which then reads those weights over the host link, of experts
the ones that got a token: ggml/src/ggml-backend.cpp, ggml_backend_sched_backend_id_from_cur and
ggml_backend_sched_compute_splits, and ggml-cuda.cu, ggml_backend_cuda_device_offload_op; at 0c1e57098.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Generic

from shardwise.cost import host_of
from shardwise.ledger.number import X, above, total
from shardwise.ledger.op import Op, within
from shardwise.ledger.traced import named
from shardwise.ops.experts import EXPERTS
from shardwise.ops.overlap import messages
from shardwise.records import dataclass, replace
from shardwise.serving._beside import shared_beside_routed
from shardwise.serving._cache import sequence_bytes
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import EngineCostModel, op_seconds, product_rates
from shardwise.serving._ledger import StepLedger, step_ledger, weight_bytes
from shardwise.serving._memory import caches_of
from shardwise.serving._sizes import ServingSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost(Generic[X]):
    """Seconds of some operators on one rank by operator, role and axis, their FLOPs and the bytes that they move.

    `routed` are seconds of the GEMMs of routed experts.
    """

    seconds: X
    routed: X
    operators: dict[str, X]
    roles: dict[str, X]
    exposed: dict[str, X]
    hidden: dict[str, X]
    flops: X
    moved_bytes: X

    @classmethod
    def nothing(cls, zero: X) -> LayerCost[X]:
        """Return the cost of a layer without operators, which a search has pruned away."""
        return cls(
            seconds=zero, routed=zero, operators={}, roles={}, exposed={}, hidden={}, flops=zero, moved_bytes=zero
        )


_SUMS, _TABLES = ("seconds", "routed", "flops", "moved_bytes"), ("operators", "roles", "exposed", "hidden")


def add(into: dict[str, X], more: dict[str, X], times: X | float = 1) -> None:
    """Add numbers by key to others, so many times each, in place."""
    for key, value in more.items():
        into[key] = into[key] + times * value if key in into else times * value


def layer_cost(ops: tuple[Op[X], ...], costs: EngineCostModel[X], label: str) -> LayerCost[X]:
    """Return what a list of operators adds up to in one forward pass; a message is waited for unless it is hidden."""
    zero = 0 * ops[0].forward_bytes
    seconds = routed = zero
    operators: dict[str, X] = {}
    roles: dict[str, X] = {}
    exposed: dict[str, X] = {}
    hidden: dict[str, X] = {}
    timed = [(op, op_seconds(costs, op)) for op in ops]
    most = costs.beside_rows * costs.decoding, costs.group_shapes["tp"][-1]
    for op, compute in shared_beside_routed(timed, most, partial(product_rates, costs)):
        operators[op.name] = operators[op.name] + compute if op.name in operators else compute
        roles[op.role] = roles[op.role] + compute if op.role in roles else compute
        seconds = seconds + compute
        routed = routed + compute if within(op.region, EXPERTS) else routed
        if not op.forward:
            continue
        sent = messages(costs, op.forward, compute)
        seconds = seconds + total(
            (named(waiting, f"{axis} messages of {op.name}") for axis, waiting in sent.exposed.items()), zero
        )
        add(exposed, sent.exposed)
        add(hidden, sent.hidden)
    return LayerCost(
        seconds=named(seconds, label),
        routed=routed,
        operators=operators,
        roles=roles,
        exposed=exposed,
        hidden=hidden,
        flops=total((op.flops for op in ops), zero),
        moved_bytes=total((op.forward_bytes for op in ops), zero),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink(Generic[X]):
    """The way between a device and its host in one step of so many tokens: bytes a second, and seconds of a copy."""

    tokens: X
    bytes_per_second: float
    copy_seconds: float
    device_tokens: float
    """Tokens from which the device runs what lies on the host."""

    def copied(self, size_bytes: X) -> X:
        """Return seconds to bring bytes over."""
        seconds: X = size_bytes / self.bytes_per_second + self.copy_seconds
        return seconds

    def chosen(self, on_device: LayerCost[X], on_host: LayerCost[X]) -> LayerCost[X]:
        """Return what a part of the host costs, where the tokens of the step have it run."""

        def either(name: str) -> X:
            near, far = getattr(on_device, name), getattr(on_host, name)
            seconds: X = above(self.tokens, self.device_tokens - 0.5, near, far)
            return seconds

        def merged(name: str) -> dict[str, X]:
            near, far = getattr(on_device, name), getattr(on_host, name)
            zero, most = 0 * on_device.seconds, self.device_tokens - 0.5
            keys = dict.fromkeys((*near, *far))
            return {key: above(self.tokens, most, near.get(key, zero), far.get(key, zero)) for key in keys}

        tables = {name: merged(name) for name in _TABLES}
        sums: dict[str, Any] = {name: either(name) for name in _SUMS}
        return LayerCost(**sums, **tables)


def host_way(case: ServingCase, tokens: X) -> HostLink[X]:
    """Return the way between the device of a case and its host."""
    return HostLink(
        tokens=tokens,
        bytes_per_second=host_of(case.cluster).link_bytes_per_second,
        copy_seconds=0.0 if case.efficiencies.ideal else case.engine.host.copy_seconds,
        device_tokens=case.engine.operators.device_tokens,
    )


def waiting(part: LayerCost[X], seconds: X) -> LayerCost[X]:
    """Return a part with what it waits for the link to the host."""
    exposed = {**part.exposed, "host": part.exposed.get("host", 0 * seconds) + seconds}
    return replace(part, seconds=part.seconds + named(seconds, "over the host link"), exposed=exposed)


def _there(part: LayerCost[X]) -> LayerCost[X]:
    """Return a part whose operators are named as those of the host."""
    return replace(part, operators={f"host.{name}": seconds for name, seconds in part.operators.items()})


def _both(one: LayerCost[X], other: LayerCost[X]) -> LayerCost[X]:
    tables = {}
    for name in _TABLES:
        tables[name] = dict(getattr(one, name))
        add(tables[name], getattr(other, name))
    sums = {name: getattr(one, name) + getattr(other, name) for name in _SUMS}
    return LayerCost(**sums, **tables)


def _idle(zero: X) -> LayerCost[X]:
    return LayerCost(
        seconds=zero, routed=zero, operators={}, roles={}, exposed={}, hidden={}, flops=zero, moved_bytes=zero
    )


def experts_apart(ops: tuple[Op[X], ...]) -> tuple[tuple[Op[X], ...], tuple[Op[X], ...]]:
    """Return the operators of a layer that run where its routed experts lie, and the others."""
    lie = tuple(op for op in ops if within(op.region, EXPERTS))
    return lie, tuple(op for op in ops if not within(op.region, EXPERTS))


def _read_bytes(case: ServingCase, ops: tuple[Op[X], ...]) -> X:
    """Return bytes of the weights that operators read: of experts those that got a token."""
    zero = 0 * ops[0].forward_bytes
    edges = (case.activation_bytes * op.rows * op.batch * (op.columns + op.inner) for op in ops if op.kind == "grouped")
    read = total((op.forward_bytes for op in ops if op.kind == "grouped"), zero) - total(edges, zero)
    return read + weight_bytes(tuple(op for op in ops if op.kind != "grouped"), case.format, zero)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitStep(Generic[X]):
    """One step of a model that is split with the host: device and host, their operators, and the way between."""

    case: ServingCase
    host: ServingCase
    costs: EngineCostModel[X]
    host_costs: EngineCostModel[X]
    ledger: StepLedger[X]
    host_ledger: StepLedger[X]
    way: HostLink[X]

    def stream(self) -> X:
        """Return seconds in which the stream of all tokens crosses, in the type that the engine keeps it in."""
        width = self.case.engine.quantisation.activation_bytes / self.case.activation_bytes
        return self.way.copied(self.ledger.stream_bytes * width)

    def layer(self, index: int, on_device: LayerCost[X], cached_bytes: X) -> LayerCost[X]:
        """Return a layer, or an end of the model, that lies on the host with what it keeps of the context."""
        (label, ops), (_, far) = self.ledger.lines[index], self.host_ledger.lines[index]
        brought = self.way.copied(_read_bytes(self.case, ops) + cached_bytes)
        return self.way.chosen(
            waiting(on_device, brought), _there(layer_cost(far, self.host_costs, f"{label} on the host"))
        )

    def experts(self, index: int, on_device: LayerCost[X]) -> LayerCost[X]:
        """Return a layer whose routed experts lie on the host: tokens cross, and what each expert made of them."""
        (label, ops), (_, far) = self.ledger.lines[index], self.host_ledger.lines[index]
        (lie, rest), (there, _) = experts_apart(ops), experts_apart(far)
        brought = waiting(on_device, self.way.copied(_read_bytes(self.case, lie)))
        down = next(op for op in lie if op.role == "down" and op.kind == "grouped")
        made = self.case.engine.quantisation.activation_bytes * down.rows * down.batch * down.columns
        near = layer_cost(rest, self.costs, f"{label} without experts")
        far_cost = _there(layer_cost(there, self.host_costs, f"experts of {label} on the host"))
        crossing = waiting(_both(near, far_cost), self.stream() + self.way.copied(made))
        return self.way.chosen(brought, crossing)


def host_lines(
    case: ServingCase,
    sizes: ServingSizes[X],
    costs: EngineCostModel[X],
    ledger: StepLedger[X],
    parts: tuple[LayerCost[X], ...],
) -> list[tuple[X | float, LayerCost[X]]]:
    """Return what runs in a step of a model that is split with the host, each with how often.

    `parts` are the lines of the ledger on the device: kinds of layer, embedding and head.
    """
    if case.host is None or costs.processor is None:
        return []
    near, far = sizes.stages
    step = ledger.step
    split = SplitStep(
        case=case,
        host=case.host,
        costs=costs,
        host_costs=replace(costs.processor, decoding=costs.decoding),
        ledger=ledger,
        host_ledger=step_ledger(case.host, sizes, step),
        way=host_way(case, step.sequences * step.tokens + 0 * sizes.tp),
    )
    *kinds, _, head = parts
    nothing = 0 * ledger.stream_bytes
    lines: list[tuple[X | float, LayerCost[X]]] = []
    for i, (part, caches) in enumerate(zip(kinds, caches_of(case, sizes), strict=True)):
        cache = step.sequences * sequence_bytes(caches, step.context + step.tokens + nothing)
        lines.append((near.layers[i] - far.experts[i], part))
        if far.layers[i]:
            lines.append((far.layers[i], split.layer(i, part, cache)))
        if far.experts[i]:
            lines.append((far.experts[i], split.experts(i, part)))
    there = layer_cost(split.host_ledger.lines[-2][1], split.host_costs, "embedding on the host")
    lines.append((1, _there(there)))
    lines.append((1, split.layer(len(kinds) + 1, head, nothing) if far.ends else head))
    if near.ends:
        lines.append((1, waiting(_idle(nothing), split.stream())))
    return lines
