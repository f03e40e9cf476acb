"""What messages between replicas take of compute follows the cores that NCCL holds for the layout of their group."""

from __future__ import annotations

import numpy
import pytest

from shardwise.cost import Efficiencies, overlap_slowdown
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Training
from shardwise.training import train

# Cluster, type of products, ranks of the group by tier, and the share of cores that its messages hold.
HELD = (
    ("16xa100-sxm-80gb", "bf16", (8, 8), 24 / 108),
    ("16xa100-sxm-80gb", "bf16", (8, 16), 16 / 108),
    ("16xa100-sxm-80gb", "bf16", (4, 16), 8 / 108),
    ("16xa100-sxm-80gb", "bf16", (1, 2), 2 / 108),
    ("16xh100-sxm-80gb", "bf16", (1, 2), 4 / 132),
    ("16xh100-sxm-80gb", "bf16", (8, 16), 0.5),
    ("16xh100-sxm-80gb", "bf16", (8, 8), 0.5),
    ("16xh100-sxm-80gb", "fp8", (1, 2), 0.35),
    ("16xh100-sxm-80gb", "fp8", (8, 16), 0.35),
    ("16xb200-sxm-180gb", "bf16", (8, 8), 0.35),
    ("16xb200-sxm-180gb", "nvfp4", (1, 2), 0.35),
)


@pytest.mark.parametrize(("cluster", "dtype", "at", "share"), HELD)
def test_messages_hold_cores_by_the_ranks_of_their_group_in_a_node(
    cluster: str, dtype: str, at: tuple[int, int], share: float
) -> None:
    """NCCL holds cores for each adapter of a group in a node; beside more than are left, persistent products wait.

    Products on every core wait for any message.
    """
    found = overlap_slowdown(Cluster.parse(cluster), dtype, Efficiencies())
    assert found is not None
    assert found.lost_share(at) / found.longer == pytest.approx(share)


@pytest.mark.parametrize(("device", "fewer"), [("h100-sxm-80gb", True), ("a100-sxm-80gb", False)])
def test_persistent_products_lose_no_more_to_a_message_over_fewer_adapters(device: str, fewer: bool) -> None:
    """Eight H100 with a quarter of their adapters lose as many seconds to the same bytes, not four times as many.

    A100's products wait for no core, and lose a share of however long the message lasts.
    """
    usual = Cluster.parse(f"16x{device}").tiers[-1].bytes_per_second
    slow = Cluster.parse(f"16x{device}", {"slow_bandwidth": f"{usual / 4e9}GB/s"})
    plan, job = Plan(sharding="fsdp", dp=16, micro_batch=8), Training(seq_len=4096, global_batch=512)
    steps = [
        train(load_model("llama-2-7b"), cluster, plan, job).evaluation.step.stages[0]
        for cluster in (Cluster.parse(f"16x{device}"), slow)
    ]
    (fast, compute), (long, slowed) = ((step.hidden["dp"], step.compute) for step in steps)
    assert long > 2 * fast
    assert (slowed == pytest.approx(compute, rel=1e-3)) is fewer


def test_columns_of_groups_lose_what_each_group_loses() -> None:
    """A column of groups gives the shares of its groups, to the last bit."""
    found = overlap_slowdown(Cluster.parse("16xh100-sxm-80gb"), "bf16", Efficiencies())
    assert found is not None
    at = numpy.array([1.0, 2.0, 8.0]), numpy.array([2.0, 4.0, 8.0])
    assert list(found.lost_share(at)) == [found.lost_share((a, b)) for a, b in zip(*at, strict=True)]


def test_only_known_cores_are_held() -> None:
    """Devices whose cores are not many and equal lose nothing, as where every efficiency is one."""
    assert overlap_slowdown(Cluster.parse("16xtpu-v5p"), "bf16", Efficiencies()) is None
    assert overlap_slowdown(Cluster.parse("16xh100-sxm-80gb"), "bf16", Efficiencies(ideal=True)) is None
