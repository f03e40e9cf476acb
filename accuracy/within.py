"""Tokens a second within the latencies that served deployments had, over what they served.

For each row of a closed loop `plan infer` is asked for the most tokens a second on the layout of the deployment, under
the mean TTFT and TPOT that were measured there, clients and queues included. Rows are read as all predictions of
published runs read them, with what their sources say elsewhere, the mean lengths of requests among it. `infer` is asked
too for as many requests as were in flight: how far it is off there, raised to the elasticity of throughput over TPOT,
is how far the search is off.

A replica runs whole requests, so that of four in flight the search can find three or five, a quarter apart, and no
error of TPOT is small enough to tell whether the limit holds four; engines pad five to the eight of a captured graph.
What is predicted for half, as many and twice the requests is told beside it, read at the measured TPOT along the lines
between them: as two measured runs of a deployment, at such numbers of users, are compared (accuracy.repeats).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accuracy.published import KINDS, Published, PublishedInference
from shardwise import InferReport, IntRanges, SearchOptions, ServingOptions, ServingSpace, infer, plan_serving
from shardwise.errors import InputError
from shardwise.measured import Context, Record, engine_as_noted, quantile, read_table, workload_of

LATENCIES = {"ttft", "tpot"}
Curve = dict[int, tuple[float, float]]
"""By requests in flight: TPOT, and tokens a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Within:
    """A deployment: requests in flight, tokens a second that were served, and that are found within its latencies.

    `between` are those at the TPOT between what is predicted for half, as many and twice the requests that were.
    `predicted` are those of as many requests as were in flight, whose TPOT is `tpot` times the measured one;
    `elasticity` by how much the logarithm of throughput grows with that of TPOT where twice as many run.
    """

    case_id: str
    concurrency: int
    served: float
    found: float
    between: float
    predicted: float
    tpot: float
    elasticity: float

    @property
    def ratio(self) -> float:
        """Found over served."""
        return self.found / self.served


def _only(value: int) -> IntRanges:
    return IntRanges(ranges=((value, value),))


def along(tpot: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """Return tokens a second at a TPOT on the line of logarithms through two pairs of TPOT and tokens a second.

    >>> round(along(0.015, (0.01, 100.0), (0.02, 200.0)))
    150
    """
    (first, few), (last, many) = low, high
    if last <= first:
        return few
    return few * math.exp(math.log(many / few) * math.log(tpot / first) / math.log(last / first))


def served_at(curve: Curve, tpot: float) -> float:
    """Return the tokens a second of a run at a TPOT, along lines of logarithms between its points and beyond the last.

    >>> round(served_at({1: (0.01, 100.0), 4: (0.02, 200.0)}, 0.015))
    150
    """
    points = sorted(curve.values())
    after = next((i for i, (at, _) in enumerate(points) if at > tpot), len(points) - 1)
    return along(tpot, points[max(after, 1) - 1], points[max(after, 1)])


def _between(curve: dict[int, InferReport], each: int, ttft: float, tpot: float) -> float:
    """Return tokens a second at a mean TPOT between those of some numbers of requests, 0 where the first token is late.

    Where fewer of a replica make no shorter steps than more of it, more are what is read.
    """
    if curve[each].request_ttft_seconds > ttft:
        return 0.0
    points = {batch: (one.request_tpot_seconds, one.output_tokens_per_second) for batch, one in curve.items()}
    return served_at(points, tpot)


def _elasticity(one: InferReport, more: InferReport) -> float:
    slower = math.log(more.request_tpot_seconds / one.request_tpot_seconds)
    faster = math.log(more.output_tokens_per_second / one.output_tokens_per_second)
    return faster / slower if slower > 0 else math.inf


def within(record: Record, context: Context, latencies: dict[str, float]) -> Within:
    """Return what is found within the latencies of a row's deployment; raises `InputError` where it is refused."""
    rows = PublishedInference()
    record = rows.completed(record, context)
    base, _ = rows.predict(record, context)
    case, ttft, tpot = base.case, latencies["ttft"], latencies["tpot"]
    asked = workload_of(record, case.plan.dp, case.model.max_context or 10**6)
    lengths = {name: round(getattr(asked, name).mean) for name in ("input_tokens", "output_tokens")}
    case = replace(case, engine=engine_as_noted(record, case.engine), job=replace(case.job, **lengths))
    degrees: dict[str, Any] = {name: _only(getattr(case.plan, name)) for name in ("tp", "pp", "dp", "ep", "etp")}
    space = ServingSpace(engine=(case.engine,), **degrees)
    options = SearchOptions(max_ttft_seconds=ttft, max_tpot_seconds=tpot, top=1, risk=0.5)
    found = plan_serving(case.model, case.cluster, replace(case.job, batch=1), space, options).best
    flight, made = record.whole("concurrency"), case.job.output_tokens
    each = -(-flight // case.plan.dp)
    curve = {batch: _asked(case, batch) for batch in sorted({max(each // 2, 1), each, 2 * each})}
    one, more = curve[each], curve[2 * each]
    return Within(
        case_id=record.text("case_id"), concurrency=flight, served=flight * made / (ttft + (made - 1) * tpot),
        found=found[0].output_tokens_per_second if found else 0.0,
        between=_between(curve, each, ttft, tpot),
        predicted=one.output_tokens_per_second * flight / (each * case.plan.dp),
        tpot=one.request_tpot_seconds / tpot, elasticity=_elasticity(one, more),
    )  # fmt: skip


def _asked(case: Any, batch: int) -> InferReport:
    """Return what `infer` says of so many requests on each replica of a deployment."""
    job = replace(case.job, batch=batch)
    return infer(case.model, case.cluster, case.plan, job, ServingOptions(engine=case.engine))


def rows_within(files: Sequence[str], engine: str) -> Iterator[Within]:
    """Yield what is found for every closed loop of an engine that states both latencies and is not of low quality."""
    for path in files:
        latencies: dict[str, dict[str, float]] = defaultdict(dict)
        records: dict[str, Record] = {}
        for row in read_table(path, KINDS).rows:
            record = Record(row)
            if record.whole("concurrency") and record.text("engine") == engine and record.text("quality") != "low":
                latencies[record.text("case_id")][record.text("metric")] = record.number("value")
                records[record.text("case_id")] = record
        context = Published(Path(path).parent)
        for name, record in records.items():
            if latencies[name].keys() >= LATENCIES and record.text("serving_mode") == "online":
                try:
                    yield within(record, context, latencies[name])
                except InputError:
                    continue


def shares(ratios: Sequence[float]) -> str:
    """Return the median of ratios, and how many lie between 0.8 and 1.25, in words."""
    near = sum(0.8 <= ratio <= 1.25 for ratio in ratios) / len(ratios)
    return f"median {quantile(sorted(ratios), 0.5):.2f}, 0.8 to 1.25 in {near:.0%}"


def lines(found: Sequence[Within]) -> Iterator[str]:
    """Yield the median ratio and the share of rows between 0.8 and 1.25, of few and of many requests in flight.

    Beside what is found stand what is where the number of requests is not whole, and throughput and TPOT of as many
    requests as were in flight, over the measured ones.
    """
    for word, some in (
        ("all", found),
        ("up to 8 in flight", [one for one in found if one.concurrency <= 8]),
        ("more than 8", [one for one in found if one.concurrency > 8]),
    ):
        if some:
            steepness = quantile(sorted(one.elasticity for one in some), 0.5)
            yield f"{word:18s} {len(some):4d} rows, {shares([one.ratio for one in some])}"
            yield f"  between requests:  {shares([one.between / one.served for one in some])}"
            yield f"  as many in flight: {shares([one.predicted / one.served for one in some])}"
            yield f"  their TPOT:        {shares([one.tpot for one in some])}, throughput as its power {steepness:.1f}"
