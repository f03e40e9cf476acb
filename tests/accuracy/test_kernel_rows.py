"""What is predicted for rows of kernel tables, and what stands in for kernels that were not measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import measured_rows
from shardwise.measured import Comparison

PRODUCT = {"dtype": "bf16", "m": "4096", "n": "8192", "k": "8192"}
EXPERTS = {
    "dtype": "bf16", "num_tokens": "64", "hidden_size": "4096", "intermediate_size": "1536", "top_k": "8",
    "num_experts": "128", "moe_tp": "1", "moe_ep": "1", "routing": "power_law_1.01", "kernel": "",
}  # fmt: skip
DECODE = {
    "op": "generation", "kv_dtype": "bf16", "batch": "16", "query_tokens": "1", "prefix_tokens": "4096",
    "num_heads": "32", "num_kv_heads": "8", "head_dim": "128", "sliding_window": "0",
}  # fmt: skip


def only(folder: Path, row: dict[str, str], device: str, engine: str) -> Comparison:
    """Return the one row of a file with its prediction on a device."""
    return measured_rows.published(folder, {"device": device, "engine": engine, **row, "time_seconds": "3e-4"})


def test_a_table_that_stands_under_two_devices_is_predicted_where_it_was_taken(tmp_path: Path) -> None:
    """SGLang's products of B300 are those of GB300, and say so; its experts, and other engines, are of B300."""
    copied, own = (only(tmp_path, PRODUCT, "b300", engine) for engine in ("sglang", "vllm"))
    assert copied.predicted == only(tmp_path, PRODUCT, "gb300", "sglang").predicted
    assert "kernels of b300: taken on gb300, whose table this is" in copied.assumed
    assert own.predicted != only(tmp_path, PRODUCT, "gb300", "vllm").predicted
    assert not any("taken on" in note for note in own.assumed)


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s", "mi300x"])
@pytest.mark.parametrize("engine", ["", "pytorch", "tensorrt-llm"])
def test_products_of_any_engine_are_predicted(tmp_path: Path, device: str, engine: str) -> None:
    """What a table of no known engine walks through is beyond every cache: all of it comes from memory."""
    found = only(tmp_path, PRODUCT, device, engine)
    assert found.status == "predicted", found.reason


@pytest.mark.parametrize(
    ("row", "device", "engine", "said"),
    [(DECODE, "b200-sxm-180gb", "trtllm", True), (PRODUCT, "rtx-pro-6000-server", "vllm", True),
     (DECODE, "h200-sxm-141gb", "trtllm", False), (EXPERTS, "b200-sxm-180gb", "vllm", False),
     (DECODE, "b200-sxm-180gb", "own", False)],
)  # fmt: skip
def test_a_row_that_is_predicted_as_its_table_would_state_it_says_so(
    tmp_path: Path, row: dict[str, str], device: str, engine: str, said: bool
) -> None:
    """Rows of Blackwell in tables of engines are taken for replays on ticks; a time that was taken otherwise is not."""
    found = only(tmp_path, row, device, engine)
    assert found.status == "predicted", found.reason
    assert any("ticks of 2.048 us" in note for note in found.assumed) is said


def test_kernels_of_engines_that_no_device_of_a_family_was_measured_with_are_those_of_one_other(
    tmp_path: Path,
) -> None:
    """MI300X runs attention as A100 does, by its own peaks, and the row says so; its experts are AITER's own."""
    assert "kernel not stated: constants of aiter" in only(tmp_path, EXPERTS, "mi300x", "vllm").assumed
    found, own = (only(tmp_path, DECODE, device, "vllm") for device in ("mi300x", "h100-sxm-80gb"))
    assert found.status == own.status == "predicted", found.reason
    assert "kernels of cdna: those of ampere" in found.assumed
    assert not any("kernels of" in note for note in own.assumed)


@pytest.mark.parametrize("row", [PRODUCT, DECODE, EXPERTS], ids=["products", "attention", "experts"])
def test_an_engine_is_known_by_its_own_name_too(tmp_path: Path, row: dict[str, str]) -> None:
    """Tables say trtllm, people TensorRT-LLM: kernels, copies and ticks are the same."""
    found = {
        only(tmp_path, row, "b200-sxm-180gb", name).predicted for name in ("trtllm", "TensorRT-LLM", "tensorrt_llm")
    }
    assert len(found) == 1


@pytest.mark.parametrize(("engine", "stands"), [("pytorch", "vllm"), ("tensorrt-llm", "")])
def test_an_input_that_another_engine_quantises_is_said_to_be_so(tmp_path: Path, engine: str, stands: str) -> None:
    """Where no kernel of the engine that narrows an input was measured, vLLM's stands in by name."""
    found = only(tmp_path, {**PRODUCT, "dtype": "fp8"}, "h100-sxm-80gb", engine)
    assert [note for note in found.assumed if note.startswith("kernels of ")] == (
        [f"kernels of {engine}: those of {stands}"] if stands else []
    )


# github.com/vllm-project/vllm pull 24700 (2025-09): benchmarks/kernels/benchmark_moe.py of Mixtral-8x7B at tp 2 on
# H100, its tuned tiles, tokens routed at random.
MIXTRAL = {1: 144.03, 2: 229.28, 4: 351.10, 8: 434.98, 16: 471.49, 32: 487.35, 64: 483.14, 96: 494.42, 128: 491.39}


@pytest.mark.parametrize("kernel", ["vllm_unquantizedfusedmoe_triton_tritonexperts", ""])
@pytest.mark.parametrize(("tokens", "measured"), MIXTRAL.items())
def test_experts_of_mixtral_take_what_vllm_timed(tmp_path: Path, kernel: str, tokens: int, measured: float) -> None:
    """Experts of a step that decodes are within a tenth of vLLM's own timing, on which no constant rests."""
    row = {
        **EXPERTS, "num_tokens": f"{tokens}", "intermediate_size": "14336", "top_k": "2", "num_experts": "8",
        "moe_tp": "2", "routing": "", "kernel": kernel,
    }  # fmt: skip
    assert only(tmp_path, row, "h100-sxm-80gb", "vllm").predicted == pytest.approx(measured * 1e-6, rel=0.1)
