"""What runs beside the kernels of an operator: messages that hide behind them, cores that messages hold, the host.

`training/_overlap.py` has what runs beside whole passes of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeAlias

from shardwise.cost import Copies, HostRates, Network, OverlapSlowdown, PassSeconds, Rates, collective_seconds
from shardwise.ledger.number import X, above, is_plain, maximum, total
from shardwise.ledger.op import Collective, Op
from shardwise.ledger.traced import named
from shardwise.plans import Schedule, Stack, find_rules
from shardwise.records import dataclass, replace

# Messages that hold no cores beside compute: those that wait, and those of copy engines.
_NO_CORES = ("exposed", "copied", "sharded")
Pairing: TypeAlias = Literal["never", "between nodes", "always"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages(Generic[X]):
    """Seconds of communication of one pass by axis: what waits and what runs beside compute."""

    exposed: dict[str, X]
    hidden: dict[str, X]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel(Generic[X]):
    """What blocks run on: rates of the device, links, and how each axis' groups lie on them.

    `replicas` is what messages between replicas take of compute; nothing where it is not given.
    `host` is given where copies lie there.
    """

    rates: Rates[X]
    network: Network[X]
    group_shapes: dict[str, tuple[X, ...]]
    overlap: bool = True
    exposed_axes: tuple[str, ...] = ()
    replicas: OverlapSlowdown | None = None
    host: HostRates | None = None
    module_launch: float = 0.0
    """Seconds of the host for a kernel that Python modules launch in a forward pass (0: hidden)."""
    gradient_launch: float = 0.0
    """Seconds of the host for a kernel of a backward pass whose functions are Python's own (0: autograd's, in C++)."""
    module_hook: float = 0.0
    """Seconds of the host for what fetches and releases the weights of a module under ZeRO-3, in each of its passes."""
    messages: dict[tuple[object, ...], X] | None = None
    """Seconds of messages of states that are known on this network, where their sizes have a hash and come again."""

    def may_overlap(self, axis: str) -> bool:
        """Return whether messages of an axis may run beside compute; tp2 goes with tp and etp with ep."""
        return self.overlap and {"tp2": "tp", "etp": "ep"}.get(axis, axis) not in self.exposed_axes

    def slowdown_seconds(self, hidden: X) -> X:
        """Return seconds that compute loses to messages that run so long beside it."""
        return hidden * self.rates.contention

    def lost_share(self, group: str) -> X:
        """Return the share that compute loses of the seconds of messages between replicas that are hidden beside it."""
        at = self.group_shapes[group]
        return self.replicas.lost_share(at) if self.replicas else 0 * at[-1]

    def with_usual_adapters(self) -> CostModel[X]:
        """Return the same on a network with the device's usual adapters, itself where a node has no fewer."""
        usual = self.replicas.usual if self.replicas else None
        return self if usual is None else replace(self, network=usual, messages=None)

    def message(self, one: Collective[X]) -> X:
        """Return seconds of one message of a collective."""
        copies: Copies[X] | None = None
        if one.fanout:
            copies = Copies(
                fanout=one.fanout, copy_bytes=one.copy_bytes, beside_bytes=one.beside_bytes, queued=one.queued
            )
        return collective_seconds(self.network, one.verb, one.size_bytes, self.group_shapes[one.axis], copies)


def pairing(stack: Stack, schedule: Schedule) -> Pairing:
    """Return where expert messages run beside the compute of another micro-batch.

    Always under schedules of pairs; Megatron-Core, --overlap-moe-expert-parallel-comm: forward and backward of two
    micro-batches interleave by layer, which the recipes that do it between nodes do under interleaving alone.
    """
    rules = find_rules(schedule)
    if rules.paired:
        return "always"
    return "never" if stack.overlap_experts == "between nodes" and not rules.chunked else stack.overlap_experts


def sends_overlap(costs: CostModel[X], stack: Stack, schedule: Schedule) -> bool:
    """Return whether what pipeline stages send runs beside their compute, as the stack has it under a schedule."""
    return costs.may_overlap("pp") and schedule in stack.overlap_sends


def _exposed(costs: CostModel[X], collective: Collective[X], compute: X) -> tuple[X, X]:
    """Return (exposed, hidden) seconds of a collective beside `compute` seconds of its operator."""
    one = costs.message(collective)
    if collective.hides == "sharded" or is_plain(one, 0):
        return 0 * one, 0 * one
    if collective.hides == "exposed" or not costs.may_overlap(collective.axis):
        return one * collective.count, 0 * one
    if collective.hides == "ring":
        # Each of the c blocks of attention covers one step (arXiv:2310.01889).
        blocks = collective.count + 1 if collective.blocks is None else collective.blocks
        waits = collective.count * maximum(one - compute / blocks, 0.0)
    else:
        waits = maximum(one * collective.count - compute, 0.0)
    return waits, one * collective.count - waits


def _panels(costs: CostModel[X], panels: Sequence[Collective[X]], compute: X) -> list[tuple[X, X]]:
    """Return (exposed, hidden) seconds of the messages of panels, each its share of the set that one panel needs.

    With t1 of a set and tc of compute, nb panels take t1 + (nb - 1) * max(t1, tc / nb) + tc / nb; what is over tc is
    exposed (arXiv:2410.00273, whose form waits for one set more when bound by messages).
    """
    sends = [costs.message(c) for c in panels]
    one_set = total(sends)
    pairs = []
    for c, one in zip(panels, sends, strict=True):
        waits = one_set + (c.count - 1) * maximum(one_set - compute / c.count, 0.0)
        exposed = waits * (one / maximum(one_set, 1e-30))
        pairs.append((exposed, one * c.count - exposed))
    return pairs


def exposed_and_hidden(
    costs: CostModel[X], collectives: tuple[Collective[X], ...], compute: X, late: X | float = 0
) -> list[tuple[X, X]]:
    """Return (exposed, hidden) seconds of each collective of one operator and pass, those in the same compute sharing.

    None of those that are sent where weights are sharded alone, which `sharded_seconds` has.

    `late` are the seconds of the weight gradient, which runs after the input gradient and covers what that one sends.
    """
    pairs: list[tuple[X, X]] = []
    left = {"compute": compute, "late": compute * 0 + late}
    panels = [c for c in collectives if c.hides in ("panels", "copied") and costs.may_overlap(c.axis)]
    of_panels = dict(zip(map(id, panels), _panels(costs, panels, compute + late), strict=True)) if panels else {}
    for c in collectives:
        window = "late" if c.hides == "late" else "compute"
        waits, behind = of_panels[id(c)] if id(c) in of_panels else _exposed(costs, c, left[window])
        if c.hides in left and not is_plain(behind, 0):
            left[window] = maximum(left[window] - behind, 0.0)
        pairs.append((waits, behind))
    return pairs


def messages(
    costs: CostModel[X], collectives: tuple[Collective[X], ...], compute: X, late: X | float = 0
) -> Messages[X]:
    """Return seconds of the collectives of one operator and pass by axis; `late` are those of the weight gradient."""
    exposed: dict[str, X] = {}
    hidden: dict[str, X] = {}
    if not collectives:
        return Messages(exposed=exposed, hidden=hidden)
    for c, (waits, behind) in zip(collectives, exposed_and_hidden(costs, collectives, compute, late), strict=True):
        exposed[c.axis] = exposed[c.axis] + waits if c.axis in exposed else waits
        hidden[c.axis] = hidden[c.axis] + behind if c.axis in hidden else behind
    return Messages(exposed=exposed, hidden=hidden)


def sharded_seconds(costs: CostModel[X], ops: Sequence[Op[X]], zero: X) -> X:
    """Return the seconds of what backward sends over tp where weights are sharded, before gradients are scattered."""
    return total((costs.message(c) * c.count for op in ops for c in op.backward if c.hides == "sharded"), zero)


def merge(into: dict[str, X], more: dict[str, X]) -> None:
    """Add seconds by axis to others, in place."""
    for axis, seconds in more.items():
        into[axis] = into[axis] + seconds if axis in into else seconds


def bucketed(seconds: X, compute_seconds: X, buckets: X) -> X:
    """Return what stays exposed of seconds that are moved in equal buckets, one for each layer that runs beside them.

    The last bucket at least; the first layer covers nothing, since no bucket is ready before it ends: of L layers
    max(t / L, t - c * (L - 1) / L).
    """
    return maximum(seconds / buckets, seconds - compute_seconds * (buckets - 1) / buckets)


def slowed_passes(costs: CostModel[X], op: Op[X], t: PassSeconds[X], hidden: Iterable[dict[str, X]]) -> PassSeconds[X]:
    """Return the seconds of an operator's passes, slowed by the cores of messages that run beside (forward, backward).

    `hidden` are the seconds of those messages by axis.
    """
    if not costs.rates.contention or all(c.hides in _NO_CORES for c in (*op.forward, *op.backward)):
        return t
    lost, lost_back = (
        costs.slowdown_seconds(total(hidden_seconds.values(), 0 * t.forward))
        if any(c.hides not in _NO_CORES for c in sent)
        else 0 * t.forward
        for hidden_seconds, sent in zip(hidden, (op.forward, op.backward), strict=True)
    )
    return replace(
        t,
        forward=t.forward + named(lost, "compute slowed by messages"),
        backward_input=t.backward_input + named(lost_back, "compute slowed by messages"),
    )


# What every layer has: the last map of a mixer or of a feed-forward.
_OF_LAYERS = frozenset({"out", "down", "feed_forward", "shared_gate", "combine"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePasses(Generic[X]):
    """Seconds of the device for the passes of a block, its messages with them, and whether the block routes tokens."""

    forward: X
    backward: X
    replay: X
    routes: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchWaits(Generic[X]):
    """Seconds that the device waits for the host's launches in each pass, and what the host takes for a whole one.

    `backward_gemms` are those of GEMMs of experts; `least` are what launches leave of each pass whatever its messages
    take. `ahead`: the host runs ahead of the device from one pass to the next.
    """

    forward: X
    backward: X
    backward_gemms: X | float = 0
    passes: tuple[X, X] | None = None
    least: tuple[X, X] | None = None
    ahead: bool = False


def launch_waits(
    costs: CostModel[X], ops: Sequence[Op[X]], again: Mapping[int, X | float], device: DevicePasses[X]
) -> LaunchWaits[X]:
    """Return the seconds that the device waits for the host's launches in a forward pass, and in a backward pass.

    Both gradients of experts' GEMMs are launched ahead of the device, one expert after another; what backward runs
    again waits for the count of rows.
    """
    zero = 0 * device.forward
    gemms = [op for op in ops if not is_plain(op.host_seconds, 0) and costs.rates.sharpness != math.inf]
    if not gemms:
        waits = _module_waits(costs, ops, again, device)
        return replace(waits, least=waits.passes)
    launched = 2 * total((zero + op.host_seconds for op in gemms), zero)
    late = named(maximum(launched - device.backward, 0.0), "launches by the host, backward")
    waits = _module_waits(costs, ops, again, replace(device, backward=device.backward + late))
    forward, backward = waits.passes or (zero, zero)
    least = forward, maximum(backward, above(launched, 0, launched + device.replay, zero))
    return replace(waits, backward_gemms=late, least=least)


def _module_waits(
    costs: CostModel[X], ops: Sequence[Op[X]], again: Mapping[int, X | float], device: DevicePasses[X]
) -> LaunchWaits[X]:
    """Return the seconds that the device waits for a host whose Python launches module by module.

    A forward pass, and all of it that `again` says backward computes again, runs module by module in Python; autograd's
    own thread launches the gradients from C++, or calls functions that a framework wrote in Python. Those run ahead of
    the device from one pass to the next, unless a layer reads the counts of its routed rows, and what stands before and
    behind the layers waits for none of them. One thread launches modules and GEMMs of experts, one after the other.
    """
    zero = 0 * device.forward
    alone = bool(costs.gradient_launch) and not any(op.role in _OF_LAYERS for op in ops)
    if not costs.module_launch or costs.rates.sharpness == math.inf or alone:
        return LaunchWaits(forward=zero, backward=zero)
    ahead = total((zero + op.launches for op in ops), zero)
    replayed = total(((zero + op.launches) * again[id(op)] for op in ops if id(op) in again), zero)
    back = total(((zero + op.launches) * (("input" not in op.without) + _weight_pass(op)) for op in ops), zero)
    gemms = [op for op in ops if not is_plain(op.host_seconds, 0)]
    experts = total((zero + op.host_seconds for op in gemms), zero)
    more = total(((zero + op.host_seconds) * again[id(op)] for op in gemms if id(op) in again), 2 * experts)
    forward = costs.module_launch * ahead + experts
    backward = costs.module_launch * replayed + (costs.gradient_launch or costs.rates.launch) * back + more
    if costs.gradient_launch and not device.routes:
        behind = forward + backward - device.forward - device.backward - device.replay
        waits = named(maximum(behind, 0.0), "launches by Python modules")
        return LaunchWaits(forward=zero, backward=waits, passes=(forward, backward), ahead=True)
    return LaunchWaits(
        forward=named(maximum(forward - device.forward, 0.0), "launches by Python modules"),
        backward=named(maximum(backward - device.backward - device.replay, 0.0), "launches of the backward pass"),
        passes=(forward, backward),
    )


def hook_seconds(
    costs: CostModel[X], ops: Sequence[Op[X]], again: Mapping[int, X | float], zero: X
) -> tuple[X, X] | None:
    """Return seconds of the host for the hooks of modules, which ZeRO-3 sets, in a forward pass and in a backward pass.

    Backward fetches for what `again` says that it computes again, and for the gradients. None where there are none.
    """
    if not costs.module_hook or costs.rates.sharpness == math.inf:
        return None
    once = total((zero + costs.module_hook * _fetches(op) for op in ops), zero)
    more = total((zero + costs.module_hook * _fetches(op) * again[id(op)] for op in ops if id(op) in again), zero)
    return once, once + more


def _fetches(op: Op[X]) -> float:
    # Modules with weights that an operator stands for; each expert of a loop has linear layers of its own.
    if not op.weights:
        return 0
    return op.kernels if op.kind == "grouped" else max(len(op.modules), 1)


def _weight_pass(op: Op[X]) -> bool:
    # A pass of a layer whose weights another owns has a gradient of them all the same.
    return op.kind in ("matmul", "grouped") and bool(op.weights or op.modules) and "weight" not in op.without
