"""Adding operators up: seconds by operator and by axis, and bytes alive, of one layer and of one engine step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, largest, total
from shardwise.ledger.op import Op
from shardwise.ledger.traced import named
from shardwise.ops.fold import messages
from shardwise.serving._adapters import adapter_bytes
from shardwise.serving._case import Case
from shardwise.serving._ledger import live_bytes, table_bytes, weight_bytes
from shardwise.serving._price import Server, op_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[X]):
    """Seconds of a list of operators on one rank by operator and axis, their FLOPs and the bytes that they move."""

    seconds: X
    operators: dict[str, X]
    exposed: dict[str, X]
    hidden: dict[str, X]
    flops: X
    moved_bytes: X


def add(into: dict[str, X], more: dict[str, X], times: X | float = 1) -> None:
    """Add numbers by key to others, so many times each, in place."""
    for key, value in more.items():
        into[key] = into[key] + times * value if key in into else times * value


def fold(ops: tuple[Op[X], ...], m: Server[X], label: str) -> Part[X]:
    """Return what a list of operators adds up to in one forward pass; a message is waited for unless it is hidden."""
    zero = 0 * ops[0].forward_bytes
    seconds = zero
    operators: dict[str, X] = {}
    exposed: dict[str, X] = {}
    hidden: dict[str, X] = {}
    for op in ops:
        compute = op_seconds(m, op)
        said = messages(m, op.forward, compute)
        waits = total((named(s, f"{axis} messages of {op.name}") for axis, s in said.exposed.items()), zero)
        seconds = seconds + compute + waits if said.exposed else seconds + compute
        add(operators, {op.name: compute})
        add(exposed, said.exposed)
        add(hidden, said.hidden)
    return Part(
        seconds=named(seconds, label),
        operators=operators,
        exposed=exposed,
        hidden=hidden,
        flops=total((op.flops for op in ops), zero),
        moved_bytes=total((op.forward_bytes for op in ops), zero),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBytes(Generic[X]):
    """Bytes of a list of operators on one rank: weights, the embedding table among them, and most alive at once."""

    weights: X
    table: X
    live: X


def bytes_of(case: Case, lines: Sequence[tuple[str, tuple[Op[X], ...]]], zero: X) -> list[PartBytes[X]]:
    """Return bytes of every kind of layer, of the embedding and of the head, adapters included."""
    form = case.format
    more = adapter_bytes(case, [ops for _, ops in lines], zero) if case.job.adapter_rank else [zero] * len(lines)
    return [
        PartBytes(
            weights=named(weight_bytes(ops, form, zero), f"weights of {label}") + adapters,
            table=table_bytes(ops, form, zero),
            live=largest([zero, *map(live_bytes, ops)]),
        )
        for (label, ops), adapters in zip(lines, more, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts(Generic[X]):
    """A model folded for one step: its kinds of layer, embedding, head, and the message between stages."""

    kinds: tuple[Part[X], ...]
    embedding: Part[X]
    head: Part[X]
    send: X


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(Generic[X]):
    """Seconds of prefill or of one decode step: their sum is `seconds`; `slowest_stage` is one stage with its send."""

    seconds: X
    operators: dict[str, X]
    exposed: dict[str, X]
    hidden: dict[str, X]
    overhead: X
    overlapped: X
    slowest_stage: X
    flops: X
    moved_bytes: X


def weighted(phases: list[tuple[Phase[X], float]], name: str) -> Phase[X]:
    """Return the weighted mean of phases whose weights add up to one."""
    operators: dict[str, X] = {}
    exposed: dict[str, X] = {}
    hidden: dict[str, X] = {}
    for phase, weight in phases:
        add(operators, phase.operators, weight)
        add(exposed, phase.exposed, weight)
        add(hidden, phase.hidden, weight)

    def mean(pick: str) -> X:
        values: list[X] = [weight * getattr(phase, pick) for phase, weight in phases]
        return total(values, 0 * values[0])

    return Phase(
        seconds=named(mean("seconds"), name),
        operators=operators,
        exposed=exposed,
        hidden=hidden,
        overhead=mean("overhead"),
        overlapped=mean("overlapped"),
        slowest_stage=mean("slowest_stage"),
        flops=mean("flops"),
        moved_bytes=mean("moved_bytes"),
    )
