"""Shared experts on a second stream of captured steps, and the kernels that routers of few tokens run in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.serving_cases import ask
from shardwise.cost import family_of
from shardwise.hardware import find_device
from shardwise.ledger.op import Op, within
from shardwise.models import load_model
from shardwise.ops.experts import EXPERTS, SHARED
from shardwise.plans import Plan, Serving
from shardwise.serving._beside import rows_beside, shared_beside_routed
from shardwise.serving._cost_model import EngineCostModel, engine_cost_model, op_seconds, product_rates
from shardwise.serving._engine import find_engine
from shardwise.serving._ledger import EngineStep, step_ledger
from shardwise.serving._placed import layer_cost
from shardwise.serving._sizes import sizes_of


def layer_of(model: str, engine: str, device: str, tokens: int, tp: int = 1) -> tuple[EngineCostModel, list[Op]]:
    """Return the device under an engine in a decode step of so many tokens, and the operators of a layer of experts."""
    case = ask(model, Serving(batch=tokens), Plan(tp=tp), device, engine=engine).case
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    step = EngineStep(phase="decode", sequences=tokens, tokens=1, context=128)
    lines = (ops for _, ops in step_ledger(case, sizes, step).lines)
    layer = next([*ops] for ops in lines if any(op.role == "router" for op in ops))
    return replace(engine_cost_model(case, sizes), decoding=True), layer


def seconds_of(model: str, engine: str, device: str, tokens: int, tp: int = 1) -> tuple[float, float, float]:
    """Return seconds of shared experts one after the other and beside the routed ones, and those of these."""
    costs, ops = layer_of(model, engine, device, tokens, tp)
    timed = [(op, op_seconds(costs, op)) for op in ops]
    found = [*shared_beside_routed(timed, (costs.beside_rows, float(tp)), lambda op: product_rates(costs, op))]
    assert [op for op, _ in found] == ops
    alone, left = (sum(s for op, s in some if within(op.region, SHARED)) for some in (timed, found))
    routed = sum(s for op, s in found if op.role == "router" or within(op.region, EXPERTS))
    assert routed == sum(s for op, s in timed if op.role == "router" or within(op.region, EXPERTS))
    return alone, left, routed


@pytest.mark.parametrize("model", ["qwen3.5-397b-a17b", "glm-4.6", "kimi-linear-48b-a3b", "llama-4-scout"])
def test_shared_experts_of_short_steps_are_hidden_but_for_the_addition(model: str) -> None:
    """One kernel of 2.2 us adds both results; the rest runs while the routed experts do."""
    alone, left, routed = seconds_of(model, "sglang-0.5.15", "b200-sxm-180gb", 1, tp=8)
    assert alone < routed
    assert 2.2e-6 < left < 2.3e-6 < alone


def test_a_stream_beside_another_does_not_make_the_memory_faster() -> None:
    """Both together take at least what their bytes take, and no longer than one after the other and the addition."""
    for tokens in (1, 16, 256, 1024):
        costs, ops = layer_of("kimi-linear-48b-a3b", "sglang-0.5.15", "h100-sxm-80gb", tokens)
        alone, left, routed = seconds_of("kimi-linear-48b-a3b", "sglang-0.5.15", "h100-sxm-80gb", tokens)
        both = [op for op in ops if op.role == "router" or within(op.region, EXPERTS) or within(op.region, SHARED)]
        assert left + routed > sum(op.forward_bytes for op in both) / costs.rates.memory_bytes
        assert left < alone + 3e-5


def test_what_a_second_stream_saved_of_kimi_linear() -> None:
    """0.30 ms of a token at tp 2: 194.0 and 205.8 tokens/s (sgl-project/sglang pull 12660, Hopper or Blackwell)."""
    alone, left, _ = seconds_of("kimi-linear-48b-a3b", "sglang-0.5.7", "h100-sxm-80gb", 1, tp=2)
    measured = 1 / 193.98 - 1 / 205.84
    assert 26 * (alone - left) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3.5-397b-a17b", "gpt-oss-120b"])
def test_more_tokens_take_no_less_time_at_the_limits_of_kernels(model: str) -> None:
    """Beyond the tokens of a router's kernel, and of a second stream, a layer takes no less."""

    def layer_seconds(tokens: int) -> float:
        costs, ops = layer_of(model, "sglang", "b200-sxm-180gb", tokens, tp=8)
        return float(layer_cost(tuple(ops), costs, "layer").seconds)

    for last in (8, 16, 64, 128, 1024):
        assert layer_seconds(last) <= layer_seconds(last + 1)


@pytest.mark.parametrize(
    ("engine", "model", "device", "rows"),
    [
        ("sglang", "qwen3.5-397b-a17b", "b200-sxm-180gb", 1024),
        ("sglang-0.5.7", "deepseek-r1", "h200-sxm-141gb", 1024),
        ("sglang", "minimax-m3", "b200-sxm-180gb", 1024),
        ("sglang-0.5.15", "minimax-m3", "b200-sxm-180gb", 0),
        ("sglang", "gemma-4-26b-a4b", "b200-sxm-180gb", 0),
        ("sglang", "deepseek-r1", "mi300x", 0),
        ("vllm", "deepseek-r1", "b200-sxm-180gb", 0),
    ],
)
def test_who_runs_shared_experts_on_a_second_stream(engine: str, model: str, device: str, rows: int) -> None:
    """SGLang on NVIDIA's devices, models by what their modules do in its releases."""
    family = family_of(find_device(device).device)
    assert rows_beside(find_engine(engine).operators, family, load_model(model)) == rows


@pytest.mark.parametrize(
    ("engine", "model", "device", "tokens", "microseconds"),
    [
        ("sglang", "deepseek-v3", "b300", 1, 1.73),
        ("sglang", "deepseek-v3", "b300", 8, 3.52),
        ("sglang-0.5.7", "kimi-k2", "b200-sxm-180gb", 4, 3.20),
        ("vllm", "deepseek-v3", "b200-sxm-180gb", 2, 2.21),
        ("vllm-2025", "deepseek-v3", "b200-sxm-180gb", 2, 4.90),
        ("vllm", "deepseek-v3", "b200-sxm-180gb", 32, 5.06),
        ("sglang", "gpt-oss-120b", "b200-sxm-180gb", 32, 3.4),
        ("sglang-0.5.11", "gpt-oss-120b", "b200-sxm-180gb", 1, 5.7),
        ("vllm", "glm-5", "b200-sxm-180gb", 1, 4.5),
    ],
)
def test_routers_of_few_tokens_take_what_was_measured(
    engine: str, model: str, device: str, tokens: int, microseconds: float
) -> None:
    """In a kernel of their own, or in the library's (vllm-project/vllm pulls 37244 and 44217, sglang pull 21531)."""
    costs, ops = layer_of(model, engine, device, tokens, tp=8)
    router = next(op for op in ops if op.role == "router")
    assert op_seconds(costs, router) == pytest.approx(microseconds * 1e-6, rel=0.25)


def test_other_engines_keep_a_kernel_for_thin_products() -> None:
    """TensorRT-LLM has kernels of its own for few tokens; vLLM's library has those of routers alone."""
    found = []
    for engine in ("tensorrt-llm", "vllm", "sglang"):
        costs, ops = layer_of("glm-4.6", engine, "b200-sxm-180gb", 1, tp=8)
        found.append([op_seconds(costs, next(op for op in ops if op.role == role)) for role in ("router", "qkv")])
    (own, qkv), (library, same), (_, slower) = found
    assert own < library
    assert qkv == same < slower
