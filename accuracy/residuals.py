"""Residuals of published runs, intervals made of them, and how many measurements lie inside where a source is left out.

One residual a configuration and headline: the logarithm of measured over predicted seconds or bytes. An interval is
the 10 and 90 % quantile of the residuals of comparable runs, a source weighing as the square root of its runs, each
end moved by one amount a headline so that 80 % of the runs of sources and devices that were left out lie inside.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from accuracy.adapters import ADAPTED
from accuracy.published import Published
from shardwise import InputError, find_device
from shardwise.cost import band_names, family_of
from shardwise.measured import WEIGHTY, Comparison, engine_named, framework_of

Names: TypeAlias = tuple[str, ...]
Interval: TypeAlias = tuple[float, float]
SHARE = 0.8
FEWEST_SOURCES, FEWEST_RUNS = 2, 10
TRAINING = {
    "step_time": "step_seconds",
    "tokens_per_second_per_gpu": "step_seconds",
    "flops_per_second_per_gpu": "step_seconds",
    "peak_memory": "memory.peak_bytes",
}
SERVING = {
    "batch_latency": "request_seconds",
    "output_tokens_per_second": "request_seconds",
    "output_tokens_per_second_per_gpu": "request_seconds",
    "ttft": "ttft_seconds",
    "ttft_p50": "ttft_seconds",
    "prefill_tokens_per_second": "ttft_seconds",
    "tpot": "tpot_seconds",
    "tpot_p50": "tpot_seconds",
    "decode_tokens_per_second": "tpot_seconds",
    "kv_cache_tokens": "kv_cache_tokens",
}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Residual:
    """One run: what it measured, the names of bands that hold for it, where it comes from, and the residual.

    `stack` is the stack or engine that ran it, `family` the family of its device.
    """

    quantity: str
    names: Names
    source: str
    device: str
    stack: str
    family: str
    log: float


def residuals(rows: Iterable[Comparison]) -> list[Residual]:
    """Return the residuals of training and serving rows; toy runs count for memory alone, rows of quality C not.

    Nor do runs of adapters, which no report speaks of.
    """
    found: dict[tuple[str, str], Residual] = {}
    for row in rows:
        quantity = (TRAINING if row.kind == "training" else SERVING).get(row.metric)
        toy = row.source.startswith("megatron_ci") and quantity == "step_seconds"
        if quantity is None or toy or row.quality in ("C", "low") or not row.measured or not row.predicted:
            continue
        if ADAPTED in row.assumed:
            continue
        ratio = row.measured / row.predicted
        rate = "per_second" in row.metric
        one = Residual(
            quantity=quantity,
            names=names_of(row),
            source=row.source,
            device=row.device,
            stack=stack_of(row),
            family=family_name(row.device),
            log=math.log(1 / ratio if rate else ratio),
        )
        found.setdefault((quantity, row.case_id), one)
    return list(found.values())


def names_of(row: Comparison) -> Names:
    """Return the names of bands that hold for a row, the nearest first."""
    family = family_name(row.device)
    if row.kind == "training":
        if row.metric == "peak_memory":
            return memory_names(row)
        return band_names(family, row.family == "experts", any(one.startswith(WEIGHTY) for one in row.assumed))
    said = " ".join(row.assumed)
    early = "before V1" in said or "overheads of vllm-v0" in said
    engine = "vllm-v0" if early else engine_named(Published.engines, row.engine)
    return (f"{family}.{engine}", family, "other")


def family_name(device: str) -> str:
    """Return the family of a device's constants, "generic" where the catalogue does not know it.

    >>> family_name("h200-sxm-141gb"), family_name("abacus")
    ('hopper', 'generic')
    """
    try:
        return family_of(find_device(device).device)
    except InputError:
        return "generic"


def stack_of(row: Comparison) -> str:
    """Return the stack or engine that ran a row, "other" where its framework is not known."""
    if row.kind != "training":
        return engine_named(Published.engines, row.engine)
    return framework_of(Published.frameworks, row.engine, {}).stack or "other"


def memory_names(row: Comparison) -> Names:
    """Return the names of bands of memory: the framework's stack decides what is kept, whatever the device."""
    return (stack_of(row).removesuffix("-scores"), "other")


def quantiles(logs: Sequence[Residual], widen: float) -> Interval:
    """Return the factors of the interval of some runs; the prediction itself always lies inside."""
    counts: dict[str, int] = defaultdict(int)
    for one in logs:
        counts[one.source] += 1
    ranked = sorted((one.log, 1 / math.sqrt(counts[one.source])) for one in logs)
    total = sum(weight for _, weight in ranked)
    low = _quantile(ranked, total * (1 - SHARE) / 2)
    high = _quantile(ranked, total * (1 + SHARE) / 2)
    return math.exp(min(low - widen, 0.0)), math.exp(max(high + widen, 0.0))


def _quantile(ranked: Sequence[tuple[float, float]], at: float) -> float:
    passed = 0.0
    for value, weight in ranked:
        passed += weight
        if passed >= at:
            return value
    return ranked[-1][0]


def table(runs: Sequence[Residual], widen: float) -> dict[str, tuple[Interval, list[Residual]]]:
    """Return the intervals of one headline by name; a name needs enough runs of several sources."""
    groups: dict[str, list[Residual]] = defaultdict(list)
    for one in runs:
        for name in one.names:
            groups[name].append(one)
    kept = {n: g for n, g in groups.items() if n == "other" or _enough(g)}
    kept.setdefault("other", list(runs))
    return {name: (quantiles(group, widen), group) for name, group in sorted(kept.items())}


def _enough(group: Sequence[Residual]) -> bool:
    return len(group) >= FEWEST_RUNS and len({one.source for one in group}) >= FEWEST_SOURCES


def left_out(runs: Sequence[Residual], key: Callable[[Residual], str], widen: float) -> dict[Residual, bool]:
    """Return whether each run lies inside the interval that is made without its source or device."""
    found: dict[Residual, bool] = {}
    for value in sorted({key(one) for one in runs}):
        rest = [one for one in runs if key(one) != value]
        if not rest:
            continue
        made = table(rest, widen)
        for one in runs:
            if key(one) == value:
                name = next((n for n in one.names if n in made), "other")
                low, high = made[name][0]
                found[one] = math.log(low) - 1e-12 <= one.log <= math.log(high) + 1e-12
    return found


def share(inside: Mapping[Residual, bool]) -> float:
    """Return the share of runs that lie inside, 0 of none."""
    return sum(inside.values()) / len(inside) if inside else 0.0


def fitted_widening(runs: Sequence[Residual]) -> float:
    """Return the widening with which left-out sources and left-out devices come nearest to the share wanted."""

    def off(widen: float) -> float:
        each = (left_out(runs, lambda one: one.source, widen), left_out(runs, lambda one: one.device, widen))
        return sum((share(inside) - SHARE) ** 2 for inside in each if inside)

    return min((0.01 * step for step in range(-20, 60)), key=off)
