"""Sizes of GGUF files, tensor by tensor, and what of them lies on a device."""

from __future__ import annotations

import pytest

from serving.serving_cases import ask
from shardwise.hardware import find_device
from shardwise.models import Model
from shardwise.ops.count import count_parameters
from shardwise.plans import Plan, Serving
from shardwise.serving import find_engine, find_format, format_names

MIXTURES = [name for name in format_names(spellings=False) if name.startswith(("iq", "q2", "q3", "q4_k", "q5_k"))]
MIB = 2**20
# Metal's device, whose memory is the host's: all of a file is there.
WHOLE = "apple-m4-max-40core"


def file_bytes(model: str, weights: str) -> float:
    """Return the bytes of the tensors of a file."""
    return ask(model, Serving(weights=weights), engine="llama.cpp", device=WHOLE).weights_bytes_per_gpu


@pytest.mark.parametrize("weights", MIXTURES)
def test_rules_make_the_published_bits_of_every_mixture(weights: str) -> None:
    """Bits a weight of Llama-3.1-8B are those of llama-quantize's README to its last digit, in all 21 mixtures."""
    parameters = count_parameters(Model.load("llama-3.1-8b"))
    # A table of 64 factors of rotation is a tensor of the file, too.
    bits = 8 * (file_bytes("llama-3.1-8b", weights) + 4 * 64) / (parameters + 64)
    assert bits == pytest.approx(find_format(weights).bits, abs=6e-5)


@pytest.mark.parametrize(
    ("model", "weights", "mib"),
    [
        # Sizes that llama-bench and llama-quantize print; github.com/geerlingguy/ai-benchmarks issues 53 and 54.
        ("tinyllama-1.1b", "q4_k_m", 636.18),
        ("llama-3.2-3b", "q4_k_m", 1918.35),
        ("llama-3.2-1b", "q4_k_m", 762.81),  # a tied table has the type of the head
        ("gemma-3-1b", "q4_k_m", 762.49),  # rows of 1,152, no multiple of 256
        ("qwen2.5-0.5b", "q4_k_m", 373.71),
        ("qwen2.5-0.5b", "q8_0", 500.79),
    ],
)
def test_files_are_as_large_as_published(model: str, weights: str, mib: float) -> None:
    """Sizes of files that no constant of a mixture fits, for their tables or the width of their rows, to 0.01 %."""
    assert file_bytes(model, weights) == pytest.approx(mib * MIB, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "gib"),
    [("mixtral-8x7b", 26.49), ("qwen3-30b-a3b", 17.28), ("gemma-2-9b", 5.36), ("gemma-3-27b", 15.40), ("phi-4", 8.43)],
)
def test_experts_and_joint_projections_have_types_of_their_own(model: str, gib: float) -> None:
    """Eight experts have keys and values in q8_0, one matrix for queries, keys and values the type of values."""
    assert file_bytes(model, "q4_k_m") == pytest.approx(gib * 2**30, abs=0.006 * 2**30)


@pytest.mark.parametrize(("weights", "size"), [("q4_k_m", 11.6e9), ("q8_0", 12.1e9)])
def test_experts_that_were_trained_in_mxfp4_stay_in_it(weights: str, size: float) -> None:
    """Files of gpt-oss-20b of any mixture, as published, to 1 %: 4-bit types would make rows of 2,880 wider."""
    assert file_bytes("gpt-oss-20b", weights) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("model", "plan", "mib"),
    [
        ("llama-3.1-8b", Plan(), 4403.49),  # start-up logs: CUDA0, beside 281.81 in CPU_Mapped
        ("qwen2.5-0.5b", Plan(), 373.71),  # Vulkan0: what is tied to the head is there
    ],
)
def test_tables_stay_with_the_host(model: str, plan: Plan, mib: float) -> None:
    """Device buffers of start-up logs are without the table of token embeddings, unless the head multiplies by it."""
    job = Serving(weights="q4_k_m")
    report = ask(model, job, plan, engine="llama.cpp", device="rtx-4090")
    assert report.weights_bytes_per_gpu == pytest.approx(mib * MIB, rel=1e-4)


def test_a_first_stage_has_no_table() -> None:
    """Two devices hold a tied table once: what the first one lacks of the second is the head that they do not share."""
    whole, both = (ask("llama-3.2-1b", Serving(weights="q4_0"), plan, engine="llama.cpp", device="rtx-4090")
                   for plan in (Plan(), Plan(pp=2)))  # fmt: skip
    first, last = (stage.weights for stage in both.on_devices)
    assert first + last == pytest.approx(whole.weights_bytes_per_gpu)
    assert last - first == pytest.approx(128256 * 2048 * 6.5625 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("engine", "words", "able"),
    [
        ("vllm", ("q6_k", ""), "or --engine sglang or --engine llama.cpp"),
        ("tensorrt-llm", ("nf4", ""), "or --engine vllm or --engine sglang"),
        ("llama.cpp", ("bf16", "fp8"), "or --engine vllm or --engine sglang or --engine tensorrt-llm"),
    ],
)
def test_a_format_that_an_engine_lacks_names_the_engines_that_run_it(
    engine: str, words: tuple[str, str], able: str
) -> None:
    """Those alone whose formats were read; releases and modes go by the name of today's engine."""
    problems = find_engine(engine).refused_formats(*words, find_device("rtx-4090").device)
    assert [one.remedy.endswith(able) for one in problems.items] == [True]
