"""What a plan cannot have here is turned off, and the framework of one that names none found; both are said."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.answers._case import Inputs

if TYPE_CHECKING:
    from shardwise.models import Model
    from shardwise.plans import Plan, Stack


def settled(inputs: Inputs, stack: Stack | None, model: Model, plan: Plan, seq_len: int) -> Plan:
    """Return a plan without sequence parallelism where nobody asked for it and it cannot split the sequence.

    Experts need it (`expert_laws`): there the degree stays what is refused.
    """
    from shardwise.plans.laws import field_problems, splits_sequence

    asked = inputs.imported is not None or "sequence_parallel" in inputs.values.keys() | inputs.bad
    split = plan.tp > 1 and plan.sequence_parallel
    if not asked and split and stack is not None and stack.runs.sequence_parallel == (False,):
        inputs.notes.append(f"sequence_parallel off: {stack.name} does not have it")
        return replace(plan, sequence_parallel=False)
    experts = model.has_experts
    filled = replace(plan, dp=plan.dp or 1, micro_batch=plan.micro_batch or 1)
    if asked or experts or field_problems(filled).items or splits_sequence(plan, seq_len):
        return plan
    inputs.notes.append(f"sequence_parallel off: {seq_len // plan.cp} tokens of a rank do not divide by tp {plan.tp}")
    return replace(plan, sequence_parallel=False)


def usual_stack(inputs: Inputs) -> str:
    """Return the framework of the plan that the flags describe, said where its sharding alone would mean another."""
    from shardwise.answers._case import make_plan
    from shardwise.plans import Plan, default_stack

    if any(isinstance(inputs.values.get(name), str) for name in ("tp", "cp", "pp", "vpp", "ep", "dp")) or isinstance(
        inputs.values.get("sharding"), tuple
    ):
        # Values to try, of a search.
        return default_stack(Plan())
    plan = make_plan(inputs)
    name, alone = default_stack(plan), default_stack(Plan(sharding=plan.sharding))
    if name != alone:
        inputs.notes.append(f"stack {name}: not given, and {alone} does not split a model as this plan does")
    return name
