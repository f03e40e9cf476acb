"""The answer of a search, of training plans or of deployments: the best, the front, and why others were rejected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from shardwise.notebook import Card, CardLine, in_words, plain_line
from shardwise.records import dataclass
from shardwise.search._options import SearchOptions

if TYPE_CHECKING:
    from shardwise.frames import Frame
    from shardwise.plans import Plan, Serving

Report = TypeVar("Report")
Case = TypeVar("Case")


@dataclass(slots=True)
class PlanCounts:
    """Plans by what became of them; what the laws dropped is with the constraints."""

    legal: int = 0
    fitting: int = 0
    evaluated: int = 0
    too_large: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Plans that a law or a limit rejected: how many, and what would do."""

    name: str
    title: str
    count: int
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedPlan(Generic[Case]):
    """A plan that ties with another, behind it by a share of the objective; `case` is its device, job and formats."""

    plan: Plan
    case: Case
    behind: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGroup(Generic[Report, Case]):
    """A plan, and the best plans of other degrees that tie with it, in the order of the ranking."""

    first: Report
    ties: tuple[TiedPlan[Case], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPoint:
    """A point of the front: tokens a second of a device and of a user, at a rate of one replica."""

    plan: Plan
    job: Serving
    engine: Any
    rate: float
    tokens_per_second_per_gpu: float
    tokens_per_second_per_user: float
    ttft_seconds: float


class Reports(Sequence[Report]):
    """Reports that are made when they are asked for.

    >>> made = Reports([1, 2, 3], lambda entry: f"report {entry}")
    >>> len(made), made[-1], made[::2]
    (3, 'report 3', ('report 1', 'report 3'))
    """

    def __init__(self, entries: Sequence[Any], report: Callable[[Any], Report]) -> None:
        self._entries, self._report = entries, report

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Report: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Report, ...]: ...
    def __getitem__(self, index: int | slice) -> Report | tuple[Report, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return self._report(self._entries[index])


class SearchResult(Card, ABC, Generic[Report]):
    """What every search answers; the best first."""

    options: SearchOptions
    seconds: float
    covered: float

    def __repr__(self) -> str:
        """Return what was found in one line, as a notebook shows it."""
        return f"<{type(self).__name__} of {self.num_plans:,} plans: {self.best[0] if self.best else 'none feasible'}>"

    def _title(self) -> str:
        """Return how many plans there are, and the best one's line."""
        return f"{self.num_plans:,} plans: {plain_line(self.best[0]) if self.best else 'none feasible'}"

    def _facts(self) -> Iterator[CardLine]:
        """Yield the best plans, each in words with the verdict of its report."""
        best: Sequence[Any] = self.best[:10]
        for place, report in enumerate(best, 1):
            batch = getattr(report.job, "batch", 0)
            layout = in_words(report.plan, "order", "fast") + (f", batch {batch}" if batch else "")
            yield CardLine(str(place), layout, plain_line(report).rpartition(": ")[2])

    @abstractmethod
    def frame(self) -> Frame:
        """Return every legal plan of the space as a row, whether it fits or not."""

    @property
    @abstractmethod
    def num_plans(self) -> int:
        """Plans of the space, legal or not."""

    @property
    @abstractmethod
    def counts(self) -> PlanCounts:
        """Plans that are legal, feasible, and were evaluated."""

    @property
    @abstractmethod
    def best(self) -> Sequence[Report]:
        """The best plans, each as `train` or `infer` answers it."""

    @property
    @abstractmethod
    def groups(self) -> tuple[PlanGroup[Report, Any], ...]:
        """The best plans in groups of ties, each with a plan that is worse than the first of the one before."""

    def group_of(self, place: int) -> int:
        """Return the number of the group, from 1, of one of the best plans."""
        ends = accumulate(1 + len(group.ties) for group in self.groups)
        return next((number for number, end in enumerate(ends, 1) if place < end), len(self.groups))

    @property
    @abstractmethod
    def front(self) -> Sequence[Report]:
        """Plans that none beats in every way that counts at once."""

    @property
    @abstractmethod
    def nearest(self) -> Report | None:
        """The plan that is nearest to doing where none is feasible, else one that is short of the least memory."""

    @property
    @abstractmethod
    def rejected(self) -> tuple[Rejection, ...]:
        """The laws and limits in the order in which they are asked, with how many plans each rejected and a remedy."""

    @abstractmethod
    def value(self, report: Report) -> float:
        """Return the objective of a plan, less being better."""


# Fields that follow from the others: a change of a degree takes them along.
FOLLOWING = ("dp", "etp", "order", "vpp", "stage_layers", "sequence_parallel")
_BEHIND = {
    "step": "slower",
    "throughput": "less throughput",
    "cost": "dearer",
    "memory": "more memory",
    "devices": "more devices",
    "ttft": "later",
    "tpot": "slower",
    "latency": "longer",
    "days": "longer",
    "headroom": "more memory",
}


def loss_of(objective: str, value: float, best: float) -> float:
    """Return by how much a value of an objective is worse than the best, both with less being better.

    >>> loss_of("step", 1.25, 1.0), loss_of("throughput", 1.25, 1.0)
    (0.25, 0.2)
    """
    return round(1 - best / value, 12) if objective == "throughput" else value / best - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Why a plan is rejected, and the single-field change that makes it feasible with the least loss by the objective.

    Without a `field` no single change helps. `loss` is a share of the best plan's value; `best` says that the
    changed plan is the best one.

    >>> str(Remedy(why="the nearest is 12.0% short", field="recompute", value="selective", loss=0.03, objective="step"))
    'the nearest is 12.0% short: recompute selective is feasible, 3.0% slower than the best'
    """

    why: str
    field: str = ""
    value: object = None
    loss: float = 0.0
    best: bool = False
    objective: str = "step"

    @property
    def cost(self) -> str:
        """What the change costs, in words."""
        return "the best plan" if self.best else f"{self.loss:.1%} {_BEHIND[self.objective]} than the best"

    def __str__(self) -> str:
        if not self.field:
            return f"{self.why}; no single change of the space helps"
        value = ",".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)
        value = value.lower() if isinstance(self.value, bool) else value
        return f"{self.why}: {self.field.replace('_', ' ')} {value} is feasible, {self.cost}"


def missed(by: float) -> str:
    """Return in words by how much a limit is missed, `by` a share of it: percent, and times where that is far.

    >>> missed(0.014), missed(2931.7)
    ('misses it by 1.4%', 'misses it 2,933 times over')
    """
    return f"misses it by {by:.1%}" if by < 10 else f"misses it {by + 1:,.0f} times over"


def changed_field(differences: Sequence[tuple[str, object]]) -> tuple[str, object] | None:
    """Return the one field that was changed, of all in which two plans differ; None where there are more or none.

    >>> changed_field([("tp", 4), ("dp", 2)]), changed_field([("tp", 4), ("pp", 2), ("dp", 1)])
    (('tp', 4), None)
    """
    own = [d for d in differences if d[0] not in FOLLOWING]
    if len(own) == 1:
        return own[0]
    return differences[0] if not own and len(differences) == 1 else None
