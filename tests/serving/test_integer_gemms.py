"""Prompts of llama.cpp on narrow weights: GEMMs in 8-bit integers, beside which tiles of weights are loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.serving_cases import ask
from shardwise.ledger.op import Op
from shardwise.plans import Serving
from shardwise.serving import EngineCostModel, engine_cost_model, find_engine
from shardwise.serving._integers import expanded, loaded_seconds, tiled_rows


def prompt(device: str, weights: str = "q8_0", model: str = "llama-3.1-8b", tokens: int = 2048, **own: float) -> float:
    """Return seconds of a prompt in one step, with figures of quantisation that differ."""
    engine = find_engine("llama.cpp")
    engine = replace(engine, quantisation=replace(engine.quantisation, **own))  # type: ignore[arg-type]
    job = Serving(batch=1, input_tokens=tokens, output_tokens=1, weights=weights, max_batched_tokens=tokens)
    return float(ask(model, job, device=device, engine=engine).ttft_seconds)


@pytest.mark.parametrize(
    ("model", "device", "weights", "tokens", "measured"),
    [
        ("llama-3.1-8b", "rtx-4090", "q4_k_s", 512, 12394),  # github.com/ggml-org/llama.cpp pull 24127
        ("llama-3.1-8b", "rtx-4090", "q4_k_s", 256, 11022),
        ("qwen2.5-7b", "gb10", "q8_0", 2048, 2276),  # benches/dgx-spark.md
        ("qwen2.5-7b", "gb10", "q8_0", 512, 2381),
        ("qwen3-30b-a3b", "gb10", "q8_0", 2048, 3176),
        ("llama-3-8b", "rx-7900-xtx", "q4_k_m", 512, 3227),  # pull 26284
    ],
)
def test_prompts_on_integers_are_near(model: str, device: str, weights: str, tokens: int, measured: float) -> None:
    """Tokens a second are within 12 % of the published figure, in 4 and in 8 bits, with much bandwidth and little."""
    assert abs(prompt(device, weights, model, tokens) * measured / tokens - 1) <= 0.12


def test_weights_that_fit_no_cache_are_loaded_for_each_tile_of_tokens() -> None:
    """Cores of GB10 take 27 to 94 MB of weights in turn, its cache has 24: 2,048 tokens load all of them 16 times."""
    often, once = (prompt("gb10", load_rows=rows) for rows in (128, 0))
    read = 7.0e9 * 34 / 32 / (0.83 * 2.73e11)
    assert 14 * read < often - once < 16 * read
    assert prompt("rx-7900-xtx", load_rows=128) == prompt("rx-7900-xtx", load_rows=0)  # no cache is known


def test_vector_units_bound_what_matrix_units_add_up() -> None:
    """Scales are applied by vector units: A100, whose matrix units outrun them, gains without; a GeForce does not."""
    for device, bound in (("a100-sxm-80gb", True), ("rtx-4090", False), ("rtx-3090", False)):
        assert (prompt(device) > 1.3 * prompt(device, scaled_flops=1000.0)) == bound


@pytest.mark.parametrize("device", ["gb10", "rtx-4090", "rx-7900-xtx", "t4"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_longer_prompts_take_longer(device: str, model: str) -> None:
    """Seconds grow with the tokens of a step across tiles and kernels."""
    seconds = [prompt(device, "q4_k_m", model, tokens) for tokens in (8, 9, 16, 64, 127, 129, 256, 257, 2048)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("device", "model", "layers", "measured"),
    [
        ("rtx-5090", "qwen3.5-9b", 24, 0.48e-6),  # github.com/ggml-org/llama.cpp pull 22587
        ("ryzen-ai-max-395", "qwen3.6-35b-a3b", 30, 220.9e-3 / 2048 / 30),  # AMD-Ecosystem/llama.cpp pull 54
    ],
)
def test_recurrences_of_prompts_run_token_by_token(device: str, model: str, layers: int, measured: float) -> None:
    """One kernel takes the tokens one after another: seconds a token and layer are near the published ones."""
    engine = find_engine("llama.cpp")
    twice = tuple((names, share / 2) for names, share in engine.operators.scan_shares)
    slower = replace(engine, operators=replace(engine.operators, scan_shares=twice))
    job = Serving(batch=1, input_tokens=2048, output_tokens=1, weights="q4_k_m", max_batched_tokens=2048)
    slow, own = (float(ask(model, job, device=device, engine=one).ttft_seconds) for one in (slower, engine))
    assert abs((slow - own) / 2048 / layers / measured - 1) <= 0.12
    assert not find_engine("vllm").operators.scan_shares  # chunks


@pytest.fixture(scope="module")
def gb10() -> EngineCostModel[float]:
    """GB10 in llama.cpp, of 48 cores and a last cache of 24 MB."""
    job = Serving(batch=1, input_tokens=512, output_tokens=1, weights="q8_0")
    report = ask("llama-3.1-8b", job, device="gb10", engine="llama.cpp")
    return engine_cost_model(report.case, report.evaluation.sizes)


def test_the_last_tile_of_an_expert_is_half_empty(gb10: EngineCostModel[float]) -> None:
    """Rows of experts take as long as their tiles, at the share of dense GEMMs; up to eight run without tiles."""
    own = gb10.engine.quantisation
    assert tiled_rows(gb10, 100.0) == pytest.approx((100 + own.tile_rows / 2) / own.experts_share)
    assert tiled_rows(gb10, 8.0) == 8


@pytest.mark.parametrize(
    ("experts", "inner", "loads"), [(1, 1024.0, 1), (1, 8192.0, 4), (8, 1024.0, 1), (8, 8192.0, 4)]
)
def test_weights_are_loaded_once_where_the_cache_keeps_them(
    gb10: EngineCostModel[float], experts: int, inner: float, loads: int
) -> None:
    """48 cores take 128 columns each: 6 MB of a depth of 1,024 stay in 24 MB, 50 of 8,192 are loaded for each tile."""
    read = 4096 * inner * experts
    op = Op(name="down", kind="matmul", region="mlp", rows=512.0, columns=4096.0, inner=inner, batch=float(experts),
            flops=0.0, forward_bytes=read, backward_flops=0.0, backward_bytes=0.0, weight_flops=0.0,
            weight_bytes=0.0)  # fmt: skip
    assert loaded_seconds(gb10, read, op, 512.0) == pytest.approx(loads * loaded_seconds(gb10, read, op, 128.0))


@pytest.mark.parametrize(("width", "widened"), [(1.0, True), (2.0, False)])
def test_narrow_weights_are_read_and_written_in_16_bits_by_a_kernel(
    gb10: EngineCostModel[float], width: float, widened: bool
) -> None:
    """A kernel of its own starts, reads what is stored and writes two bytes an element; 16-bit weights need none."""
    elements, edges = 4096.0 * 1024.0, gb10.activation_width * 512 * (4096 + 1024)
    op = Op(name="down", kind="matmul", region="mlp", rows=512.0, columns=4096.0, inner=1024.0, flops=0.0,
            forward_bytes=width * elements + edges, backward_flops=0.0, backward_bytes=0.0, weight_flops=0.0,
            weight_bytes=0.0)  # fmt: skip
    seconds = (width + 2) * elements / gb10.rates.memory_bytes + gb10.rates.memory_start
    assert expanded(gb10, op) == pytest.approx(seconds if widened else 0.0)
