"""The answer about one training plan: does it fit, how long is a step, what does it cost, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwise.cost import Conditions
from shardwise.errors import InputError, Problem, check_finite
from shardwise.field_types import typed
from shardwise.hardware import Cluster
from shardwise.ledger.traced import Traced, leaf, named, tracing
from shardwise.models import Model
from shardwise.notebook import Card
from shardwise.plans import Plan, Training, default_stack, filling, sharding_stack
from shardwise.plans.laws import stack_problems
from shardwise.records import dataclass, replace
from shardwise.training import _headlines
from shardwise.training._assumed import stated
from shardwise.training._case import TrainingCase, TrainingOptions, stages_of
from shardwise.training._changes import Change, changes_of, least_recompute, likely, settled
from shardwise.training._communicators import outside_bytes
from shardwise.training._evaluate import Evaluation, PricedBlocks, evaluate, hosted_of, memory_of
from shardwise.training._framework_bytes import reserved_bytes
from shardwise.training._parts import StageMemory
from shardwise.training._resolve import Question, complete
from shardwise.training._savers import MemorySaver, proposals, savers_of, surprises_of
from shardwise.training._sizes import leaves, sizes_of
from shardwise.training._tuning import TuningSummary, tuning_summary
from shardwise.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from shardwise.training._timeline import StepTimeline

HEADLINES = ("step", "memory", "tokens_per_second_per_gpu", "mfu", "hfu")
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "recomputed", "buffers")


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainReport(Card):
    """Memory, time and cost of one training plan. Build one with `train`; plans beside it share what is `priced`."""

    case: TrainingCase
    evaluation: Evaluation[float]
    assumptions: tuple[str, ...]
    generation: _headlines.Generation = _headlines.Generation()
    priced: PricedBlocks | None = field(default=None, repr=False, compare=False)
    finish: Callable[[TrainReport], TrainReport] | None = field(default=None, repr=False, compare=False)
    """What adds rollouts to the answers about plans beside this one, which are judged with them as it is."""

    def __repr__(self) -> str:
        """Return the verdict in one line, as a notebook shows it."""
        where = f"{self.case.model.name} on {self.plan.num_devices} x {self.case.cluster.device.name}"
        fits = f"{'fits' if self.fits else 'does not fit'}, {show_bytes(self.device_bytes)}"
        return f"<TrainReport {where}: {fits}, {show_seconds(self.step_seconds)} a step, MFU {self.mfu:.1%}>"

    @property
    def plan(self) -> Plan:
        """The complete plan."""
        return self.case.plan

    @property
    def job(self) -> Training:
        """The complete job."""
        return self.case.job

    @cached_property
    def unlaunched(self) -> tuple[Problem, ...]:
        """What of the plan its framework cannot launch; empty where it can."""
        return stack_problems(self.case.stack, self.plan, **self.case.job_words)

    @cached_property
    def peak_stage(self) -> int:
        """Index of the run of stages with the highest peak."""
        peaks = [reserved_bytes(self.case.stack, m) for m in self.evaluation.memory]
        return peaks.index(max(peaks))

    @property
    def memory(self) -> StageMemory[float]:
        """Bytes of the heaviest stage."""
        return self.evaluation.memory[self.peak_stage]

    @property
    def peak_moment(self) -> str:
        """The moment of the step at which the heaviest stage peaks."""
        moments = self.memory.moments
        return max(moments, key=lambda name: moments[name])

    @property
    def allocated_bytes(self) -> float:
        """Peak bytes of tensors on the heaviest rank (torch.cuda.max_memory_allocated)."""
        return self.evaluation.peak + self.case.workspace_bytes

    @property
    def reserved_bytes(self) -> float:
        """What the caching allocator holds from the driver (torch.cuda.max_memory_reserved)."""
        return self.evaluation.needed - outside_bytes(self.case.stack, self.case.cluster, self.evaluation.sizes)

    @property
    def device_bytes(self) -> float:
        """What the device shows: reserved, the context and communicator buffers."""
        return self.evaluation.needed + self.evaluation.resident

    @property
    def host_bytes(self) -> float:
        """What lies in the host's memory for a device, pages included that pass through it."""
        return hosted_of(self.evaluation.stages, self.evaluation.memory) + self.evaluation.moved

    @cached_property
    def verdict(self) -> _headlines.Verdict:
        """Whether the plan fits the device."""
        cluster, sizes = self.case.cluster, {name: getattr(self.memory, name) for name in CATEGORIES}
        limit = cluster.device.usable_memory_bytes
        host = self.host_bytes * min(cluster.devices_per_node, cluster.num_devices)
        return _headlines.Verdict(
            fits=self.device_bytes <= limit and not 0 < cluster.host_memory_bytes < host,
            host_limit_bytes=cluster.host_memory_bytes,
            host_needed_bytes=host,
            limit_bytes=limit,
            needed_bytes=self.device_bytes,
            required_bytes=self.evaluation.required,
            dominant=max(sizes, key=lambda n: sizes[n]),
        )

    @property
    def fits(self) -> bool:
        """Whether the plan fits the device, and the engine of its rollouts where that is timed."""
        return self.verdict.fits and self.generation.fits

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.evaluation.step.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens a second and device."""
        return self.job.tokens_per_step / self.step_seconds / self.plan.num_devices

    @cached_property
    def model_flops_per_token(self) -> float:
        """Model FLOPs a token, attention over the full square (PaLM appendix B)."""
        return _headlines.model_flops_per_token(self.case)

    @cached_property
    def causal_flops_per_token(self) -> float:
        """Model FLOPs a token, attention over what the mask leaves (Megatron-LM today)."""
        return _headlines.model_flops_per_token(self.case, "masked")

    @cached_property
    def hardware_flops_per_token(self) -> float:
        """FLOPs a token that are executed by convention: model FLOPs and the recomputed forward passes."""
        return self.model_flops_per_token + _headlines.recomputed_flops_per_token(self.case)

    @property
    def model_flops_per_second_per_gpu(self) -> float:
        """Model FLOP/s on each device."""
        return self.model_flops_per_token * self.tokens_per_second_per_gpu

    def _share(self, flops_per_token: float) -> float:
        peak = self.case.cluster.device.peak_flops(self.case.recipe.precision.compute)
        return flops_per_token * self.tokens_per_second_per_gpu / float(peak)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the dense peak of the compute type."""
        return self._share(self.model_flops_per_token)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation, recompute counted."""
        return self._share(self.hardware_flops_per_token)

    @cached_property
    def tuning(self) -> TuningSummary | None:
        """What a fine-tuning trains; None where all weights do."""
        return tuning_summary(self.case.model, self.job, self.case.stack)

    @cached_property
    def phases(self) -> tuple[_headlines.Phase, ...]:
        """The phases of a step of preferences or rewards, none of next tokens."""
        return _headlines.phases_of(self.case, self.evaluation)

    @cached_property
    def goodput(self) -> float:
        """Share of time that trains: checkpoints and the work lost to failures taken off."""
        return _headlines.goodput_of(self.job, self.plan.num_devices + self.generation.devices)

    @property
    def whole_step_seconds(self) -> float:
        """Seconds of a step with what an engine generates for it, one after the other as on-policy training has it."""
        return self.generation.seconds + self.step_seconds

    @property
    def training_seconds(self) -> float:
        """Seconds for the token budget, goodput included; 0 without a budget."""
        steps = self.job.run_tokens / self.job.tokens_per_step
        return steps * self.whole_step_seconds / self.goodput

    @property
    def device_hours(self) -> float:
        """Device-hours for the token budget."""
        return self.training_seconds / 3600 * (self.plan.num_devices + self.generation.devices)

    @property
    def usd(self) -> float | None:
        """Dollars for the token budget, None without a price."""
        price = self.case.cluster.usd_per_device_hour
        return None if price is None else self.device_hours * price

    @cached_property
    def traced(self) -> Evaluation[Traced]:
        """The same evaluation with every number recording its arithmetic."""
        with tracing():
            stages: Any = stages_of(self.case)
            return evaluate(self.case, sizes_of(self.plan, self.job.global_batch, self.case.domains), stages)

    @cached_property
    def traced_memory(self) -> tuple[StageMemory[Traced], ...]:
        """The memory of the stages with every number recording its arithmetic, from the blocks of the model on."""
        with tracing():
            sizes = sizes_of(self.plan, self.job.global_batch, self.case.domains)
            stages, parts = self.evaluation.stages, self.evaluation.parts
            shared = tuple(replace(one, elements=leaves(one.elements)) for one in parts.shared)
            blocks: Any = replace(leaves(replace(parts, shared=())), shared=shared)
            return memory_of(self.case, sizes, blocks, leaves(stages))

    @cached_property
    def interval(self) -> dict[str, tuple[float, float]]:
        """10 to 90 % intervals of the headlines, from published runs of comparable devices and models."""
        return self.interval_for(False)

    def interval_for(self, assumed: bool) -> dict[str, tuple[float, float]]:
        """Return 10 to 90 % intervals; wider ones where fields of the plan that matter were assumed."""
        return {name: (low, high) for name, (low, _, high) in self._intervals(assumed).items()}

    @cached_property
    def typical(self) -> dict[str, float]:
        """The headlines in the middle of published runs: predictions times the median of measured over predicted."""
        return {name: typical for name, (_, typical, _) in self._intervals(False).items()}

    def _intervals(self, assumed: bool) -> dict[str, tuple[float, float, float]]:
        headlines = {name: getattr(self, name) for name in (*_headlines.GROWING, *_headlines.SHRINKING, "device_bytes")}
        headlines |= {"memory.peak_bytes": self.allocated_bytes, "required_bytes": self.evaluation.required}
        return _headlines.intervals(headlines, self.conditions_for(assumed), self.case, self._least_seconds)

    @cached_property
    def conditions(self) -> Conditions:
        """What decides how far published runs like this one were off."""
        hosts = _headlines.host_range(self.case, self.evaluation, self.priced)
        return _headlines.conditions(self.case, self.evaluation.rates.family, hosts)

    def conditions_for(self, assumed: bool) -> Conditions:
        """Return what decides how far published runs were off; `assumed`: fields of the plan that matter were."""
        return self.conditions.also("assumed fields") if assumed else self.conditions

    @cached_property
    def _least_seconds(self) -> float:
        ideal = replace(self.case, efficiencies=_headlines.IDEAL)  # no run is quicker
        return _headlines.seconds_elsewhere(ideal, self.evaluation, self.priced)

    @property
    def chance_to_fit(self) -> float:
        """Chance that the device has what is required, as published runs were off; 0 where the host lacks some."""
        return self.verdict.chance(self.case.memory_band)

    @typed
    def explain(self, what: str = "step") -> Traced:
        """Return a headline as a number that opens: one of `HEADLINES`; raises `InputError` for another name.

        >>> from shardwise.hardware import Cluster
        >>> from shardwise.models import load_model
        >>> job = Training(seq_len=1024, global_batch=8)
        >>> report = train(load_model("gpt2"), Cluster.parse("8xa100-sxm-80gb"), Plan(dp=0), job)
        >>> float(report.explain("step")) == report.step_seconds
        True
        """
        if what not in HEADLINES:
            rule, remedy = "is not a number that can be explained", "use one of " + ", ".join(HEADLINES)
            raise InputError([Problem("what", what, rule, remedy)])
        step, peak = self.traced.step.total, self.traced.peak
        if what in ("step", "memory"):
            return step if what == "step" else peak
        with tracing():
            devices = leaf("devices", self.plan.num_devices)
            tokens = leaf("tokens of a step", self.job.tokens_per_step) / (step * devices)
            tokens = named(tokens, "tokens a second and device")
            if what == "tokens_per_second_per_gpu":
                return tokens
            per_token = {"mfu": self.model_flops_per_token, "hfu": self.hardware_flops_per_token}[what]
            peak_flops = float(self.case.cluster.device.peak_flops(self.case.recipe.precision.compute))
            achieved = named(
                leaf("FLOPs a token", per_token, "PaLM, arXiv:2204.02311, appendix B") * tokens, "FLOP/s achieved"
            )
            return named(achieved / leaf("peak FLOP/s", peak_flops, "datasheet, dense"), what)

    def timeline(self) -> StepTimeline:
        """Return one step as it runs, chunk by chunk, in seconds; raises `InputError` where there are too many chunks.

        >>> from shardwise.hardware import Cluster
        >>> from shardwise.models import load_model
        >>> plan, job = Plan(pp=4, dp=0), Training(seq_len=1024, global_batch=16)
        >>> timeline = train(load_model("gpt2"), Cluster.parse("4xa100-sxm-80gb"), plan, job).timeline()
        >>> abs(timeline.difference) < timeline.tolerance
        True
        """
        from shardwise.training._timeline import timeline_of

        return timeline_of(self.case, self.evaluation)

    @cached_property
    def savers(self) -> tuple[MemorySaver, ...]:
        """Every single change that may take less memory, evaluated: bytes saved, seconds added, or the rule broken."""
        return savers_of(self, self._asked_again)

    @cached_property
    def proposals(self) -> tuple[MemorySaver, ...]:
        """Savers together that fit, the quickest first; the one that needs least where none fits."""
        return proposals(self, self._asked_again)

    @cached_property
    def surprises(self) -> tuple[str, ...]:
        """What of a fine-tuning takes memory that its users do not expect."""
        return surprises_of(self, asked_again)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Single-field changes of a plan that does not fit, with less memory, those that fit first."""
        return () if self.fits else changes_of(self, lambda case: self._finished(report_of(case, (), self.priced)))

    def _asked_again(self, case: TrainingCase) -> TrainReport:
        return self._finished(asked_again(case))

    def _finished(self, report: TrainReport) -> TrainReport:
        """Return the answer about a plan beside this one, with the rollouts of its steps where this one has them."""
        return report if self.finish is None else self.finish(report)


def report_of(case: TrainingCase, notes: tuple[str, ...], priced: PricedBlocks | None = None) -> TrainReport:
    """Return the report of a complete case; `priced` has blocks of other plans of the question."""
    whole = evaluate(case, sizes_of(case.plan, case.job.global_batch, case.domains), stages_of(case), priced)
    return TrainReport(case=case, evaluation=whole, assumptions=notes, priced=priced)


def asked_again(case: TrainingCase) -> TrainReport:
    """Return the report of a case whose plan and job have changed; beside stated accumulation the batch follows."""
    options = TrainingOptions(
        stack=case.stack, efficiencies=case.efficiencies, accumulation=case.accumulation, overlap=case.overlap
    )
    job = replace(case.job, global_batch=0) if case.batch_follows else case.job
    return train(case.model, case.cluster, case.plan, job, options)


@typed
def train(
    model: Model, cluster: Cluster, plan: Plan, job: Training, options: TrainingOptions | None = None
) -> TrainReport:
    """Return memory, time and cost of one training plan; raises `InputError` with every problem of the input.

    >>> from shardwise.hardware import Cluster
    >>> from shardwise.models import load_model
    >>> model, cluster = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    >>> report = train(model, cluster, Plan(dp=0, sharding="fsdp"), Training(seq_len=4096, global_batch=64))
    >>> report.plan.dp
    8
    """
    risk = (options := options or TrainingOptions()).risk
    own = options.stack or default_stack(filling(plan, cluster.num_devices), job.adapter, job.method)
    stack = sharding_stack(own, plan.sharding)
    if plan.recompute == "auto":
        options = replace(options, stack=stack)
        least = least_recompute(plan, model, stack, risk, lambda p: train(model, cluster, p, job, options))
        return replace(least, assumptions=(settled(least.plan, likely(least, risk), risk), *least.assumptions))
    model, priced, sequence = _headlines.with_values(model, job), PricedBlocks(), plan.sequence_parallel
    batches = bool(plan.micro_batch), bool(job.global_batch)

    def case(p: Plan, j: Training) -> TrainingCase:
        return TrainingCase(
            model=model, cluster=cluster, job=j, stack=stack, plan=p, efficiencies=options.efficiencies,
            overlap=options.overlap, sequence_parallel=sequence, accumulation=options.accumulation,
            stated_batches=batches,
        )  # fmt: skip

    def seconds(p: Plan, j: Training) -> float | None:
        known_floor = report_of(case(p, j), (), priced)
        return known_floor.step_seconds if likely(known_floor, risk) else None

    asked = Question(model=model, cluster=cluster, plan=plan, job=job, stack=stack, accumulation=options.accumulation)
    plan, job, notes = complete(replace(asked, risk=risk), seconds)
    report = report_of(case(plan, job), (), priced)
    check_finite({"step_seconds": report.step_seconds, "device_bytes": report.device_bytes})
    rates, network = report.evaluation.rates.assumptions, report.evaluation.network.assumptions
    noted = (*model.assumptions, *cluster.assumptions, *notes, *stated(report.case), *rates, *network)
    if report.host_bytes and not cluster.host_memory_bytes:
        needed = show_bytes(report.verdict.host_needed_bytes)
        noted = (*noted, f"host_memory: not known, {needed} on the host of a node are taken to be there")
    noted = (*noted, *_headlines.launch_notes(report.case, report.evaluation))
    return replace(report, assumptions=tuple(dict.fromkeys(noted)))
