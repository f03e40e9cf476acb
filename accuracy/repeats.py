"""How far measured throughput within measured latencies agrees between runs of the same deployment.

A second run of a deployment, at several numbers of requests in flight, is the best of predictions: what it serves at
the TPOT that the first one measured, between its own points and beyond the last ones along its power law, over what the
first served then. Where throughput grows steeply with TPOT two runs are as far apart as predictions are from either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from accuracy.published import KINDS
from accuracy.within import Curve, served_at, shares
from shardwise.measured import Record, read_table

# What of a row says which deployment it is, its release and day left out.
_DEPLOYMENT = (
    "source", "model", "device", "engine", "num_gpus", "tp", "pp", "dp", "ep", "attention_dp",
    "weight_dtype", "kv_dtype", "input_tokens", "output_tokens", "prefix_tokens",
)  # fmt: skip
_FORMATS = ("gemm_quant", "moe_quant")


def curves(files: Sequence[str], engine: str) -> dict[tuple[str, ...], dict[tuple[str, str], Curve]]:
    """Return what closed loops measured by deployment and by run, which is a release and what its notes call origin."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    records: dict[str, Record] = {}
    for path in files:
        for row in read_table(path, KINDS).rows:
            record = Record(row)
            online = record.text("serving_mode") == "online" and record.text("engine") == engine
            if online and record.whole("concurrency") and record.text("quality") != "low":
                values[record.text("case_id")][record.text("metric")] = record.number("value")
                records[record.text("case_id")] = record
    runs: dict[tuple[str, ...], dict[tuple[str, str], Curve]] = defaultdict(lambda: defaultdict(dict))
    for name, record in records.items():
        if values[name].keys() >= {"ttft", "tpot"}:
            ttft, tpot = values[name]["ttft"], values[name]["tpot"]
            flight, made = record.whole("concurrency"), record.number("output_tokens")
            formats = (record.notes.get(word, "") for word in _FORMATS)
            deployment = (*(record.text(word) for word in _DEPLOYMENT), *formats)
            run = record.text("engine_version"), record.notes.get("origin", "")
            runs[deployment][run][flight] = tpot, flight * made / (ttft + (made - 1) * tpot)
    return runs


def ratios(files: Sequence[str], engine: str, same_release: bool) -> Iterator[float]:
    """Yield what one run serves at the TPOT of another one of its deployment, over what that one served."""
    for runs in curves(files, engine).values():
        for run, curve in runs.items():
            for other, points in runs.items():
                if other != run and len(curve) > 1 and (run[0] == other[0] or not same_release):
                    yield from (served_at(curve, tpot) / served for tpot, served in points.values())


def lines(files: Sequence[str], engine: str) -> Iterator[str]:
    """Yield how many measured runs lie where another run of their deployment says; nothing where none was repeated."""
    for word, same in (("another run", False), ("of its release", True)):
        if every := sorted(ratios(files, engine, same)):
            yield f"{word:18s} {len(every):4d} rows, {shares(every)}"
