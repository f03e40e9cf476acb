"""Formats that parts of a model have of their own in a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.serving_cases import ask, model_of, moe_block
from shardwise.models import load_model
from shardwise.plans import Serving


@pytest.mark.parametrize(
    ("name", "copy"),
    [("qwen3.5-122b-a10b", "nvidia/Qwen3.5-122B-A10B-NVFP4"), ("glm-5", "nvidia/GLM-5-NVFP4")],
)
def test_a_format_by_name_is_what_the_published_copy_has(name: str, copy: str) -> None:
    """`--weights nvfp4` of a mixture keeps wide what NVIDIA's copy of it does."""
    job = Serving(input_tokens=8, output_tokens=8)
    named = ask(load_model(name), replace(job, weights="nvfp4"), device="b200-sxm-180gb")
    assert named.weights_bytes_per_gpu == ask(load_model(copy), job, device="b200-sxm-180gb").weights_bytes_per_gpu


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
