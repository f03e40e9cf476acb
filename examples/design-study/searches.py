"""Searches of the study: what is asked, what is kept of an answer, and many of them on all cores."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from cases import JOBS, NETWORK, STACK, cluster_of, model_of, space_of, with_rates

import shardwise as sw
from shardwise import plan_training
from shardwise.answers import train_tree
from shardwise.search import IntRanges, SearchOptions, SearchSpace


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One search: the best plans of a model on each count of devices, fields of the space and the device changed."""

    model: str
    system: str
    domain: int
    layout: str
    counts: tuple[int, ...] = (NETWORK,)
    space: tuple[tuple[str, Any], ...] = ()
    rates: tuple[tuple[str, float], ...] = ()
    detail: bool = False

    def cluster(self) -> sw.Cluster:
        """Return the devices that are asked for."""
        found = cluster_of(self.system, self.domain, max(self.counts))
        return with_rates(found, **dict(self.rates)) if self.rates else found

    def choices(self) -> SearchSpace:
        """Return the plans that are asked for."""
        devices = IntRanges(tuple((n, n) for n in self.counts))
        return space_of(self.layout, **{"devices": devices, **dict(self.space)})


@dataclass(frozen=True, kw_only=True)
class Best:
    """The fastest plan that fits: seconds, bytes of the fullest device, and, where asked, what the step is made of."""

    seconds: float
    held_bytes: float
    plan: sw.Plan
    shares: dict[str, float]

    def words(self) -> str:
        """Return its degrees, and the ranks in the fast domain where their order does not say."""
        p = self.plan
        sizes = [f"{axis} {getattr(p, axis)}" for axis in ("tp", "tp2", "cp", "pp", "dp") if getattr(p, axis) > 1]
        fast = [f"{axis} {n}" for axis, n in zip(("tp", "tp2", "cp", "dp", "pp"), p.fast, strict=False) if n > 1]
        return ", ".join([*sizes, f"micro-batch {p.micro_batch}"]) + (f" (fast: {', '.join(fast)})" if fast else "")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is kept of a search: the size of its space, its time, and by count of devices the front and the best."""

    ask: Ask
    plans: int
    legal: int
    seconds: float
    front: dict[int, tuple[tuple[float, float], ...]]
    best: dict[int, Best]

    def within(self, capacity_bytes: float, count: int = NETWORK) -> float | None:
        """Return the seconds of the fastest plan of the front that takes no more bytes; None where none does."""
        return min((s for s, held in self.front.get(count, ()) if held <= capacity_bytes), default=None)


def days(model: str, seconds: float) -> float:
    """Return the days of a run whose steps take so many seconds."""
    job = JOBS[model]
    return job.run_tokens / job.tokens_per_step * seconds / 86400


def answer(ask: Ask) -> Answer:
    """Return the answer of one search."""
    start = time.process_time()
    found = plan_training(
        model_of(ask.model),
        ask.cluster(),
        JOBS[ask.model],
        ask.choices(),
        SearchOptions(stack=STACK, top=1, explore=True),
    )
    entries = {count: front for count, front in sorted(found.partial.front.entries.items()) if front}
    best = {}
    for count, front in entries.items():
        report = found.report(front[0])
        shares = shares_of(report) if ask.detail else {}
        best[count] = Best(
            seconds=front[0].step_seconds, held_bytes=front[0].device_bytes, plan=report.plan, shares=shares
        )
    return Answer(
        ask=ask,
        plans=found.num_plans,
        legal=found.counts.legal,
        seconds=time.process_time() - start,
        front={count: tuple((e.step_seconds, e.device_bytes) for e in front) for count, front in entries.items()},
        best=best,
    )


def shares_of(report: sw.TrainReport) -> dict[str, float]:
    """Return what a step is made of, as shares of its seconds."""
    step = train_tree(report)["step"]
    exposed = step["exposed_seconds"]
    parts = {
        "compute": step["compute_seconds"] + step["recompute_seconds"],
        "tensor": sum(exposed.get(axis, 0.0) for axis in ("tp", "tp2", "cp")),
        "data": exposed.get("dp", 0.0),
        "between": exposed.get("pp", 0.0),
        "bubble": step["bubble_seconds"],
        "update": step["optimizer_seconds"] + step["overhead_seconds"],
    }
    return {name: seconds / report.step_seconds for name, seconds in parts.items()}


def answers(asks: Sequence[Ask], workers: int = 0) -> list[Answer]:
    """Return the answers of many searches, in the order asked, on so many cores or on all."""
    workers = workers or os.cpu_count() or 1
    if workers == 1 or len(asks) < 2:
        return [answer(ask) for ask in asks]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(answer, asks, chunksize=max(1, len(asks) // (8 * workers))))
