"""What engines make of a plan that leaves its layout open: stages, parts of experts, the order of ranks."""

from __future__ import annotations

from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import AXES, Axis, Plan
from shardwise.records import replace
from shardwise.serving._engine import Engine


def over_devices(engine: Engine, plan: Plan, cluster: Cluster, layers: int, notes: list[str]) -> Plan:
    """Return the plan with the stages or ranks that the engine makes of a node's devices where nobody lays a model out.

    A plan without replicas (dp 0) has those of one server a node.
    """
    n, dp, axis = cluster.num_devices, plan.dp, engine.layouts.fills_with
    parts = n // dp if dp else min(n, cluster.devices_per_node)
    if (
        axis == "dp"
        or plan.tp * plan.pp > 1
        or parts < 2
        or n % (parts * (dp or 1))
        or (axis == "pp" and parts > layers)
    ):
        return plan
    notes.append(
        f"{axis} {parts}: {engine.brand} splits a model over the devices that it sees; --dp {n} gives each one"
    )
    return replace(plan, pp=parts) if axis == "pp" else replace(plan, tp=parts)


def with_experts(plan: Plan, model: Model, notes: list[str]) -> Plan:
    """Spread experts over the tensor-parallel ranks that the plan leaves over, as engines do by default."""
    if not model.has_experts or plan.ep * plan.etp >= plan.tp or plan.tp % plan.ep:
        return plan
    etp = plan.tp // plan.ep
    notes.append(f"etp {etp}: experts are split over the tensor-parallel ranks, as engines do by default")
    return replace(plan, etp=etp)


# Pipeline ranks lie within those of data parallelism, and tensor-parallel ranks within both (vLLM
# vllm/distributed/parallel_state.py).
TOGETHER: tuple[Axis, ...] = (*(axis for axis in AXES if axis not in ("pp", "dp")), "pp", "dp")


def stages_together(plan: Plan) -> Plan:
    """Return a plan whose replicas each have their stages beside each other, unless it orders its axes.

    Engines are started one by one, each on devices of its own; groups that share experts are ranks of one stage of one
    engine (SGLang python/sglang/srt/distributed/parallel_state.py: attention groups within tensor parallelism).

    >>> stages_together(Plan(tp=2, pp=2, dp=3)).order
    ('tp', 'tp2', 'cp', 'pp', 'dp')
    """
    if plan.pp == 1 or plan.dp == 1 or plan.fast or plan.order != AXES or plan.ep * plan.etp > plan.tp:
        return plan
    return replace(plan, order=TOGETHER)
