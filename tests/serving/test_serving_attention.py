"""Attention in engines: the kernels of tables, by the operator that the ledger has of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.serving_cases import ask
from shardwise.cost import Datasheet, Efficiencies, last_cache_bytes
from shardwise.cost._kernels import PrefillAttention, costed_seconds, kernel_costs, prompt_parts
from shardwise.hardware import find_device
from shardwise.ledger.op import Op
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving._cost_model import _chip, engine_cost_model
from shardwise.serving._kernels import attention_kernels, cached_seconds, prompt_seconds

H100 = find_device("h100-sxm-80gb").device
CHIP: Datasheet[Any] = Datasheet(
    flops=H100.peak_flops("bf16"),
    bytes_per_second=H100.memory_bytes_per_second,
    cores=float(H100.num_cores),
    cached_bytes=last_cache_bytes(H100),
)


def core(tokens: float, keys: float, flops: float, cached: float) -> Op[Any]:
    """Return the ledger's line of attention of 32 heads of 128 over keys and values of 8 heads in 16 bits."""
    return Op(name="attention", kind="attention", region="attention.core", flops=flops, backward_flops=0.0,
              forward_bytes=2 * tokens * 32 * 256 + 2 * cached * 8 * 256, backward_bytes=0.0, weight_flops=0.0,
              weight_bytes=0.0, rows=tokens, columns=keys, inner=256.0, batch=32.0)  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize(("sequences", "queries"), [(1, 4096), (4, 2048), (16, 512)])
def test_a_prompt_costs_what_its_kernel_was_measured_to(engine: str, sequences: int, queries: int) -> None:
    """The prompt of a Llama 3.1 8B layer takes the seconds of the form that is fitted to tables, within 3 %."""
    kernels = attention_kernels(H100, engine, load_model("llama-3.1-8b"), (2, 2))
    assert kernels is not None
    pairs = sequences * queries * (queries + 1) / 2
    op = core(sequences * queries, queries, 512 * 32 * pairs, sequences * queries)
    kernel = kernel_costs(H100, "prefill", (engine, "bf16"), 128, False)
    assert kernel is not None
    work = PrefillAttention(sequences=float(sequences), queries=float(queries), past=0.0, heads=32.0, kv_heads=8.0,
                  pair_flops=512, token_bytes=512, edge_bytes=4.0 * sequences * queries * 32 * 128)  # fmt: skip
    expected = costed_seconds(kernel, prompt_parts(CHIP, work, kernel.packs))
    assert prompt_seconds(kernels, CHIP, op) == pytest.approx(expected, rel=0.03)


def test_a_cache_twice_as_long_takes_nearly_twice_as_long() -> None:
    """64 sequences behind 32,768 tokens take 1.8 to 2.1 times the seconds behind 16,384."""
    kernels = attention_kernels(H100, "vllm", load_model("llama-3.1-8b"), (2, 2))
    assert kernels is not None
    short, long = (cached_seconds(kernels, CHIP, core(64, n, 512 * 32 * 64 * n, 64 * n)) for n in (16384.0, 32768.0))
    assert 1.8 < long / short < 2.1


def test_engines_differ_by_their_attention_kernels() -> None:
    """The same long prompt on H100 takes other seconds of attention in vLLM than in TensorRT-LLM."""
    job = Serving(batch=1, input_tokens=32768, output_tokens=2)
    found = [
        ask("llama-3.1-8b", job, Plan(), engine=engine).evaluation.prefill.operators["attention"]
        for engine in ("vllm", "tensorrt-llm")
    ]
    assert found[0] != found[1]
    assert 0.4 < found[0] / found[1] < 2.5


def test_imposed_efficiencies_replace_the_measured_kernels() -> None:
    """With every efficiency one, attention of a prompt takes its FLOPs at the peak."""
    job = Serving(batch=1, input_tokens=8192, output_tokens=2)
    found = ask("llama-3.1-8b", job, Plan(), efficiencies=Efficiencies(ideal=True)).evaluation.prefill
    assert found.operators["attention"] == pytest.approx(
        32 * 512 * 32 * 8192 * 8193 / 2 / H100.peak_flops("bf16"), rel=0.01
    )


def test_latent_attention_has_its_own_kernels() -> None:
    """DeepSeek-V3 runs latent kernels; a device without tables of engines has none."""
    kernels = attention_kernels(H100, "vllm", load_model("deepseek-v3"), (2, 2))
    assert kernels is not None
    assert [kernel.dims for kernel in kernels.decode] == [2 * 512 + 64]
    assert attention_kernels(find_device("mi300x").device, "vllm", load_model("deepseek-v3"), (2, 2)) is None
    assert attention_kernels(H100, "llama.cpp", load_model("llama-3.1-8b"), (2, 2)) is None


def test_no_layer_finds_its_cache_where_a_table_does() -> None:
    """Weights of all layers pass between two visits to a cache, so that a step reads it from memory, however small."""
    report = ask("llama-3.1-8b", Serving(batch=1, input_tokens=1024, output_tokens=2), Plan())
    chips = [
        _chip(replace(engine_cost_model(report.case, report.evaluation.sizes), decoding=decoding))
        for decoding in (True, False)
    ]
    assert [chip.cached_bytes for chip in chips] == [0, last_cache_bytes(H100)]


@pytest.mark.parametrize(("model", "slower"), [("llama-3.1-70b", True), ("llama-3.1-8b", False)])
def test_releases_of_2025_read_8_bit_caches_of_large_groups_as_wide_ones(model: str, slower: bool) -> None:
    """On Hopper before 0.11.1 groups of 8 cost what their cache does in 16 bits; queries have kernels of their own."""

    def attention(engine: str, cache: str, device: str = "h100-sxm-80gb") -> float:
        job = Serving(batch=64, input_tokens=4096, kv_cache=cache, weights="fp8")
        return ask(model, job, Plan(tp=4), device=device, engine=engine).evaluation.decode.operators["attention"]

    layers = len(load_model(model).layers)
    old, new, wide = (attention(*one) for one in (("vllm-0.11", "fp8"), ("vllm-0.13", "fp8"), ("vllm-0.11", "bf16")))
    assert old == pytest.approx((wide if slower else new) + layers * 8.2e-6, rel=1e-6) and old > new
    assert wide == attention("vllm-0.13", "bf16")
    for device, late in (("b200-sxm-180gb", 8.2e-6), ("l40s", 0.0)):
        late += attention("vllm-0.13", "fp8", device) / layers
        assert attention("vllm-0.11", "fp8", device) == pytest.approx(layers * late)


@pytest.mark.parametrize(
    ("device", "weights", "cache", "least", "most"),
    [
        ("rtx-pro-6000-server", "nvfp4", "fp8", 360e12, 430e12),
        ("rtx-pro-6000-server", "nvfp4", "bf16", 190e12, 230e12),
        ("rtx-pro-6000-server", "int4", "fp8", 190e12, 230e12),
        ("l40s", "fp8", "fp8", 240e12, 280e12),
        ("h100-sxm-80gb", "fp8", "fp8", 700e12, 800e12),
    ],
)
def test_prompts_over_8_bit_caches_run_in_8_bits_beside_narrow_weights(
    device: str, weights: str, cache: str, least: float, most: float
) -> None:
    """TensorRT-LLM's prompts of 16,384 tokens reach what its tables have: FLOP/s of the half that a mask leaves."""
    job = Serving(batch=1, input_tokens=16384, output_tokens=2, weights=weights, kv_cache=cache)
    report = ask("qwen3-8b", job, Plan(), device, engine="tensorrt-llm")
    flops = 36 * 2 * 32 * 128 * 16384**2
    assert least < flops / float(report.evaluation.prefill.roles["attention"]) < most
