"""Kernels of an engine: which measured kernel prices the experts of a format."""

from __future__ import annotations

import pytest

from shardwise.cost import Efficiencies, ExpertsFit, constants, fit_from
from shardwise.hardware import find_device
from shardwise.serving._engine import find_engine, kernels_of


@pytest.mark.parametrize(("products", "values"), [("fp8", "fp8"), ("fp8-block", "fp8_block"), ("bf16", "bf16")])
def test_block_scaled_experts_take_their_own_kernel(products: str, values: str) -> None:
    """Experts with scales of blocks are priced with the kernel measured on them, not with one of per-tensor scales."""
    device = find_device("h200-sxm-141gb").device
    kernels = kernels_of(device, "hopper", products, find_engine("vllm"), Efficiencies())
    measured = max(constants()["hopper"]["experts"]["vllm"][values].values(), key=lambda row: row["rows"])
    assert kernels.experts_narrow == fit_from(ExpertsFit, measured)
