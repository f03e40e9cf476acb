"""What communicators hold beside the allocator: one of each group that reduces, channels to each peer."""

from __future__ import annotations

import pytest

from shardwise.hardware import Cluster, peer_bytes
from shardwise.models import Model
from shardwise.plans import Plan, Training, find_stack
from shardwise.training import TrainingOptions, outside_bytes, train

MIB = 2**20


def outside(stack: str, on: str, model: str = "qwen3-30b-a3b", **plan: object) -> float:
    """Return the bytes beside the allocator of a plan."""
    one = Plan(**{"micro_batch": 1, "sharding": "distributed-optimizer", **plan})  # type: ignore[arg-type]
    job = Training(seq_len=4096, global_batch=4 * one.dp)
    report = train(Model.load(model), Cluster.parse(on), one, job, TrainingOptions(stack=stack))
    return float(outside_bytes(report.case.stack, report.case.cluster, report.evaluation.sizes))


def test_an_all_to_all_holds_channels_to_each_peer_of_its_node() -> None:
    """Experts on eight H100 add 32 channels of 12 MiB to each of seven peers, as NCCL's log has them."""
    stack, cluster = find_stack("megatron"), Cluster.parse("8xh100-sxm-80gb")
    assert peer_bytes(cluster.device) == 32 * (10 + 2) * MIB
    alone, spread = outside("megatron", "8xh100-sxm-80gb", dp=8), outside("megatron", "8xh100-sxm-80gb", dp=8, ep=8)
    assert spread - alone == stack.communicator_bytes + 7 * 384 * MIB


def test_experts_over_nodes_hold_no_channels_of_their_own() -> None:
    """A group that spans nodes has two channels to a peer, in a buffer that all share."""
    one, two = (outside("megatron", "16xh100-sxm-80gb", dp=16, ep=ep) for ep in (1, 16))
    assert two - one == find_stack("megatron").communicator_bytes


def test_copies_of_experts_have_a_communicator() -> None:
    """Replicas that hold the same experts reduce in a group that is not the one of the dense weights."""
    one, two = (outside("megatron", "8xh100-sxm-80gb", dp=8, ep=ep) for ep in (8, 4))
    assert one - two == 4 * 384 * MIB - find_stack("megatron").communicator_bytes


@pytest.mark.parametrize(("pp", "peers"), ((2, 1), (4, 2), (8, 2)))
def test_stages_of_one_node_hold_channels_to_their_neighbours(pp: int, peers: int) -> None:
    """Each stage sends to the next and receives from it: one peer of two stages, two of more."""
    flat = outside("megatron", "8xa100-sxm-80gb", "llama-3-8b", dp=8)
    axes = 2 if pp < 8 else 1
    piped = outside("megatron", "8xa100-sxm-80gb", "llama-3-8b", pp=pp, dp=8 // pp)
    assert piped - flat == (axes - 1) * find_stack("megatron").communicator_bytes + peers * 384 * MIB


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
