"""A complete question about training, and what follows from it for every number."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Any

from shardwise.cost import WANTED_CHANCE, Band, Efficiencies, family_of, memory_band, typical_slack, typical_waiting
from shardwise.hardware import Cluster
from shardwise.ledger.number import X, above
from shardwise.models import Model
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
    find_sharding,
    layers_of,
    reference_of,
    splits_replicas,
    trained_recipe,
    tuning_of,
)
from shardwise.plans.partition import split_layers
from shardwise.records import dataclass, replace
from shardwise.training._ledger import idle_layers
from shardwise.training._parts import Recipe
from shardwise.training._stages import LayerKind, LayerOrder, Partition, Stages, kinds_of, order_of, runs_of

_FIRST_GROUPS = 2020


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """What else a prediction takes: the framework ("" for the sharding's own), efficiencies, accumulation, overlap.

    What is left open is chosen to fit with a chance of `risk`, as a search chooses; 0 goes by the prediction alone.
    """

    stack: Stack | str = ""
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    accumulation: int = 0
    overlap: bool = True
    risk: float = WANTED_CHANCE


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
    accumulation: int = 0
    """Micro-batches of a step on each replica where they were stated, which a changed plan keeps; 0: deduced."""
    stated_batches: tuple[bool, bool] = (True, True)
    """Whether micro-batch and global batch were stated; beside accumulation what was not follows a changed plan."""

    @property
    def batch_follows(self) -> bool:
        """Whether the global batch follows from stated accumulation."""
        return self.accumulation > 0 and not self.stated_batches[1]

    def planned(self, plan: Plan, job: Training) -> TrainingCase:
        """Return the case of another plan, and of the job with the batch that the plan deduced."""
        other = replace(self, plan=plan, job=job)
        if replace(job, global_batch=self.job.global_batch) == self.job:
            # What no plan decides is not found again; whether weights are sharded decides how wide frozen experts are.
            alike = plan.sharding_rules.weights == self.plan.sharding_rules.weights
            names = ("precision", "order", "domains", *(("tuning",) if alike else ()))
            other.__dict__.update({name: getattr(self, name) for name in names})
        return other

    @cached_property
    def precision(self) -> Precision:
        """The types of each parameter."""
        if self.tuning and not self.job.precision:
            return find_precision(trained_recipe(self.job, self.stack))
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
            reenters=self.reenters,
        )

    @property
    def autocast(self) -> bool:
        """Whether weights are in fp32 and GEMMs take 16-bit copies of them and of fp32 inputs, which autograd keeps.

        FSDP casts weights before a unit runs, and its inputs with them (torch FSDP MixedPrecisionPolicy), also where it
        keeps them gathered and shards gradients alone (SHARD_GRAD_OP).
        """
        if not self.stack.autocasts or find_sharding(self.plan.sharding).gradients:
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
        those on the host too; of ms-swift all but those of replicas on several devices; of TRL those of adapters under
        ZeRO-3.
        """
        where, hosted = self.stack.checkpoint_reenters, "activations" in self.plan.offload
        if where == "sft":
            return self.job.method == "sft" and not hosted
        weights, zero = self.plan.sharding_rules.weights, bool(self.stack.step_gradients)
        if where == "zero3 adapters":
            return weights and zero and bool(self.job.adapter)
        fsdp = weights and not zero and not hosted
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
        early |= {"quantize_moe_experts": "true"} if settings.quantize_moe_experts else {}
        kept = {"checkpoint_policy": settings.checkpoint_policy} if settings.checkpoint_policy else {}
        loss = {"loss": settings.loss} if settings.loss else {}
        base = {"adapter": job.adapter, "adapter_precision": job.adapter_precision, "base": job.base or "bf16"}
        return {
            "precision": self.precision.name, "optimizer": job.optimizer, "method": job.method,
            "layers": str(self.model.num_layers), "experts": str(self.model.has_experts).lower(),
            **(base if job.adapter else {"full_training": "true"}), **tiles, **early, **kept, **loss,
        }  # fmt: skip

    @property
    def layer_type(self) -> tuple[str, int]:
        """The type of what layers make and multiply but for narrow weights, and its bytes."""
        wide = self.tuning is not None and self.tuning.wide_layers
        return ("fp32", 4) if wide else (self.precision.compute, self.precision.activation_bytes)

    @property
    def widest_group(self) -> int:
        """Up to how many values a head a fused kernel of PyTorch's takes heads that share keys, 0 where none does.

        On NVIDIA's devices since compute capability 8.0, A100 of 2020 the first
        (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Types of 16 bits alone have one there; a recipe of fp32
        is counted as if it had, as on a CPU, on which whole steps were recorded, and `stated` says so.
        """
        device = self.cluster.device
        older = device.vendor == "NVIDIA" and device.knows("year") and device.year < _FIRST_GROUPS
        wide = device.vendor == "NVIDIA" and self.tuning is not None and self.tuning.wide_layers
        return 0 if older or wide else WIDEST_GROUP

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
        return tuning_of(self.job, self.stack, self.model.family, bool(self.plan.sharding_rules.weights))

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
