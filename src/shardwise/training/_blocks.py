"""A block folded: all that composition needs of it, from its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Generic, TypeAlias

from shardwise.cost import PassSeconds, op_seconds
from shardwise.ledger.flow import gradient_passes
from shardwise.ledger.number import X, above, ceil, divide, largest, maximum, total
from shardwise.ledger.op import Op, within
from shardwise.ledger.saved import Checkpoint, keep, recomputed_shares
from shardwise.ledger.traced import named
from shardwise.ops.count import RECOMPUTED
from shardwise.ops.layout import Layout
from shardwise.ops.overlap import (
    CostModel,
    DevicePasses,
    Messages,
    hook_seconds,
    launch_waits,
    merge,
    messages,
    sharded_seconds,
    slowed_passes,
)
from shardwise.records import dataclass
from shardwise.training._made import gradients_beside, late_bytes, widest_bytes, working_bytes
from shardwise.training._weights import FrozenWeights, ParameterCounts, elements, frozen_weights, narrow_elements

RECOMPUTE: dict[str, tuple[Checkpoint, ...]] = {
    mode: (Checkpoint(regions),) if regions else () for mode, regions in RECOMPUTED.items()
}
HALVES = (Checkpoint(("attention",)), Checkpoint(("mlp",)))
"""Units of full recompute where a framework wraps the parts of a layer (`Stack.checkpoint_halves`)."""
# Megatron-LM core/transformer/transformer_config.py, recompute_modules; the second group discards its output too.
MODULES: dict[str, tuple[Checkpoint, ...]] = {
    "core_attn": RECOMPUTE["selective"],
    "mlp": (Checkpoint(("mlp",)),),
    "moe": (Checkpoint(("mlp",)),),
    "shared_experts": (Checkpoint(("mlp.shared",)),),
    "moe_act": (Checkpoint(("mlp.experts.act",), discards_output=True),),
    "mlp_act": (Checkpoint(("mlp.act",), discards_output=True),),
    "layernorm": (Checkpoint(("norm1",), discards_output=True), Checkpoint(("norm2",), discards_output=True)),
    "mla_up_proj": (Checkpoint(("attention.up",), discards_output=True),),
}


def checkpoints(mode: str, modules: Iterable[str]) -> tuple[Checkpoint, ...]:
    """Return the units that a recompute mode and a list of modules run again.

    >>> checkpoints("selective", ["layernorm"])[1].regions
    ('norm1',)
    """
    return (*RECOMPUTE[mode], *(unit for name in modules for unit in MODULES[name]))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost(Generic[X]):
    """One block, embedding or head on one rank and for one micro-batch: seconds, bytes, parameters.

    `elements` are what trains of the model. `gradient_shapes` are the elements of the gradient of each weight of a
    GEMM, where memory depends on them.
    """

    forward: X
    backward_input: X
    backward_weight: X
    replay: X
    compute: X
    exposed: dict[str, X]
    hidden: dict[str, X]
    forward_exposed: dict[str, X]
    replay_exposed: dict[str, X]
    kept_bytes: X
    dropped_bytes: X
    transient_bytes: X
    working_bytes: X
    widest_bytes: X
    beside_kept: X
    """Bytes that lie free beside each byte that a layer which runs again keeps, in the blocks of the allocator."""
    elements: ParameterCounts[X]
    flops: X
    model_flops: X
    gradients_beside: X | float = 0
    """Gradients at once behind activations whose output is not kept."""
    adapters: ParameterCounts[X] | None = None
    frozen: FrozenWeights[X] | None = None
    narrow: X | float = 0
    """Parameters that GEMMs of fewer than 16 bits multiply, frozen ones too."""
    gradient_shapes: dict[str, X] = field(default_factory=dict)
    behind_pair: dict[str, X] = field(default_factory=dict)
    """By axis, the share of what messages expose in their own operator that a paired micro-batch hides after all."""
    sharded: X | float = 0
    """Seconds of what backward sends over tp besides, where weights are sharded."""
    unpaired: X | float = 0
    """Seconds that a pass without a paired micro-batch takes more, forward and backward together."""
    windows: dict[str, X] = field(default_factory=dict)
    """Seconds of the parts of a layer that run beside those of a paired micro-batch, and of messages of experts."""
    host: tuple[X, X] | None = None
    """Seconds in which the host launches a forward pass and a backward pass, where its launches are charged."""
    least: tuple[X, X] | None = None  # Of a forward and a backward pass by launches, whatever hides of its messages.
    host_ahead: bool = False  # It runs ahead of the device from one pass to the next.
    launch_waits: X | float = 0
    """Seconds of both passes in which the device waits for launches."""
    hooks: tuple[X, X] | None = None
    """Seconds of the host for what fetches weights module by module under ZeRO-3, in a forward and a backward pass."""

    @property
    def backward(self) -> X:
        """Seconds of the whole backward pass, replay included."""
        return self.backward_input + self.backward_weight + self.replay


# Seconds of an operator's passes, and the messages of forward and of backward.
PricedOp: TypeAlias = tuple[PassSeconds[X], Messages[X], Messages[X]]


# Lists of operators are known as the objects that they are, which stay as long as what is known of them: operators are
# wide records, and to hash one takes a third of the time of its price.
_Ops: TypeAlias = tuple[Op[X], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockContents(Generic[X]):
    """What of a block neither prices nor recompute decide: bytes that it makes, parameters, FLOPs of all passes."""

    transient_bytes: X
    working_bytes: X
    widest_bytes: X
    gradients_beside: X
    elements: ParameterCounts[X]
    adapters: ParameterCounts[X] | None
    frozen: FrozenWeights[X] | None
    narrow: X
    flops: X
    model_flops: X


@dataclass(slots=True)
class WrittenBlocks(Generic[X]):
    """Operators of the parts of a model by layout, and what is in lists of them, whatever they run on."""

    ledgers: dict[object, dict[tuple[object, ...], _Ops[X]]] = field(default_factory=dict)
    contents: dict[int, tuple[_Ops[X], BlockContents[X]]] = field(default_factory=dict)


@dataclass(slots=True)
class KnownPrices(Generic[X]):
    """Operators, and lists of them that were priced on one machine, for those that come again."""

    written: WrittenBlocks[X] = field(default_factory=WrittenBlocks)
    operators: dict[tuple[object, ...], list[tuple[Op[X], PricedOp[X]]]] = field(default_factory=dict)
    """By some of their sizes, which are hashed sooner than all."""
    lists: dict[int, tuple[_Ops[X], list[PricedOp[X]]]] = field(default_factory=dict)
    blocks: dict[tuple[int, tuple[Checkpoint, ...], str], tuple[_Ops[X], BlockCost[X]]] = field(default_factory=dict)

    def ledger(self, y: Layout[X]) -> dict[tuple[object, ...], _Ops[X]]:
        """Return the operators that are known of a layout."""
        return self.written.ledgers.setdefault(y, {})

    def priced(self, costs: CostModel[X], ops: _Ops[X]) -> list[PricedOp[X]]:
        """Return the prices of some operators."""
        if id(ops) not in self.lists:
            self.lists[id(ops)] = ops, [self._priced_op(costs, op) for op in ops]
        return self.lists[id(ops)][1]

    def _priced_op(self, costs: CostModel[X], op: Op[X]) -> PricedOp[X]:
        alike = self.operators.setdefault((op.name, op.flops, op.forward_bytes, op.backward_bytes), [])
        for other, price in alike:
            if other == op:
                return price
        alike.append((op, priced_op(costs, op)))
        return alike[-1][1]

    def contents(self, ops: _Ops[X], zero: X) -> BlockContents[X]:
        """Return what is in some operators."""
        if id(ops) not in self.written.contents:
            self.written.contents[id(ops)] = ops, contents_of(ops, zero)
        return self.written.contents[id(ops)][1]


@dataclass(slots=True)
class ColumnPrices(KnownPrices[X]):
    """What is known of one column of sizes under one layout: columns have no hash."""

    def ledger(self, y: Layout[X]) -> dict[tuple[object, ...], _Ops[X]]:
        """Return the operators that are known."""
        return self.written.ledgers.setdefault("", {})

    def _priced_op(self, costs: CostModel[X], op: Op[X]) -> PricedOp[X]:
        return priced_op(costs, op)


def priced_op(costs: CostModel[X], op: Op[X]) -> PricedOp[X]:
    """Return the seconds of an operator's passes, and its messages."""
    t = op_seconds(costs.rates, op)
    ahead = messages(costs, op.forward, t.forward)
    back = messages(costs, op.backward, t.backward_input, t.backward_weight)
    return slowed_passes(costs, op, t, (ahead.hidden, back.hidden)), ahead, back


_WAYS = ("forward", "backward")


@dataclass(slots=True)
class _PassSums(Generic[X]):
    """Seconds of the passes of a block in the making, and of their messages by axis."""

    forward: X
    backward: X
    weight: X
    replay: X
    compute: X
    exposed: dict[str, X] = field(default_factory=dict)
    hidden: dict[str, X] = field(default_factory=dict)
    forward_exposed: dict[str, X] = field(default_factory=dict)
    replay_exposed: dict[str, X] = field(default_factory=dict)
    windows: dict[str, X] = field(default_factory=dict)
    routes: bool = False

    def pair(self, op: Op[X], t: PassSeconds[X], sides: tuple[dict[str, X], dict[str, X]]) -> None:
        """Add an operator to the parts of a layer that run beside those of another micro-batch.

        Megatron-LM core/models/common/model_chunk_schedule_plan.py, run: experts, and what comes before tokens are
        sent, with what sends them to experts ("dispatch") and back ("combine").
        """
        if op.role in ("dispatch", "combine"):
            ahead, back = (
                {f"{op.role} {way}": s["ep"]} if "ep" in s else {} for way, s in zip(_WAYS, sides, strict=True)
            )
            merge(self.windows, {**ahead, **back})
        elif within(op.region, "mlp") and op.role != "router":
            merge(self.windows, {"experts": t.forward + t.backward_input + t.backward_weight})
        else:
            merge(self.windows, {"before forward": t.forward, "before backward": t.backward_input + t.backward_weight})

    def add(self, op: Op[X], priced: PricedOp[X], again: X | float | None) -> None:
        """Add an operator, of which backward runs a share `again`, None where it does not."""
        t, ahead, back = priced
        if self.routes:
            self.pair(op, t, (ahead.exposed, back.exposed))
        forward = _with_messages(t.forward, ahead.exposed, f"{op.name} forward")
        self.forward = self.forward + forward
        self.backward = self.backward + _with_messages(t.backward_input, back.exposed, f"{op.name} backward")
        self.weight = self.weight + t.backward_weight
        self.compute = self.compute + t.forward + t.backward_input + t.backward_weight
        merge(self.forward_exposed, ahead.exposed)
        for side in (ahead, back):
            merge(self.exposed, side.exposed)
            merge(self.hidden, side.hidden)
        if again is not None:
            self.replay = self.replay + again * forward
            self.compute = self.compute + again * t.forward
            merge(self.exposed, ahead.exposed)
            merge(self.replay_exposed, ahead.exposed)
            merge(self.hidden, ahead.hidden)


def _with_messages(seconds: X, exposed: dict[str, X], name: str) -> X:
    """Return the seconds of a pass with those that its messages wait."""
    if not exposed:
        return seconds
    return named(seconds + total((named(s, f"{a} messages") for a, s in exposed.items()), 0 * seconds), name)


def beside_kept(widest: X, kept: X, dropped: X) -> X:
    """Return the bytes that checkpoints leave free in the blocks that they lie in, for each of their own.

    A layer that runs again frees all that it made but its checkpoint, and the next one cuts its own from the smallest
    block that is free (c10/cuda/CUDACachingAllocator.cpp, best fit). What is then missing is a block for the widest
    tensor of a layer, so that every checkpoint ends up in such a block, with as many others as it has whole room for.

    >>> beside_kept(2.5e6, 1e6, 0.0), beside_kept(2.5e6, 1e6, 1.0)
    (0.0, 0.25)
    """
    ratio = divide(widest, maximum(kept, 1.0))
    whole = maximum(ceil(ratio + 1e-9) - 1, 1)
    return above(dropped, 0, maximum(divide(ratio, whole) - 1, 0.0), 0 * widest)


def contents_of(ops: _Ops[X], zero: X) -> BlockContents[X]:
    """Return what is in some operators, whatever they run on and whatever of them runs again."""
    made = [
        *(named(zero + o.output_bytes, f"output of {o.name}") for o in ops),
        *(zero + o.transient_bytes for o in ops),
        *late_bytes(ops, zero),
    ]
    return BlockContents(
        transient_bytes=largest([zero, *made]),
        gradients_beside=gradients_beside(ops, zero),
        working_bytes=working_bytes(ops, zero),
        widest_bytes=widest_bytes(ops, zero),
        elements=elements(ops, zero),
        adapters=elements(ops, zero, adapter=True) if any(w.adapter for o in ops for w in o.weights) else None,
        frozen=frozen_weights(ops, zero),
        narrow=narrow_elements(ops, zero),
        flops=total((o.flops + o.backward_flops + o.weight_flops for o in ops), zero),
        model_flops=total(((1 + gradient_passes(o)) * (zero + o.model_flops) for o in ops), zero),
    )


def fold(
    ops: _Ops[X],
    costs: CostModel[X],
    units: tuple[Checkpoint, ...] = (),
    label: str = "",
    known: KnownPrices[X] | None = None,
) -> BlockCost[X]:
    """Return a list of operators folded into seconds, bytes and parameters; `units` run again in backward.

    What comes again is priced once where it is `known`: a list of operators, or some of them under other units.
    """
    zero = 0 * ops[0].forward_bytes
    if known is None:
        # Columns of plans have no hash.
        return _folded(ops, costs, (units, label), [priced_op(costs, op) for op in ops], contents_of(ops, zero))
    key = id(ops), units, label
    if key not in known.blocks:
        cost = _folded(ops, costs, (units, label), known.priced(costs, ops), known.contents(ops, zero))
        known.blocks[key] = ops, cost
    return known.blocks[key][1]


def _folded(
    ops: _Ops[X],
    costs: CostModel[X],
    run: tuple[tuple[Checkpoint, ...], str],
    prices: Sequence[PricedOp[X]],
    contents: BlockContents[X],
) -> BlockCost[X]:
    """Return a block as it is `run`: the units that run again, and its label."""
    (units, label), zero = run, 0 * ops[0].forward_bytes
    shares, routes = recomputed_shares(ops, units), any(op.role == "dispatch" for op in ops)
    sums = _PassSums(forward=zero, backward=zero, weight=zero, replay=zero, compute=zero, routes=routes)
    for op, priced in zip(ops, prices, strict=True):
        sums.add(op, priced, shares.get(id(op)))
    back = sums.backward + sums.weight
    device = DevicePasses(forward=sums.forward, backward=back, replay=sums.replay, routes=routes)
    host = launch_waits(costs, ops, shares, device)
    late = host.backward + host.backward_gemms
    kept = keep(ops, units)
    saved, made = (total((named(t.size_bytes, t.name) for t in some), zero) for some in (kept.kept, kept.dropped))
    return BlockCost(
        forward=named(sums.forward + host.forward, f"{label}forward"),
        backward_input=named(sums.backward + late, f"{label}input gradients"),
        backward_weight=named(sums.weight, f"{label}weight gradients"),
        replay=named(sums.replay, f"{label}recompute"),
        compute=sums.compute + late + host.forward,
        host=host.passes,
        least=host.least,
        host_ahead=host.ahead,
        launch_waits=host.forward + host.backward,
        hooks=hook_seconds(costs, ops, shares, zero),
        exposed=sums.exposed,
        hidden=sums.hidden,
        forward_exposed=sums.forward_exposed,
        replay_exposed=sums.replay_exposed,
        sharded=sharded_seconds(costs, ops, zero),
        windows=sums.windows,
        kept_bytes=named(saved, f"{label}saved for backward"),
        dropped_bytes=named(made, f"{label}recomputed in backward"),
        transient_bytes=contents.transient_bytes,
        working_bytes=contents.working_bytes,
        widest_bytes=contents.widest_bytes,
        gradients_beside=contents.gradients_beside,
        beside_kept=beside_kept(contents.widest_bytes, saved, made),
        elements=contents.elements,
        adapters=contents.adapters,
        frozen=contents.frozen,
        narrow=contents.narrow,
        flops=contents.flops + total((shares[id(o)] * o.flops for o in ops if id(o) in shares), zero),
        model_flops=contents.model_flops,
    )
