"""The question of a search for a way to serve: its setups, and its layouts, of each of which `infer` asks the laws."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from shardwise.cost import family_of
from shardwise.errors import InputError, Problem, Problems
from shardwise.hardware import Cluster, part_of
from shardwise.models import Block, Model
from shardwise.plans import AXES, Plan, Serving, dense_group_shapes, divisors, with_groups
from shardwise.plans.fields import DEPLOYED
from shardwise.plans.laws import all_blocks, expert_laws, tensor_laws
from shardwise.records import dataclass, replace
from shardwise.search._columns import distinct_rows
from shardwise.search._options import SearchOptions
from shardwise.search._placements import COLUMNS
from shardwise.search._serving_space import Layouts, ServingSpace, law_key, law_keys
from shardwise.search._space import AxisOrder
from shardwise.serving import (
    TOGETHER,
    Engine,
    ServingCase,
    ServingOptions,
    ServingQuestion,
    ServingSizes,
    complete,
    complete_plan,
    engine_on,
    sizes_of_columns,
)

MEMORY = "memory"
FORMATS = "formats"
SetupOutcome = tuple[Any, ...]
_LAW_OF = {"tp": "tensor", "ep": "experts", "etp": "experts", "pp": "pipeline", "stage_layers": "pipeline"}
LAUNCH = "launch"
TITLES = {
    "tensor": "tensor parallelism divides heads and widths",
    "experts": "experts divide over ranks",
    "pipeline": "stages divide the layers",
    LAUNCH: "the engine launches the layout",
    FORMATS: "the engine and the device run the format",
    MEMORY: "more memory than the engine has, with the wanted chance to fit",
}


@dataclass(frozen=True, kw_only=True)
class ServingGrid:
    """The question of a search, and its layouts and setups."""

    model: Model
    cluster: Cluster
    job: Serving
    space: ServingSpace
    options: SearchOptions
    prefixes: bool = False
    """Whether servers cache prefixes."""
    one_replica: bool = False
    """Whether every layout is of one replica: `dp` are its groups of attention, over all of which experts are."""

    @cached_property
    def domains(self) -> tuple[int, ...]:
        """Devices in one domain of each tier."""
        return tuple(tier.size for tier in self.cluster.tiers)

    @cached_property
    def layouts(self) -> Layouts:
        """Every layout of the space, judged by the laws."""
        columns = self._placed(np.array(list(self._degrees()), np.int64).reshape(-1, len(DEPLOYED)))
        complete: dict[tuple[Any, ...], tuple[Plan, tuple[Problem, ...]]] = {}
        names: dict[str, int] = {}
        law = np.full(len(columns["order"]), -1)
        keys = law_keys(columns)
        first, back = distinct_rows(keys)
        layouts_of = Layouts(columns=columns, orders=self.space.orders, law=law, laws=(), complete=complete)
        fields = []
        for row in first.tolist():
            plan = layouts_of.bare(row)
            whole, problems = self._judged_plan(plan)
            name = _LAW_OF.get(problems[0].field, problems[0].field) if problems else ""
            refused = [] if problems else [self._refused(engine, whole) for engine in self._engines]
            if refused and all(refused):
                name, problems = LAUNCH, refused[0]
            complete[law_key(plan)] = whole, problems
            fields.append(names.setdefault(name, len(names)) if name else -1)
        law = np.array(fields, np.int64)[back] if fields else law
        return replace(layouts_of, law=law, laws=tuple(names))

    def _judged_plan(self, plan: Plan) -> tuple[Plan, tuple[Problem, ...]]:
        """Return a complete plan and what is wrong with it; laws of fewer fields first, each asked once a value."""
        stage = plan.tp * plan.dp % (plan.ep * plan.etp) == 0
        asked = (((plan.tp,), tensor_laws), ((plan.tp, plan.ep, plan.etp, stage), expert_laws))
        for key, law in asked:
            if key not in self._laws_said:
                plan_problems = Problems()
                law(self.model, self._blocks, replace(plan, sequence_parallel=plan.tp > 1), plan_problems)
                self._laws_said[key] = tuple(plan_problems.items)
            if self._laws_said[key]:
                return plan, self._laws_said[key]
        problems = Problems()
        whole = part_of(self.cluster, plan.num_devices)
        question = ServingQuestion(model=self.model, cluster=whole, plan=plan, job=self.job)
        return complete_plan(question, problems, []), tuple(problems.items)

    def _refused(self, engine: Engine, plan: Plan, form: str = "") -> tuple[Problem, ...]:
        """Return why an engine does not launch a complete plan; nothing is refused where plans are explored."""
        if self.options.explore:
            return ()
        family = family_of(self.cluster.device)
        return tuple(engine.layouts.refused(engine.title, self.model, plan, form, family).items)

    def launches(self, case: ServingCase) -> Any:
        """Return which kinds of legal layouts the engine of a case launches; the others another of the space does."""
        key = case.engine, case.format.name
        if key not in self._launched:
            plans = map(self.layouts.plan, self.kinds[0].tolist())
            self._launched[key] = np.array(
                [not self._refused(case.engine, plan, case.format.name) for plan in plans], bool
            )
        return self._launched[key]

    @cached_property
    def _launched(self) -> dict[tuple[Engine, str], Any]:
        return {}

    def unlaunched(self) -> list[tuple[int, Problem]]:
        """Return how many legal layouts the engine of each setup does not launch, and why not the first."""
        refusals = []
        for _, case in self.setups:
            fell = np.flatnonzero(~self.launches(case))
            if len(fell):
                first = self.layouts.plan(int(self.kinds[0][fell[0]]))
                why = self._refused(case.engine, first, case.format.name)
                refusals.append((int(np.isin(self.kinds[1], fell).sum()), why[0]))
        return refusals

    @cached_property
    def _laws_said(self) -> dict[tuple[Any, ...], tuple[Problem, ...]]:
        return {}

    @cached_property
    def _engines(self) -> tuple[Engine, ...]:
        return tuple(engine_on(one, self.cluster.device) for one in self.space.engine)

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        return tuple(all_blocks(self.model))

    def _degrees(self) -> Iterator[tuple[int, ...]]:
        """Yield tp, pp, dp, ep and etp of every layout, whatever the laws say of it."""
        space, n = self.space, self.cluster.num_devices
        for count in space.devices.of(range(1, n + 1)) if space.devices.ranges else [n]:
            ways = divisors(count)
            for tp, pp in product(space.tp.of(ways), space.pp.of(w for w in ways if w <= self.model.num_layers)):
                dp = count // (tp * pp)
                if count % (tp * pp) == 0 and space.dp.of([dp]):
                    for ep, etp in self._experts(tp, divisors(tp * dp)):
                        if not self.one_replica or dp == max(ep * etp // tp, 1):
                            yield tp, pp, dp, ep, etp

    def _experts(self, tp: int, ways: list[int]) -> list[tuple[int, int]]:
        """Return (ep, etp) as engines have it: etp divides the tensor-parallel ranks, and experts fill those at least.

        Of groups of attention an etp that is asked for may split experts over the ranks of all, as vLLM does without
        --enable-expert-parallel. Weights that replicas share leave experts within the tensor-parallel ranks. vLLM docs,
        data and expert parallel deployment; SGLang docs, --ep-size and --moe-dp-size (2026).
        """
        if not self.has_experts:
            return [(1, 1)]
        asked = bool(self.space.etp.ranges)
        every = product(self.space.ep.of(ways), self.space.etp.of(w for w in ways if asked or tp % w == 0))
        most = tp if self.job.shard_weights else self.cluster.num_devices**2
        return [(ep, etp) for ep, etp in every if (ep * etp >= tp or tp % ep) and ep * etp <= most]

    @cached_property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.model.has_experts

    def plan(self, layout: int) -> Plan:
        """Return the complete plan of a legal layout."""
        return self.layouts.plan(int(self.layouts.legal[layout]))

    @property
    def own_degrees(self) -> tuple[str, ...]:
        """The degrees that change what a replica does: their number does where they share weights."""
        return tuple(name for name in DEPLOYED if name != "dp" or name in self._talking)

    @property
    def _talking(self) -> tuple[str, ...]:
        """The axes that send messages; replicas do where they share weights."""
        experts = ("ep", "etp") if self.has_experts else ()
        return ("tp", "pp", *experts, *(("dp",) if self.job.shard_weights else ()))

    def _placed(self, degrees: Any) -> dict[str, Any]:
        """Return a row for each order of the axes that places its messages otherwise, and the number of its place."""
        sizes = dict(zip(DEPLOYED, degrees.T, strict=True))
        orders, rows = len(self.space.orders), len(degrees)
        each = [self._place(sizes, order) for order in self.space.orders]
        spans = [np.concatenate(tiers) for tiers in zip(*each, strict=True)]
        _, place = distinct_rows(spans) if spans else (None, np.zeros(orders * rows, np.int64))
        codes = place.reshape(orders, rows)
        fresh = np.ones_like(codes, bool)
        for i in range(1, len(codes)):
            fresh[i] = (codes[:i] != codes[i]).all(axis=0)
        row, order = np.nonzero(fresh.T)
        return {**{name: size[row] for name, size in sizes.items()}, "order": order, "place": codes.T[fresh.T]}

    def _place(self, sizes: dict[str, Any], order: AxisOrder) -> list[Any]:
        """Return the ranks of each axis that sends messages in one domain of each tier."""
        alone = self._spans(sizes, order)
        if order != AXES:
            return alone
        apart = (sizes["pp"] == 1) | (sizes["dp"] == 1) | (sizes["ep"] * sizes["etp"] > sizes["tp"])
        return [np.where(apart, *both) for both in zip(alone, self._spans(sizes, TOGETHER), strict=True)]

    def _spans(self, sizes: dict[str, Any], order: AxisOrder) -> list[Any]:
        one = np.ones_like(sizes["tp"])
        dense = dense_group_shapes({**sizes, "tp2": one, "cp": one}, order, self.domains, COLUMNS)
        groups = {"dp": sizes["dp"], "shard": sizes["dp"], "ep": sizes["ep"], "etp": sizes["etp"]}
        placed = with_groups(dense, groups, COLUMNS)
        return [placed[axis][tier] for axis, tier in product(self._talking, range(len(self.domains) - 1))]

    @cached_property
    def setups(self) -> list[tuple[SetupOutcome, ServingCase]]:
        """Every (engine, weights, kv_cache, compute) that the device can run, those that come to the same once."""
        return [(word, case) for word, case in self._judged.values() if isinstance(case, ServingCase)]

    @cached_property
    def unusable(self) -> list[tuple[SetupOutcome, Problem]]:
        """Every (engine, weights, kv_cache, compute) that the device cannot run, and why."""
        return [(word, why) for word, why in self._judged.values() if isinstance(why, Problem)]

    @cached_property
    def _judged(self) -> dict[Any, tuple[SetupOutcome, ServingCase | Problem]]:
        outcomes: dict[Any, tuple[SetupOutcome, ServingCase | Problem]] = {}
        for word in self.space.setups(self.job):
            engine, weights, kv_cache, compute = word
            job = replace(self.job, batch=1, weights=weights, kv_cache=kv_cache, compute=compute)
            one = Plan(dp=self.cluster.num_devices)
            try:
                question = ServingQuestion(
                    model=self.model, cluster=self.cluster, plan=one, job=job, efficiencies=self.options.efficiencies,
                    engine=ServingOptions(engine=engine).caching(self.prefixes).engine,
                )  # fmt: skip
                case, _ = complete(question)
            except InputError as error:
                others = [p for p in error.problems if p.field not in ("compute", "dtype", "weights", "kv_cache")]
                if others:
                    raise InputError(others) from None
                outcomes[word] = word, _unusable(error.problems[0])
                continue
            key = case.engine, case.format, case.dtype, case.compute, case.cache_element_bytes
            outcomes.setdefault(key, (word, replace(case, job=case.capped(case.job))))
        return outcomes

    @cached_property
    def kinds(self) -> tuple[Any, Any]:
        """Return one legal layout of each kind, and the kind of every legal layout: replicas alike are one kind."""
        columns, legal = self.layouts.columns, self.layouts.legal
        alike = [columns[name][legal] for name in (*self.own_degrees, "place")]
        first, back = distinct_rows(alike)
        return legal[first], back

    def sizes(self, model: Model) -> ServingSizes[Any]:
        """Return the numbers of one layout of each kind as columns, for the model as an engine runs it."""
        if model not in self._sizes:
            plans = [self.layouts.plan(row) for row in self.kinds[0].tolist()]
            self._sizes[model] = sizes_of_columns(model, plans, [1] * len(plans), self.domains)
        return self._sizes[model]

    @cached_property
    def _sizes(self) -> dict[Model, ServingSizes[Any]]:
        return {}

    @cached_property
    def programs(self) -> dict[int, Any]:
        """What was recorded, by setup."""
        return {}


def _unusable(problem: Problem) -> Problem:
    """Return why a device cannot multiply in a format, said of the weights: their format is what can be chosen."""
    if problem.field != "dtype":
        return problem
    return replace(problem, field="weights", remedy=problem.remedy.replace("use ", "use --weights ", 1))
