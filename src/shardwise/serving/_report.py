"""The answer about one serving plan: does it fit, how fast are first and next tokens, what do they cost, and why."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

from shardwise.cost import Band, Conditions, band_of
from shardwise.errors import InputError, Problem, check_finite
from shardwise.field_types import typed
from shardwise.hardware import Cluster
from shardwise.ledger.traced import Traced, tracing
from shardwise.models import Model
from shardwise.notebook import Card
from shardwise.plans import Plan, Serving
from shardwise.records import dataclass, replace
from shardwise.serving._batch import BatchCost, evaluate, request_seconds
from shardwise.serving._cache import keeps_states
from shardwise.serving._capacity import Capacity, cache_tokens, capacity_of, held_tokens, most_requests, state_blocks
from shardwise.serving._case import ServingCase, ServingQuestion, complete
from shardwise.serving._memory import StageBytes
from shardwise.serving._options import ServingOptions
from shardwise.serving._sizes import sizes_of
from shardwise.serving._stated_cache import overstated, states_bytes
from shardwise.serving._static_share import memory_share
from shardwise.serving._step import StepCost
from shardwise.units import show_bytes, show_seconds

# What tells comparable published batches apart (`InferReport.conditions`).
_MANY_RANKS, _LONG, _LARGE, _WIDE_BYTES = 8, 4096, 32, 2.0
_NARROW = ("fp8", "fp4", "int8")
CATEGORIES = ("weights", "kv_cache", "working", "context", "communicators", "graphs")


def conditions_of(case: ServingCase, family: str) -> Conditions:
    """Return what decides how far published batches like that of a case were off, on a family of devices."""
    conditions = {
        "experts": case.model.has_experts,
        "many ranks": case.plan.num_devices > _MANY_RANKS,
        "narrow types": case.compute in _NARROW,
        "narrow weights": case.format.bytes < _WIDE_BYTES,
        "long prompts": case.job.input_tokens > _LONG,
        "large batch": case.job.batch > _LARGE,
    }
    words = tuple(word for word, holds in conditions.items() if holds)
    return Conditions(stack=case.engine.kernels, family=family, words=words, device=case.cluster.device.chip)


def beside_cache_band(case: ServingCase, family: str) -> Band:
    """Return the band of the bytes beside the cache of a case, however many requests are asked for and on any ranks.

    Published cache capacities are judged by it: where weights leave little room, an error of a per cent in them is one
    of a third in tokens.
    """
    one = replace(case, plan=Plan(), job=replace(case.job, batch=1))
    return band_of("beside_cache_bytes", conditions_of(one, family))


@dataclass(frozen=True, kw_only=True, repr=False)
class InferReport(Card):
    """Memory, time and cost of one serving plan. Build one with `infer`.

    Times are of one replica's batch; rates and cost are of the whole deployment.
    """

    case: ServingCase
    evaluation: BatchCost[float]
    assumptions: tuple[str, ...]

    def __repr__(self) -> str:
        """Return the verdict in one line, as a notebook shows it."""
        where = f"{self.case.model.name} on {self.plan.num_devices} x {self.case.cluster.device.name}"
        fits = f"{'fits' if self.fits else 'does not fit'}, {show_bytes(self.memory.needed)}"
        first, gap = map(show_seconds, self._of_a_request)
        times = f"TTFT {first}, TPOT {gap}{' of a request while the batch stays full' * (self.job.batch > 1)}"
        return f"<InferReport {where}: {fits}, {times}>"

    @property
    def plan(self) -> Plan:
        """The complete plan."""
        return self.case.plan

    @property
    def job(self) -> Serving:
        """The job as it was asked."""
        return self.case.job

    @cached_property
    def memory(self) -> StageBytes[float]:
        """Bytes of the stage that is nearest to its limit, or farthest beyond it."""
        return max(self.evaluation.memory, key=lambda m: m.kv_cache - m.cache_budget)

    @property
    def short_by_bytes(self) -> float:
        """Bytes that are missing; negative when there is room."""
        return self.memory.kv_cache - self.memory.cache_budget

    @property
    def fits(self) -> bool:
        """Whether the batch fits at its full length under the engine's memory budget."""
        return self.short_by_bytes <= 0

    @property
    def chance_to_fit(self) -> float:
        """The chance that the batch fits, by how far bytes beside published caches were from predicted ones.

        A batch fits where the engine's cache holds its tokens; without a cache of tokens nothing is published, and the
        answer is as certain as its bytes.
        """
        if not self.kv_cache_bytes_per_gpu or not self.kv_cache_budget_bytes_per_gpu:
            return float(self.fits)
        tight = min(self.on_devices, key=lambda m: m.most_beside - m.beside_cache)
        room = tight.most_beside / tight.beside_cache
        return beside_cache_band(self.case, self.evaluation.family).chance(room) if room > 0 else 0.0

    @property
    def dominant(self) -> str:
        """What takes most of the memory."""
        return max(CATEGORIES, key=lambda name: float(getattr(self.memory, name)))

    @property
    def memory_share(self) -> float:
        """The share of the memory that the engine may use, as it spells it."""
        return float(memory_share(self.case, sizes_of(self.case.model, self.plan, self.job, self.case.domains)))

    @property
    def on_devices(self) -> tuple[StageBytes[float], ...]:
        """Bytes of the stages that devices hold."""
        return self.evaluation.on_devices

    @property
    def on_host(self) -> StageBytes[float] | None:
        """Bytes of the part that the host's processor holds and runs, None where all lies on the device."""
        stages = zip(self.evaluation.memory, self.evaluation.sizes.stages, strict=True)
        return next((memory for memory, stage in stages if stage.on_host), None)

    @property
    def weights_bytes_per_gpu(self) -> float:
        """Bytes of weights on a device of the heaviest stage."""
        return max(m.weights for m in self.on_devices)

    @property
    def kv_cache_bytes_per_gpu(self) -> float:
        """Bytes of the batch's cache at full length on a device of the heaviest stage."""
        return max(m.kv_cache for m in self.on_devices)

    @property
    def kv_cache_budget_bytes_per_gpu(self) -> float:
        """Bytes that the engine sets aside for the cache on a device, on the tightest stage; 0 when nothing is left."""
        return max(0.0, min(m.cache_budget for m in self.on_devices))

    @cached_property
    def capacity(self) -> Capacity:
        """What would fit on one replica."""
        return capacity_of(self.case, self.evaluation, self.max_concurrency)

    @property
    def cache_share(self) -> float:
        """The share that the cache may take of what the engine may use, on the stage that leaves it least."""
        tight = min(self.on_devices, key=lambda m: m.cache_budget)
        return max(0.0, tight.cache_budget) / tight.limit if tight.limit > 0 else 0.0

    @cached_property
    def kv_cache_tokens(self) -> int:
        """Tokens of cache that fit on one replica."""
        return cache_tokens(self.case, self.evaluation)

    def held_tokens(self, length: float) -> int:
        """Tokens that requests of a mean length hold on one replica together, 0 where the longest does not fit."""
        return held_tokens(self.case, self.evaluation, length)

    @cached_property
    def most_started(self) -> int:
        """Sequences at once that the engine starts with at most, 0 where nothing bounds them."""
        if not self.fits:
            return 0
        if self.case.engine.memory.sizes_states and keeps_states(self.case.model.kinds):
            return self.max_concurrency
        return state_blocks(self.case, self.evaluation)

    @cached_property
    def max_concurrency(self) -> int:
        """Requests of input and output tokens that fit on one replica at once."""
        return most_requests(self.case, self.evaluation)

    @property
    def ttft_seconds(self) -> float:
        """Seconds from a batch's arrival to its first tokens: the prefill of the whole batch."""
        return self.evaluation.prefill.seconds

    @property
    def tpot_seconds(self) -> float:
        """Seconds of one decode step, the mean over the generation; 0 where nothing is generated."""
        return self.evaluation.decode.seconds

    @property
    def request_seconds(self) -> float:
        """Seconds from a batch's arrival to its last tokens: TTFT and output - 1 decode steps."""
        return self.evaluation.request_seconds

    @cached_property
    def _of_a_request(self) -> tuple[float, float]:
        return request_seconds(self.case, self.evaluation)

    @property
    def request_ttft_seconds(self) -> float:
        """Seconds from a request's arrival to its first token where the batch stays full: what limits are about."""
        return self._of_a_request[0]

    @property
    def request_tpot_seconds(self) -> float:
        """Seconds between a request's tokens where the batch stays full, prompts of others among them."""
        return self._of_a_request[1]

    @property
    def batch_in_flight(self) -> int:
        """Requests that run at once on all replicas."""
        return self.job.batch * self.plan.dp

    @property
    def prefill_tokens_per_second(self) -> float:
        """Input tokens a second while prefilling, all replicas."""
        return self.batch_in_flight * self.job.input_tokens / self.ttft_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Output tokens a second while decoding, all replicas."""
        return self.batch_in_flight / self.tpot_seconds if self.tpot_seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Requests finished a second, all replicas: whole sequences, images or fields of a model run in one pass."""
        return self.batch_in_flight / self.request_seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens a second over whole requests, prefill included, all replicas."""
        return self.batch_in_flight * self.job.output_tokens / self.request_seconds

    @property
    def pipelined_decode_tokens_per_second(self) -> float:
        """Output tokens a second while decoding with a batch in every pipeline stage."""
        slowest = self.evaluation.decode.slowest_stage
        return self.batch_in_flight / slowest if slowest else 0.0

    def _usd(self, seconds: float, tokens: float) -> float | None:
        price = self.case.cluster.usd_per_device_hour
        return None if price is None or not tokens else price * self.plan.num_devices / 3600 * seconds / tokens * 1e6

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """Dollars per million output tokens, the whole request charged to them; None without a price or output."""
        return self._usd(self.request_seconds, self.batch_in_flight * self.job.output_tokens)

    @property
    def usd_per_million_input_tokens(self) -> float | None:
        """Dollars per million input tokens, by the prefill's share of the time; None without a price."""
        return self._usd(self.ttft_seconds, self.batch_in_flight * self.job.input_tokens)

    @cached_property
    def traced(self) -> BatchCost[Traced]:
        """The same evaluation with every number recording its arithmetic."""
        with tracing():
            return evaluate(self.case, sizes_of(self.case.model, self.plan, self.job, self.case.domains))

    @typed
    def explain(self, what: str = "ttft") -> Traced:
        """Return "ttft", "tpot", "request", "memory" or "kv_cache" as a number that opens; else raise `InputError`."""
        cost = self.traced
        heaviest = cost.memory[self.evaluation.memory.index(self.memory)]
        numbers: dict[str, Any] = {
            "ttft": cost.prefill.seconds,
            "tpot": cost.decode.seconds,
            "request": cost.request_seconds,
            "memory": heaviest.needed,
            "kv_cache": heaviest.kv_cache,
        }
        if what not in numbers:
            rule, remedy = "is not a number that can be explained", "use one of " + ", ".join(numbers)
            raise InputError([Problem("what", what, rule, remedy)])
        return cast(Traced, numbers[what])

    @property
    def interval(self) -> dict[str, tuple[float, float]]:
        """10 to 90 % intervals of the headlines, from published batches on comparable devices and engines."""
        return {name: (low, high) for name, (low, _, high) in self._intervals.items()}

    @property
    def typical(self) -> dict[str, float]:
        """The headlines in the middle of published batches: predictions times the median of measured over predicted."""
        return {name: typical for name, (_, typical, _) in self._intervals.items()}

    def _cache_tokens_where(self, factor: float) -> float:
        """Tokens of cache where the bytes beside it are so many times what is predicted."""
        return self.kv_cache_tokens * max(0.0, 1 - factor * (1 - self.cache_share)) / self.cache_share

    @cached_property
    def _intervals(self) -> dict[str, tuple[float, float, float]]:
        known, intervals = self.conditions, {}
        for name in ("ttft_seconds", "tpot_seconds", "request_seconds"):
            value, band = getattr(self, name), band_of(name, known)
            intervals[name] = value * band.low, value * band.typical, value * band.high
        if self.kv_cache_tokens and not states_bytes(self.job):
            band = beside_cache_band(self.case, self.evaluation.family)
            low, typical, high = map(self._cache_tokens_where, (band.high, band.typical, band.low))
            intervals["kv_cache_tokens"] = low, typical, high
        rate, band = self.output_tokens_per_second, band_of("request_seconds", known)
        intervals["output_tokens_per_second"] = rate / band.high, rate / band.typical, rate / band.low
        costs = ("usd_per_million_output_tokens", "request_seconds"), ("usd_per_million_input_tokens", "ttft_seconds")
        for name, over in costs:
            if price := getattr(self, name):
                low, typical, high = (bound / getattr(self, over) for bound in intervals[over])
                intervals[name] = price * low, price * typical, price * high
        return intervals

    @property
    def conditions(self) -> Conditions:
        """What decides how far published batches like this one were off."""
        return conditions_of(self.case, self.evaluation.family)

    def own_values(self) -> dict[str, Any]:
        """Return what follows from the report alone as plain values; None where a price is not known."""
        names = (
            "fits", "chance_to_fit", "short_by_bytes", "dominant", "ttft_seconds", "tpot_seconds", "request_seconds",
            "request_ttft_seconds", "request_tpot_seconds",
            "output_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second",
            "pipelined_decode_tokens_per_second", "samples_per_second", "weights_bytes_per_gpu",
            "kv_cache_bytes_per_gpu", "kv_cache_budget_bytes_per_gpu", "kv_cache_tokens", "max_concurrency",
            "usd_per_million_output_tokens", "usd_per_million_input_tokens",
        )  # fmt: skip
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        if not self.job.output_tokens:
            record["tpot_seconds"] = record["request_tpot_seconds"] = None
        wanted = ("largest_prefill_batch", "largest_decode_batch", "longest_context")
        record.update({name: getattr(self.capacity, name) for name in wanted})
        record["memory"] = memory_tree(self)
        record["time"] = {"prefill": time_tree(self.evaluation.prefill), "decode": time_tree(self.evaluation.decode)}
        record["weights"], record["compute"] = self.case.format.name, self.case.compute
        record["assumptions"] = list(self.assumptions)
        return record


def memory_tree(report: InferReport) -> dict[str, Any]:
    """Return bytes of every distinct stage by category, and those of the tightest one."""

    def tree(memory: StageBytes[float]) -> dict[str, float]:
        parts = {name: float(getattr(memory, name)) for name in CATEGORIES}
        return {**parts, "needed_bytes": float(memory.needed), "limit_bytes": float(memory.limit)}

    host = report.on_host
    return {
        "peak_bytes": float(report.memory.needed),
        "limit_bytes": float(report.memory.limit),
        "stages": [tree(memory) for memory in report.on_devices],
        "host": None if host is None else tree(host),
    }


def time_tree(cost: StepCost[float]) -> dict[str, Any]:
    """Return seconds of a phase: operators, exposed messages and overhead, less `overlapped`, add up to them."""
    rows = {a: {"exposed": float(s), "hidden": float(cost.hidden.get(a, 0.0))} for a, s in cost.exposed.items()}
    axes = {axis: row for axis, row in rows.items() if any(row.values())}
    return {
        "seconds": float(cost.seconds),
        "operators": {name: float(s) for name, s in cost.operators.items()},
        "axes": axes,
        "overhead": float(cost.overhead),
        "overlapped": float(cost.overlapped),
    }


@typed
def infer(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    job: Serving,
    options: ServingOptions = ServingOptions(),  # noqa: B008 (frozen)
) -> InferReport:
    """Return memory, time and cost of one static batch; raises `InputError` with every problem of the input.

    >>> from shardwise.hardware import Cluster
    >>> from shardwise.models import load_model
    >>> job = Serving(batch=8, input_tokens=1024, output_tokens=128)
    >>> report = infer(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), Plan(), job)
    >>> report.fits, round(report.tpot_seconds * 1000, 1) > 4.8
    (True, True)
    """
    question = ServingQuestion(
        model=model, cluster=cluster, plan=plan, job=job, engine=options.engine, efficiencies=options.efficiencies
    )
    case, notes = complete(question)
    evaluation: BatchCost[float] = evaluate(case, sizes_of(case.model, case.plan, case.job, case.domains))
    report = InferReport(case=case, evaluation=evaluation, assumptions=())
    check_finite({"request_seconds": report.request_seconds, "weights_bytes_per_gpu": report.weights_bytes_per_gpu})
    if 0 < (most := report.most_started) < (asked := case.profiled.sequences):
        notes += (f"{case.engine.brand} needs --max-sequences {most}: {asked:,} are more than its blocks of states",)
    notes += overstated(case, report.kv_cache_budget_bytes_per_gpu)
    notes_of = (*model.assumptions, *cluster.assumptions, *notes, *evaluation.notes)
    return replace(report, assumptions=tuple(dict.fromkeys(notes_of)))
