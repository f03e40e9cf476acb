"""The search: every legal plan of a space, evaluated and ranked, with what became of all others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.cost import Efficiencies
from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster, Tier
from shardwise.models import Model
from shardwise.plans import Plan, Stack, Training, find_stack
from shardwise.plans.laws import stack_problems
from shardwise.search._engine import Engine, Here, Part
from shardwise.search._key import Entry, plan_of
from shardwise.search._launch import within
from shardwise.search._mesh import Counts, Mesh
from shardwise.search._rank import OBJECTIVES, Front, Top
from shardwise.search._rows import Rows
from shardwise.search._space import Space
from shardwise.training import Case, TrainReport
from shardwise.training._report import report_of

ROWS = 12_000
TOO_LARGE = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is wanted of a search: the objective, how many plans, and whether to leave out what cannot be best."""

    objective: str = "step"
    top: int = 10
    prune: bool = True
    stack: Stack | str = "megatron"
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    overlap: bool = True
    explore: bool = False
    """Try layouts too that the framework cannot launch."""
    rows: int = ROWS


@dataclass(slots=True)
class Tally:
    """What became of the plans of some parts of a space."""

    top: Top
    front: Front
    counts: Counts = field(default_factory=Counts)
    fallen: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Problem] = field(default_factory=dict)
    nearest: Entry | None = None
    parts: int = 0

    @property
    def known(self) -> tuple[Top, Front]:
        """The best plans and the front of the parts."""
        return self.top, self.front

    def merge(self, other: Tally) -> None:
        """Take in what became of the plans of other parts."""
        self.top.merge(other.top.entries)
        self.front.merge(other.front)
        for name in ("legal", "fitting", "evaluated", "too_large"):
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        self.fallen += other.fallen
        for name, problem in sorted(other.examples.items()):
            kept = self.examples.get(name, problem)
            self.examples[name] = min(kept, problem, key=str)
        if other.nearest is not None:
            self.nearest = min(self.nearest or other.nearest, other.nearest)
        self.parts += other.parts


@dataclass(slots=True)
class Work:
    """Evaluates parts of a space; it travels to other processes, and what it saw first helps to leave out later plans.

    A plan is left out only where seconds that its step is never shorter than put it behind plans already found.
    """

    rows: Rows
    wish: Wish
    top: Top = field(init=False)
    front: Front = field(init=False)
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        self.top, self.front = Top(self.wish.top, self.wish.objective), Front()

    def _may(self, least_seconds: Any, held: Any, devices: Any) -> Any:
        return self.top.may(least_seconds, held, devices) | self.front.may(least_seconds, held, devices)

    @property
    def known(self) -> tuple[Top, Front]:
        """The best plans and the front so far."""
        return self.top, self.front

    def learn(self, known: tuple[Top, Front]) -> None:
        """Take in the best plans and the front of other parts."""
        self.top.merge(known[0].entries)
        self.front.merge(known[1])

    def __call__(self, parts: Sequence[Part]) -> Tally:
        """Return what became of the plans of the parts."""
        if self.mesh is None:
            self.mesh = Mesh(self.rows, prune=self.wish.prune, may=self._may if self.wish.prune else None)
        mesh = self.mesh.fresh()
        for start, end in parts:
            for sheet in mesh.sheets(start, end):
                self.top.add(sheet)
                self.front.add(sheet)
        tally = Tally(self.top.copied(), self.front.copied(), counts=mesh.counts, parts=len(parts))
        tally.fallen.update(mesh.court.fallen)
        tally.examples.update(mesh.court.examples)
        tally.nearest = mesh.nearest
        return tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Plans that fell to one law or limit: how many, and what would do."""

    name: str
    title: str
    count: int
    remedy: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Found:
    """The answer of a search; `covered` is the share of the parts of the space that were evaluated."""

    rows: Rows
    wish: Wish
    tally: Tally
    seconds: float
    covered: float

    def __repr__(self) -> str:
        """Return what was found in one line, as a notebook shows it."""
        return f"<Found of {self.num_plans:,} plans: {self.best[0] if self.best else 'none will do'}>"

    @property
    def num_plans(self) -> int:
        """Plans of the space."""
        return self.rows.num_plans

    @property
    def counts(self) -> Counts:
        """Plans that are legal, fit, and were evaluated in memory and time."""
        return self.tally.counts

    @cached_property
    def best(self) -> tuple[TrainReport, ...]:
        """The best plans, each as `train` answers it."""
        return tuple(self.report(entry) for entry in self.tally.top.entries)

    @cached_property
    def front(self) -> tuple[TrainReport, ...]:
        """Plans that none beats in step time, memory and devices at once."""
        return tuple(self.report(entry) for entry in self.tally.front.plans())

    @cached_property
    def nearest(self) -> TrainReport | None:
        """The legal plan that is short of the least memory, where any is short."""
        return self.report(self.tally.nearest) if self.tally.nearest is not None else None

    def report(self, entry: Entry) -> TrainReport:
        """Return the report of a ranked plan."""
        plan = plan_of(entry.key, self.rows)
        case = replace(self.rows.case, plan=plan, cluster=part_of(self.rows.case.cluster, plan.num_devices))
        return report_of(case, ())

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """The laws and limits in the order in which they are asked, with how many plans fell to each."""
        laws = self.rows.laws
        found = [
            Rejection(name=name, title=law.title, count=self.tally.fallen[name], remedy=self._example(name))
            for name, law in laws.items()
            if self.tally.fallen[name]
        ]
        if self.counts.too_large:
            remedy = self._memory_remedy()
            title = "more memory than a device has"
            found.append(Rejection(name=TOO_LARGE, title=title, count=self.counts.too_large, remedy=remedy))
        return tuple(found)

    def _example(self, name: str) -> str:
        problem = self.tally.examples.get(name)
        return str(problem) if problem is not None else ""

    def _memory_remedy(self) -> str:
        report = self.nearest
        if report is None:
            return ""
        short = report.verdict.short_by_bytes / report.verdict.limit_bytes
        fitting = [c for c in report.changes if c.fits]
        if not fitting:
            return f"the nearest is {short:.1%} short, and no single change makes it fit"
        change = fitting[0]
        slower = change.step_seconds / report.step_seconds - 1
        pace = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster"
        return f"the nearest is {short:.1%} short: {change.field} {change.value} fits, {pace}"


def part_of(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the first so many devices of a cluster, joined as they are there.

    >>> part_of(Cluster.parse("64xh100-sxm-80gb"), 16).num_devices
    16
    """
    if num_devices == cluster.num_devices:
        return cluster
    inner = [t for t in cluster.tiers[:-1] if t.size < num_devices]
    last = next(t for t in cluster.tiers if t.size >= num_devices)
    tiers: tuple[Tier, ...] = (*inner, replace(last, size=num_devices))
    return replace(cluster, num_devices=num_devices, tiers=tiers)


def plan_training(
    model: Model,
    cluster: Cluster,
    job: Training,
    space: Space | None = None,
    wish: Wish | None = None,
    *,
    engine: Engine | None = None,
) -> Found:
    """Return the best plans of a space for a training job; raises `InputError` where the job or the space is wrong.

    The answer is the optimum of the model over the space: plans are left out only where a law forbids them or they
    take more memory than there is.

    >>> from shardwise.models import load_model
    >>> job = Training(seq_len=1024, global_batch=64)
    >>> found = plan_training(load_model("gpt2"), Cluster.parse("4xa100-sxm-80gb"), job)
    >>> found.counts.fitting > 0 and found.best[0].fits
    True
    """
    return searched(work_of(model, cluster, job, space, wish), engine or Here())


def work_of(model: Model, cluster: Cluster, job: Training, space: Space | None, wish: Wish | None) -> Work:
    """Return the work of a search, its input checked."""
    space, wish = space or Space(), wish or Wish()
    space.check()
    if wish.objective not in OBJECTIVES:
        remedy = "use one of " + ", ".join(OBJECTIVES)
        raise InputError([Problem("objective", wish.objective, "is not an objective", remedy)])
    if job.global_batch < 1:
        rule = "is needed: plans are compared for the same batch"
        raise InputError([Problem("global_batch", job.global_batch, rule, "for example 1024")])
    stack = find_stack(wish.stack) if isinstance(wish.stack, str) else wish.stack
    plan = Plan(sequence_parallel=False)
    case = Case(
        model=model,
        cluster=cluster,
        job=job,
        stack=stack,
        plan=plan,
        efficiencies=wish.efficiencies,
        overlap=wish.overlap,
    )
    if not wish.explore:
        _check_job(case)
    return Work(Rows(case=case, space=within(space, stack, wish.explore), explore=wish.explore), wish)


def _check_job(case: Case) -> None:
    """Raise `InputError` for a precision or an optimizer that the framework does not run."""
    job = {"precision": case.recipe.precision.name, "optimizer": case.job.optimizer}
    problems = [p for p in stack_problems(case.stack, Plan(sequence_parallel=False), **job) if p.field in job]
    if problems:
        raise InputError([replace(p, remedy=f"{p.remedy}, or --explore") for p in problems])


def searched(work: Work, engine: Engine, progress: Callable[[Tally, float], Any] | None = None) -> Found:
    """Return the answer of some work; an interrupt ends it with what was covered by then."""
    start = time.perf_counter()
    parts = work.rows.chunks(work.wish.rows)
    whole = Tally(Top(work.wish.top, work.wish.objective), Front())
    try:
        for tally in engine.run(work, parts):
            whole.merge(tally)
            if progress is not None:
                progress(whole, whole.parts / len(parts))
    except KeyboardInterrupt:
        pass
    seconds = time.perf_counter() - start
    covered = whole.parts / len(parts) if parts else 1.0
    return Found(rows=work.rows, wish=work.wish, tally=whole, seconds=seconds, covered=covered)
