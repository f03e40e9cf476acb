"""The search for a deployment under load: layouts, batch limits and replicas under limits on latency.

Every layout of the space is answered by the closed form, whose columns hold all layouts of one engine, format and
batch limit at once; the best are confirmed by simulation, each with the fewest replicas that keep the limits there.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from shardwise.errors import Problems
from shardwise.field_types import typed
from shardwise.hardware import Cluster, part_of
from shardwise.models import Model
from shardwise.notebook import Card, CardLine, in_words, plain_line
from shardwise.plans import Limit, Serving, Workload
from shardwise.records import dataclass, replace
from shardwise.search._load_front import front_of
from shardwise.search._load_groups import (
    LOAD_OBJECTIVES,
    POOLS,
    REPLICA_DEVICES,
    Candidate,
    LoadGroup,
    LoadSearch,
    LoadSpace,
)
from shardwise.search._load_pools import candidates
from shardwise.search._load_rejected import rejected_of
from shardwise.search._load_remedies import grown
from shardwise.search._options import SearchOptions
from shardwise.search._result import FrontPoint, Rejection
from shardwise.search._serving_grid import ServingGrid
from shardwise.search._space import check_experts
from shardwise.serving.load import FULLEST, LoadOptions, ServeReport, Steady, request_problems

_SIMULATIONS = 24
# Other batch limits are simulated where the closed form says so much less of a metric that missed its limit.
_BETTER = 0.97
# The least that a simulation says of what is sought, over what the closed form does: what may be better is simulated.
_LEAST = {"ttft": 0.85, "tpot": 0.95, "e2e": 0.95}
# Replicas over those that carry the load, where few more did not keep the limits.
_TIMES = (2, 4, 16)
# Devices that are asked of simulation where none of those that there are do, over those that the closed form needs, up
# to so many of these.
_WIDE, _MANY = 8, 256
# Requests of each user of a closed loop that are simulated, at least.
_TURNS = 10


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadResult(Card):
    """The answer of a search for a deployment under load; the best first, each confirmed by simulation."""

    workload: Workload
    limits: tuple[Limit, ...]
    objective: str
    best: tuple[ServeReport, ...]
    fewer: ServeReport | None
    """The best deployment with one replica less, which misses a limit or has too little room; None of one replica."""
    nearest: ServeReport | None
    """What was simulated last where nothing keeps the limits."""
    layouts: int
    """Layouts with their formats and batch limits."""
    simulated: int
    missed: int
    """Deployments that simulation refused."""
    seconds: float
    search: LoadSearch

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """What the laws and the limits rejected."""
        tried = self.wider.search.cluster.num_devices if self.wider else 0
        return rejected_of(self.search, self.missed, bool(self.best), (tried, self.needed_devices if tried else 0))

    @cached_property
    def least_devices(self) -> int:
        """Fewest devices that carry the load within its limits by the closed form, 0 where no number does."""
        one = self.search
        forms = [group for group in one.groups if group.form is not None and one.space.pools != "disaggregated"]
        needed = [*one.pairs.values(), *(float(few) for g in forms for few in one.fewest(g, math.inf) * g.devices)]
        return int(min((few for few in needed if math.isfinite(few)), default=0))

    @cached_property
    def wider(self) -> LoadResult | None:
        """The fewest devices that keep the limits of many times as many, where none of these do; None of too many."""
        one, least = self.search, self.least_devices
        if self.best or not 0 < least <= _MANY:
            return None
        # The simulation asks for more than the closed form, or keeps a limit on no number.
        cluster = grown(one.cluster, _WIDE * max(least, one.cluster.num_devices))
        asked = one.space, "devices", 1
        return plan_serve(one.grid.model, cluster, one.workload, one.grid.job, one.options, asked)

    @property
    def needed_devices(self) -> int:
        """Fewest devices that simulation confirms, or the closed form if it was not asked, 0 where no number does."""
        if self.wider is None:
            return self.least_devices
        return self.wider.best[0].devices if self.wider.best else 0

    @cached_property
    def front(self) -> tuple[FrontPoint, ...]:
        """The points that none beats in tokens a second of a device and of a user."""
        return front_of(self.search)

    @property
    def _none(self) -> str:
        return "none keeps the limits" if self.limits else "none carries the load"

    def __repr__(self) -> str:
        """Return the best in one line."""
        return f"<LoadResult of {self.layouts:,} layouts: {self.best[0] if self.best else self._none}>"

    def _facts(self) -> Iterator[CardLine]:
        """Yield the best deployments, each in words with its devices and the verdict of its report."""
        for place, report in enumerate(self.best[:10], 1):
            verdict = plain_line(report).rpartition(": ")[2]
            words = in_words(report.base.plan, "order", "fast")
            yield CardLine(str(place), words, f"{report.devices} devices, {verdict}")

    def _title(self) -> str:
        """Return how many layouts there are, and the best one's line."""
        return f"{self.layouts:,} layouts: {plain_line(self.best[0]) if self.best else self._none}"


def _of(candidate: Candidate, metric: str) -> float:
    """Return the mean of a metric by the closed form."""
    return float(getattr(candidate.steady, f"{'tpot' if metric == 'itl' else metric}_seconds"))


def _no_better(candidate: Candidate, broken: dict[str, float]) -> bool:
    """Return whether other batch limits of a layout leave every metric that missed its limit as it was."""
    return bool(broken) and all(_of(candidate, metric) > _BETTER * seconds for metric, seconds in broken.items())


def _simulated_value(search: LoadSearch, report: ServeReport) -> tuple[float, float]:
    """Return what is sought of a deployment that was simulated, less being better, and what decides between equals."""
    if search.sparing:
        return report.devices, report.latencies["e2e"]["mean"]
    return report.latencies[search.objective]["mean"], report.devices


def _settled(search: LoadSearch, best: list[ServeReport], top: int, least: float) -> bool:
    """Return whether so many are known, and nothing whose closed form says no less can be better than these."""
    if len(best) < top or search.sparing:
        return len(best) >= top
    return least * _LEAST[search.objective] >= sorted(_simulated_value(search, one)[0] for one in best)[top - 1]


def _confirmed(search: LoadSearch, top: int) -> tuple[list[ServeReport], ServeReport | None, int, int]:
    """Return the best deployments that simulation confirms, the last that it refused, how many, and simulations.

    Candidates come best first; one that misses a limit comes back with more replicas. Of seconds the closed form is
    near the simulation, which decides: whatever may be better than what is confirmed is simulated.
    """
    order = [(search.value(one), number, one) for number, one in enumerate(candidates(search))]
    heapq.heapify(order)
    best: list[ServeReport] = []
    known: set[tuple[Any, ...]] = set()
    refused: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    nearest: Candidate | None = None
    missed, simulated = 0, 0
    while order and simulated < _SIMULATIONS and not _settled(search, best, top, order[0][0][0]):
        _, number, candidate = heapq.heappop(order)
        if candidate.key in known:
            continue
        first = candidate.prefill.dp if candidate.prefill else 0
        same = refused.setdefault((*candidate.key, candidate.replicas, first), [])
        if not any(_no_better(candidate, broken) for broken in same):
            report, simulated = search.simulate(candidate, until_missed=True), simulated + 1
            if report.meets:
                best.append(report)
                known.add(candidate.key)
                continue
            nearest = candidate
            same.append({limit.metric: _of(candidate, limit.metric) for limit in report.broken})
        missed += 1
        again = candidate.more([metric for broken in same[-1:] for metric in broken])
        if search.sparing and again.devices <= search.cluster.num_devices:
            heapq.heappush(order, (search.value(again), number, again))
    if nearest and not best and search.sparing and simulated >= _SIMULATIONS:
        widest, more = _widened(search)
        best, simulated = [widest] if widest else [], simulated + more
    best = sorted(best, key=lambda one: _simulated_value(search, one))[:top]
    return best, search.simulate(nearest) if nearest and not best else None, missed, simulated


def _widened(search: LoadSearch) -> tuple[ServeReport | None, int]:
    """Return the best of the layouts with as many replicas as keep the limits, None of none, and simulations.

    Where one replica more after another was not enough: each layout is tried at many times as many as carry the load.
    """
    best, simulated = None, 0
    layouts: dict[tuple[Any, ...], Candidate] = {}
    for one in sorted(candidates(search), key=search.value):
        layouts.setdefault(one.key, one)
    for one in layouts.values():
        low, most = 1.0, (best.devices - 1 if best else search.cluster.num_devices) // one.devices
        for times in sorted({min(each, most) for each in _TIMES if most > 1}):
            wide = _times(one, times)
            report, simulated = search.simulate(wide, until_missed=True), simulated + 1
            if report.meets:
                best, more = _fewest(search, one, (low, times), report)
                simulated += more
                break
            low = times
    return best, simulated


def _times(candidate: Candidate, factor: float) -> Candidate:
    """Return a candidate with so many times the workers of each pool."""
    first = candidate.prefill
    if first is not None:
        first = replace(first, dp=round(first.dp // candidate.first_groups * factor) * candidate.first_groups)
    return replace(candidate, replicas=round(candidate.replicas * factor), prefill=first)


def _fewest(
    search: LoadSearch, one: Candidate, times: tuple[float, float], report: ServeReport
) -> tuple[ServeReport, int]:
    """Return the deployment of a layout with the fewest replicas that keep the limits, by halves, and simulations."""
    low, high = (round(each * one.replicas) for each in times)
    simulated = 0
    while high - low > 1:
        middle = (low + high) // 2
        tried, simulated = search.simulate(_times(one, middle / one.replicas), until_missed=True), simulated + 1
        low, high, report = (low, middle, tried) if tried.meets else (middle, high, report)
    return report, simulated


def _enough(report: ServeReport) -> bool:
    """Return whether a deployment keeps the limits, and has the room that each that is proposed has."""
    return report.meets and (not report.open_loop or report.utilisation <= FULLEST)


def _with_fewer(search: LoadSearch, best: ServeReport) -> Candidate:
    """Return the best deployment with a replica less: where that is too few, with the batch limits that carry most."""
    case, replicas = best.base.case, best.replicas - 1
    own = Candidate(
        plan=replace(best.base.plan, dp=best.groups), job=best.base.job, engine=case.engine, replicas=replicas,
        steady=best.steady,
    )  # fmt: skip
    # Users of a closed loop ask no more than is carried, at a rate of 0 before anyone knows.
    if search.workload.arrivals.rate <= replicas * best.groups * best.steady.capacity:
        return own
    others = [
        (steady.capacity, number, replace(own, job=group.job, engine=group.engine, steady=steady))
        for number, (group, steady) in enumerate(_alike(search, own))
    ]
    return max(others, default=(0.0, 0, own))[2]


def _alike(search: LoadSearch, one: Candidate) -> Iterator[tuple[LoadGroup, Steady[float]]]:
    """Yield what the closed form says of a layout under each of the batch limits, with an engine and formats alike."""
    for group in search.groups:
        if group.form is None or group.case.engine != one.engine:
            continue
        for row, plan in enumerate(group.plans):
            if replace(one, plan=plan, job=group.job).key == one.key:
                yield group, search.steady(group, one.replicas).row(row)


def _problems(workload: Workload, options: LoadOptions, objective: str, pools: str) -> Problems:
    problems, arrivals = workload.problems(), workload.arrivals
    if arrivals.kind not in ("poisson", "constant", "gamma") and (arrivals.kind != "closed" or workload.finite):
        rule = "has an end: how many replicas a load needs is asked of a rate, or of users who ask again and again"
        problems.add("rate", arrivals.kind, rule, "give for example --rate 50/s, or --users 64")
    elif arrivals.kind == "closed" and pools != "aggregated":
        rule = "is asked of one pool, where users take turns"
        problems.add("pools", pools, rule, "leave it out, or give --rate in place of --users")
    if objective not in LOAD_OBJECTIVES:
        problems.add("objective", objective, "is not an objective", "use one of " + ", ".join(LOAD_OBJECTIVES))
    for limit in options.limits:
        problems.items.extend(limit.problems(workload).items)
    return problems


def _check(space: LoadSpace, model: Model) -> None:
    """Raise `InputError` for layouts, limits of batches and pools that cannot be tried."""
    problems = Problems()
    with problems.collect():
        space.layouts.check()
    check_experts(problems, space.layouts, model)
    for name in ("step_tokens", "max_sequences"):
        if not (values := getattr(space, name)) or min(values) < 0:
            shown = ",".join(map(str, values))
            problems.add(name, shown, "must be numbers of at least 0", "use (0,) for the engine's own")
    if space.pools not in POOLS:
        problems.add("pools", space.pools, "is not known", "use one of " + ", ".join(POOLS))
    problems.raise_if_any()


@typed
def plan_serve(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    job: Serving | None = None,
    options: LoadOptions | None = None,
    search: tuple[LoadSpace, str, int] = (LoadSpace(), "devices", 3),
) -> LoadResult:
    """Return the best deployments for a load on up to all devices of a cluster; raises `InputError` for bad input.

    `search` is the space, the objective and how many deployments are wanted. The closed form answers every layout; each
    of the best is simulated, and more replicas are taken where that misses a limit. Seconds and requests a second.

    >>> from shardwise.models import load_model
    >>> from shardwise.plans import Arrivals, Length
    >>> load = Workload(input_tokens=Length(mean=512), output_tokens=Length(mean=64), arrivals=Arrivals(rate=60.0))
    >>> limits = (Limit(metric="ttft", quantile="p99", seconds=0.5),)
    >>> space = LoadSpace(step_tokens=(0,), max_sequences=(0,))
    >>> model, on = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    >>> result = plan_serve(model, on, load, None, LoadOptions(limits=limits), (space, "devices", 1))
    >>> result.best[0].meets, result.best[0].devices <= 8
    (True, True)
    """
    start = time.perf_counter()
    (space, objective, top), options, job = search, options or LoadOptions(), job or Serving()
    _problems(workload, options, objective, space.pools).raise_if_any()
    _check(space, model)
    needed = max((limit.needed_of(workload) for limit in options.limits), default=0)
    workload = replace(workload, count=max(workload.count, needed, _TURNS * workload.arrivals.users))
    prompt, made = workload.longest
    request_problems(model, workload).raise_if_any()
    asked = replace(job, batch=1, input_tokens=prompt, output_tokens=made)
    if not space.layouts.devices.ranges:
        space = replace(space, layouts=replace(space.layouts, devices=REPLICA_DEVICES))
    widest = max(high for _, high in space.layouts.devices.ranges)
    grid = ServingGrid(
        model=model,
        cluster=part_of(cluster, min(cluster.num_devices, widest)),
        job=asked,
        space=space.layouts,
        options=SearchOptions(efficiencies=options.serving.efficiencies),
        prefixes=workload.repeats,
        one_replica=True,
    )
    one = LoadSearch(grid=grid, space=space, workload=workload, options=options, objective=objective, cluster=cluster)
    best, nearest, missed, simulated = _confirmed(one, top)
    fewer = None
    while best and one.sparing and best[0].prefill is None and best[0].replicas > 1:
        fewer, simulated = one.simulate(_with_fewer(one, best[0])), simulated + 1
        if not _enough(fewer):
            break
        best[0], fewer = fewer, None
    many = sum(len(group.plans) + group.short for group in one.groups)
    return LoadResult(
        workload=workload, limits=options.limits, objective=objective, best=tuple(best), fewer=fewer,
        nearest=nearest, layouts=many, simulated=simulated, missed=missed, seconds=time.perf_counter() - start,
        search=one,
    )  # fmt: skip
