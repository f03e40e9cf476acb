"""What messages between replicas take of compute follows the cores that NCCL holds for the layout of their group."""

from __future__ import annotations

import numpy
import pytest

from shardwise.cost import Efficiencies, overlap_slowdown
from shardwise.hardware import Cluster

# Cluster, type of products, ranks of the group by tier, and the share of cores that its messages hold.
HELD = (
    ("16xa100-sxm-80gb", (8, 8), 24 / 108),
    ("16xa100-sxm-80gb", (8, 16), 16 / 108),
    ("16xa100-sxm-80gb", (4, 16), 8 / 108),
    ("16xa100-sxm-80gb", (1, 2), 2 / 108),
    ("16xh100-sxm-80gb", (1, 2), 4 / 132),
    ("16xh100-sxm-80gb", (8, 16), 0.5),
    ("16xh100-sxm-80gb", (8, 8), 0.5),
    ("16xb200-sxm-180gb", (8, 8), 32 / 148),
)


@pytest.mark.parametrize(("cluster", "at", "share"), HELD)
def test_messages_hold_cores_by_the_ranks_of_their_group_in_a_node(
    cluster: str, at: tuple[int, int], share: float
) -> None:
    """NCCL holds cores for each adapter of a group in a node; beside more than are left, persistent products wait."""
    found = overlap_slowdown(Cluster.parse(cluster), "bf16", Efficiencies())
    assert found is not None
    assert found.lost_share(at) / found.longer == pytest.approx(share)


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
