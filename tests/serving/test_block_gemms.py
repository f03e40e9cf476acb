"""GEMMs in 8-bit blocks in kernels that a launch asks for."""

from __future__ import annotations

import pytest

from serving.serving_cases import ask
from shardwise.hardware import find_device
from shardwise.ledger.op import Op
from shardwise.plans import Plan, Serving
from shardwise.serving import find_engine
from shardwise.serving._block_tiles import in_tiles


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


@pytest.mark.parametrize(
    ("engine", "device", "linear", "blocks"),
    [
        ("sglang-0.5.7", "mi300x", "down", 7168 / 128),
        ("sglang-0.5.7", "mi300x", "out", 2048 / 128),
        ("sglang", "mi325x", "mlp.up", 7168 / 128),
        ("sglang", "mi325x", "down", 0.0),
        ("sglang-0.5.7", "mi300x", "mlp.shared.up", 0.0),
        ("sglang-0.5.7", "mi355x", "down", 0.0),
        ("sglang-0.5.7", "h200-sxm-141gb", "down", 0.0),
        ("vllm", "mi300x", "down", 0.0),
    ],
)
def test_blocks_on_cdna_3_are_multiplied_in_tiles_that_walk_their_depth(
    engine: str, device: str, linear: str, blocks: float
) -> None:
    """SGLang's kernel there takes 2.2 us a block of depth for one token as for 100, but for shapes that have tiles."""
    jobs = [Serving(batch=batch, input_tokens=64, output_tokens=2, weights="fp8-block") for batch in (1, 100)]
    found = [ask("deepseek-v3", job, Plan(tp=8), device=device, engine=engine).evaluation for job in jobs]
    seconds = [one.decode.operators[linear] / (3 if linear == "mlp.up" else 61) for one in found]
    if blocks:
        assert seconds == pytest.approx([2.2e-6 * blocks] * 2)
    else:
        assert seconds[0] < 20e-6


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "seconds"),
    [
        (1.0, 1280.0, 1000.0, 8 * 2e-6),
        (129.0, 2560.0, 1000.0, 2 * 2 * 8 * 2e-6),
        (256.0, 2560.0, 1000.0, 2 * 2 * 8 * 2e-6),
        (1.0, 1290.0, 1000.0, 1.1 * 8 * 2e-6),
        (1.0, 64.0, 100000.0, 3e-6),
        (1.0, 128.0, 128.0, 3e-6),
    ],
)
def test_tiles_of_128_walk_blocks_of_depth(rows: float, columns: float, inner: float, seconds: float) -> None:
    """Tiles that no row or column fills count whole, ten run at a time, and nothing is quicker than the best kernel."""
    op = Op(name="down", kind="matmul", region="mlp", rows=rows, columns=columns, inner=inner, flops=0.0,
            forward_bytes=0.0, backward_flops=0.0, backward_bytes=0.0, weight_flops=0.0, weight_bytes=0.0)  # fmt: skip
    assert in_tiles(find_engine("sglang-0.5.7"), (2e-6, 10.0), op, 3e-6) == pytest.approx(seconds)
