"""From a row of a training file to a prediction: the plan, the job and the stack that the row states."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import cast

from shardwise.hardware import Cluster
from shardwise.models import Model, MoE
from shardwise.plans import Plan, Recompute, Training
from shardwise.plans._laws import module_names
from shardwise.plans._plan import ContextKind, Sharding
from shardwise.training import Options, TrainReport, train
from shardwise.validation._cells import Cells, refuse
from shardwise.validation._frozen import beside, frozen_cells, frozen_recipe, trains_adapters
from shardwise.validation._layers import spread
from shardwise.validation._network import cluster_of
from shardwise.validation._places import Places
from shardwise.validation._rules import Framework, framework_of, words
from shardwise.validation._training_stack import by_operator, dropout_of, named_stack, precision_of, used_stack

# Cells that decide a prediction; rows that agree in them share it.
SETTINGS = (
    *("model", "device", "num_gpus", "gpus_per_node", "inter_node", "seq_len", "micro_batch", "global_batch", "tp"),
    *("sp", "cp", "cp_kind", "pp", "vpp", "dp", "ep", "etp", "sharding", "recompute", "recompute_detail"),
    *("compute_dtype", "param_dtype", "grad_dtype", "attention_kernel", "optimizer", "master_weights", "finetune"),
    *("offload", "framework", "notes"),
)
_TUNED = "seconds of fine-tuning of adapters, or on unpacked samples, are not modelled"
# Modules that Megatron-Bridge's recipes of mixtures run again (perf_recipes/*/recompute_modules), the least first.
_RECIPES = (
    (),
    ("moe_act",),
    ("mla_up_proj", "moe_act"),
    ("mla_up_proj", "moe_act", "layernorm"),
    ("mla_up_proj", "moe_act", "layernorm", "mlp", "shared_experts"),
)
# Bytes a second to the host's memory that only NVLink-C2C has.
_NEAR = 1e11


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
    cluster = cluster_of(cells, device, notes)
    plan = _plan(cells, model, framework, cluster.devices_per_node)
    stack = named_stack(cells, framework, plan.sharding, model)
    precision = frozen_recipe(row) if adapters else precision_of(cells, stack, set(device.matrix_flops))
    job = Training(
        seq_len=int(cells.positive("seq_len")),
        global_batch=_global_batch(cells, plan, cluster.num_devices),
        precision=precision,
        optimizer=_optimizer(cells),
        dropout=dropout_of(cells, model, stack),
    )
    question = Asked(model, cluster, job, Options(stack=used_stack(cells, stack)))
    if not plan.micro_batch:
        plan = question.filled(plan if not _searched(cells) else replace(plan, recompute="full"))
    if _searched(cells) and cells.text("metric") == "fits":
        cells.taken("verdict")
        report = question.train(replace(plan, recompute="none"))
    elif _searched(cells):
        cells.taken("recompute")
        report = question.least(plan)
        if question.offloads and not report.fits:
            cells.assume("activations over the device's memory go to the host beside compute, as in NVIDIA's recipes")
    else:
        report = question.train(_recomputed(cells, plan, model))
    extra = beside(row, report) if adapters else 0.0
    return Predicted(report, tuple(dict.fromkeys((*notes, *cells.assumed, *row.assumed))), extra)


@dataclass(frozen=True, slots=True)
class Asked:
    """What stays the same while recompute is searched."""

    model: Model
    cluster: Cluster
    job: Training
    options: Options

    def train(self, plan: Plan) -> TrainReport:
        """Return the report of a plan."""
        return train(self.model, self.cluster, plan, self.job, self.options)

    def filled(self, plan: Plan) -> Plan:
        """Return the plan with the largest micro-batch that fits."""
        return replace(plan, micro_batch=self.train(plan).plan.micro_batch)

    @property
    def stack(self) -> str:
        """The name of the framework."""
        return self.options.stack if isinstance(self.options.stack, str) else self.options.stack.name

    @property
    def offloads(self) -> bool:
        """Whether NVIDIA's recipes would offload activations rather than run layers again: where the host is near.

        github.com/NVIDIA-NeMo/Megatron-Bridge perf_recipes/llama/gb200: cpu_offloading_num_layers, no recompute.
        """
        device = self.cluster.device
        near = device.knows("host_bytes_per_second") and device.host_bytes_per_second > _NEAR
        return self.stack.startswith("megatron-bridge") and near

    def lighter(self) -> tuple[tuple[Recompute, tuple[str, ...]], ...]:
        """Return what is tried before whole layers: attention's core, or the modules of NVIDIA's recipes."""
        known = module_names(tuple(self.model.kinds))
        if not self.stack.startswith("megatron-bridge") or "moe" not in known:
            return ("none", ()), ("selective", ())
        steps = [tuple(name for name in names if name in known) for names in _RECIPES]
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


def _degree(cells: Cells, name: str) -> int:
    if not cells.says(name):
        cells.taken("degrees")
        return 1
    return max(cells.whole(name), 1)


def _plan(cells: Cells, model: Model, framework: Framework, node: int) -> Plan:
    tp, cp, pp = (_degree(cells, name) for name in ("tp", "cp", "pp"))
    product = int(cells.noted("model_parallel_size"))
    if product > 1 and tp * pp == 1:
        cells.taken("model_parallel_size")
        tp = max(d for d in range(1, min(product, node) + 1) if product % d == 0 and not model_heads(model) % d)
        pp = product // tp
    experts = any(isinstance(b.feed_forward, MoE) for b in model.kinds)
    vpp = _vpp(cells, model, pp)
    plan = Plan(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=0,
        ep=_degree(cells, "ep") if experts else 1,
        etp=_etp(cells, tp) if experts else 1,
        micro_batch=_micro_batch(cells, framework.stack, pp, max(cells.whole("num_gpus") // (tp * cp * pp), 1)),
        sequence_parallel=_sequence_parallel(cells, framework, tp, experts),
        schedule="interleaved" if vpp > 1 else "1f1b",
        cp_kind=_cp_kind(cells, cp),
        sharding=_sharding(cells, framework),
    )
    plan = _shard(cells, plan)
    if model.num_layers % (pp * vpp):
        cells.taken("stage_layers")
        plan = replace(plan, stage_layers=spread(model.num_layers, pp * vpp))
    return plan


def model_heads(model: Model) -> int:
    """Return the query heads of a model, by which tensor parallelism must divide; 1 where it has none."""
    mixers = [m for block in model.kinds for m in block.mixers]
    return next((int(m.heads) for m in mixers if hasattr(m, "heads")), 1)


def _vpp(cells: Cells, model: Model, pp: int) -> int:
    if pp > 1 and not cells.says("vpp"):
        cells.taken("vpp")
    layers = re.fullmatch(r"(\d+) layers?", cells.text("vpp"))  # of a chunk
    stated = round(model.num_layers / (pp * int(layers[1]))) if layers else cells.whole("vpp", 1)
    vpp = max(stated, 1) if pp > 1 else 1
    return vpp if pp * vpp <= model.num_layers or pp * vpp == model.num_layers + 2 else 1


def _etp(cells: Cells, tp: int) -> int:
    if not cells.says("etp") and tp > 1:
        cells.taken("etp")
    return max(cells.whole("etp", 1), 1)


def _micro_batch(cells: Cells, stack: str, pp: int, replicas: int) -> int:
    """Return the micro-batch: the stated one, 1 in a pipeline, 0 for the fastest that fits.

    torchtitan states the batch of a replica and cuts it into as many micro-batches as stages (its
    parallelisms/pipelining_utils.py, 2024-12), as does any source whose pipeline would have one micro-batch.
    """
    stated, batch = cells.whole("micro_batch"), cells.whole("global_batch")
    if not stated:
        cells.taken("micro_batch")
        return 1 if pp > 1 or not batch else 0
    if pp > 1 and stack == "automodel":
        cells.assume("micro_batch: one sequence of the batch of a replica (AutoModel, pp_microbatch_size)")
        return 1
    whole = batch == stated * replicas or stack.startswith("fsdp2")
    if pp > 1 and stated >= pp and stated % pp == 0 and whole:
        cells.assume("micro_batch: the batch of a replica, cut into as many micro-batches as stages")
        return stated // pp
    return stated


def _searched(cells: Cells) -> bool:
    """Return whether the amount of recompute is not told: not stated, or by a policy of its own."""
    if not cells.says("recompute"):
        return True
    stack = framework_of(cells.text("framework"), cells.row).stack
    some = "=custom" in cells.text("recompute_detail") or stack == "fms-fsdp"
    return cells.text("recompute") == "selective" and some


def _sequence_parallel(cells: Cells, framework: Framework, tp: int, experts: bool) -> bool:
    if cells.says("sp"):
        return cells.whole("sp") > 0
    if tp > 1:
        cells.taken("sp")
    # Without it every rank of a tensor-parallel group would route all tokens (Megatron-LM arguments.py).
    return framework.sequence_parallel or (experts and tp > 1)


def _cp_kind(cells: Cells, cp: int) -> ContextKind:
    word = cells.text("cp_kind")
    if cp > 1 and not word:
        cells.taken("cp_kind")
    kind = words("cp_kind").get(word or "ring")
    if kind is None:
        raise refuse("cp_kind", word, "is not a known kind")
    return cast(ContextKind, kind)


def _sharding(cells: Cells, framework: Framework) -> Sharding:
    word = cells.text("sharding")
    if not word:
        cells.taken("sharding")
        return cast(Sharding, framework.sharding)
    found = words("sharding").get(word)
    if found is None:
        raise refuse("sharding", word, "is not a known kind of sharding")
    return cast(Sharding, found)


def _shard(cells: Cells, plan: Plan) -> Plan:
    """Return the plan with the sharding group where it is smaller than the replicas: sharding within, copies across."""
    size, replicas = int(cells.noted("shard_size")), cells.whole("dp") or 0
    if plan.sharding == "hsdp":
        return replace(plan, shard=size or cells.whole("gpus_per_node") or 8)
    if size and replicas and size < replicas and plan.sharding in ("fsdp", "zero1", "distributed-optimizer"):
        return replace(plan, sharding="hsdp" if plan.sharding == "fsdp" else plan.sharding, shard=size)
    return plan


def _optimizer(cells: Cells) -> str:
    word = cells.text("optimizer")
    if not word:
        return cells.taken("optimizer")
    found = words("optimizer").get(word)
    if found is None:
        raise refuse("optimizer", word, "is not modelled")
    return found


def _global_batch(cells: Cells, plan: Plan, devices: int) -> int:
    batch = cells.whole("global_batch")
    if batch:
        return batch
    replicas = max(devices // (plan.tp * plan.cp * plan.pp), 1)
    cells.taken("global_batch")
    return max(plan.micro_batch, 1) * replicas * plan.pp


def _recomputed(cells: Cells, plan: Plan, model: Model) -> Plan:
    """Return the plan with the recompute that a row states."""
    word, each = cells.text("recompute"), -(-model.num_layers // plan.pp)
    if by_operator(cells):
        return replace(plan, recompute="full")
    if word == "selective":
        return _selective(cells, plan)
    if word == "partial":
        cells.assume("recompute of a part of the layers: half of them")
        return replace(plan, recompute="full", recompute_layers=max(1, each // 2))
    if word not in ("none", "full"):
        raise refuse("recompute", word, "is not a known kind of recompute")
    return replace(plan, recompute=cast(Recompute, word))


def _selective(cells: Cells, plan: Plan) -> Plan:
    """Return the plan that runs the named modules again, attention's core where none is named."""
    detail = cells.text("recompute_detail").lower()
    table = words("modules")
    pieces = [p for p in re.split(r"[,;]\s*|\s{2,}", detail) if p]
    if any(p not in table for p in pieces):
        pieces = detail.replace(",", " ").split()
    named = tuple(dict.fromkeys(table[p] for p in pieces if p in table))
    if named in ((), ("core_attn",)):
        return replace(plan, recompute="selective")
    return replace(plan, modules=named)
