"""Formats that parts of a model have of their own in a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.serving_cases import ask, model_of, moe_block
from shardwise import count
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._engine import find_engine
from shardwise.serving._formats import checkpoint_format
from shardwise.serving._sizes import sizes_of


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("qwen3.5-122b-a10b", "nvidia/Qwen3.5-122B-A10B-NVFP4"),
        ("glm-5", "nvidia/GLM-5-NVFP4"),
        ("gemma-4-31b", "nvidia/Gemma-4-31B-IT-NVFP4"),
    ],
)
def test_a_format_by_name_is_what_the_published_copy_has(name: str, copy: str) -> None:
    """`--weights nvfp4` of a mixture, or of a dense Gemma 4, keeps wide what NVIDIA's copy of it does."""
    job = Serving(input_tokens=8, output_tokens=8)
    named = ask(load_model(name), replace(job, weights="nvfp4"), device="b200-sxm-180gb")
    assert named.weights_bytes_per_gpu == ask(load_model(copy), job, device="b200-sxm-180gb").weights_bytes_per_gpu


def test_a_format_of_experts_is_of_linear_layers_where_there_are_none() -> None:
    """A dense model in MXFP4 has its linear layers in it: embedding and head alone stay in 16 bits."""
    model, job = load_model("llama-3.1-70b"), Serving(input_tokens=8, output_tokens=8, weights="mxfp4")
    report = ask(model, job, device="b200-sxm-180gb")
    wide = 2 * model.vocab * model.hidden
    matrices = count(model).parameters - wide - (2 * model.num_layers + 1) * model.hidden
    assert report.weights_bytes_per_gpu == pytest.approx(2 * wide + matrices * 0.53125, rel=1e-3)
    named = "mxfp4+attention=mxfp4+recurrent=mxfp4+feed-forward=mxfp4"
    assert report.case.format.name == named
    assert ask("gpt-oss-20b", job, device="b200-sxm-180gb").case.format.name == "mxfp4"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_inputs_of_mxfp4_are_narrow_where_the_device_multiplies_them(engine: str) -> None:
    """Files of Quark have inputs in 4 bits on CDNA 4, in every part; gpt-oss's own have not, and no earlier device.

    Prompts of Llama-3.1-405B take less than four times what the peak of 4-bit floats allows.
    """
    job = Serving(batch=64, input_tokens=1024, output_tokens=1024, weights="mxfp4")
    asked = {
        (name, on): ask(load_model(name), job, device=on, engine=find_engine(engine))
        for name, on in (("llama-3.1-405b", "mi355x"), ("qwen3-coder-480b-a35b", "mi355x"), ("gpt-oss-20b", "mi355x"))
    }
    assert [one.case.compute for one in asked.values()] == ["fp4", "fp4", "bf16"]
    dense = asked["llama-3.1-405b", "mi355x"]
    assert {one.compute for one in dense.case.format.narrow} == {"fp4"}
    assert ask(load_model("llama-3.1-70b"), job, device="mi300x", engine=find_engine(engine)).case.compute == "bf16"
    flops = 64 * 1024 * 2 * 405e9 / 10.07e15
    assert flops < dense.ttft_seconds < 4 * flops


def test_parts_of_a_checkpoint_have_their_own_bytes() -> None:
    """Nemotron-3 Super in NVFP4, with the layer that predicts, has the 74.80 GiB of its published files within 2 %.

    Attention in 16 bits adds its elements by what they are wider; parts in the format of the rest change nothing.
    """
    job = Serving(input_tokens=8, output_tokens=8, weights="nvfp4")
    guesses = replace(job, speculative_method="mtp", num_speculative_tokens=1, acceptance_rate=0.7)
    report = ask("nemotron-3-super-120b-a12b", guesses, device="b200-sxm-180gb")
    assert report.case.format.name == "nvfp4+attention=bf16+latent=bf16+recurrent=fp8+shared=fp8+mtp=bf16"
    assert report.weights_bytes_per_gpu == pytest.approx(74.80 * 2**30, rel=0.02)
    model, elements = model_of(moe_block(), layers=2), 2 * 2048 * 128 * (16 + 4 + 4 + 16)
    whole, same, wide, half = (
        ask(model, replace(job, weights=f"nvfp4{more}"), device="b200-sxm-180gb").weights_bytes_per_gpu
        for more in ("", "+attention=nvfp4", "+attention=bf16", "+attention=bf16*1/2")
    )
    assert (same - whole, wide - whole, half - whole) == (0, elements * 1.4375, elements * 1.4375 / 2)


@pytest.mark.parametrize(
    ("quantization", "name", "size"),
    [
        ("gptq-int4-g32", "int4-g32", 0.5625),
        ("awq-int4-g64", "int4-g64", 0.53125),
        ("torchao-int4-g64+attention=bf16", "int4-g64+attention=bf16", 0.53125),
        ("torchao-fp8", "fp8", 1.0),
        ("modelopt-fp8_pb_wo", "fp8-block", 1.0),
        ("modelopt-w4a16_nvfp4+attention=fp8_pb_wo", "nvfp4-w4a16+attention=fp8-block", 0.5625),
    ],
)
def test_a_checkpoint_has_the_bytes_of_its_format(quantization: str, name: str, size: float) -> None:
    """Scales are counted by the size of the group."""
    form = checkpoint_format(quantization)
    assert (form.name, form.bytes) == (name, pytest.approx(size, rel=1e-3))


def test_the_group_of_a_format_changes_no_kernel() -> None:
    """Kimi-K2.5 has groups of 32 and wide attention: its experts are Marlin's, as those of plain 4 bits are.

    The kernel takes the size of the group as an argument (github.com/vllm-project/vllm v0.33.0
    vllm/model_executor/layers/fused_moe/experts/marlin_moe.py).
    """
    job = Serving(input_tokens=8, output_tokens=8)
    released, plain = (
        ask(load_model("kimi-k2.5"), replace(job, weights=weights), Plan(tp=8), device="h200-sxm-141gb", engine="vllm")
        for weights in ("", "int4")
    )
    assert released.case.format.name == "int4-g32+attention=bf16+feed-forward=bf16+shared=bf16"
    cases = [report.case for report in (released, plain)]
    sizes = [sizes_of(case.model, case.plan, case.job, case.domains) for case in cases]
    own, other = (engine_cost_model(case, size).kernels for case, size in zip(cases, sizes, strict=True))
    assert own.experts_wide == other.experts_wide
    memory, device = find_engine("vllm").memory, "hopper"
    assert memory.expert_workspace(device, released.case.format.kind) == memory.expert_workspace(device, "int4")


def test_experts_in_mxfp4_have_whole_tiles_on_blackwell() -> None:
    """An eighth of an expert of gpt-oss is 360 wide: FlashInfer's kernels take 256 at a time until vLLM 0.26, then 128.

    The hidden side of 2,880 has 3,072 (vllm/model_executor/layers/fused_moe/oracle/mxfp4.py of v0.26.0 and v0.27.0).
    """
    job = Serving(input_tokens=8, output_tokens=8)
    old, new, today = (
        ask("gpt-oss-120b", job, Plan(tp=8), device="b200-sxm-180gb", engine=engine).weights_bytes_per_gpu
        for engine in ("vllm-0.26", "vllm-0.28", "vllm")
    )
    assert new == today
    assert old - new == pytest.approx(36 * 128 * 3 * 3072 * (512 - 384) * 4.25 / 8)
