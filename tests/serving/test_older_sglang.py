"""Kernels that older releases of SGLang ran beside experts: the choice of experts, and their own all-reduce."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.serving_cases import ask
from shardwise.cost import Efficiencies, family_of, reduce_of
from shardwise.hardware import find_device
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving._cost_model import engine_cost_model, op_seconds
from shardwise.serving._engine import find_engine
from shardwise.serving._kernels import kernels_of
from shardwise.serving._ledger import EngineStep, step_ledger
from shardwise.serving._sizes import sizes_of


@pytest.mark.parametrize(
    ("engine", "model", "device", "weights", "ep", "chosen"),
    [
        ("sglang-0.5.7", "glm-4.6", "b200-sxm-180gb", "bf16", 1, True),
        ("sglang-0.5.7", "glm-4.5-air", "h200-sxm-141gb", "bf16", 8, True),
        ("sglang-0.5.11", "glm-4.6", "h200-sxm-141gb", "fp8-block", 1, True),
        ("sglang-0.5.11", "glm-4.5-air", "h200-sxm-141gb", "bf16", 1, True),
        ("sglang-0.5.11", "glm-4.5-air", "h200-sxm-141gb", "bf16", 8, False),
        ("sglang-0.5.11", "glm-4.6", "b200-sxm-180gb", "nvfp4", 1, False),
        ("sglang-0.5.13", "glm-4.5-air", "h200-sxm-141gb", "bf16", 1, False),
        ("sglang-0.5.15", "glm-4.6", "b200-sxm-180gb", "bf16", 1, False),
        ("sglang-0.5.15", "glm-4.6", "h200-sxm-141gb", "bf16", 1, True),
        ("sglang-0.5.15", "glm-4.6", "h200-sxm-141gb", "bf16", 8, False),
        ("sglang", "glm-4.6", "h200-sxm-141gb", "bf16", 1, False),
        ("sglang-0.5.7", "qwen3-235b-a22b", "h200-sxm-141gb", "bf16", 1, False),
        ("vllm-2025", "glm-4.6", "h200-sxm-141gb", "bf16", 1, False),
    ],
)  # fmt: skip
def test_sglang_let_pytorch_choose_experts(
    engine: str, model: str, device: str, weights: str, ep: int, chosen: bool
) -> None:
    """36 us a layer where a fused kernel takes 8 (pull 5371), of experts that none of its kernels took."""
    case = ask(model, Serving(weights=weights), Plan(tp=8, ep=ep), device, engine=engine).case
    sizes, step = (
        sizes_of(case.model, case.plan, case.job, case.domains),
        EngineStep(phase="decode", sequences=1, tokens=1, context=128),
    )
    costs = engine_cost_model(case, sizes)
    router = next(op for _, ops in step_ledger(case, sizes, step).lines for op in ops if op.role == "router")
    plain = op_seconds(replace(costs, torch_choices=(False, False)), router)
    assert op_seconds(costs, router) - plain == pytest.approx(28.0275e-6 if chosen else 0.0, abs=1e-8)


@pytest.mark.parametrize(
    ("engine", "model", "device", "owner"),
    [
        ("sglang", "minimax-m2", "b200-sxm-180gb", "sglang"),
        ("sglang-0.5.13", "minimax-m2", "b200-sxm-180gb", "sglang"),
        ("sglang-0.5.11", "minimax-m2", "b200-sxm-180gb", "vllm"),
        ("sglang-0.5.11", "qwen3-235b-a22b", "b200-sxm-180gb", "sglang"),
        ("sglang-0.5.11", "qwen3-235b-a22b", "a100-sxm-80gb", "vllm"),
        ("sglang-0.5.7", "qwen3-235b-a22b", "b200-sxm-180gb", "vllm"),
        ("sglang-0.5.7", "deepseek-v3", "b200-sxm-180gb", "sglang"),
        ("sglang-0.5.7", "deepseek-v3", "h200-sxm-141gb", "vllm"),
    ],
)
def test_sglang_reduced_as_vllm_until_its_kernel_pushed(engine: str, model: str, device: str, owner: str) -> None:
    """Before 0.5.12, but in models whose all-reduces FlashInfer joins with norms on one node."""
    found = find_device(device).device
    kernels = kernels_of(found, family_of(found), "bf16", find_engine(engine), Efficiencies(), load_model(model).family)
    assert kernels.all_reduce == reduce_of(found, owner)
