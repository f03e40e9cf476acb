"""What a plan has by default and cannot have here is turned off, and said."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.cli._case import Inputs

if TYPE_CHECKING:
    from shardwise.models import Model
    from shardwise.plans import Plan


def settled(inputs: Inputs, model: Model, plan: Plan, seq_len: int) -> Plan:
    """Return a plan without sequence parallelism where nobody asked for it and it cannot split the sequence.

    Experts need it (`expert_laws`): there the degree stays what is refused.
    """
    from shardwise.models import MoE
    from shardwise.plans.laws import field_problems, splits_sequence

    asked = inputs.imported is not None or "sequence_parallel" in inputs.values.keys() | inputs.bad
    experts = any(isinstance(block.feed_forward, MoE) for block in model.kinds)
    filled = replace(plan, dp=plan.dp or 1, micro_batch=plan.micro_batch or 1)
    if asked or experts or field_problems(filled).items or splits_sequence(plan, seq_len):
        return plan
    inputs.notes.append(f"sequence_parallel off: {seq_len // plan.cp} tokens of a rank do not divide by tp {plan.tp}")
    return replace(plan, sequence_parallel=False)
