"""Residuals of published runs, bands made of them, and how many measurements lie inside where a source is left out.

One residual a configuration and headline: the logarithm of measured over predicted seconds or bytes. A band is a
range of residuals scaled by what is known of a run (`Spread`), so that a run of a source that nobody has seen lies
inside with a chance of 80 %.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from typing import Any

from accuracy.typical import beside_record, beyond, slower_of, waiting_of
from shardwise import Plan
from shardwise.cost import Conditions, Paired, Spread, joined, memory_conditions
from shardwise.measured import Comparison

SHARE = 0.8
FEWEST_SOURCES = 2
# Sizes of residuals below this are as good: 1 %.
FLOOR = 0.01
# Pull of the conditions to none, in runs of mean weight; and by how much of 1 / sources the ends lie further out, so
# that the mean over sources left out is 80 %: frameworks of training differ more than engines that serve do.
RIDGE, LEAST = 10.0, 0.01
CORRECTION = {
    "memory.peak_bytes": 0.8,
    "step_seconds": 0.4,
    "tpot_seconds": 0.75,
    **dict.fromkeys(("request_seconds", "load.requests_per_second", "load.tpot_seconds"), 0.6),
}
USUAL_CORRECTION = 0.35
# A run weighs as one over this power of the runs of its source. With 1 every source has one vote, as bands for a run of
# a laboratory that nobody has seen ask for; the root where that was not tried, or brought nothing (memory).
# Under load bands are narrower with it, and 88 to 91 % of runs of sources left out lie inside either way.
ONE_VOTE = ("step_seconds", "load.requests_per_second", "load.tpot_seconds", "load.ttft_seconds")
POWER, USUAL_POWER = dict.fromkeys(ONE_VOTE, 1.0), 0.5
# So many sources make a stack one that was seen: bytes, which know no other condition, are off by a third more where a
# single laboratory ran it.
MET_BY = {"memory.peak_bytes": 2}
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
    "kv_cache_tokens": "beside_cache_bytes",
    "kv_cache_bytes_per_gpu": "beside_cache_bytes",
}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Residual:
    """One run: what it measured, what is known of it, where it comes from, and the residual of a record."""

    quantity: str
    conditions: Conditions
    source: str
    model: str
    device: str
    num_devices: int
    family: str
    log: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The headlines whose bands make up its own, with the share of each; its quantity alone where there are none."""
    error: float = 0.0
    """What was predicted over what was measured, seconds or bytes, less one."""
    case: Any = None
    """The question and the plan that were predicted."""
    typical: bool = False
    """Whether the run counts for how much longer than a record typical ones take: training of all weights does."""
    waits: float = 0.0
    """The share of a record's step in messages that nothing hides."""
    stranger: bool = False
    """Whether no constant was chosen beside it: the ends of a band are its business, how long typical runs take not."""

    @property
    def stack(self) -> str:
        """The stack or engine that ran it."""
        return self.conditions.stack


def residuals(rows: Iterable[Comparison], stranger: bool = False) -> list[Residual]:
    """Return the residuals of training and serving rows; toy runs count for memory alone, rows of quality C not."""
    found: dict[tuple[str, str, tuple[str, ...]], Residual] = {}
    for row in rows:
        quantity = row.headline or (TRAINING if row.kind == "training" else SERVING).get(row.metric)
        toy = row.source.startswith("megatron_ci") and quantity == "step_seconds"
        if quantity is None or toy or row.quality in ("C", "low") or not row.measured or not row.predicted:
            continue
        if row.conditions is None:
            continue
        ratio = row.measured / row.predicted
        if quantity == "beside_cache_bytes":
            # A release whose cache is what remains of reserved memory is not predicted by what is in use.
            engine = getattr(row.case, "engine", None)
            if engine is not None and engine.memory.profiles_reserved:
                continue
            ratio = (1 - row.cache_share * ratio) / (1 - row.cache_share)
            if ratio <= 0:
                continue
        typical = quantity == "step_seconds" and any(said.startswith("tuning: how well") for said in row.assumed)
        slack, waits = beside_record(row.case) if typical else (0.0, 0.0)
        one = Residual(
            quantity=quantity,
            conditions=memory_conditions(_stack_of(row), "fine-tuning" in row.conditions.words)
            if row.metric == "peak_memory"
            else row.conditions,
            family=row.conditions.family,
            source=row.source,
            model=row.model,
            device=row.device,
            num_devices=row.num_devices,
            log=math.log(1 / ratio if "per_second" in row.metric else ratio) + slack,
            case=row.case,
            parts=row.parts if len(row.parts) > 1 else {},
            typical=typical and "fine-tuning" not in row.conditions.words,
            waits=waits,
            error=(ratio if "per_second" in row.metric else 1 / ratio) - 1,
            stranger=stranger,
        )
        found.setdefault((quantity, row.case_id, row.conditions.words), one)
    return list(found.values())


def _stack_of(row: Comparison) -> str:
    """Return the release that ran a row, whose bytes are its own, where steps know its stack alone."""
    stack = getattr(row.case, "stack", None)
    return stack.name if stack else row.conditions.stack if row.conditions else ""


def stacks_of(runs: Sequence[Residual]) -> dict[str, tuple[str, ...]]:
    """Return the families of devices with runs of as many sources as it takes, by stack or engine."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in runs:
        found[one.stack][one.conditions.family].add(one.source)
    least = MET_BY.get(runs[0].quantity, 1)
    met = {
        stack: tuple(sorted(family for family, sources in families.items() if len(sources) >= least))
        for stack, families in sorted(found.items())
    }
    return {stack: families for stack, families in met.items() if families}


def devices_of(runs: Iterable[Residual], without: str = "") -> tuple[str, ...]:
    """Return the devices with runs of other sources than one; none where devices play no part."""
    return tuple(sorted({one.conditions.device for one in runs if one.source != without} - {""}))


def spread_of(runs: Sequence[Residual]) -> Spread:
    """Return the spread of the residuals of one headline.

    The ends are quantiles of residuals over scales that were fitted without their own source, further out the fewer
    sources there are. A source weighs as `POWER` says.
    """
    import numpy as np

    fitted = _fitted(runs)
    weights = _weights(runs)
    scaled = np.array(_scaled(runs, fitted))
    order = np.argsort(scaled)
    passed = np.cumsum(weights[order]) / weights.sum()
    share = (1 + SHARE) / 2
    correction = CORRECTION.get(runs[0].quantity, USUAL_CORRECTION)
    beyond = max(1 - share * (1 + correction / fitted.sources), LEAST)
    places = (min(int(np.searchsorted(passed, at)), len(runs) - 1) for at in (beyond, 0.5, 1 - beyond))
    low, typical, high = (float(scaled[order[place]]) for place in places)
    ours = [one for one in runs if not one.stranger]
    return replace(fitted, low=low, typical=typical, high=high, paired=paired_of(paired(ours)))


def paired(runs: Sequence[Residual]) -> list[tuple[str, float]]:
    """Return for every two runs of one source and job under plans of other degrees how far their ratio was off.

    The source, and the logarithm of measured over predicted ratio of their seconds, without its sign.
    """
    jobs: dict[tuple[str, Any], list[Residual]] = defaultdict(list)
    for one in runs:
        if one.case is not None:
            jobs[one.source, _question(one.case)].append(one)
    return [
        (source, abs(one.log - other.log))
        for (source, _), same in jobs.items()
        for one, other in combinations(same, 2)
        if _degrees(one) != _degrees(other)
    ]


def _question(case: Any) -> Any:
    """Return what plans of one job share: deployments are made of replicas, which any number of devices may hold."""
    if hasattr(case, "engine"):
        return case.model, case.cluster.device.name, case.job, case.engine.name, case.format, case.dtype
    return replace(case, plan=Plan())


_DEGREES = ("tp", "tp2", "cp", "pp", "dp", "ep", "etp")


def _degrees(one: Residual) -> tuple[int, ...]:
    return tuple(getattr(one.case.plan, name) for name in _DEGREES) if one.case else ()


def paired_of(pairs: Sequence[tuple[str, float]]) -> Paired | None:
    """Return what 80 % of pairs of runs lie within, a source weighing as the square root of its pairs."""
    counts = Counter(source for source, _ in pairs)
    if len(counts) < FEWEST_SOURCES:
        return None
    ordered = sorted((log, 1 / math.sqrt(counts[source])) for source, log in pairs)
    # Their own last sum is the whole: from Python 3.12 on `sum` rounds otherwise.
    passed = [*accumulate(weight for _, weight in ordered)]
    within = next(i for i, weight in enumerate(passed) if weight >= SHARE * passed[-1])
    return Paired(log=ordered[within][0], pairs=len(pairs), source=", ".join(sorted(counts)))


def paired_left_out(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the share of the pairs of each source that lie within what the others give."""
    found = {}
    for source in sorted({source for source, _ in pairs}):
        made = paired_of([one for one in pairs if one[0] != source])
        own = [log for name, log in pairs if name == source]
        if made is not None:
            found[source] = round(sum(log <= made.log for log in own) / len(own), 3)
    return found


def _scaled(runs: Sequence[Residual], fitted: Spread) -> list[float]:
    """Return the residual of each run over the scale that the other sources give it; of all where they are too few."""
    without = {}
    for source in fitted.source.split(", "):
        rest = [one for one in runs if one.source != source]
        enough = len({one.source for one in rest}) >= FEWEST_SOURCES
        without[source] = _fitted(rest, fitted.waiting) if enough else fitted
    return [
        beyond_typical(one, made) / made.scale_of(one.conditions) for one in runs for made in (without[one.source],)
    ]


def _weights(runs: Sequence[Residual]) -> Any:
    """Return what each run counts: less the more its source has, by the power of its headline."""
    import numpy as np

    counts, power = Counter(one.source for one in runs), POWER.get(runs[0].quantity, USUAL_POWER)
    return np.array([1 / counts[one.source] ** power for one in runs])


def _fitted(runs: Sequence[Residual], waiting: float | None = None) -> Spread:
    """Return the scale of the residuals of one headline and what widens it, its ends one scale from none.

    The logarithm of the size of a residual is a sum of what the conditions of its run add (ridge regression); a
    condition that no more than its own source brings is taken as a run of that source would meet it. `waiting` is
    fitted where it is not given.
    """
    import numpy as np

    sources = sorted({one.source for one in runs})
    said = _known(runs)
    usual = [one for one in runs if one.typical and not one.stranger]
    waiting = waiting_of(usual) if waiting is None else waiting
    slower = slower_of(usual, waiting)
    logs = np.array([beyond(one, slower, waiting) if one.typical else one.log for one in runs])
    words, added = _widening(said, np.log(np.maximum(np.abs(logs), FLOOR)), _weights(runs))
    widest = float(np.exp((_matrix(said, words) @ added).max() - added[0]))
    return Spread(
        low=-1.0,
        typical=0.0,
        high=1.0,
        scale=float(np.exp(added[0])),
        wider={word: float(np.exp(more)) for word, more in zip(words, added[1:], strict=True)},
        widest=widest,
        seen=stacks_of(runs),
        devices=devices_of(runs),
        rows=len(runs),
        sources=len(sources),
        source=", ".join(sources),
        slower=slower,
        waiting=waiting,
    )


def _known(runs: Sequence[Residual]) -> list[tuple[str, ...]]:
    """Return what is known of each run, its stack and its device as the other sources have them."""
    families: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    devices: dict[str, set[str]] = defaultdict(set)
    for one in runs:
        families[one.stack][one.conditions.family].add(one.source)
        devices[one.conditions.device].add(one.source)
    least = MET_BY.get(runs[0].quantity, 1)
    known = []
    for one in runs:
        own = tuple(name for name, sources in families[one.stack].items() if len(sources - {one.source}) >= least)
        met = (one.conditions.device,) if devices[one.conditions.device] - {one.source} else ()
        known.append(one.conditions.known({one.stack: own} if own else {}, met))
    return known


def beyond_typical(one: Residual, made: Spread) -> float:
    """Return the residual of a run as it is predicted: of those that are typical, what is left of it."""
    return beyond(one, made.slower, made.waiting) if one.typical else one.log


def _matrix(said: Sequence[tuple[str, ...]], words: Sequence[str]) -> Any:
    """Return a row for each run: one, and whether each word is said of it."""
    import numpy as np

    return np.array([[1.0, *(float(word in known) for word in words)] for known in said])


def _widening(said: Sequence[tuple[str, ...]], sizes: Any, weights: Any) -> tuple[list[str], Any]:
    """Return the words that make residuals larger, and what each adds to the logarithm of their size, the base first.

    What is known of a run never makes its band narrower: words that would are left out one by one.
    """
    import numpy as np

    words = sorted({word for known in said for word in known})
    matrix = _matrix(said, words)
    while True:
        penalty = RIDGE * weights.mean() * np.diag([0.0, *(1.0 for _ in words)])
        added = np.linalg.solve((matrix.T * weights) @ matrix + penalty, matrix.T @ (weights * sizes))
        least = int(np.argmin(added[1:])) if words else 0
        if not words or added[1:][least] >= 0:
            return words, added
        del words[least]
        matrix = np.delete(matrix, least + 1, axis=1)


def left_out(
    runs: Sequence[Residual], key: Callable[[Residual], str], every: Sequence[Residual] = ()
) -> dict[Residual, bool]:
    """Return whether each run lies inside the band that is made without its source or device.

    `every` are the runs that the bands of its parts are made of, where it is a sum of them.
    """
    found: dict[Residual, bool] = {}
    made_of = runs[0].parts
    for value in sorted({key(one) for one in runs}):
        others = [one for one in (every if made_of else runs) if key(one) != value]
        rest = {name: [one for one in others if one.quantity == name] for name in made_of or (runs[0].quantity,)}
        if any(len({one.source for one in runs_of}) < FEWEST_SOURCES for runs_of in rest.values()):
            continue
        made = {name: spread_of(runs_of) for name, runs_of in rest.items()}
        for one in runs:
            if key(one) == value:
                shares = one.parts or {one.quantity: 1.0}
                band = joined([(share, made[name].band(one.conditions)) for name, share in shares.items()])
                log = one.log if made_of else beyond_typical(one, made[one.quantity])
                found[one] = math.log(band.low) - 1e-12 <= log <= math.log(band.high) + 1e-12
    return found


def share(inside: Mapping[Residual, bool]) -> float:
    """Return the share of runs that lie inside, 0 of none."""
    return sum(inside.values()) / len(inside) if inside else 0.0


def share_of_groups(inside: Mapping[Residual, bool], key: Callable[[Residual], str]) -> float:
    """Return the mean over sources or devices of the share of their runs that lie inside."""
    found: dict[str, list[bool]] = defaultdict(list)
    for one, held in inside.items():
        found[key(one)].append(held)
    return sum(sum(held) / len(held) for held in found.values()) / len(found) if found else 0.0
