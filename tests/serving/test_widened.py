"""GEMMs of many rows whose kernels widen narrow weights: slower than those of 16-bit weights."""

from __future__ import annotations

import pytest

from serving.serving_cases import ask
from shardwise.cost import Efficiencies
from shardwise.plans import Serving
from shardwise.serving import InferReport


def prompt(device: str, weights: str, engine: str = "vllm", **more: object) -> InferReport:
    """One prompt of 8,000 tokens of Gemma 4 12B."""
    job = Serving(batch=1, input_tokens=8013, output_tokens=2, weights=weights)
    return ask("gemma-4-12b", job, device=device, engine=engine, **more)


@pytest.mark.parametrize(
    ("device", "measured"),
    [("a100-sxm-80gb", 1.406), ("h100-sxm-80gb", 0.604)],
)
def test_prompts_in_4_bits_take_what_was_measured(device: str, measured: float) -> None:
    """dual_radeon, vLLM 0.28: before, they were priced as 16-bit ones, 22 and 44 % too fast."""
    assert prompt(device, "int4", "vllm-0.28").ttft_seconds == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("device", "weights", "slower"),
    [
        ("a100-sxm-80gb", "int4", True),
        ("a100-sxm-80gb", "fp8", True),
        ("h100-sxm-80gb", "int4", True),
        ("h100-sxm-80gb", "fp8", False),
        ("rtx-4090", "int4", False),
    ],
)
def test_prompts_are_slower_where_weights_are_widened(device: str, weights: str, slower: bool) -> None:
    """Not where 8 bits are multiplied as they are, nor on GeForce, whose cores wait for their sums."""
    wide = ask("llama-3.1-8b", Serving(batch=1, input_tokens=4096, output_tokens=2), device=device)
    narrow = ask("llama-3.1-8b", Serving(batch=1, input_tokens=4096, output_tokens=2, weights=weights), device=device)
    assert (narrow.ttft_seconds > 1.2 * wide.ttft_seconds) is slower


def test_ideal_kernels_widen_for_nothing() -> None:
    """Imposed efficiencies have no such share."""
    ideal = Efficiencies(ideal=True)
    wide, narrow = (prompt("h100-sxm-80gb", w, efficiencies=ideal).ttft_seconds for w in ("", "int4"))
    assert narrow <= wide


@pytest.mark.parametrize(("model", "measured"), [("gemma-4-31b", 11.64e-3), ("gemma-4-12b", 6.227e-3)])
def test_tokens_in_4_bits_on_hopper_take_what_was_measured(model: str, measured: float) -> None:
    """dual_radeon, vLLM 0.28 on H100: before, 16 to 19 % too fast."""
    job = Serving(batch=1, input_tokens=513, output_tokens=512, weights="int4")
    assert ask(model, job, engine="vllm-0.28").tpot_seconds == pytest.approx(measured, rel=0.1)
