"""Memory and time of a pipeline over meshes of plans: one recording for each schedule and partition of the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from functools import cached_property, lru_cache
from typing import Any

from shardwise.ledger.number import above, maximum, minimum
from shardwise.ledger.symbol import Graph
from shardwise.ops.overlap import CostModel, Pairing, pairing
from shardwise.plans import Schedule, find_rules
from shardwise.records import dataclass, replace
from shardwise.search._blocks import PlanBlocks
from shardwise.search._columns import distinct
from shardwise.search._constraints import staged
from shardwise.search._grid import PlanGrid
from shardwise.search._program import BATCH, PLACE, ROW, SPLIT, BlockColumn, Program
from shardwise.search._recorded import NESTED, RecordedBlocks, blocks_of, case_for, known_sizes, sizes_given
from shardwise.search._recordings import Recordings, fingerprint, recordings_of
from shardwise.training import (
    ModelBlocks,
    PlanSizes,
    StageMemory,
    Stages,
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
    peak_of,
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


def _stages_with(stages: Sequence[Stages[Any]], number: Callable[[str, float], Any]) -> tuple[Stages[Any], ...]:
    """Return stages with `number` of each of their numbers by name, but of what is absent or there once."""

    def each(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(number(f"{name} {k}", n) if n else n for k, n in enumerate(values))

    def one(i: int, stage: Stages[Any]) -> Stages[Any]:
        run = f"of stages {i}"
        return replace(
            stage,
            count=number(f"count {run}", stage.count) if stage.count > 1 else stage.count,
            position=number(f"position {run}", stage.position) if stage.position else stage.position,
            layers=each(f"layers {run}", stage.layers),
            mirrored=each(f"mirrored layers {run}", stage.mirrored),
        )

    return tuple(one(i, stage) for i, stage in enumerate(stages))


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
class _Symbols:
    """What formulas of a composition are recorded on: sizes, blocks and stages as symbols of one graph."""

    graph: Graph
    sizes: PlanSizes[Any]
    parts: ModelBlocks[Any]
    stages: tuple[Stages[Any], ...]
    _memory: dict[str, tuple[StageMemory[Any], ...]] = field(default_factory=dict)

    def memory_of(self, case: TrainingCase) -> tuple[StageMemory[Any], ...]:
        """Return the memory of each run of stages under the sharding of a case, recorded once."""
        sharding = case.plan.sharding
        if sharding not in self._memory:
            own = padded(case.recipe, self.sizes, self.parts)
            self._memory[sharding] = memory_of(case, self.sizes, own, self.stages)
        return self._memory[sharding]


@dataclass(frozen=True)
class Composition:
    """One schedule over one partition of the layers, recorded for the shardings that some of its plans have.

    Outputs are `bytes` on a device, `step` seconds and `least` seconds of a step, each by sharding. Where the host
    of a node may lack memory that is added to `bytes`, and stands apart as `short` beside `device` bytes.
    """

    case: TrainingCase
    grid: PlanGrid
    owner: Compositions
    shardings: tuple[str, ...]

    def _program(self, name: str, outputs: Callable[[], Mapping[str, Any]]) -> Program:
        """Return a program of the composition, or of others with stages of one form; kept or recorded now."""
        kept = self.owner.kept
        return kept.programs.get(name) or kept.put(name, Program(outputs()))

    def _symbols(self, flat: bool) -> _Symbols:
        """Return symbols of plans at their places, or of `flat` ones, and of the numbers of the stages."""
        graph, parts = self.owner.symbols(flat, pairing(self.case.stack, self.case.plan.schedule))
        # Chunks of a stage only divide: one recording does for all numbers of them.
        vpp = graph.given("vpp", 0, True, 1.0) if find_rules(self.case.plan.schedule).chunked else 1.0
        pp = graph.given("pp", 0, True, 1.0) if self.case.plan.pp > 1 else 1
        stages = _stages_with(self.stages, lambda name, _: graph.given(name, 0, True, 1.0))
        return _Symbols(graph, sizes_given(graph, self.grid, {"pp": pp, "vpp": vpp}), parts, stages)

    @cached_property
    def numbers(self) -> dict[str, float]:
        """What programs of the form of the stages read of them: the stages, and counts of stages and of layers."""
        numbers = {"pp": float(self.case.plan.pp)} if self.case.plan.pp > 1 else {}
        _stages_with(self.stages, lambda name, value: numbers.setdefault(name, float(value)))
        return numbers

    @cached_property
    def form(self) -> str:
        """A name for the schedule and which numbers of the stages are more than absent or there once."""
        return f"{self.case.plan.schedule} {fingerprint(_stages_with(self.stages, lambda name, _: name))}"

    @property
    def form_of_all(self) -> str:
        """A name for the form and all shardings."""
        return f"{self.form} {' '.join(self.shardings)}"

    @cached_property
    def stages(self) -> tuple[Stages[Any], ...]:
        """The stages of the composition."""
        return stages_of(self.case)

    @cached_property
    def cases(self) -> dict[str, TrainingCase]:
        """The case of each sharding."""
        return {sharding: case_for(self.case, sharding=sharding) for sharding in self.shardings}

    def _send(self, graph: Graph, sizes: PlanSizes[Any]) -> Any:
        """Return the seconds of a message between stages: which share is sent depends on sequence parallelism."""
        boundary = _filled(self.owner.recorded.boundary, graph, False)
        machine = self.owner.machine(self.case, graph, sizes)
        one, other = (
            send_of(case_for(self.case, sequence_parallel=split), machine, sizes, boundary) for split in (True, False)
        )
        return one if one is other else above(graph.given("sequence_parallel", SPLIT, True), 0.5, one, other)

    @cached_property
    def _flat(self) -> _Symbols:
        """Symbols of plans wherever their ranks are, which bytes and bounds share."""
        return self._symbols(flat=True)

    @cached_property
    def _placed(self) -> _Symbols:
        """Symbols of plans at their places, which the times of all groups share."""
        return self._symbols(flat=False)

    def _seconds(self, group: Sequence[str]) -> Mapping[str, Any]:
        """Seconds of a step under the shardings of a group, as symbols."""
        given = self._placed
        sizes, stages = given.sizes, given.stages
        machine = self.owner.machine(self.case, given.graph, sizes)
        recipe = self.cases[group[0]].recipe
        own = padded(recipe, sizes, given.parts)
        job = step_job(self.case, own, self._send(given.graph, sizes))
        timed = tuple(stage_seconds(machine, sizes, recipe, own, s) for s in stages)
        piped = piped_seconds(machine, sizes, recipe, timed, runs_of_seconds(stages, timed), job)
        outputs: dict[str, Any] = {}
        for sharding in group:
            case = self.cases[sharding]
            if case.recipe.optimizer.paged:
                moved = moved_pages(*self._device_bytes(case, given)[1:3], case.cluster.device.usable_memory_bytes)
                piped = replace(piped, job=replace(job, paging=paging_seconds(machine, moved)))
            outputs[f"step {sharding}"] = with_update(machine, sizes, case.recipe, own, stages, piped).total
        return outputs

    def _bytes(self, given: _Symbols) -> Mapping[str, Any]:
        outputs = dict[str, Any]()
        for sharding in self.shardings:
            case = self.cases[sharding]
            hosted, paged, device, required = self._device_bytes(case, given)
            room, moved = case.cluster.device.usable_memory_bytes, 0.0
            if case.recipe.optimizer.paged:
                moved = moved_pages(paged, device, room)
                device = device + resident_pages(paged, device, room)
            if case.cluster.host_memory_bytes and case.recipe.uses_host:
                short = self._short(given.sizes, hosted + moved)
                outputs[f"short {sharding}"] = maximum(short, 0.0)
                # So that every limit of bytes rejects the plan, by as much as the host lacks.
                required = above(short, 0.0, maximum(required, room) + short, required)
            outputs |= {f"device {sharding}": device, f"required {sharding}": required}
        return outputs

    def _short(self, sizes: PlanSizes[Any], hosted: Any) -> Any:
        """Bytes that the host of a node lacks, negative where it has room."""
        cluster = self.case.cluster
        sharing = minimum(sizes.tp * sizes.tp2 * sizes.cp * sizes.pp * sizes.dp, cluster.devices_per_node)
        return hosted * sharing - cluster.host_memory_bytes

    def _device_bytes(self, case: TrainingCase, given: _Symbols) -> tuple[Any, Any, Any, Any]:
        """Bytes on the host for a device, of optimizer state that may leave it, those it shows and has to have."""
        memory, stages = given.memory_of(case), given.stages
        reserved, workspace = reserved_of(case.stack, stages, memory), case.workspace_at(given.sizes.tp)
        pool = (reserved, peak_of(stages, memory))
        shown, required = device_bytes(case.stack, case.cluster, given.sizes, pool, workspace)
        return hosted_of(stages, memory), paged_of(stages, memory), shown, required

    @cached_property
    def least(self) -> Program:
        """Seconds that no step is shorter than, by sharding; it reads the least times of each row."""
        return self._program(f"least {self.form_of_all}", self._least)

    def _least(self) -> Mapping[str, Any]:
        sizes, parts, stages = self._flat.sizes, self._flat.parts, self._flat.stages
        machine = self.owner.machine(self.case, self._flat.graph, sizes)
        piped = least_piped_seconds(machine, sizes, self.case.recipe, parts, stages, self.case.plan.schedule)
        bounds: dict[str, Any] = {}
        for sharding in self.shardings:
            recipe = self.cases[sharding].recipe
            own = padded(recipe, sizes, parts)
            update = update_seconds(machine, sizes, recipe, own, stages) + recipe.stack.step_overhead_seconds
            bounds[f"least {sharding}"] = piped + update
        return bounds

    @cached_property
    def memory(self) -> Program:
        """Bytes on a device, by sharding."""
        return self._program(f"memory {self.form_of_all}", lambda: self._bytes(self._flat))

    @cached_property
    def state(self) -> Program:
        """Bytes that no micro-batch and no recomputation brings a device below, by sharding."""

        def outputs() -> Mapping[str, Any]:
            return {f"state {s}": self._state(self.cases[s]) for s in self.shardings}

        return self._program(f"state {self.form_of_all}", outputs)

    def _state(self, case: TrainingCase) -> Any:
        """Bytes that weights, gradients and optimizer state alone require of a device, as the update finds it."""
        memory = self._flat.memory_of(case)
        states = [m.weights + m.gradients + m.optimizer for m in memory]
        least = tuple(replace(m, peak=one, fragmented=one) for m, one in zip(memory, states, strict=True))
        stages = self._flat.stages
        pool = (reserved_of(case.stack, stages, least), peak_of(stages, least))
        workspace = case.workspace_at(self._flat.sizes.tp)
        return device_bytes(case.stack, case.cluster, self._flat.sizes, pool, workspace)[1]

    @cached_property
    def whole(self) -> Program:
        """Bytes and seconds, by sharding."""

        def both() -> Mapping[str, Any]:
            seconds = {name: value for group in self.groups for name, value in self._seconds(group).items()}
            return {**self._bytes(self._placed), **seconds}

        return self._program(f"whole {self.form_of_all}", both)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Shardings whose micro-batches take the same time."""
        by_mask: dict[tuple[bool, ...], list[str]] = {}
        for sharding in self.shardings:
            r = self.cases[sharding].recipe
            # Gradients of a micro-batch that go to the host are those of a rank.
            sent = r.offloads("gradients") and r.shards_optimizer
            kind = r.shards_gradients, r.shards_weights, r.keeps_gathered, r.replicates_shards, sent
            by_mask.setdefault(kind, []).append(sharding)
        return tuple(map(tuple, by_mask.values()))

    def steps(self, group: tuple[str, ...]) -> Program:
        """Seconds of the shardings of a group, recorded when a plan of it is first timed."""
        return self._program(f"steps {' '.join(group)} {self.form}", lambda: self._seconds(group))


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
        self._machines: dict[tuple[Graph, bool], CostModel[Any]] = {}

    def symbols(self, flat: bool, paired: Pairing) -> tuple[Graph, ModelBlocks[Any]]:
        """Return the graph of formulas at all places, or of `flat` ones, and a symbol for each number of the blocks."""
        graph, key = self._graphs[flat], (flat, paired)
        if key not in self._parts:
            self._parts[key] = _filled(self.recorded.parts[paired], graph, flat)
        return graph, self._parts[key]

    def machine(self, case: TrainingCase, graph: Graph, sizes: PlanSizes[Any]) -> CostModel[Any]:
        """Return what plans of a case run on, with symbols of a graph; messages that come again are recorded once."""
        key = graph, case.recipe.uses_host
        if key not in self._machines:
            self._machines[key] = replace(machine_of(case, {}), messages={})
        return replace(self._machines[key], group_shapes=sizes.group_shapes)

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
            self._known[key] = Composition(case, self.grid, self, shardings)
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
