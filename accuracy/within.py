"""Tokens a second within the latencies that served deployments had, over what they served.

For each row of a closed loop `plan infer` is asked for the most tokens a second on the layout of the deployment, under
the mean TTFT and TPOT that were measured there, clients and queues included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise import IntRanges, SearchOptions, ServingSpace, plan_serving
from shardwise.errors import InputError
from shardwise.measured import KINDS, Context, InferenceRows, Record, quantile, read_table

LATENCIES = {"ttft", "tpot"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Within:
    """A deployment: requests in flight, tokens a second that were served, and that are found within its latencies."""

    case_id: str
    concurrency: int
    served: float
    found: float

    @property
    def ratio(self) -> float:
        """Found over served."""
        return self.found / self.served


def _only(value: int) -> IntRanges:
    return IntRanges(ranges=((value, value),))


def within(record: Record, context: Context, latencies: dict[str, float]) -> Within:
    """Return what is found within the latencies of a row's deployment; raises `InputError` where it is refused."""
    base, _ = InferenceRows().predict(record, context)
    case, ttft, tpot = base.case, latencies["ttft"], latencies["tpot"]
    degrees: dict[str, Any] = {name: _only(getattr(case.plan, name)) for name in ("tp", "pp", "dp", "ep", "etp")}
    space = ServingSpace(engine=(case.engine,), **degrees)
    options = SearchOptions(max_ttft_seconds=ttft, max_tpot_seconds=tpot, top=1, risk=0.5)
    found = plan_serving(case.model, case.cluster, replace(case.job, batch=1), space, options).best
    flight, made = record.whole("concurrency"), case.job.output_tokens
    return Within(
        case_id=record.text("case_id"), concurrency=flight, served=flight * made / (ttft + (made - 1) * tpot),
        found=found[0].output_tokens_per_second if found else 0.0,
    )  # fmt: skip


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
        context = Context(Path(path).parent)
        for name, record in records.items():
            if latencies[name].keys() >= LATENCIES and record.text("serving_mode") == "online":
                try:
                    yield within(record, context, latencies[name])
                except InputError:
                    continue


def lines(found: Sequence[Within]) -> Iterator[str]:
    """Yield the median ratio and the share of rows between 0.8 and 1.25, of few and of many requests in flight."""
    for word, some in (
        ("all", found),
        ("up to 8 in flight", [one for one in found if one.concurrency <= 8]),
        ("more than 8", [one for one in found if one.concurrency > 8]),
    ):
        ratios = sorted(one.ratio for one in some)
        if ratios:
            near = sum(0.8 <= ratio <= 1.25 for ratio in ratios) / len(ratios)
            yield f"{word:18s} {len(ratios):4d} rows, median {quantile(ratios, 0.5):.2f}, 0.8 to 1.25 in {near:.0%}"
