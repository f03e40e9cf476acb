"""What communicators hold beside the allocator: one of each group that a framework reduces in."""

from __future__ import annotations

from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Training, find_stack
from shardwise.training import TrainingOptions, outside_bytes, train


def outside(stack: str, on: str, model: str = "qwen3-30b-a3b", **plan: object) -> float:
    """Return the bytes beside the allocator of a plan."""
    one = Plan(**{"micro_batch": 1, "sharding": "distributed-optimizer", **plan})  # type: ignore[arg-type]
    job = Training(seq_len=4096, global_batch=4 * one.dp)
    report = train(Model.load(model), Cluster.parse(on), one, job, TrainingOptions(stack=stack))
    return float(outside_bytes(report.case.stack, report.case.cluster, report.evaluation.sizes))


def test_experts_have_a_communicator() -> None:
    """A group of experts adds a communicator to those of the other axes and of all ranks."""
    one, two = (outside("megatron", "16xh100-sxm-80gb", dp=16, ep=ep) for ep in (1, 16))
    assert two - one == find_stack("megatron").communicator_bytes


def test_copies_of_experts_have_a_communicator() -> None:
    """Replicas that hold the same experts reduce in a group that is not the one of the dense weights."""
    one, two = (outside("megatron", "8xh100-sxm-80gb", dp=8, ep=ep) for ep in (8, 4))
    assert two - one == find_stack("megatron").communicator_bytes


def test_megatron_and_deepspeed_have_a_communicator_of_all_ranks() -> None:
    """The default group reduces beside the groups of axes, which torch's own meshes of one dimension have not."""
    own = find_stack("megatron").communicator_bytes
    context = find_stack("megatron").context_bytes(Cluster.parse("a100-sxm-80gb").device)
    given = {"dp": 8, "sharding": "zero2"}
    held = {
        name: outside(name, "8xa100-sxm-80gb", "llama-3-8b", **given) - context
        for name in ("megatron", "deepspeed", "fsdp2")
    }
    assert held == {"megatron": 2 * own, "deepspeed": 2 * own, "fsdp2": own}
    assert outside("megatron", "a100-sxm-80gb", "llama-3-8b") == context
