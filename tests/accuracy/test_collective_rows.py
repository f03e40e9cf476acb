"""Rows of collectives: node types, engines' own kernels and how they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from accuracy.published import measured

COLUMNS = "device,engine,engine_version,op,dtype,num_gpus,gpus_per_node,message_bytes,variant,time_seconds"


def predicted(folder: Path, device: str, engine: str, variant: str, ranks: int, size: float = 2**24) -> float:
    """Return seconds predicted for one all-reduce."""
    path = folder / "kernels_collective_mine.csv"
    path.write_text(f"{COLUMNS}\n{device},{engine},,all_reduce,bf16,{ranks},8,{size},{variant},1\n", encoding="utf-8")
    (row,) = measured([str(path)]).rows
    assert row.predicted is not None
    return row.predicted


def test_a_bridge_joins_pairs_and_the_host_joins_them(tmp_path: Path) -> None:
    """Two A100 PCIe with a bridge all-reduce five times faster than without; four meet over the host."""
    alone = predicted(tmp_path, "a100-pcie-80gb", "nccl", "nccl", 2)
    pair, four = (predicted(tmp_path, "a100-pcie-80gb", "nccl", "a100_pairwise_nvlink", n) for n in (2, 4))
    assert alone > 5 * pair
    assert four > 3 * pair


def test_an_eager_call_takes_its_host_and_a_copy(tmp_path: Path) -> None:
    """Small messages called one by one take the host's time, twice as long on Grace; large ones copy their input."""
    graph, eager = (predicted(tmp_path, "h100-sxm-80gb", "vllm", f"vllm_{v}", 8, 8192) for v in ("graph", "eager"))
    grace = predicted(tmp_path, "gb200", "vllm", "vllm_eager", 4, 8192)
    assert graph < 7e-6
    assert eager == pytest.approx(21e-6, rel=0.1)
    assert grace > 2 * eager
    large = [predicted(tmp_path, "h100-sxm-80gb", "vllm", f"vllm_{v}", 8, 2**30) for v in ("graph", "eager")]
    assert large[1] - large[0] == pytest.approx(2 * 2**30 / (0.9 * 3.35e12), rel=0.02)
