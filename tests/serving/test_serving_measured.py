"""Published measurements of static batches: how far the prediction is off, with nothing fitted to these rows.

Sources: LLM-Inference-Bench (arXiv:2411.00136, github.com/argonne-lcf, All_results.csv, seconds of a batch);
TensorRT-LLM v0.9 performance overview (docs/source/performance, output tokens a second and GPU);
github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference (README, llama.cpp output tokens a second);
github.com/ROCm/vllm (docs/dev-docker/README.md at 040de12, seconds of a batch on 8 MI300X).
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from serving.serving_cases import ask
from shardwise import Cluster, Efficiencies, ServingOptions, infer, load_model
from shardwise.plans import Plan, Serving
from shardwise.serving import find_engine

# model, device, tp, engine, weights, batch, input, output, seconds of the batch
ROWS = (
    ("llama-2-7b", "h100-sxm-80gb", 1, "tensorrt-llm-0.11", "fp16", 32, 1024, 1024, 15.931),  # All_results row 1210
    ("llama-3-8b", "a100-sxm-40gb", 1, "vllm-v0", "fp16", 32, 1024, 1024, 26.355),  # row 798
    ("llama-3-8b", "a100-sxm-40gb", 4, "tensorrt-llm-0.11", "fp16", 32, 1024, 1024, 10.654),  # row 646
    ("llama-2-70b", "h100-sxm-80gb", 4, "vllm-v0", "fp16", 32, 1024, 1024, 28.855),  # row 1549
    ("llama-3-8b", "a100-sxm-40gb", 2, "tensorrt-llm-0.11", "fp16", 16, 256, 256, 2.76),
    ("llama-3-70b", "mi300x", 2, "vllm-rocm-0.6", "fp16", 64, 128, 128, 18.69),
    ("qwen2-7b", "mi300x", 1, "vllm-rocm-0.6", "fp16", 16, 2048, 2048, 30.98),
    ("llama-3.1-70b", "mi300x", 8, "vllm-0.13", "fp8", 1, 128, 2048, 17.236),  # ROCm/vllm docs/dev-docker at 0.10.0
    ("llama-3.1-70b", "mi300x", 8, "vllm-0.13", "fp8", 128, 128, 2048, 46.484),
    ("llama-3.1-405b", "mi300x", 8, "vllm-0.13", "fp8", 32, 128, 2048, 68.901),
    ("llama-2-7b", "a100-sxm-40gb", 2, "deepspeed-mii", "fp16", 1, 1024, 1024, 12.25),
    ("llama-2-70b", "a100-sxm-80gb", 8, "tensorrt-llm-0.9", "fp16", 512, 128, 2048, 512 * 2048 / (8 * 684)),
    ("llama-2-70b", "h200-sxm-141gb", 1, "tensorrt-llm-0.9", "fp8", 1024, 128, 128, 1024 * 128 / 3989),
    ("llama-2-70b", "l40s", 2, "tensorrt-llm-0.9", "fp8", 256, 128, 128, 256 * 128 / (2 * 562)),
    ("llama-3-8b", "rtx-4090", 1, "llama.cpp-2024", "fp16", 1, 1, 512, 512 / 54.84),
    ("llama-3-8b", "rtx-4090", 1, "llama.cpp-2024", "q4_k_m", 1, 1, 512, 512 / 130.58),
)


def error(row: tuple[str, str, int, str, str, int, int, int, float]) -> float:
    """Return the relative error of the predicted seconds of a batch."""
    model, device, tp, engine, weights, batch, input_tokens, output_tokens, measured = row
    cache = "fp8" if weights == "fp8" else "fp16"
    job = Serving(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens, weights=weights, kv_cache=cache)
    return ask(model, job, Plan(tp=tp), device, engine=engine).request_seconds / measured - 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2]}x{row[1]} {row[4]} b{row[5]}")
def test_each_measured_batch_is_near(row: tuple[str, str, int, str, str, int, int, int, float]) -> None:
    """Seconds of every batch are within 27 % of the published figure."""
    assert abs(error(row)) <= 0.27


def test_half_of_the_measured_batches_are_within_a_tenth() -> None:
    """The median error over the table is at most 10 %, and its bias is smaller than that."""
    errors = [error(row) for row in ROWS]
    assert median(map(abs, errors)) <= 0.10
    assert abs(sum(errors) / len(errors)) <= 0.10


@pytest.mark.parametrize(
    ("model", "weights", "tp", "weights_bytes", "cache_bytes"),
    [
        ("llama-3.1-8b", "bf16", 1, 16.095e9, 55.169e9),
        ("llama-3.1-70b", "fp8", 2, 36.378e9, 34.360e9),
    ],
)
def test_the_budget_of_vllm_closes(model: str, weights: str, tp: int, weights_bytes: float, cache_bytes: float) -> None:
    """Weights and cache of vLLM's start-up log on H100 at 0.9 (github.com/llm-d/llm-d-benchmark) to 1 %.

    The engine was set up for 1,024 sequences and steps of 8,192 tokens; the 70B row is Llama-3.3, of the same sizes.
    """
    job = Serving(input_tokens=8192, output_tokens=1, weights=weights, max_sequences=1024, max_batched_tokens=8192)
    r = ask(model, job, Plan(tp=tp), engine="vllm-2025")
    assert r.weights_bytes_per_gpu == pytest.approx(weights_bytes, rel=0.01)
    assert r.kv_cache_budget_bytes_per_gpu == pytest.approx(cache_bytes, rel=0.01)


# model, device, weights, tokens before it, tokens a second of one sequence: github.com/ggml-org/llama.cpp
# benches/dgx-spark.md (build 6918 of November 2025), pulls 16991 and 15616, issue 28196 (native Linux);
# github.com/geerlingguy/ai-benchmarks issue 48; one from smeltcore.com (2026).
TODAY = (
    ("gpt-oss-20b", "gb10", "mxfp4", 4096, 77.36),
    ("gpt-oss-20b", "gb10", "mxfp4", 32768, 59.85),
    ("gpt-oss-120b", "gb10", "mxfp4", 4096, 53.95),
    ("qwen3-30b-a3b", "gb10", "q8_0", 8192, 48.58),
    ("qwen2.5-7b", "gb10", "q8_0", 16384, 25.93),
    ("gemma-3-4b", "gb10", "q4_0", 8192, 67.81),
    ("gpt-oss-20b", "rtx-pro-6000-workstation", "mxfp4", 64, 391.2),
    ("qwen3-30b-a3b", "rtx-5090", "q4_k_m", 200, 376.9),
    ("qwen3.5-27b", "rtx-5090", "q4_k_m", 200, 81.82),
    ("gpt-oss-20b", "rtx-5090", "mxfp4", 4096, 298.2),
    ("qwen3-30b-a3b", "apple-m2-ultra-76core", "q8_0", 64, 76.31),
    ("tinyllama-1.1b", "apple-m1-ultra-64core", "q4_k_m", 64, 242.56),
)
# The same of prompts that run token by token, which end without a head: pulls 20586, 24216, 15631 and 17505.
TOKEN_BY_TOKEN = (
    ("llama-3.1-8b", "rtx-4090", "q4_0", 256, 193.1),
    ("llama-3.1-8b", "rtx-4090", "q4_0", 33024, 102.8),
    ("llama-3.2-1b", "rtx-4090", "q4_0", 256, 909.5),
    ("llama-3.2-1b", "rtx-3090", "q4_0", 256, 760.8),
    ("llama-3.2-1b", "rtx-5090", "bf16", 256, 652.6),
    ("gpt-oss-20b", "rtx-3090", "mxfp4", 256, 237.5),
    ("qwen3-30b-a3b", "rtx-4090", "q4_0", 2048, 205.9),
)


@pytest.mark.parametrize("row", TODAY, ids=lambda row: f"{row[0]} {row[1]} {row[3]}")
def test_one_sequence_of_todays_llama_cpp_is_near(row: tuple[str, str, str, int, float]) -> None:
    """A token of one sequence is within 20 % of the published figure, experts as dense models."""
    model, device, weights, before, measured = row
    job = Serving(batch=1, input_tokens=before, output_tokens=32, weights=weights)
    assert abs(ask(model, job, Plan(), device, engine="llama.cpp").tpot_seconds * measured - 1) <= 0.2


@pytest.mark.parametrize("row", TOKEN_BY_TOKEN, ids=lambda row: f"{row[0]} {row[1]} {row[3]}")
def test_a_token_without_its_head_in_todays_llama_cpp_is_near(row: tuple[str, str, str, int, float]) -> None:
    """Kernels start as in replayed graphs, and weights stream as fast as its own kernels read them: within 22 %."""
    model, device, weights, before, measured = row
    job = Serving(batch=1, input_tokens=before, output_tokens=1, weights=weights)
    report = ask(model, job, Plan(), device, engine="llama.cpp")
    ended = sum(float(report.evaluation.decode.roles.get(role, 0.0)) for role in ("head", "sampling"))
    assert abs((report.tpot_seconds - ended) * measured - 1) <= 0.22


@pytest.mark.parametrize(
    ("model", "device", "weights", "measured"),
    [
        ("llama-3-70b", "apple-m2-ultra-76core", "q4_k_m", 12.48),
        ("llama-3-8b", "apple-m2-ultra-76core", "q4_k_m", 78.81),
        ("llama-3-8b", "apple-m2-ultra-76core", "fp16", 36.9),
        ("llama-3-70b", "apple-m3-max-40core", "q4_k_m", 7.65),
        ("llama-3-8b", "apple-m1-7core", "q4_k_m", 10.2),
    ],
)
def test_matrix_vector_kernels_multiply_one_row(model: str, device: str, weights: str, measured: float) -> None:
    """A token on devices without matrix units is within 22 % (GPU-Benchmarks-on-LLM-Inference): no tile of 16 rows."""
    job = Serving(batch=1, input_tokens=1, output_tokens=512, weights=weights)
    assert abs(ask(model, job, Plan(), device, engine="llama.cpp-2024").tpot_seconds * measured - 1) <= 0.22


@pytest.mark.parametrize(
    ("model", "device", "weights", "tokens", "measured"),
    [
        ("qwen3-30b-a3b", "rtx-5090", "q4_k_m", 1024, 12241),  # issue 28196
        ("qwen3.5-27b", "rtx-5090", "q4_k_m", 1024, 3972),
        ("qwen3.5-27b", "rtx-5090", "nvfp4", 512, 4691),  # pull 21896
        ("gpt-oss-20b", "rtx-5090", "mxfp4", 512, 13305),  # pull 17906
        ("llama-3.2-3b", "apple-m1-ultra-64core", "q4_k_m", 512, 2143),  # geerlingguy/ai-benchmarks issue 48
        ("gpt-oss-20b", "rtx-3090", "mxfp4", 512, 4703),  # pull 20586
        ("gpt-oss-20b", "rtx-3090", "mxfp4", 256, 3047),
        ("llama-3.1-8b", "rtx-4090", "q4_0", 512, 10359),  # pull 7676
        ("llama-3.1-8b", "rtx-4090", "q4_0", 128, 7444),
        ("llama-3.1-8b", "rtx-3090", "q6_k", 512, 3491),  # pull 7860
        ("gpt-oss-120b", "gb10", "mxfp4", 512, 1686),
    ],
)
def test_a_prompt_of_todays_llama_cpp_is_near(
    model: str, device: str, weights: str, tokens: int, measured: float
) -> None:
    """Tokens a second of a prompt are within 40 % of the published figure: what integers reach is one share."""
    job = Serving(batch=1, input_tokens=tokens, output_tokens=1, weights=weights)
    found = ask(model, job, Plan(), device, engine="llama.cpp").prefill_tokens_per_second
    assert 0.6 <= measured / found <= 1.4


@pytest.mark.parametrize(
    ("model", "device", "weights", "before", "step", "measured"),
    [
        ("llama-3-8b", "rx-7900-xtx", "q4_k_m", 4096, 512, 2693),  # github.com/ggml-org/llama.cpp pull 26284
        ("gpt-oss-20b", "strix-halo", "mxfp4", 32768, 2048, 1003),  # github.com/kyuz0/amd-strix-halo-toolboxes
        ("gpt-oss-120b", "strix-halo", "mxfp4", 32768, 2048, 589),
    ],
)
def test_prompts_behind_a_context_on_rdna_are_near(
    model: str, device: str, weights: str, before: int, step: int, measured: float
) -> None:
    """Attention of prompts on RDNA 3 reaches 0.285 of the peak: tokens a second are within 12 %."""
    job = Serving(
        input_tokens=2048 + before, prefix_tokens=before, output_tokens=1, weights=weights, max_batched_tokens=step
    )
    seconds = ask(model, replace(job, batch=1), Plan(), device, engine="llama.cpp").ttft_seconds
    assert abs(seconds * measured / 2048 - 1) <= 0.12


@pytest.mark.parametrize(
    ("engine", "model", "device", "weights", "before", "tokens", "measured"),
    [
        ("llama.cpp", "qwen3.6-35b-a3b", "strix-halo", "q4_k_m", 32768, 512, 576),  # ggml-org/llama.cpp pull 26419
        ("llama.cpp", "qwen3.6-35b-a3b", "strix-halo", "q4_k_m", 65536, 512, 390),
        ("llama.cpp-2025", "ministral-3-8b-instruct", "r9700", "bf16", 32768, 2048, 545),  # amd-r9700-ai-toolboxes
        ("llama.cpp-2025", "qwen3-30b-a3b", "r9700", "q4_k_m", 32768, 2048, 403),
        ("llama.cpp-2025", "llama-2-7b", "r9700", "q4_0", 32768, 2048, 568),
    ],
)
def test_attention_runs_on_vector_units_where_matrix_units_take_no_such_heads(
    engine: str, model: str, device: str, weights: str, before: int, tokens: int, measured: float
) -> None:
    """Heads of 256 on RDNA, and all heads before 2026: tokens a second behind a context are within 12 %."""
    asked = {"input_tokens": tokens + before, "prefix_tokens": before, "output_tokens": 1, "weights": weights}
    job = Serving(batch=1, max_batched_tokens=2048, **asked)
    seconds = ask(model, job, Plan(), device, engine=engine).ttft_seconds
    assert abs(seconds * measured / tokens - 1) <= 0.12


def test_heads_that_matrix_units_take_do_not_run_on_vector_units() -> None:
    """Llama 3 8B shares keys of 128 among four heads: only what is older than such kernels runs it on vector units."""
    job = Serving(batch=1, input_tokens=18432, prefix_tokens=16384, output_tokens=1, weights="q8_0")
    new, old = (ask("llama-3-8b", job, Plan(), "r9700", engine=name) for name in ("llama.cpp", "llama.cpp-2025"))
    assert old.ttft_seconds > 2 * new.ttft_seconds
    new, old = (ask("llama-3-8b", job, Plan(), "rtx-4090", engine=name) for name in ("llama.cpp", "llama.cpp-2025"))
    assert old.ttft_seconds == new.ttft_seconds


@pytest.mark.parametrize(
    ("device", "measured"),
    [("m1-max", 46.2), ("m4", 20.9), ("m5-max", 89.3)],  # brand-o/normiebench issues 40 and 3, AlexsJones/llmfit
)
def test_cores_of_newer_apple_chips_widen_weights_beside_floats(device: str, measured: float) -> None:
    """Llama 3.1 8B in Q4_K_M: M1 Max is bound by widening, M4 and M5 by memory; tokens a second within 15 %."""
    job = Serving(batch=1, input_tokens=1, output_tokens=128, weights="q4_k_m")
    found = 1 / ask("llama-3.1-8b", job, Plan(), device, engine="llama.cpp").tpot_seconds
    assert abs(found / measured - 1) <= 0.15


@pytest.mark.parametrize(
    ("model", "device", "weights", "measured"),
    [
        ("llama-3.1-8b", "m3-ultra-60core", "mlx4", 119.4),  # github.com/raullenchai/Rapid-MLX
        ("gemma-3-27b", "m3-ultra-60core", "mlx4", 35.2),
        ("qwen2.5-14b", "m4-pro", "mlx4", 25.9),  # github.com/AlexsJones/llmfit
        ("qwen3-30b-a3b", "m4-pro", "mlx4", 70.4),
        ("qwen3-4b", "m4-max", "bf16", 52.5),  # github.com/ml-explore/mlx-lm mlx_lm/BENCHMARKS.md
    ],
)
def test_a_token_of_mlx_is_near(model: str, device: str, weights: str, measured: float) -> None:
    """One user's tokens a second are within 16 % of the published figure, with no constant of MLX's own."""
    job = Serving(batch=1, input_tokens=512, output_tokens=128, weights=weights)
    found = 1 / ask(model, job, Plan(), device, engine="mlx").tpot_seconds
    assert abs(found / measured - 1) <= 0.16


def test_two_cards_that_held_a_mixture_in_16_bits_are_said_to() -> None:
    """Qwen3 30B in 16 bits ran behind 32,768 tokens on two R9700 of 32,624 MiB each (kyuz0/amd-r9700-ai-toolboxes)."""
    job = Serving(batch=1, input_tokens=34816, output_tokens=1, weights="bf16", max_batched_tokens=2048)
    assert ask("qwen3-30b-a3b", job, Plan(pp=2), "r9700", engine="llama.cpp").fits


@pytest.mark.parametrize(("model", "measured"), [("gemma-4-31b", 75), ("qwen3.5-27b", 82), ("qwen3.5-9b", 213)])
def test_thin_products_on_blackwell_are_bound_by_its_cores(model: str, measured: float) -> None:
    """B300 decodes hardly faster than H200 with llama.cpp: tokens a second are within 15 % (pavlokhmel.com)."""
    job = Serving(batch=1, input_tokens=200, output_tokens=128, weights="q4_k_m")
    seconds, other = (ask(model, job, Plan(), device, engine="llama.cpp").tpot_seconds for device in ("b300", "h200"))
    assert abs(seconds * measured - 1) <= 0.15
    assert 1 < other / seconds < 1.2


def test_the_file_of_gpt_oss_is_as_large_as_published() -> None:
    """Experts in mxfp4 and the rest in q8_0 are 11.27 GiB, the file of ggml-org, where the checkpoint has 12.8."""
    job = Serving(batch=1, input_tokens=64, output_tokens=1, weights="mxfp4")
    held = ask("gpt-oss-20b", job, Plan(), "gb10", engine="llama.cpp").weights_bytes_per_gpu
    assert abs(held / (11.27 * 2**30) - 1) <= 0.005


@pytest.mark.parametrize(
    ("device", "weights"), [("rtx-4090", "bf16"), ("apple-m2-ultra-76core", "q4_k_m"), ("rtx-4090", "q4_k_m")]
)
def test_tiles_of_integers_are_those_of_narrow_weights_on_matrix_units(device: str, weights: str) -> None:
    """Experts lose to tiles where products run on integers, and nowhere else, nor where all is ideal."""
    today = find_engine("llama.cpp")
    whole = replace(today, quantisation=replace(today.quantisation, tile_rows=0, experts_share=1.0))
    job = Serving(batch=1, input_tokens=2048, output_tokens=1, weights=weights)
    for ideal in (True, False):
        options = [ServingOptions(engine=e, efficiencies=Efficiencies(ideal=ideal)) for e in (today, whole)]
        ours, theirs = (
            infer(load_model("qwen3-30b-a3b"), Cluster.parse(device), Plan(), job, one).ttft_seconds for one in options
        )
        if (device, weights, ideal) == ("rtx-4090", "q4_k_m", False):
            assert ours > 1.1 * theirs
        else:
            assert ours == theirs
