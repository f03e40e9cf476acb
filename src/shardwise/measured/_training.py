"""From a row of a training file to a prediction: the plan, the job and the stack that the row states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import Known
from shardwise.hardware import Cluster
from shardwise.measured._comparison import Prediction
from shardwise.measured._context import Context, cluster_of
from shardwise.measured._frameworks import Framework, adjusted, framework_of, offload_bytes_per_second
from shardwise.measured._record import Record, refuse
from shardwise.measured._training_metrics import WEIGHTY, interval_of, value_of
from shardwise.measured._training_plan import (
    dropout_of,
    effort_of,
    global_batch_of,
    method_of,
    named_stack,
    optimizer_of,
    optimizer_rank_of,
    plan_of,
    precision_of,
    recompute_unknown,
    recomputed,
)
from shardwise.measured._training_tuning import is_tuned, natural, tuning_fields, with_length
from shardwise.models import Model
from shardwise.plans import Plan, Stack, Training, find_stack
from shardwise.records import dataclass
from shardwise.training import Options, TrainReport, train

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
        return Prediction(value=value, interval=interval, assumed=assumed, fits=self.fits, conditions=known)


class TrainingRows:
    """Predicts rows of training files; rows of one configuration share a prediction."""

    def __init__(self) -> None:
        self._known = Known[Predicted]()

    def __call__(self, record: Record, context: Context) -> Prediction:
        """Return the predicted value of a row, its interval and what was assumed."""
        key = (*(record.text(name) for name in ("case_id", *SETTINGS)), self.asked(record))
        return self._known.of(key, lambda: self.predict(record, context)).answer(record)

    def asked(self, record: Record) -> str:
        """Return the metric of a row where the prediction of its configuration depends on it, empty elsewhere."""
        metric = record.text("metric")
        return metric if metric == "fits" or natural(record) else ""

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
        return train(self.model, self.cluster, plan, self.job, Options(stack=self.stack))

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
    table, model = context.frameworks, context.model(record.text("model"))
    device, notes = context.device(record.text("device"))
    framework = framework_of(table, record.text("framework"), record.row)
    if not framework.known and not record.says("stack"):
        record.taken("framework")
    cluster = cluster_of(record, device, notes)
    plan = plan_of(record, model, framework, cluster.devices_per_node)
    stack = named_stack(record, framework, plan.sharding, model, table)
    precision = record.text("precision") or precision_of(record, stack, set(device.matrix_flops), table)
    job = Training(
        seq_len=int(record.positive("seq_len")),
        global_batch=global_batch_of(record, plan, cluster.num_devices),
        precision=precision,
        optimizer=optimizer_of(record),
        optimizer_rank=optimizer_rank_of(record),
        method=method_of(record),
        dropout=dropout_of(record, model, stack, table),
        tuning=effort_of(record),
        **(tuning_fields(record, model) if is_tuned(record) else {}),
    )
    return TrainingQuestion(
        model=model,
        cluster=cluster,
        plan=plan,
        job=job,
        stack=adjusted(table, find_stack(stack), record.row),
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
        record.taken("verdict")
        return question.train(replace(plan, recompute="none"))
    usual = question.stack.usual_recompute
    if usual != "none" and not record.says("recompute"):
        record.assume(f"recompute {usual}: what {question.stack.name} does unless told")
        return question.train(replace(plan, recompute=usual, offload=plan.offload or question.stack.usual_offload))
    record.taken("recompute")
    report = question.least(plan)
    if question.offloads and not report.fits:
        record.assume("activations over the device's memory go to the host beside compute, as in NVIDIA's recipes")
    return report


def _check(record: Record) -> None:
    """Raise where a row describes what the package does not model."""
    if not record.whole("num_gpus"):
        raise refuse("num_gpus", None, "is not stated")
