"""What would change the winner: the next plans, how far behind they are, and the constants that could put them ahead.

Each constant in turn takes the blame for the whole spread of published times over predictions (bands.toml of `cost`
and of `serving`): rates move between 1/high and 1/low of what is assumed, overheads between low and high. A constant
whose own spread is narrower puts no more plans ahead than are listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardwise.cost import Band, band_of
from shardwise.errors import InputError, Problem, plain
from shardwise.field_types import typed
from shardwise.notebook import PlainValues
from shardwise.records import dataclass
from shardwise.search._moved import CONSTANTS, Moves, constant_band, is_training, moved_replicas, moved_steps
from shardwise.search._result import SearchResult, loss_of

if TYPE_CHECKING:
    from shardwise.search._serving import ServingResult
    from shardwise.search._training import TrainingResult
    from shardwise.serving import InferReport
    from shardwise.training import TrainReport

TIMED = ("step", "throughput", "cost", "days", "ttft", "tpot", "latency")
# Share of the objective below which two plans are the same.
_ROUNDING = 1e-9
# Steps of the logarithm of a factor, from 1 to the end of its band, at which the gap of two plans is looked at, and how
# often the step in which it closes is cut again where it is not straight: 1/256 of a band is more than the two digits
# that are shown.
_STEPS, _ROUNDS = 16, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """A constant that puts a runner-up ahead within its band: `factor` of what is assumed at which they are equal.

    `regret` is the share by which the best is then worse, where the constant lies at that end of its band.
    """

    constant: str
    factor: float
    low: float
    high: float
    regret: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp(PlainValues):
    """A plan behind the best by a share of its objective, and the constants that would put it ahead."""

    report: TrainReport | InferReport
    behind: float
    sensitivity: tuple[Sensitivity, ...]


@typed
def runners_up(result: TrainingResult | ServingResult, most: int = 2) -> tuple[RunnerUp, ...]:
    """Return the next plans behind the best, at most so many, each of other degrees: those that tie with it first.

    Constants are moved where the objective is made of time; for the others none is listed.

    >>> from shardwise.hardware import Cluster
    >>> from shardwise.models import load_model
    >>> from shardwise.search import plan_serving
    >>> from shardwise.plans import Serving
    >>> job, on = Serving(input_tokens=512, output_tokens=64), Cluster.parse("2xh100-sxm-80gb")
    >>> near = runners_up(plan_serving(load_model("llama-3.1-8b"), on, job))
    >>> near[0].behind > 0
    True
    """
    if not isinstance(result, SearchResult):
        rule, remedy = "must be the answer of a search", "give what plan_training or plan_serving returned"
        raise InputError([Problem("result", plain(result), rule, remedy)])
    if len(result.best) < 2:
        return ()
    reports: Sequence[Any] = result.best
    best, *others = reports[: most + 1]
    moved, objective = _Moved(result), result.options.objective
    top = result.value(best)
    moved.look([best, *others])
    return tuple(
        RunnerUp(
            report=report,
            behind=loss_of(objective, result.value(report), top),
            sensitivity=ahead,
        )
        for report, ahead in zip(others, moved.overtaking(best, others), strict=True)
    )


def _band(result: TrainingResult | ServingResult) -> Band:
    best: Any = result.best[0]
    if is_training(best):
        return band_of("step_seconds", best.conditions)
    return band_of(result.options.serving_headline or "request_seconds", best.conditions)


@dataclass
class _Moved:
    """The objective of plans with one constant moved, each worked out once."""

    result: TrainingResult | ServingResult

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, str, float], float] = {}

    def _know(self, reports: Sequence[Any], moves: Moves) -> None:
        """Keep the objective of plans with each of some constants moved, all plans alike worked out as one column."""
        result: Any = self.result
        if is_training(reports[0]):
            steps = moved_steps(reports, moves)
            values = [[result.value_at(r, s) for s in own] for r, own in zip(reports, steps, strict=True)]
        else:
            values = [[result.value(one) for one in own] for own in moved_replicas(reports, moves)]
        for report, own in zip(reports, values, strict=True):
            self._known |= {(id(report), *move): value for move, value in zip(moves, own, strict=True)}

    @cached_property
    def ends(self) -> dict[str, tuple[float, float]]:
        """The ends of the band of each constant, as factors of what is assumed."""
        return {name: constant_band(name, _band(self.result)) for name in CONSTANTS}

    def look(self, reports: Sequence[Any]) -> None:
        """Work out the objective of plans at all ends at once."""
        result: Any = self.result
        self._known |= {(id(report), name, 1.0): result.value(report) for report in reports for name in CONSTANTS}
        moves = [(name, end) for name, ends in self.ends.items() for end in ends if end != 1]
        if moves and result.options.objective in TIMED:
            self._know(reports, moves)

    def _gap(self, best: Any, other: Any, name: str, factor: float) -> float:
        """Return the share by which the other plan is behind with a constant moved."""
        return self._known[id(other), name, factor] / self._known[id(best), name, factor] - 1

    def overtaking(self, best: Any, others: Sequence[Any]) -> list[tuple[Sensitivity, ...]]:
        """Return for each of some plans the constants that put it ahead of the best within their bands."""
        if self.result.options.objective not in TIMED:
            return [()] * len(others)
        # Plans that are the same but for rounding do not overtake each other.
        places, moves = range(len(others)), [(name, end) for name, ends in self.ends.items() for end in ends]
        ways = [(p, *m) for p in places for m in moves if m[1] != 1 and self._gap(best, others[p], *m) < -_ROUNDING]

        def gaps(asked: _Asked) -> dict[int, list[float]]:
            seen = {(ways[i][0], (ways[i][1], f)) for i, factors in asked.items() for f in factors}
            if new := {(p, move) for p, move in seen if (id(others[p]), *move) not in self._known}:
                self._know([best, *(others[p] for p in sorted({p for p, _ in new}))], sorted({move for _, move in new}))
            return {i: [self._gap(best, others[ways[i][0]], ways[i][1], f) for f in some] for i, some in asked.items()}

        rows: list[list[Sensitivity]] = [[] for _ in others]
        for (place, name, end), factor in zip(ways, crossings(gaps, [end for *_, end in ways]), strict=True):
            regret = self._known[id(best), name, end] / self._known[id(others[place]), name, end] - 1
            low, high = self.ends[name]
            rows[place].append(Sensitivity(constant=name, factor=factor, low=low, high=high, regret=regret))
        return list(map(tuple, rows))


_Asked = Mapping[int, Sequence[float]]


def crossings(gaps: Callable[[_Asked], Mapping[int, Sequence[float]]], ends: Sequence[float]) -> list[float]:
    """Return for each of some gaps a factor between 1 and its end beyond which it is below zero.

    Factors of all gaps are asked for together.

    >>> factors = crossings(lambda asked: {i: [f - 0.8 - i / 10 for f in own] for i, own in asked.items()}, [0.5, 0.6])
    >>> [round(factor, 4) for factor in factors]
    [0.8, 0.9]
    """
    searches = [_crossing(end) for end in ends]
    asked, factors = {place: next(one) for place, one in enumerate(searches)}, dict[int, float]()
    while asked:
        answers, asked = gaps(asked), {}
        for place, own in answers.items():
            try:
                asked[place] = searches[place].send(own)
            except StopIteration as done:
                factors[place] = done.value
    return [factors[place] for place in range(len(ends))]


def _crossing(end: float) -> Generator[Sequence[float], Sequence[float], float]:
    """Yield factors at which a gap is asked for until it is known where between 1 and `end` it falls below zero.

    A gap may jump where another operator binds, so that steps are even; a column of many factors takes hardly longer
    than one of few.
    """
    near, far = 0.0, math.log(end)
    above, below = yield (1.0, end)
    for _ in range(_ROUNDS if above > 0 else 0):
        places = [near + (far - near) * i / _STEPS for i in range(1, _STEPS)]
        values = [*(yield [math.exp(place) for place in places]), below]
        around, gaps = [near, *places, far], [above, *values]
        first = next(i for i, gap in enumerate(values) if gap < 0)
        near_it = slice(max(first - 1, 0), first + 3)
        if _is_straight(gaps[near_it]):
            return math.exp(_zero(around[near_it], gaps[near_it]))
        (near, far), (above, below) = around[first : first + 2], gaps[first : first + 2]
    return math.exp(near + (far - near) * above / (above - below) if above > 0 else near)


def _is_straight(gaps: Sequence[float]) -> bool:
    """Return whether lines through each two of gaps at even steps meet zero at one place but for a share of a step."""
    falls = [a - b for a, b in pairwise(gaps)]
    meets = [at + gap / fall for at, (gap, fall) in enumerate(zip(gaps, falls, strict=False)) if fall > 0]
    return len(meets) == len(falls) and max(meets) - min(meets) < 1 / _STEPS


def _zero(places: Sequence[float], gaps: Sequence[float]) -> float:
    """Return where gaps that fall at some places are zero, by Lagrange's polynomial of the place over the gap.

    >>> round(_zero([0.0, 1.0, 2.0], [1.0, 0.4, -0.4]), 4)
    1.5476
    """
    others = [[b / (b - a) for j, b in enumerate(gaps) if j != i] for i, a in enumerate(gaps)]
    return sum(place * math.prod(shares) for place, shares in zip(places, others, strict=True))
