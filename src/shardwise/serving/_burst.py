"""Prompts that meet an idle device, whose clock no power limits yet: how much faster their products are, and how long.

Work of prompts fills a bucket that runs out while none of it runs. What has run in it, up to `gone_seconds`, says what
is left of the highest clock. Sequences that decode wait for the memory, and draw less than the limit.
"""

from __future__ import annotations

from typing import Any

from shardwise.cost import Burst, constants, family_of
from shardwise.ledger.number import X
from shardwise.records import replace
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import EngineCostModel


def burst_of(case: ServingCase) -> Burst | None:
    """Return how prompts of a case run before power limits the clock of its device, None where that is not known.

    >>> from shardwise.hardware import Cluster
    >>> from shardwise.models import load_model
    >>> from shardwise.plans import Plan, Serving
    >>> from shardwise.serving import infer
    >>> model, devices = load_model("llama-3.1-8b"), ("h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb")
    >>> [burst_of(infer(model, Cluster.parse(f"1x{one}"), Plan(), Serving()).case) is None for one in devices]
    [False, True, True]
    """
    device, wanted = case.cluster.device, case.efficiencies
    burst = constants().families[family_of(device)].burst
    stated = wanted.ideal or wanted.compute or wanted.matmul_flops_per_second
    return None if burst is None or stated or device.chip not in burst.devices else burst


def burst_notes(case: ServingCase) -> tuple[str, ...]:
    """Return what is said of a device whose clock lasts for a while, which runs prompts of a server."""
    burst = burst_of(case)
    if burst is None or not case.model.generates:
        return ()
    note = f"clock: after a pause GEMMs of prompts are {burst.share:.0%} faster, until power limits it within"
    return (f"{note} {burst.full_seconds:.2g} to {burst.gone_seconds:.2g} s: serve counts that, infer does not",)


def at_clock(costs: EngineCostModel[X], clock: Any) -> EngineCostModel[X]:
    """Return an engine whose products run at a clock, over that which lasts."""

    def faster(rates: Any) -> Any:
        return replace(rates, matmul_flops=rates.matmul_flops * clock)

    return replace(
        costs,
        rates=faster(costs.rates),
        narrow=tuple((name, faster(rates)) for name, rates in costs.narrow),
        weight_only=tuple((name, faster(rates)) for name, rates in costs.weight_only),
    )


class MatrixClock:
    """What is left of the highest clock of devices that compute prompts, as time goes on."""

    __slots__ = ("burst", "level", "seen", "stages")

    def __init__(self, burst: Burst, stages: int = 1) -> None:
        self.burst, self.stages = burst, stages
        self.level = self.seen = 0.0
        """Seconds of prompts that ran and no pause took back, at a time."""

    def left(self, now: float, seconds: float) -> float:
        """Return the share of the highest clock that is left to a step that begins at a time and takes so long."""
        burst, level = self.burst, self._at(now)
        if level >= burst.gone_seconds:
            return 0.0
        each = seconds / self.stages
        return (gained(burst, level + each) - gained(burst, level)) / each

    def ran(self, begin: float, seconds: float) -> None:
        """Note a step of prompts that began at a time, through all stages in so many seconds."""
        each = seconds / self.stages
        self.level = min(self._at(begin) + each, self.burst.gone_seconds)
        self.seen = max(begin, self.seen) + each

    def _at(self, now: float) -> float:
        return max(self.level - max(now - self.seen, 0.0) * self.burst.recovery, 0.0)


def gained(burst: Burst, level: float) -> float:
    """Return the seconds at the highest clock that so many seconds of work are worth, beside those at the lasting one.

    >>> burst = Burst(share=0.1, full_seconds=0.1, gone_seconds=0.2, recovery=1.0, devices=())
    >>> [round(gained(burst, level), 3) for level in (0.05, 0.1, 0.15, 0.2, 0.4)]
    [0.05, 0.1, 0.138, 0.15, 0.15]
    """
    full, gone = burst.full_seconds, burst.gone_seconds
    if level <= full:
        return level
    level = min(level, gone)
    return level - (level - full) ** 2 / (2 * (gone - full))
