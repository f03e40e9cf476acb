"""What an answer about a training assumed because the input was silent, and what of the input changed nothing."""

from __future__ import annotations

from shardwise.ops import count_parameters
from shardwise.training._evaluate import TrainingCase


def idle_settings(case: TrainingCase) -> list[tuple[str, str]]:
    """Return the settings of the framework that change nothing under a plan, and why."""
    s, plan, found = case.stack.settings, case.plan, list[tuple[str, str]]()
    if s.partition_activations and plan.recompute != "full":
        found.append(("partition_activations", "there are no checkpoints of whole layers"))
    elif s.partition_activations and (plan.tp == 1 or plan.sequence_parallel):
        found.append(
            ("partition_activations", "tp is 1" if plan.tp == 1 else "sequence parallelism splits them already")
        )
    if s.bucket_elements and not case.recipe.shards_optimizer:
        found.append(("bucket_elements", "no optimizer is sharded"))
    if s.max_live_parameters and not case.recipe.shards_weights:
        found.append(("max_live_parameters", "no weights are sharded"))
    return found


def stated(case: TrainingCase) -> tuple[str, ...]:
    """Return what was assumed because the input was silent."""
    notes = [f"stack {case.stack.name}: {case.stack.title}"]
    if not case.job.precision:
        notes.append(f"precision {case.recipe.precision.name}: the stack's own")
    experts = case.model.has_experts
    if case.plan.pp == 1 and case.plan.schedule != "1f1b":
        notes.append(f"schedule {case.plan.schedule}: no effect, pp is 1")
    if case.plan.cp == 1 and case.plan.cp_kind != "ring":
        notes.append(f"cp_kind {case.plan.cp_kind}: no effect, cp is 1")
    if case.job.expert_imbalance > 1 and not experts:
        notes.append(f"expert_imbalance {case.job.expert_imbalance:g}: no effect, {case.model.name} has no experts")
    if case.plan.tp > 1 and case.plan.etp == 1 and experts:
        notes.append(f"etp 1: experts are whole on their ranks; etp {case.plan.tp} splits them as tp splits the rest")
    notes += [f"{name}: no effect, {why}" for name, why in idle_settings(case)]
    if case.recipe.precision.note:
        notes.append(case.recipe.precision.note)
    if 0 < case.job.run_tokens < 20 * count_parameters(case.model):
        share = case.job.run_tokens / count_parameters(case.model)
        notes.append(f"{share:.3g} tokens a parameter: under the 20 of compute-optimal training (arXiv:2203.15556)")
    if case.job.dropout is None and case.model.dropout:
        notes.append("dropout: the model's own configuration has it")
    if case.cluster.usd_per_device_hour is None:
        notes.append("price: not known, no cost given")
    return tuple(notes)
