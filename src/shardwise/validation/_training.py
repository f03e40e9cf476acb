"""From a row of a training file to a prediction: the plan, the job and the stack that the row states."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Recompute, Stack, Training, find_stack
from shardwise.plans.laws import module_names
from shardwise.training import Options, TrainReport, train
from shardwise.validation._cells import Cells, refuse
from shardwise.validation._frameworks import (
    adjusted,
    framework_of,
    offload_bytes_per_second,
    recompute_steps,
)
from shardwise.validation._frozen import MEMORY, beside, frozen_cells, frozen_recipe, trains_adapters
from shardwise.validation._network import cluster_of
from shardwise.validation._places import Places
from shardwise.validation._training_plan import global_batch_of, optimizer_of, plan_of, recompute_unknown, recomputed
from shardwise.validation._training_stack import dropout_of, named_stack, precision_of
from shardwise.validation._tuned import tuned

# Cells that decide a prediction; rows that agree in them share it.
SETTINGS = (
    *("model", "device", "num_gpus", "gpus_per_node", "inter_node", "seq_len", "micro_batch", "global_batch", "tp"),
    *("sp", "cp", "cp_kind", "pp", "vpp", "dp", "ep", "etp", "sharding", "recompute", "recompute_detail"),
    *("compute_dtype", "param_dtype", "grad_dtype", "attention_kernel", "optimizer", "master_weights", "finetune"),
    *("offload", "framework", "notes"),
)
_TUNED = "other adapters than LoRA, and seconds on unpacked samples, are not modelled"


@dataclass(frozen=True, slots=True)
class Predicted:
    """The report of one configuration, what had to be assumed for it, and bytes that its adapters add."""

    report: TrainReport
    assumed: tuple[str, ...]
    beside: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the configuration fits its device."""
        return self.report.device_bytes + self.beside <= self.report.case.cluster.device.usable_memory_bytes


def asked(cells: Cells) -> str:
    """Return the metric of a row where the prediction of its configuration depends on it, empty elsewhere."""
    metric = cells.text("metric")
    return metric if metric == "fits" or trains_adapters(cells) else ""


def predict(cells: Cells, places: Places) -> Predicted:
    """Return the prediction of a row's configuration; raises `InputError` with the reason where there is none."""
    if cells.text("case_id") in places.arguments:
        from shardwise.validation._arguments import predict_arguments

        return predict_arguments(cells, places)
    cells = row = cells.completed()
    adapters = trains_adapters(cells)
    if adapters:
        cells = frozen_cells(cells)
    _check(cells)
    model = places.model(cells.text("model"))
    device, notes = places.device(cells.text("device"))
    framework = framework_of(cells.text("framework"), cells.row)
    if not framework.known:
        cells.taken("framework")
    cluster = cluster_of(cells, device, notes)
    plan = plan_of(cells, model, framework, cluster.devices_per_node)
    stack = named_stack(cells, framework, plan.sharding, model)
    precision = frozen_recipe(row) if adapters else precision_of(cells, stack, set(device.matrix_flops))
    job = Training(
        seq_len=int(cells.positive("seq_len")),
        global_batch=global_batch_of(cells, plan, cluster.num_devices),
        precision=precision,
        optimizer=optimizer_of(cells),
        dropout=dropout_of(cells, model, stack),
    )
    question = Question(model, cluster, job, adjusted(find_stack(stack), cells.row))
    report = _report(cells, question, plan, recompute_unknown(cells, framework))
    extra = 0.0
    if adapters and row.text("metric") in MEMORY:
        extra = beside(row, report)
    elif adapters:
        report = tuned(row, report)
    return Predicted(report, tuple(dict.fromkeys((*notes, *cells.assumed, *row.assumed))), extra)


@dataclass(frozen=True, slots=True)
class Question:
    """What stays the same while recompute is searched."""

    model: Model
    cluster: Cluster
    job: Training
    stack: Stack

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
        near = device.knows("host_bytes_per_second") and device.host_bytes_per_second > offload_bytes_per_second()
        return bool(recompute_steps(self.stack.name)) and near

    def lighter(self) -> tuple[tuple[Recompute, tuple[str, ...]], ...]:
        """Return what is tried before whole layers: attention's core, or the modules of the stack's recipes."""
        known, recipe = module_names(tuple(self.model.kinds)), recompute_steps(self.stack.name)
        if not recipe or "moe" not in known:
            return ("none", ()), ("selective", ())
        steps = (tuple(name for name in names if name in known) for names in recipe)
        return tuple(("none", modules) for modules in dict.fromkeys(steps))

    def least(self, plan: Plan) -> TrainReport:
        """Return the report with the least recompute that fits: none, attention's core, then the fewest whole layers.

        Full recompute of every layer where nothing fits.
        """
        for mode, modules in self.lighter():
            report = self.train(replace(plan, recompute=mode, modules=modules))
            if report.fits:
                return report
        if self.offloads:
            return self.train(plan)
        every = self.train(replace(plan, recompute="full"))
        low, high = 0, -(-self.model.num_layers // plan.pp)
        if not every.fits:
            return every
        while high - low > 1:
            middle = (low + high) // 2
            report = self.train(replace(plan, recompute="full", recompute_layers=middle))
            low, high = (low, middle) if report.fits else (middle, high)
            every = report if report.fits else every
        return every


def _report(cells: Cells, question: Question, plan: Plan, unknown: bool) -> TrainReport:
    """Return the report of a plan with the recompute that a row states, or, where that is unknown, is taken for it."""
    if not plan.micro_batch:
        plan = question.filled(replace(plan, recompute="full") if unknown else plan)
    if not unknown:
        return question.train(recomputed(cells, plan, question.model, question.stack))
    if cells.text("metric") == "fits":
        cells.taken("verdict")
        return question.train(replace(plan, recompute="none"))
    cells.taken("recompute")
    report = question.least(plan)
    if question.offloads and not report.fits:
        cells.assume("activations over the device's memory go to the host beside compute, as in NVIDIA's recipes")
    return report


def _check(cells: Cells) -> None:
    """Raise where a row describes what the package does not model."""
    tuned = cells.text("finetune") or "pretrain"
    if tuned not in ("pretrain", "full"):
        raise refuse("finetune", tuned, _TUNED)
    if cells.text("offload") not in ("", "none"):
        raise refuse("offload", cells.text("offload"), "offloading to the host is not modelled")
    if cells.text("optimizer").startswith("paged"):
        raise refuse("optimizer", cells.text("optimizer"), "its state moves to the host, which is not modelled")
    if tuned == "full" and ("mean_tokens_per_sample" in cells.text("notes") or "longest_sample" in cells.text("notes")):
        raise refuse("finetune", tuned, _TUNED)
    if not cells.whole("num_gpus"):
        raise refuse("num_gpus", None, "is not stated")
