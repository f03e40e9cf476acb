"""A complete question about training, what follows from it for every number, and what an answer says it assumed."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Any

from shardwise.cost import WIDE_DTYPES, Band, Efficiencies, family_of, memory_band, typical_slack, typical_waiting
from shardwise.hardware import Cluster
from shardwise.ledger.number import X, above
from shardwise.models import Block, Model
from shardwise.ops import count_parameters
from shardwise.ops.core_kernels import leaves_heads
from shardwise.ops.elementwise import written_in_python
from shardwise.ops.inputs import WIDEST_GROUP
from shardwise.plans import (
    OBJECTIVES,
    Objective,
    Plan,
    Precision,
    Stack,
    Training,
    Tuning,
    find_optimizer,
    find_precision,
    find_rules,
    find_scaling,
    find_sharding,
    layers_of,
    reference_of,
    splits_replicas,
    tuning_of,
)
from shardwise.plans.partition import split_layers
from shardwise.records import dataclass, replace
from shardwise.training._ledger import idle_layers
from shardwise.training._parts import Recipe
from shardwise.training._stages import LayerKind, LayerOrder, Partition, Stages, kinds_of, order_of, runs_of

_FIRST_GROUPS = 2020

ROLLOUTS_LEFT_OUT = "rollouts: left out of time and cost; `train --rollout-prompt-tokens N` times them"


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """Everything structural about a question: what stays the same for all plans of one column."""

    model: Model
    cluster: Cluster
    job: Training
    stack: Stack
    plan: Plan
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    overlap: bool = True
    sequence_parallel: bool = True
    """Whether tensor parallelism was asked to split the sequence too; where tp is 1 the plan says that it does not."""

    def planned(self, plan: Plan, job: Training) -> TrainingCase:
        """Return the case of another plan, and of the job with the batch that the plan deduced."""
        other = replace(self, plan=plan, job=job)
        if replace(job, global_batch=self.job.global_batch) == self.job:
            # What no plan decides is not found again.
            other.__dict__.update({name: getattr(self, name) for name in ("precision", "tuning", "order", "domains")})
        return other

    @cached_property
    def precision(self) -> Precision:
        """The types of each parameter."""
        if self.tuning and not self.job.precision:
            return find_precision(self.stack.frozen_precision or self.stack.precision)
        return find_precision(self.job.precision or self.stack.precision)

    @cached_property
    def recipe(self) -> Recipe:
        """The bytes and updates of each parameter."""
        return Recipe(
            precision=self.precision,
            adapters=self.tuning.precision if self.tuning and self.tuning.adapter else None,
            optimizer=find_optimizer(self.job.optimizer, self.job.optimizer_rank),
            sharding=self.plan.sharding,
            stack=self.stack,
            splits_replicas=splits_replicas(self.plan),
            offload=self.plan.offload,
            slack=self.slack,
            waiting=typical_waiting() if self.is_typical else 0.0,
            copies=int(reference_of(self.job, self.stack.reference) == "copy"),
            critics=int(self.objective.critic and not self.job.adapter),
            critic_adapters=int(self.objective.critic and bool(self.job.adapter)),
            scorings=self.scorings,
            turns_weights=family_of(self.cluster.device) in ("hopper", "ada"),
            autocast=self.autocast,
        )

    @property
    def autocast(self) -> bool:
        """Whether weights are in fp32 and GEMMs take 16-bit copies of them and of fp32 inputs, which autograd keeps.

        Sharded weights are cast before a unit runs, and its inputs with them (torch FSDP MixedPrecisionPolicy).
        """
        if not self.stack.autocasts or find_sharding(self.plan.sharding).weights:
            return False
        return self.precision.autocast if self.tuning is None else self.tuning.autocast and self.tuning.base.bits == 32

    @property
    def objective(self) -> Objective:
        """What is optimised, and what that takes beside the model."""
        return OBJECTIVES[self.job.method]

    @property
    def scorings(self) -> int:
        """Passes without gradients over a batch: of the reference, of the policy that generated, of the critic.

        Policy and reference run once more over mismatched answers (trl 1.16.0 trainer/kto_trainer.py _compute_loss).
        """
        one = self.objective
        referred = int(reference_of(self.job, self.stack.reference) != "none") * (1 + one.mismatched)
        return referred + one.mismatched + self.scores_rollouts + one.critic

    @property
    def scores_rollouts(self) -> bool:
        """Whether answers are scored by the policy that generated them, ahead of the update."""
        return self.objective.rollout and self.stack.scores_rollouts

    @property
    def reenters(self) -> bool:
        """Whether checkpoints are reentrant (torch.utils.checkpoint, use_reentrant) and run all of their unit again.

        Of axolotl those of supervised fine-tuning are, but on the host; of LLaMA-Factory all but under FSDP, there
        those on the host too; of ms-swift all but those of replicas on several devices.
        """
        where, hosted = self.stack.checkpoint_reenters, "activations" in self.plan.offload
        if where == "sft":
            return self.job.method == "sft" and not hosted
        fsdp = self.plan.sharding_rules.weights and not hosted
        replicas = not self.plan.sharding_rules.shards and self.cluster.num_devices > 1
        return bool(where) and not {"but fsdp": fsdp, "but replicas": replicas}.get(where, False)

    @property
    def is_typical(self) -> bool:
        """Whether the run is tuned as most are, not for a record."""
        return self.job.tuning == "typical" and not self.efficiencies.ideal

    @property
    def slack(self) -> float:
        """Share of a step that runs tuned as most are take longer than those for a record, 0 of the latter."""
        return typical_slack(family_of(self.cluster.device)) if self.is_typical else 0.0

    @property
    def job_words(self) -> dict[str, str]:
        """What is asked of the job by name, as a framework is asked whether it runs it."""
        job, settings = self.job, self.stack.settings
        tiles = {"tile_mlp": str(settings.tile_mlp)} if settings.tile_mlp > 1 else {}
        early = {"updates_in_backward": "true"} if settings.updates_in_backward else {}
        kept = {"checkpoint_policy": settings.checkpoint_policy} if settings.checkpoint_policy else {}
        loss = {"loss": settings.loss} if settings.loss else {}
        base = {"adapter": job.adapter, "adapter_precision": job.adapter_precision, "base": job.base or "bf16"}
        return {
            "precision": self.precision.name, "optimizer": job.optimizer, "method": job.method,
            "layers": str(self.model.num_layers), "experts": str(self.model.has_experts).lower(),
            **(base if job.adapter else {"full_training": "true"}), **tiles, **early, **kept, **loss,
        }  # fmt: skip

    @property
    def widest_group(self) -> int:
        """Up to how many values a head a fused kernel of PyTorch's takes heads that share keys, 0 where none does.

        On NVIDIA's devices since compute capability 8.0, A100 of 2020 the first
        (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Types of 16 bits alone have one there; fp32 is counted
        as if it had, as on a CPU, on which whole steps were recorded, and `stated` says so.
        """
        device = self.cluster.device
        older = device.vendor == "NVIDIA" and device.knows("year") and device.year < _FIRST_GROUPS
        return 0 if older else WIDEST_GROUP

    @property
    def shapes_gradients(self) -> bool:
        """Whether memory depends on the shapes of single weight gradients."""
        return self.stack.gradient_stand_ins

    @cached_property
    def workspace_bytes(self) -> float:
        """Bytes of scratch that GEMMs hold on the device."""
        return self.workspace_at(self.plan.tp)

    def workspace_at(self, tp: X) -> X | float:
        """Return the bytes of scratch that GEMMs hold on a device where so many ranks split them."""
        whole, split = (
            self.stack.workspace_bytes(family_of(self.cluster.device), self.model.has_experts, apart)
            for apart in (False, True)
        )
        return whole if split == whole else above(tp, 1, split, whole)

    @property
    def memory_band(self) -> Band:
        """How far published peaks of memory were off under its framework."""
        return memory_band(self.stack.measured_as, bool(self.tuning))

    @cached_property
    def domains(self) -> tuple[int, ...]:
        """Devices in one domain of each tier."""
        return tuple(t.size for t in self.cluster.tiers)

    @cached_property
    def partition(self) -> Partition:
        """How the plan's layers go to stages."""
        return partition_of(self.plan, self.model.num_layers, self.stack)

    @property
    def partly(self) -> bool:
        """Whether only some layers of a stage are recomputed."""
        return bool(self.plan.recompute_layers)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layer of the model under the plan's recompute."""
        recomputes = self.plan.recompute != "none"
        wakes = recomputes and bool(self.job.adapter)
        return kinds_of(self.order, self.partly, recomputes or bool(self.plan.modules), wakes)

    @cached_property
    def tuning(self) -> Tuning | None:
        """How the model is fine-tuned; None where all weights train."""
        return tuning_of(self.job, self.stack, self.model.family)

    @cached_property
    def order(self) -> LayerOrder:
        """The distinct layers of the model and their order."""
        words, count = self.tuning.layer_words if self.tuning else (), self.model.num_layers
        whole = {at for word in words for at in layers_of(word, count)}
        # Layers that stay in 16 bits are kinds of their own.
        first, last = self.stack.settings.bf16_first_layers, self.stack.settings.bf16_last_layers
        whole |= {*range(min(first, count)), *range(max(count - last, 0), count)}
        return order_of(self.model, idle_layers(self.model, self.tuning), whole)


def partition_of(plan: Plan, num_layers: int, stack: Stack) -> Partition:
    """Return how a plan's layers go to stages: as given, or as the stack cuts them."""
    sizes = plan.stage_layers or split_layers(num_layers, plan.pp * plan.vpp, stack.partition)
    recomputed = plan.recompute_layers or None
    return Partition(pp=plan.pp, vpp=plan.vpp, sizes=sizes, recomputed=recomputed, schedule=plan.schedule)


def stages_of(case: TrainingCase) -> tuple[Stages[Any], ...]:
    """Return the runs of equal stages of one plan."""
    return runs_of(case.order.layers, len(case.order.blocks), case.partition)


def idle_settings(case: TrainingCase) -> list[tuple[str, str]]:
    """Return the settings of the framework that change nothing under a plan, and why."""
    settings, plan, idle = case.stack.settings, case.plan, list[tuple[str, str]]()
    if plan.recompute != "full":
        whole = ("checkpoint_policy", "partition_activations")
        idle += [(name, "there are no checkpoints of whole layers") for name in whole if getattr(settings, name)]
    elif settings.partition_activations and (plan.tp == 1 or plan.sequence_parallel):
        idle.append(
            ("partition_activations", "tp is 1" if plan.tp == 1 else "sequence parallelism splits them already")
        )
    if settings.bucket_elements and not case.recipe.shards_optimizer:
        idle.append(("bucket_elements", "no optimizer is sharded"))
    if settings.max_live_parameters and not case.recipe.shards_weights:
        idle.append(("max_live_parameters", "no weights are sharded"))
    if settings.pipeline_runs > 1 and plan.pp == 1:
        idle.append((f"pipeline_runs {settings.pipeline_runs}", "pp is 1"))
    if settings.sync_each_batch and not (case.stack.accumulates_whole and case.recipe.shards_weights):
        idle.append(("sync_each_batch", "no gradients stay whole between micro-batches"))
    return [*idle, *_idle_bits(case), *_idle_widths(case), *_idle_kernels(case)]


def _idle_kernels(case: TrainingCase) -> list[tuple[str, str]]:
    """Return what of norms and of attention the kernels of a framework have no place for."""
    stack, idle, width = case.stack, list[tuple[str, str]](), case.stack.settings.norm_bytes
    if width == case.recipe.precision.activation_bytes:
        idle.append((f"norm_bytes {width:g}", "norms keep so many as it is"))
    elif width and stack.norm == "eager" and all(written_in_python(block.norm) for block in layers_within(case.model)):
        idle.append((f"norm_bytes {width:g}", f"norms of {stack.name} are steps, which keep copies of their own"))
    if case.job.softmax_dropout and stack.attention == "flash":
        idle.append(("softmax_dropout", "fused attention makes its masks again in backward"))
    return idle


def _idle_bits(case: TrainingCase) -> list[tuple[str, str]]:
    """Return the settings of GEMMs of fewer than 16 bits that those of a case do not read."""
    settings, compute, idle = case.stack.settings, case.recipe.precision.compute, list[tuple[str, str]]()
    for name in ("bf16_first_layers", "bf16_last_layers", "bf16_mtp_layers"):
        if getattr(settings, name) and compute in (*WIDE_DTYPES, "fp32", "tf32"):
            idle.append((name, f"GEMMs run in {compute}"))
    if settings.bf16_mtp_layers and not case.model.mtp:
        idle.append(("bf16_mtp_layers", f"{case.model.name} has none"))
    if settings.fp8_recipe and compute != "fp8":
        idle.append((f"fp8_recipe {settings.fp8_recipe}", f"GEMMs run in {compute}"))
    if settings.fp8_param_gather and find_scaling(compute) is None:
        idle.append(("fp8_param_gather", f"GEMMs run in {compute}"))
    return idle


def _idle_widths(case: TrainingCase) -> list[tuple[str, str]]:
    """Return the widths of saved MLP inputs that a model without a feed-forward has no use for."""
    if any(block.feed_forward is not None for block in layers_within(case.model)):
        return []
    names = ("mlp_input_bits", "activation_input_bits", "mlp_down_input_bits")
    why = f"{case.model.name} has no feed-forward"
    return [(name, why) for name in names if getattr(case.stack.settings, name)]


def layers_within(model: Model) -> list[Block]:
    """Return the kinds of layer of a model, those inside them too."""
    return [one for block in model.kinds for one in (block, *block.also)]


def reported_otherwise(case: TrainingCase) -> list[str]:
    """Return what the report of a stack's run states and the question does not, by flag, and what no flag says."""
    plan, settings, notes = case.plan, case.stack.settings, list[str]()
    for name, value in case.stack.reported:
        if name == "precision":
            same = case.recipe.precision.name == value
        else:
            same = {*value} <= {*plan.modules} if name == "modules" else getattr(settings, name) == value
        if not same:
            text = ",".join(value) if isinstance(value, tuple) else value
            notes.append(f"--{name.replace('_', '-')} {text}")
    flags = [f"the report of its run has {' '.join(notes)}"] if notes else []
    return [f"stack {case.stack.name}: {text}" for text in (*flags, *case.stack.uncounted)]


def _capacity_note(job: Training, model: Model) -> str:
    """Return what a capacity of experts does to the rows that tokens send them: drops, fills them up, or neither."""
    if not model.has_experts:
        return f"no effect, {model.name} has no experts"
    share = job.capacity_factor / max(job.expert_imbalance, 1.0)
    if share < 1:
        who = "the busiest experts drop" if job.expert_imbalance > 1 else "experts drop"
        return f"{who} {1 - share:.0%} of their rows; tokens/s and MFU count every token all the same"
    if job.pad_to_capacity and job.capacity_factor > 1:
        zeros = 1 - 1 / job.capacity_factor
        return f"{zeros:.0%} of the rows of experts are zeros that fill them up; MFU does not count them"
    return f"routing is taken as {'stated' if job.expert_imbalance > 1 else 'even'}, so that no row is dropped"


def idle_words(job: Training, model: Model) -> list[str]:
    """Return the words of a job that change nothing for a model, or beside the rest of it."""
    idle = list[str]()
    if job.expert_imbalance > 1 and not model.has_experts:
        idle.append(f"expert_imbalance {job.expert_imbalance:g}: no effect, {model.name} has no experts")
    if job.attention_density < 1 and not any(m.attends for b in layers_within(model) for m in b.mixers):
        idle.append(f"attention_density {job.attention_density:g}: no effect, {model.name} has no attention")
    if job.checkpoint_interval_seconds and not (job.failures_per_device_hour or job.checkpoint_seconds):
        idle.append("checkpoint_interval: no effect without failures or the time of a checkpoint")
    return idle


def stated(case: TrainingCase) -> tuple[str, ...]:
    """Return what was assumed because the input was silent."""
    notes = [f"stack {case.stack.name}: {case.cluster.device.built(case.stack.title)}", *reported_otherwise(case)]
    notes += _attention_notes(case)
    if not case.job.precision:
        notes.append(f"precision {case.recipe.precision.name}: the stack's own")
    experts = case.model.has_experts
    if case.plan.pp == 1 and case.plan.schedule != Plan().schedule:
        notes.append(f"schedule {case.plan.schedule}: no effect, pp is 1")
    off = find_rules(case.plan.schedule).uneven_error
    if off and case.plan.pp > 1 and len(set(case.partition.sizes)) > 1:
        notes.append(f"schedule {case.plan.schedule}: seconds of stages that differ are within {off:.0%} of its order")
    if case.plan.cp == 1 and case.plan.cp_kind != Plan().cp_kind:
        notes.append(f"cp_kind {case.plan.cp_kind}: no effect, cp is 1")
    notes += idle_words(case.job, case.model)
    if case.job.capacity_factor:
        notes.append(f"capacity_factor {case.job.capacity_factor:g}: {_capacity_note(case.job, case.model)}")
    if case.plan.tp > 1 and case.plan.etp == 1 and experts:
        notes.append(f"etp 1: experts are whole on their ranks; etp {case.plan.tp} splits them as tp splits the rest")
    notes += [f"{name}: no effect, {why}" for name, why in idle_settings(case)]
    if case.recipe.precision.note:
        notes.append(case.recipe.precision.note)
    if 0 < case.job.run_tokens < 20 * count_parameters(case.model):
        share = case.job.run_tokens / count_parameters(case.model)
        notes.append(f"{share:.3g} tokens a parameter: under the 20 of compute-optimal training (arXiv:2203.15556)")
    if case.job.run_tokens and case.job.method in OBJECTIVES and OBJECTIVES[case.job.method].rollout:
        notes.append(ROLLOUTS_LEFT_OUT)
    if case.job.dropout is None and case.model.dropout:
        notes.append("dropout: the model's own configuration has it")
    if case.cluster.usd_per_device_hour is None:
        notes.append("price: not known, no cost given")
    return tuple(notes)


def _attention_notes(case: TrainingCase) -> list[str]:
    """Return what is said of heads that share keys where PyTorch has no fused kernel for them."""
    mixers = [m for block in case.model.kinds for m in block.mixers if m.attends and not any(m.cost_breakpoints())]
    sizes = [size for size in (m.core(False) for m in mixers) if size is not None]
    shared = [size.head for size in sizes if size.kind == "prefill" and size.group > 1]
    device = case.cluster.device
    if any(leaves_heads(case.stack, width, case.widest_group) for width in shared):
        return [
            f"attention in steps, which keep fp32 scores: PyTorch has no fused kernel on {device.name} for heads that "
            "share keys; sequences of equal lengths, since padding makes a mask and fused kernels"
        ]
    wide = case.recipe.precision.activation_bytes == 4 and device.vendor == "NVIDIA"
    if wide and any(leaves_heads(case.stack, width, 0) for width in shared):
        return [
            "attention fused: in fp32 PyTorch has no kernel for heads that share keys on a GPU, and a batch without "
            "padding holds 13 bytes a score of a layer more"
        ]
    return []
