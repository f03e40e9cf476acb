"""The search for a way to serve a model: deployments evaluated and ranked, and why the others fell out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost import tie_factor
from shardwise.errors import Problems
from shardwise.field_types import typed
from shardwise.frames import Frame
from shardwise.hardware import Cluster, part_of
from shardwise.models import Model
from shardwise.plans import Plan, Serving
from shardwise.records import dataclass, replace
from shardwise.search._columns import distinct_rows, tied
from shardwise.search._empty import empty_rejections, why_empty_serving
from shardwise.search._options import SERVING_LIMITS, SERVING_OBJECTIVES, SearchOptions
from shardwise.search._result import PlanCounts, PlanGroup, Rejection, Remedy, Reports, SearchResult, TiedPlan, loss_of
from shardwise.search._serving_grid import FORMATS, LAUNCH, MEMORY, TITLES, ServingGrid
from shardwise.search._serving_remedies import ServingRanking, law_remedy, limit_remedy
from shardwise.search._serving_space import ServingSpace
from shardwise.search._serving_table import ServingTable, counted_tokens, stacked, table_of
from shardwise.search._space import check_experts
from shardwise.serving import InferReport, ServingCase, ServingOptions, infer, job_problems


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingResult(SearchResult[InferReport]):
    """The answer of a search for a deployment: all plans that obey the laws as a table, and the rest by reason."""

    grid: ServingGrid
    table: ServingTable | None
    seconds: float

    covered = 1.0

    def frame(self) -> Frame:
        """Return every legal plan of the space as a row, whether it fits or not."""
        from shardwise.search._frames import serving_frame

        return serving_frame(self.grid, self.table)

    @property
    def options(self) -> SearchOptions:  # type: ignore[override]
        """What was wanted."""
        return self.grid.options

    @cached_property
    def num_plans(self) -> int:
        """Plans of the space, legal or not."""
        return self.counts.evaluated + sum(count for _, _, count in self.lawless)

    @cached_property
    def counts(self) -> PlanCounts:
        """Plans that are legal, feasible, and were evaluated, which all that are legal are."""
        legal = 0 if self.table is None else len(self.table.batch)
        too_large = int(np.count_nonzero(self._verdicts[0].get(MEMORY, ())))
        fitting = int(np.count_nonzero(self._verdicts[1]))
        return PlanCounts(legal=legal, fitting=fitting, evaluated=legal, too_large=too_large)

    @cached_property
    def lawless(self) -> list[tuple[str, str, int]]:
        """Laws that reject layouts and formats: name, title and plans."""
        grid, batches = self.grid, len(self.grid.space.batches)
        each = batches * len(grid.setups)
        rejected = {law: len(fell) * each for law, fell in grid.layouts.rejected.items()}
        if others := sum(count for count, _ in grid.unlaunched()):
            rejected[LAUNCH] = rejected.get(LAUNCH, 0) + others * batches
        rows = [(law, TITLES.get(law, law), count) for law, count in rejected.items()]
        if grid.unusable:
            rows.append((FORMATS, TITLES[FORMATS], len(grid.unusable) * grid.layouts.count * batches))
        return rows

    @cached_property
    def _verdicts(self) -> tuple[dict[str, Any], Any]:
        """Which plans memory and each limit reject, a plan to the first that it breaks, and which to none."""
        if self.table is None:
            return {}, np.zeros(0, bool)
        left = self.table.fits_at_risk
        failures = {MEMORY: ~left}
        for limit in SERVING_LIMITS:
            if getattr(self.options, limit.field):
                broken = left & ~(limit.ratio(self.table, self.options) <= 1)
                failures[limit.field] = broken
                left = left & ~broken
        return failures, left

    @property
    def verdicts(self) -> dict[str, Any]:
        """Which plans memory and each limit reject, a plan to the first that it breaks."""
        return self._verdicts[0]

    @cached_property
    def _ranked(self) -> Any:
        """PlanGrid of the table that fit and keep the limits, the best first."""
        table = self.table
        if table is None:
            return np.zeros(0, np.int64)
        kept = np.flatnonzero(self._verdicts[1])
        one = table.take(kept)
        value = SERVING_OBJECTIVES[self.options.objective](one)
        last = (one.batch, one.layout, one.setup, one.devices, one.ttft_seconds, -one.tokens_per_second_per_gpu, value)
        return kept[np.lexsort(last)]

    @cached_property
    def _sets(self) -> Any:
        """The best row of each set of degrees, formats and engine, the best first; replicas and places are one."""
        if self.table is None or not len(self._ranked):
            return np.zeros(0, np.int64)
        layouts, one = self.grid.layouts, self.table.take(self._ranked)
        columns = (layouts.columns[name][layouts.legal][one.layout] for name in self.grid.own_degrees)
        return self._ranked[np.sort(distinct_rows([one.setup, *columns])[0])]

    @cached_property
    def best(self) -> Sequence[InferReport]:
        """The best deployments, each with its best batch, as `infer` answers them."""
        return Reports(self._sets[: self.options.top].tolist(), self.report)

    @cached_property
    def groups(self) -> tuple[PlanGroup[InferReport, ServingCase], ...]:
        """The best deployments in groups of ties, of other degrees or formats than the first."""
        if self.table is None:
            return ()
        values = SERVING_OBJECTIVES[self.options.objective](self.table.take(self._sets))
        ranges = tied(values, tie_factor(self.options.serving_headline))
        return tuple(
            PlanGroup(
                first=self.report(int(self._sets[start])),
                ties=tuple(self._tie(place, values[place] / values[start]) for place in range(start + 1, end)),
            )
            for start, end in ranges[: self.options.top]
        )

    def _tie(self, place: int, ratio: float) -> TiedPlan[ServingCase]:
        plan, job, _ = self._named(row := int(self._sets[place]))
        case = self.grid.setups[int(self.table.setup[row])][1]  # type: ignore[union-attr]
        behind = loss_of(self.options.objective, ratio, 1.0)
        return TiedPlan(plan=plan, case=replace(case, plan=plan, job=job), behind=behind)

    @cached_property
    def front(self) -> Sequence[InferReport]:
        """Plans that none beats in time between tokens and in tokens a second and device, the quickest first.

        Where nothing is generated, the time of a request stands for that between tokens.
        """
        if self.table is None or not len(self._ranked):
            return ()
        one = self.table.take(self._ranked)
        latency = one.tpot_seconds if one.tpot_seconds.any() else one.request_seconds
        order = np.lexsort((-one.tokens_per_second_per_gpu, latency))
        most = np.maximum.accumulate(one.tokens_per_second_per_gpu[order])
        ahead = np.r_[-np.inf, most[:-1]]
        return Reports(self._ranked[order[most > ahead]].tolist(), self.report)

    @cached_property
    def nearest(self) -> InferReport | None:
        """The plan that fits and misses the limits by the least, or lacks the least memory, where none is feasible.

        Of several limits the one that is missed by the most counts.
        """
        return self.report(self._nearest_row) if self._nearest_row >= 0 else None

    @cached_property
    def _nearest_row(self) -> int:
        if self.table is None or len(self._ranked) or not self.counts.evaluated:
            return -1
        asked = [limit.field for limit in SERVING_LIMITS if getattr(self.options, limit.field)]
        fits = self.table.fits_at_risk
        if asked and fits.any():
            worst = np.max([self.ranking.miss(name) for name in asked], axis=0)
            return int(np.argmin(np.where(fits, worst, np.inf)))
        return int(np.argmin(self.ranking.miss(MEMORY)))

    def report(self, row: int) -> InferReport:
        """Return the report of a row of the table, by `infer`, made once."""
        if row not in self._reports:
            plan, job, engine = self._named(row)
            options = ServingOptions(engine=engine, efficiencies=self.options.efficiencies)
            whole = part_of(self.grid.cluster, plan.num_devices)
            self._reports[row] = infer(self.grid.model, whole, plan, job, options)
        return self._reports[row]

    @cached_property
    def _reports(self) -> dict[int, InferReport]:
        return {}

    def _named(self, row: int) -> tuple[Plan, Serving, Any]:
        if self.table is None:
            raise LookupError(row)
        (engine, weights, kv_cache, compute), case = self.grid.setups[int(self.table.setup[row])]
        plan = self.grid.plan(int(self.table.layout[row]))
        words = {"weights": weights, "kv_cache": kv_cache, "compute": compute}
        return plan, case.capped(replace(self.grid.job, batch=int(self.table.batch[row]), **words)), engine

    def value(self, report: InferReport) -> float:
        """Return the objective of a plan, less being better."""
        one = {
            "throughput": 1 / tokens_per_second_per_gpu(report),
            "ttft": report.ttft_seconds,
            "tpot": report.tpot_seconds,
            "latency": report.request_seconds,
            "devices": float(report.plan.num_devices),
        }
        return one["throughput" if self.options.objective == "cost" else self.options.objective]

    @cached_property
    def ranking(self) -> ServingRanking:
        """The table with its order, for those who look for changes."""
        table = stacked([]) if self.table is None else self.table
        return ServingRanking(grid=self.grid, table=table, order=self._ranked, rejected=self._verdicts[0])

    def remedy(self, name: str) -> Remedy | None:
        """Return the single-field change that helps the plans that a law or a limit rejects with the least loss."""
        if self.table is None:
            problems = [
                self.grid.layouts.problem(int(fell[0]))
                for law, fell in self.grid.layouts.rejected.items()
                if law == name
            ]
            problems += [problem for _, problem in self.grid.unusable]
            return Remedy(why=str(problems[0])) if problems else None
        return (limit_remedy if name in self._verdicts[0] else law_remedy)(self.ranking, name)

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """The laws and limits in the order in which they are asked, with how many plans each rejects."""
        titles = TITLES | {limit.field: limit.title for limit in SERVING_LIMITS}
        fell = {name: int(np.count_nonzero(rows)) for name, rows in self._verdicts[0].items()}
        if not self.num_plans and not self.grid.layouts.count:
            return empty_rejections(why_empty_serving(self.grid))
        counted = [*self.lawless, *((name, titles[name], count) for name, count in fell.items() if count)]
        return tuple(Rejection(name=n, title=t, count=c, remedy=str(self.remedy(n) or "")) for n, t, c in counted)


def tokens_per_second_per_gpu(report: InferReport) -> float:
    """Return tokens a second and device over whole requests: output tokens, or input where nothing is generated."""
    return report.samples_per_second * counted_tokens(report.job) / report.plan.num_devices


@typed
def plan_serving(
    model: Model,
    cluster: Cluster,
    job: Serving,
    space: ServingSpace | None = None,
    options: SearchOptions | None = None,
) -> ServingResult:
    """Return the best ways to serve batches of a job; raises `InputError` where the job or the space is wrong.

    The answer is the optimum of the model over the space: every plan that obeys the laws is evaluated as `infer` does.
    The job's batch is not read: batches are those of the space.

    >>> from shardwise.models import load_model
    >>> job = Serving(input_tokens=1024, output_tokens=128)
    >>> cluster = Cluster.parse("8xh100-sxm-80gb")
    >>> result = plan_serving(load_model("llama-3.1-8b"), cluster, job, options=SearchOptions(max_tpot_seconds=0.02))
    >>> result.best[0].fits, result.best[0].tpot_seconds <= 0.02
    (True, True)
    """
    start = time.perf_counter()
    space, options = space or ServingSpace(), (options or SearchOptions()).sought("throughput")
    one = job if model.generates else replace(job, output_tokens=0)
    problems = Problems()
    with problems.collect():
        space.check()
    check_experts(problems, space, model)
    with problems.collect():
        options.efficiencies.check()
    problems.items += [
        *options.serving_problems(cluster.usd_per_device_hour, bool(one.output_tokens)),
        *job_problems(replace(one, batch=1), model).items,
    ]
    problems.raise_if_any()
    grid = ServingGrid(model=model, cluster=cluster, job=one, space=space, options=options)
    tables = [part for setup in range(len(grid.setups)) for part in table_of(grid, setup)]
    table = stacked(tables) if tables else None
    return ServingResult(grid=grid, table=table, seconds=time.perf_counter() - start)
