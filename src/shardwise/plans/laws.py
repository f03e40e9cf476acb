"""The laws between a plan, a model, a job and a cluster, for what checks plans and what searches them.

They stand beside the package and not in it, since they know models, which plans alone do not.
"""

from shardwise.plans._capabilities import refusals
from shardwise.plans._laws import (
    all_blocks,
    context_laws,
    expert_laws,
    module_names,
    pipeline_laws,
    splits_sequence,
    summa_laws,
    tensor_laws,
)
from shardwise.plans._legality import (
    batch_problems,
    domain_problems,
    field_problems,
    is_count,
    plan_problems,
    stack_problems,
)

__all__ = [
    "all_blocks",
    "batch_problems",
    "context_laws",
    "domain_problems",
    "expert_laws",
    "field_problems",
    "is_count",
    "module_names",
    "pipeline_laws",
    "plan_problems",
    "refusals",
    "splits_sequence",
    "stack_problems",
    "summa_laws",
    "tensor_laws",
]
