"""From a row of a training file to a prediction: the plan, the job and the stack that the row states."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.errors import Known
from shardwise.hardware import Cluster
from shardwise.measured._comparison import Prediction
from shardwise.measured._context import Context, cluster_of, with_rates
from shardwise.measured._frameworks import Framework, adjusted, framework_of, offload_bytes_per_second
from shardwise.measured._record import Record, refuse
from shardwise.measured._training_plan import (
    dropout_of,
    effort_of,
    global_batch_of,
    named_stack,
    objective_of,
    optimizer_of,
    optimizer_rank_of,
    pipeline_runs_of,
    plan_of,
    precision_of,
    recompute_unknown,
    recomputed,
)
from shardwise.measured._training_tuning import (
    MEMORY,
    has_natural_lengths,
    is_tuned,
    kept_mean,
    sorted_by_length,
    tuning_fields,
    with_length,
    with_own_targets,
)
from shardwise.models import Model
from shardwise.ops import train_flops
from shardwise.plans import Plan, Stack, Training, default_stack, find_stack, usual_recompute, vendor_stack
from shardwise.records import dataclass, replace
from shardwise.training import StageMemory, TrainingOptions, TrainReport, outside_bytes, reserved_bytes, train

# Cells that decide a prediction; rows that agree in them share it.
SETTINGS = (
    *("model", "device", "num_gpus", "gpus_per_node", "inter_node", "seq_len", "micro_batch", "global_batch", "tp"),
    *("sp", "cp", "cp_kind", "pp", "vpp", "dp", "ep", "etp", "sharding", "recompute", "recompute_detail"),
    *("compute_dtype", "param_dtype", "grad_dtype", "attention_kernel", "optimizer", "master_weights", "finetune"),
    *("lora_rank", "offload", "framework", "stack", "precision", "notes"),
    *("tuning", "source", "citation"),
)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The report of one configuration, and what had to be assumed for it."""

    report: TrainReport
    assumed: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the configuration fits its device."""
        return self.report.device_bytes <= self.report.case.cluster.device.usable_memory_bytes

    def answer(self, record: Record) -> Prediction:
        """Return the predicted value of a row's metric, its interval and what was assumed."""
        own = Record(record.row)
        value = value_of(own, self.report)
        interval = interval_of(own, self.report, value, self.assumed)
        assumed = tuple(dict.fromkeys((*self.assumed, *own.assumed)))
        known = self.report.conditions_for(any(one.startswith(WEIGHTY) for one in self.assumed))
        return Prediction(
            value=value,
            interval=interval,
            assumed=assumed,
            fits=self.fits,
            conditions=known,
            case=self.report.case,
        )


class TrainingRows:
    """Predicts rows of training files; rows of one configuration share a prediction."""

    def __init__(self) -> None:
        self._known = Known[Predicted]()

    def __call__(self, record: Record, context: Context) -> Prediction:
        """Return the predicted value of a row, its interval and what was assumed."""
        key = (*(record.text(name) for name in ("case_id", *SETTINGS)), self.asked(record))
        return self._known.of(key, lambda: self.predict(record, context)).answer(record)

    def asked(self, record: Record) -> str:
        """Return what a row measures where the prediction of its configuration depends on it, empty elsewhere."""
        metric = record.text("metric")
        if has_natural_lengths(record):
            return f"{metric} {record.text('memory_kind')}"
        return metric if metric == "fits" else ""

    def predict(self, record: Record, context: Context) -> Predicted:
        """Return the prediction of a row's configuration; raises `InputError` with the reason where there is none."""
        record = with_length(record.completed())
        question = question_of(record, context)
        report = report_of(record, question)
        return Predicted(report, tuple(dict.fromkeys((*question.notes, *record.assumed))))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingQuestion:
    """What a row asks `train`: model, cluster, plan, job and stack; its framework, and notes on what was taken.

    `table` is what is known of frameworks.
    """

    model: Model
    cluster: Cluster
    plan: Plan
    job: Training
    stack: Stack
    framework: Framework
    notes: tuple[str, ...]
    table: Mapping[str, Any]

    def train(self, plan: Plan) -> TrainReport:
        """Return the report of a plan."""
        # Whoever published a run had seen what fits.
        return train(self.model, self.cluster, plan, self.job, TrainingOptions(stack=self.stack, risk=0.0))

    def filled(self, plan: Plan) -> Plan:
        """Return the plan with the largest micro-batch that fits."""
        return replace(plan, micro_batch=self.train(plan).plan.micro_batch)

    @property
    def offloads(self) -> bool:
        """Whether the stack's recipes offload activations rather than run layers again: where the host is near."""
        device = self.cluster.device
        near = device.knows("host_bytes_per_second") and device.host_bytes_per_second > offload_bytes_per_second(
            self.table
        )
        return bool(self.stack.recompute_steps) and near

    def least(self, plan: Plan) -> TrainReport:
        """Return the report with the least recompute that fits, or without any where recipes offload instead."""
        report = self.train(replace(plan, recompute="auto"))
        return self.train(plan) if self.offloads and report.plan.recompute == "full" else report


def question_of(record: Record, context: Context) -> TrainingQuestion:
    """Return what a row asks; raises `InputError` where it does not say enough, or what is not modelled."""
    _check(record)
    table, model = context.frameworks, context.model_of(record)
    device, notes = context.device(record.text("device"))
    if record.text("metric") in MEMORY and not device.matrix_flops:
        device, note = with_rates(device)
        notes = (*notes, note)
    framework = framework_of(table, record.text("framework"), record.row)
    if not framework.known and not record.says("stack"):
        record.rule_value("framework")
    cluster = cluster_of(record, device, notes)
    plan = plan_of(record, model, framework, cluster.devices_per_node)
    usual = framework.stack or vendor_stack(cluster.device.vendor) or default_stack(Plan(sharding=plan.sharding))
    stack = named_stack(record, usual, model, table)
    precision = record.text("precision") or precision_of(record, stack, set(device.matrix_flops), table)
    method, reference = objective_of(record)
    job = Training(
        seq_len=int(record.positive("seq_len")),
        global_batch=global_batch_of(record, plan, cluster.num_devices),
        precision=precision,
        optimizer=optimizer_of(record),
        optimizer_rank=optimizer_rank_of(record),
        method=method,
        reference=reference,
        dropout=dropout_of(record, model, stack, table),
        tuning=effort_of(record),
        attention_density=record.noted("attention_density") or 1.0,
        **(tuning_fields(record, model) if is_tuned(record) else {}),
    )
    known = adjusted(table, find_stack(stack), record.row)
    job = with_own_targets(record, model, job, known)
    runs = pipeline_runs_of(record, plan, cluster.num_devices)
    return TrainingQuestion(
        model=model,
        cluster=cluster,
        plan=plan,
        job=job,
        stack=replace(known, settings=replace(known.settings, pipeline_runs=runs)),
        framework=framework,
        notes=notes,
        table=table,
    )


def report_of(record: Record, question: TrainingQuestion) -> TrainReport:
    """Return the report of a row with the recompute that it states, or, where that is unknown, is taken for it."""
    plan, unknown = question.plan, recompute_unknown(record, question.framework)
    kept = question.stack.usual_offload
    if kept and not record.says("offload") and record.text("recompute") == "full":
        record.assume(f"offload {', '.join(kept)}: what {question.stack.name} does unless told")
        plan = replace(plan, offload=kept)
    if not plan.micro_batch:
        plan = question.filled(replace(plan, recompute="full") if unknown else plan)
    if not unknown:
        return question.train(recomputed(record, plan, question.model, question.stack))
    if record.text("metric") == "fits":
        record.rule_value("verdict")
        return question.train(replace(plan, recompute="none"))
    usual = usual_recompute(question.stack, question.job.base)
    if usual != "none" and not record.says("recompute"):
        record.assume(f"recompute {usual}: what {question.stack.name} does unless told")
        return question.train(replace(plan, recompute=usual, offload=plan.offload or question.stack.usual_offload))
    record.rule_value("recompute")
    report = question.least(plan)
    if question.offloads and not report.fits:
        record.assume("activations over the device's memory go to the host beside compute, as in NVIDIA's recipes")
    if question.framework.whole_batch and not report.fits and not record.says("micro_batch"):
        record.assume("what the device does not hold of a whole batch goes to the host, as in the framework's recipes")
    return report


def _check(record: Record) -> None:
    """Raise where a row describes what the package does not model."""
    if not record.whole("num_gpus"):
        raise refuse("num_gpus", None, "is not stated")


_NAMES = {
    "step_time": "step_seconds",
    "micro_step_time": "step_seconds",
    "gpu_hours": "step_seconds",
    "tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "flops_per_second_per_gpu": "tokens_per_second_per_gpu",
    "mfu": "tokens_per_second_per_gpu",
    "hfu": "tokens_per_second_per_gpu",
    "peak_memory": "memory.peak_bytes",
    "memory_after_step": "memory.peak_bytes",
    "memory_avg": "memory.peak_bytes",
    "memory_p99": "memory.peak_bytes",
}


def flops_per_token(record: Record, report: TrainReport) -> float:
    """Return FLOPs a token by the convention that the row's source counts with, or its own number of them."""
    word = record.text("flops_convention")
    if own := re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?) a token", word):
        return float(own[1])
    if word == "hardware_full_attn":
        return report.hardware_flops_per_token
    if word == "model_causal_attn":
        return report.causal_flops_per_token
    if word == "model_masked_attn":
        return train_flops(report.case.model, report.job.seq_len, "model-masked")
    if word == "lora_4n":
        return train_flops(report.case.model, report.job.seq_len, "lora")
    if word in ("", "unknown"):
        record.rule_value("flops_convention")
    elif word != "model_full_attn":
        raise refuse("flops_convention", word, "is not a convention of pre-training")
    return report.model_flops_per_token


def stages_seen(record: Record, report: TrainReport) -> tuple[StageMemory[float], ...]:
    """Return the memory of the stages whose ranks were measured."""
    scope, stages = record.text("rank_scope"), report.evaluation.stages
    if scope in ("", "unknown"):
        record.rule_value("rank_scope")
    positions = [float(s.position) for s in stages]
    if scope == "last_rank":
        return (report.evaluation.memory[positions.index(max(positions))],)
    if scope == "rank0":
        return (report.evaluation.memory[positions.index(min(positions))],)
    return report.evaluation.memory


def peak_memory(record: Record, report: TrainReport) -> float:
    """Return the peak in the kind of bytes that were measured: tensors, the allocator's reserve or the device's."""
    kind, stack, scratch = record.text("memory_kind"), report.case.stack, report.case.workspace_bytes
    stages = stages_seen(record, report)
    if kind in ("allocated", "active"):
        return max(float(m.peak) for m in stages) + scratch
    # Before it fails the allocator gives back what is free (CUDACachingAllocator.cpp release_cached_blocks).
    outside = outside_bytes(stack, report.case.cluster, report.evaluation.sizes)
    room = report.case.cluster.device.usable_memory_bytes - outside
    reserved = max(reserved_within(stack, m, room) for m in stages) + scratch * stack.reserved_over_allocated
    if kept_mean(record) > 0:
        record.assume("the loss of the longest sample finds no room in what shorter ones have freed: reserved again")
        reserved = max(reserved, min(reserved + max(float(m.logits) for m in stages), room))
    if kind == "reserved":
        return reserved
    if kind != "nvidia_smi":
        record.rule_value("memory_kind")
    return max(outside, stated_floor(record)) + reserved


def reserved_within(stack: Stack, m: StageMemory[float], room: float) -> float:
    """Return what the caching allocator holds of a run that ran: no more than there is room for, and its tensors."""
    return min(float(reserved_bytes(stack, m)), max(float(m.peak), room))


def stated_floor(record: Record) -> float:
    """Return the bytes that a row says a device held beside the trainer: its context and an engine asleep, else 0.

    >>> stated_floor(Record({"notes": "device floor with the engine asleep 919470080; phase=training"}))
    919470080.0
    """
    match = re.search(r"device floor [a-z ]*(\d+)", record.text("notes"))
    return float(match[1]) if match else 0.0


def memory_after_step(record: Record, report: TrainReport) -> float:
    """Return what stays allocated between steps: weights, optimizer state and gradients that are kept."""
    persistent = report.case.stack.gradients == "persistent"
    lasting = (
        m.weights + m.optimizer + m.framework + m.widened + (m.gradients if persistent else 0.0)
        for m in stages_seen(record, report)
    )
    return float(max(lasting)) + report.case.workspace_bytes


def memory_avg(record: Record, report: TrainReport) -> float:
    """Return what peft's own loop holds when it reads its counter behind a step, on the mean of its steps.

    State and gradients, and the outputs of the last forward pass, which a variable keeps: logits, keys and values
    (github.com/huggingface/peft method_comparison/MetaMathQA/run.py; transformers' use_cache is on).
    """
    if record.text("memory_kind") not in ("allocated", "active"):
        if not sorted_by_length(record):
            rule = "what an allocator holds on the mean is not predicted"
            raise refuse("memory_kind", record.text("memory_kind"), rule)
        return peak_memory(record, report)
    model, tokens = report.case.model, report.job.seq_len * report.plan.micro_batch
    cached = sum(c.heads * c.elements for b in model.layers for m in b.mixers for c in m.caches())
    width = report.case.recipe.precision.activation_bytes
    state = max(float(m.weights + m.optimizer + m.gradients) for m in stages_seen(record, report))
    return state + width * tokens * (model.vocab + cached) + report.case.workspace_bytes


def gpu_hours(record: Record, report: TrainReport) -> float:
    """Return device-hours for the tokens that the notes state."""
    tokens = record.noted("tokens")
    if not tokens:
        raise refuse("notes", "tokens", "the tokens of the run are not stated")
    return tokens / report.tokens_per_second_per_gpu / 3600


def micro_step(record: Record, report: TrainReport) -> float:
    """Return seconds of one micro-batch: those of a step over its micro-batches.

    The median over micro-batches is of one that no update follows, where a step has three or more.
    """
    each = report.job.global_batch / (report.plan.micro_batch * report.plan.dp)
    apart = each > 2 and "median over micro-batches" in record.text("notes")
    return (report.step_seconds - apart * float(report.evaluation.step.optimizer)) / each


_OF: dict[str, Callable[[Record, TrainReport], float]] = {
    "step_time": lambda c, r: r.step_seconds,
    "micro_step_time": micro_step,
    "gpu_hours": gpu_hours,
    "tokens_per_second_per_gpu": lambda c, r: r.tokens_per_second_per_gpu,
    "flops_per_second_per_gpu": lambda c, r: flops_per_token(c, r) * r.tokens_per_second_per_gpu,
    "mfu": lambda c, r: r.mfu * flops_per_token(c, r) / r.model_flops_per_token,
    "hfu": lambda c, r: r.mfu * flops_per_token(c, r) / r.model_flops_per_token,
    "peak_memory": peak_memory,
    "memory_after_step": memory_after_step,
    "memory_avg": memory_avg,
    "memory_p99": peak_memory,
    "fits": lambda c, r: float(r.fits),
}


def value_of(record: Record, report: TrainReport) -> float:
    """Return the predicted value of a row's metric; raises `InputError` where the metric is not predicted."""
    metric = record.text("metric")
    if metric not in _OF:
        raise refuse("metric", metric, "is not a quantity that is predicted")
    return _OF[metric](record, report)


# Assumptions that move a prediction by more than a few per cent.
WEIGHTY = ("recompute:", "micro_batch:", "sharding:", "degrees:", "model_parallel_size:")


def interval_of(
    record: Record, report: TrainReport, value: float, assumed: tuple[str, ...]
) -> tuple[float, float] | None:
    """Return the 10 to 90 % interval of a predicted value, None where its metric has none."""
    name = _NAMES.get(record.text("metric"))
    if name is None:
        return None
    low, high = report.interval_for(any(one.startswith(WEIGHTY) for one in assumed))[name]
    centre = {
        "step_seconds": report.step_seconds,
        "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
        "memory.peak_bytes": report.allocated_bytes,
    }[name]
    return value * low / centre, value * high / centre
