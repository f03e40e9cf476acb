"""Kernels of an engine: which measured kernel prices the experts of a format."""

from __future__ import annotations

import pytest

from shardwise.cost import Efficiencies
from shardwise.hardware import find_device
from shardwise.serving._engine import find_engine, kernels_of


@pytest.mark.parametrize(("products", "compute"), [("fp8", 0.1722), ("fp8-block", 0.5263), ("bf16", 0.6166)])
def test_block_scaled_experts_take_their_own_kernel(products: str, compute: float) -> None:
    """Experts with scales of blocks are priced with the kernel measured on them, not with one of per-tensor scales."""
    device = find_device("h200-sxm-141gb").device
    kernels = kernels_of(device, "hopper", products, find_engine("vllm"), Efficiencies())
    assert kernels.experts_narrow.compute == compute
