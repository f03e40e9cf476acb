"""Memory and time of a pipeline over meshes of plans: one recording for each schedule and partition of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from shardwise.errors import Problem
from shardwise.ledger.number import above, maximum, minimum
from shardwise.ledger.symbol import Graph
from shardwise.ops.overlap import Pairing, pairing
from shardwise.plans import DEGREES, Plan, Schedule, find_rules
from shardwise.records import dataclass, replace
from shardwise.search._blocks import PlanBlocks
from shardwise.search._columns import ChosenRows, Columns, ColumnsRead, distinct, exact_sum, scattered
from shardwise.search._constraints import Constraints, Law, staged
from shardwise.search._grid import PlanGrid, case_for
from shardwise.search._launch import STACK
from shardwise.search._program import BATCH, PLACE, ROW, SPLIT, BlockColumn, Program
from shardwise.search._recorded import NESTED, RecordedBlocks, blocks_of, known_sizes, sizes_given
from shardwise.search._recordings import Recordings, fingerprint, recordings_of
from shardwise.search._result import PlanCounts
from shardwise.search._space import WORDS
from shardwise.training import (
    ModelBlocks,
    PlanSizes,
    TrainingCase,
    device_bytes,
    hosted_of,
    least_piped_seconds,
    machine_of,
    memory_of,
    moved_pages,
    padded,
    paged_of,
    paging_seconds,
    piped_seconds,
    reserved_of,
    resident_pages,
    runs_of_seconds,
    send_of,
    stage_seconds,
    stages_of,
    step_job,
    update_seconds,
    with_update,
)
from shardwise.training.schedules import find_schedule


def _filled(tree: Any, graph: Graph, flat: bool) -> Any:
    """Return a tree with a symbol for each leaf; `flat` ones do not vary with places."""
    if isinstance(tree, BlockColumn):
        level = tree.level & ~PLACE if flat else tree.level
        return graph.given(tree.name, level & ~BATCH if level & BATCH else level & ~ROW | SPLIT, tree.positive)
    if isinstance(tree, NESTED):
        return replace(tree, **{f.name: _filled(getattr(tree, f.name), graph, flat) for f in fields(tree)})
    if isinstance(tree, tuple):
        return tuple(_filled(item, graph, flat) for item in tree)
    if isinstance(tree, dict):
        return {key: _filled(item, graph, flat) for key, item in tree.items()}
    return tree


@dataclass(frozen=True)
class Composition:
    """One schedule over one partition of the layers, recorded for the shardings that some of its plans have.

    Outputs are `bytes` on a device, `step` seconds and `least` seconds of a step, each by sharding. Where the host
    of a node may lack memory that is added to `bytes`, and stands apart as `short` beside `device` bytes.
    """

    name: str
    case: TrainingCase
    grid: PlanGrid
    owner: Compositions
    shardings: tuple[str, ...]

    def _program(self, kind: str, outputs: Callable[[], Mapping[str, Any]]) -> Program:
        """Return a program of the composition, kept or recorded now."""
        kept, name = self.owner.kept, f"{kind} {self.name}"
        return kept.programs.get(name) or kept.put(name, Program(outputs()))

    def _start(self, flat: bool) -> tuple[Graph, PlanSizes[Any], ModelBlocks[Any]]:
        plan = self.case.plan
        graph, parts = self.owner.symbols(flat, pairing(self.case.stack, plan.schedule))
        # Chunks of a stage only divide: one recording does for all numbers of them.
        vpp = graph.given("vpp", 0, True) if find_rules(plan.schedule).chunked else 1.0
        return graph, sizes_given(graph, self.grid, {"pp": plan.pp, "vpp": vpp}), parts

    def _send(self, graph: Graph, sizes: PlanSizes[Any]) -> Any:
        """Return the seconds of a message between stages: which share is sent depends on sequence parallelism."""
        boundary = _filled(self.owner.recorded.boundary, graph, False)
        machine = machine_of(self.case, sizes.group_shapes)
        one, other = (
            send_of(case_for(self.case, sequence_parallel=split), machine, sizes, boundary) for split in (True, False)
        )
        return one if one is other else above(graph.given("sequence_parallel", SPLIT, True), 0.5, one, other)

    @cached_property
    def _flat(self) -> tuple[Graph, PlanSizes[Any], ModelBlocks[Any]]:
        """Symbols of plans wherever their ranks are, which bytes and bounds share."""
        return self._start(flat=True)

    @cached_property
    def _placed(self) -> tuple[Graph, PlanSizes[Any], ModelBlocks[Any]]:
        """Symbols of plans at their places, which the times of all groups share."""
        return self._start(flat=False)

    def _seconds(self, group: Sequence[str]) -> Mapping[str, Any]:
        """Seconds of a step under the shardings of a group, as symbols."""
        graph, sizes, parts = self._placed
        machine, stages = machine_of(self.case, sizes.group_shapes), stages_of(self.case)
        recipe = case_for(self.case, sharding=group[0]).recipe
        own = padded(recipe, sizes, parts)
        job = step_job(self.case, own, self._send(graph, sizes))
        timed = tuple(stage_seconds(machine, sizes, recipe, own, s) for s in stages)
        piped = piped_seconds(machine, sizes, recipe, timed, runs_of_seconds(stages, timed), job)
        outputs: dict[str, Any] = {}
        for sharding in group:
            case = case_for(self.case, sharding=sharding)
            if case.recipe.optimizer.paged:
                moved = moved_pages(
                    *self._device_bytes(case, sizes, parts)[1:], case.cluster.device.usable_memory_bytes
                )
                piped = replace(piped, job=replace(job, paging=paging_seconds(machine, moved)))
            outputs[f"step {sharding}"] = with_update(machine, sizes, case.recipe, own, stages, piped).total
        return outputs

    def _bytes(self, sizes: PlanSizes[Any], parts: ModelBlocks[Any]) -> Mapping[str, Any]:
        outputs = dict[str, Any]()
        for sharding in self.shardings:
            case = case_for(self.case, sharding=sharding)
            hosted, paged, device = self._device_bytes(case, sizes, parts)
            room, moved = case.cluster.device.usable_memory_bytes, 0.0
            if case.recipe.optimizer.paged:
                moved = moved_pages(paged, device, room)
                device = device + resident_pages(paged, device, room)
            if case.cluster.host_memory_bytes and case.recipe.uses_host:
                short = self._short(sizes, hosted + moved)
                outputs |= {f"device {sharding}": device, f"short {sharding}": maximum(short, 0.0)}
                # So that every limit of bytes rejects the plan, by as much as the host lacks.
                device = above(short, 0.0, maximum(device, room) + short, device)
            outputs[f"bytes {sharding}"] = device
        return outputs

    def _short(self, sizes: PlanSizes[Any], hosted: Any) -> Any:
        """Bytes that the host of a node lacks, negative where it has room."""
        cluster = self.case.cluster
        sharing = minimum(sizes.tp * sizes.tp2 * sizes.cp * sizes.pp * sizes.dp, cluster.devices_per_node)
        return hosted * sharing - cluster.host_memory_bytes

    def _device_bytes(self, case: TrainingCase, sizes: PlanSizes[Any], parts: ModelBlocks[Any]) -> tuple[Any, Any, Any]:
        """Bytes on the host for a device, of optimizer state that may leave it, and those that it has to hold."""
        stages = stages_of(self.case)
        memory = memory_of(case, sizes, padded(case.recipe, sizes, parts), stages)
        device = device_bytes(case.stack, sizes, reserved_of(case.stack, stages, memory), case.workspace_bytes)
        return hosted_of(stages, memory), paged_of(stages, memory), device

    @cached_property
    def least(self) -> Program:
        """Seconds that no step is shorter than, by sharding; it reads the least times of each row."""
        return self._program("least", self._least)

    def _least(self) -> Mapping[str, Any]:
        _, sizes, parts = self._flat
        machine, stages = machine_of(self.case, sizes.group_shapes), stages_of(self.case)
        piped = least_piped_seconds(machine, sizes, self.case.recipe, parts, stages, self.case.plan.schedule)
        bounds: dict[str, Any] = {}
        for sharding in self.shardings:
            recipe = case_for(self.case, sharding=sharding).recipe
            own = padded(recipe, sizes, parts)
            update = update_seconds(machine, sizes, recipe, own, stages) + recipe.stack.step_overhead_seconds
            bounds[f"least {sharding}"] = piped + update
        return bounds

    @cached_property
    def memory(self) -> Program:
        """Bytes on a device, by sharding."""
        return self._program("memory", lambda: self._bytes(*self._flat[1:]))

    @cached_property
    def state(self) -> Program:
        """Bytes that no micro-batch and no recomputation brings a device below, by sharding."""

        def outputs() -> Mapping[str, Any]:
            _, sizes, parts = self._flat
            return {f"state {s}": self._state(case_for(self.case, sharding=s), sizes, parts) for s in self.shardings}

        return self._program("state", outputs)

    def _state(self, case: TrainingCase, sizes: PlanSizes[Any], parts: ModelBlocks[Any]) -> Any:
        """Bytes of a device whose stage holds weights, gradients and optimizer state alone, as the update finds it."""
        stages = stages_of(self.case)
        memory = memory_of(case, sizes, padded(case.recipe, sizes, parts), stages)
        least = tuple(replace(m, peak=m.weights + m.gradients + m.optimizer, late_block=0.0) for m in memory)
        return device_bytes(case.stack, sizes, reserved_of(case.stack, stages, least), case.workspace_bytes)

    @cached_property
    def whole(self) -> Program:
        """Bytes and seconds, by sharding."""

        def both() -> Mapping[str, Any]:
            seconds = {name: value for group in self.groups for name, value in self._seconds(group).items()}
            return {**self._bytes(*self._placed[1:]), **seconds}

        return self._program("whole", both)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Shardings whose micro-batches take the same time."""
        by_mask: dict[tuple[bool, ...], list[str]] = {}
        for sharding in self.shardings:
            r = case_for(self.case, sharding=sharding).recipe
            kind = r.shards_gradients, r.shards_weights, r.keeps_gathered, r.replicates_shards
            by_mask.setdefault(kind, []).append(sharding)
        return tuple(map(tuple, by_mask.values()))

    def steps(self, group: tuple[str, ...]) -> Program:
        """Seconds of the shardings of a group, recorded when a plan of it is first timed."""
        return self._program(f"steps {group}", lambda: self._seconds(group))


@dataclass
class Compositions:
    """The compositions of a space, recorded when they are first asked for, or kept from an earlier question."""

    grid: PlanGrid
    kept: Recordings

    def __post_init__(self) -> None:
        self._known: dict[tuple[Any, ...], Composition] = {}
        self._asked: dict[tuple[Schedule, int, int, tuple[str, ...]], Composition] = {}
        # What stages of different pipelines have in common is one symbol, made once. Proofs pay where a program runs on
        # all rows; at their places few plans are timed.
        self._graphs = {flat: Graph(proves=flat) for flat in (True, False)}
        self._parts: dict[tuple[bool, Pairing], ModelBlocks[Any]] = {}

    def symbols(self, flat: bool, paired: Pairing) -> tuple[Graph, ModelBlocks[Any]]:
        """Return the graph of formulas at all places, or of `flat` ones, and a symbol for each number of the blocks."""
        graph, key = self._graphs[flat], (flat, paired)
        if key not in self._parts:
            self._parts[key] = _filled(self.recorded.parts[paired], graph, flat)
        return graph, self._parts[key]

    @cached_property
    def recorded(self) -> RecordedBlocks:
        """The blocks, recorded now: what is composed of them and was not kept needs their trees."""
        return blocks_of(self.grid)

    @cached_property
    def blocks(self) -> PlanBlocks:
        """The blocks, kept or recorded now."""
        return PlanBlocks.kept(self.kept, len(self.grid.space.recompute)) or self.recorded.blocks.keep(self.kept)

    def of(self, schedule: Schedule, pp: int, vpp: int, shardings: tuple[str, ...]) -> Composition:
        """Return the composition of a schedule; chunks that leave the stages as they are share one."""
        asked = schedule, pp, vpp, shardings
        if asked in self._asked:
            return self._asked[asked]
        plan: Any = replace(self.grid.case.plan, schedule=schedule, pp=pp, vpp=vpp, stage_layers=())
        case = replace(self.grid.case, plan=staged(self.grid.case, plan))
        stages = stages_of(case)
        key = (schedule, pp, stages, shardings)
        if key not in self._known:
            name = f"{schedule} {pp} {fingerprint(stages)} {' '.join(shardings)}"
            self._known[key] = Composition(name, case, self.grid, self, shardings)
        self._asked[asked] = self._known[key]
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A space to record; those that agree in `key`, all that a recording reads of them, share one."""

    key: tuple[Any, ...]
    grid: PlanGrid = field(compare=False)


def compositions_of(grid: PlanGrid) -> Compositions:
    """Return the compositions of a space, those of an earlier question where they are the same.

    The counts of devices and sequences are columns of a recording: only what else a question says tells two apart.
    """
    case, space = grid.case, grid.space
    cluster = case.cluster
    last = replace(cluster.tiers[-1], size=cluster.tiers[-2].size + 1 if len(cluster.tiers) > 1 else 1)
    job = replace(case.job, global_batch=1, token_budget=0.0, sample_budget=0.0)
    key = (
        (case.model, case.stack, case.plan, job, case.efficiencies, case.overlap),
        (cluster.device, *cluster.tiers[:-1], last, cluster.devices_per_node, cluster.num_devices > 1),
        cluster.host_memory_bytes,
        (space.sequence_parallel, space.cp_kind, space.schedule, space.sharding, space.recompute),
        (*distinct(grid.base["layout"]).tolist(), bool((grid.base["cp"] > 1).any()), *known_sizes(grid).items()),
    )
    return _recorded(_Recording(key, grid))


@lru_cache(maxsize=8)
def _recorded(recording: _Recording) -> Compositions:
    # Operations that a schedule adds are known once it is loaded.
    for schedule in recording.grid.space.schedule:
        find_schedule(schedule)
    return Compositions(recording.grid, recordings_of(recording.key))


@dataclass(frozen=True, slots=True)
class _Runs:
    """What a framework runs of a pipeline: which rows with each sharding, their plans, and how many it refuses."""

    legal: Mapping[str, Any]
    each: Any
    refused: int


def composed_rows(
    grid: PlanGrid, constraints: Constraints, counts: PlanCounts, columns: Columns
) -> Iterator[tuple[tuple[Schedule, int, int], Any, dict[str, Any]]]:
    """Yield schedule, stages and chunks of rows, the rows that run so, and which of all rows do with each sharding.

    Plans that laws refuse are counted. What is said of a schedule, whatever its chunks, is asked once.
    """
    size, rules = len(columns["pp"]), () if grid.explore else grid.case.stack.runs.rules
    reads = {name for rule in rules for name, _ in (*rule.where, *rule.needs)}
    for pp in distinct(columns["pp"]).tolist():
        mine = np.flatnonzero(columns["pp"] == pp)
        rows = ChosenRows(columns, mine)
        launched_as, ran = dict[Any, _Runs](), dict[Any, tuple[Any, dict[str, Any], int, int]]()
        for schedule, vpp in grid.compositions(pp):
            fixed = {"schedule": schedule, "vpp": vpp, "pp": pp}
            key = tuple(fixed[name] for name in ("schedule", "vpp") if name in reads)
            if key not in launched_as:
                launched_as[key] = _launches(grid, constraints, rows, fixed)
            known = launched_as[key]
            constraints.reject(STACK, known.refused)
            if not constraints.check("pipeline", {"pp": rows["pp"][:1]}, schedule=schedule, vpp=vpp)[0]:
                constraints.reject("pipeline", known.each)
                continue
            if (key, schedule) not in ran:
                runs = constraints.check("schedule", rows, **fixed)
                legal = {s: scattered(one & runs, mine, size) for s, one in known.legal.items()}
                whole = exact_sum(known.each)
                kept = exact_sum(known.each[runs])
                ran[key, schedule] = mine[runs & (known.each > 0)], legal, kept, whole - kept
            allowed, legal, kept, refused = ran[key, schedule]
            constraints.reject("schedule", refused)
            counts.legal += kept
            yield (schedule, pp, vpp), allowed, legal


def _launches(grid: PlanGrid, constraints: Constraints, rows: ColumnsRead, fixed: Mapping[str, Any]) -> _Runs:
    """Return which rows of a pipeline are launched with each sharding."""
    columns, copied = dict[str, Any](), grid.copied(rows)
    weights, refused_plans = rows["places"] * len(grid.space.recompute), 0
    for sharding in grid.space.sharding:
        chosen = copied | (sharding == grid.space.sharding[0])
        runs = grid.launched(rows, sharding=sharding, **fixed)
        columns[sharding] = chosen & runs
        refused = chosen & ~runs
        if refused.any():
            refused_plans += exact_sum(weights[refused])
            if STACK not in constraints.examples:
                first = ChosenRows(rows, refused)
                problem = example(grid.laws[STACK], first, {"sharding": sharding, **fixed})
                if problem is not None:
                    constraints.examples[STACK] = problem
    ways = sum(one.view(np.int8) for one in columns.values())
    return _Runs(columns, ways * weights, refused_plans)


def example(law: Law, columns: ColumnsRead, fixed: Mapping[str, Any]) -> Problem | None:
    """Return what the law of a framework says of the first of some rows."""
    row = {name: int(columns[name][0]) for name in DEGREES if name in columns and name != "vpp"}
    sequence = bool(columns["sequence_parallel"][0])
    kind = WORDS["cp_kind"][int(columns["cp_kind"][0])]
    plan = Plan(sequence_parallel=sequence, cp_kind=kind, **{**row, **fixed})  # type: ignore[arg-type]
    return next(iter(law.problems(plan)), None)
