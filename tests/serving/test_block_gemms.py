"""GEMMs in 8-bit blocks in kernels that a launch asks for."""

from __future__ import annotations

import pytest

from serving.serving_cases import ask
from shardwise.hardware import find_device
from shardwise.plans import Plan, Serving


@pytest.mark.parametrize(
    ("weights", "device", "share"),
    [
        ("fp8-block", "b200-sxm-180gb", 0.098),
        ("fp8-block", "gb300", 0.098),
        ("fp8-block", "h200-sxm-141gb", 0.0),
        ("fp8", "b200-sxm-180gb", 0.0),
        ("nvfp4", "b200-sxm-180gb", 0.0),
    ],
)
def test_a_launch_with_flashinfers_gemms_of_blocks_runs_prompts_at_their_rate(
    weights: str, device: str, share: float
) -> None:
    """On Blackwell GEMMs in 8-bit blocks then reach what was measured of that kernel; all others are as they were."""
    tokens, job = 8192, Serving(batch=1, input_tokens=8192, output_tokens=2, weights=weights)
    told, usual = (
        ask("llama-3.1-70b", job, Plan(tp=4), device=device, engine=one).evaluation
        for one in ("sglang-flashinfer", "sglang")
    )
    if not share:
        assert told.prefill.operators == usual.prefill.operators
        return
    peak = find_device(device).device.peak_flops("fp8")
    multiplied = 80 * 2 * tokens * (2 * 28672 / 4) * 8192 / (share * peak)
    assert told.prefill.operators["mlp.up"] == pytest.approx(multiplied, rel=0.1)
    assert told.prefill.operators["mlp.up"] > 3 * usual.prefill.operators["mlp.up"]
    assert told.prefill.operators["attention"] == usual.prefill.operators["attention"]
