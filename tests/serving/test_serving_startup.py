"""What vLLM says at its start: the room that it leaves for the cache, and what it takes outside PyTorch.

Source: github.com/llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0 (Apache-2.0): start-up logs of vLLM 0.19.0
on H100 of 80 GB at 0.95 of its memory, 1,024 sequences and steps of 8,192 tokens, prompts and answers 8,192 together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.serving_cases import ask
from shardwise import Cluster, load_model
from shardwise.errors import InputError
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions, find_engine
from shardwise.serving.load import LoadOptions, serve

GIB = 2**30
# model, weights, tp, pp, GiB of the peak of activations, GiB outside PyTorch, tokens of the cache
LOGS = (
    ("codellama-7b", "", 1, 1, 0.77, 0.25, 126_256),
    ("deepseek-v2-lite", "", 1, 1, 1.93, 0.26, 1_505_552),
    ("gemma-2-9b", "", 1, 1, 3.65, 0.25, 168_880),
    ("gemma-2-27b", "", 1, 1, 3.66, 0.26, 58_672),
    ("gpt-oss-20b", "", 1, 1, 2.87, 0.25, 1_277_184),
    ("llama-3.1-8b", "", 1, 1, 1.89, 0.25, 476_016),
    ("llama-3.1-8b", "fp8", 1, 1, 1.89, 0.25, 529_248),
    ("llama-3.1-8b", "", 1, 2, 1.89, 0.07, 1_075_312),
    ("llama-3.1-8b", "", 1, 4, 1.89, 0.07, 2_257_264),
    ("llama-3.1-8b", "", 2, 1, 1.89, 2.07, 1_044_688),
    ("llama-3.1-8b", "", 4, 1, 1.89, 2.13, 2_209_792),
    ("llama-3.3-70b", "fp8", 2, 1, 1.96, 2.10, 244_304),
    ("llama-3.3-70b", "fp8", 4, 1, 1.97, 2.21, 708_992),
    ("mixtral-8x7b", "", 2, 1, 1.21, 2.07, 465_936),
    ("phi-4", "", 1, 1, 1.52, 0.25, 241_568),
    ("qwen2.5-7b", "", 1, 1, 2.21, 0.24, 1_096_000),
    ("qwen2.5-7b", "", 2, 1, 2.21, 2.06, 2_390_592),
    ("qwen2.5-7b", "", 4, 1, 2.21, 2.13, 5_043_280),
    ("qwen2.5-72b", "", 4, 1, 2.29, 2.21, 481_296),
    ("qwen3-8b", "", 1, 1, 2.21, 0.25, 418_688),
    ("qwen3-30b-a3b", "", 1, 1, 2.68, 0.27, 168_288),
)


@pytest.mark.parametrize("row", LOGS, ids=lambda row: f"{row[0]} {row[1]} tp{row[2]} pp{row[3]}")
def test_the_room_of_the_cache_is_what_the_log_says(row: tuple[str, str, int, int, float, float, int]) -> None:
    """Tokens to 1 %; the peak to 0.04 GiB where sampling is it; what is outside PyTorch to 0.07, 0.17 on four ranks."""
    model, weights, tp, pp, peak, outside, tokens = row
    job = Serving(input_tokens=4096, output_tokens=4096, weights=weights, memory_fraction=0.95)
    report = ask(model, job, Plan(tp=tp, pp=pp), engine="vllm-0.19")
    assert report.kv_cache_tokens == pytest.approx(tokens, rel=0.01)
    last = report.memory
    assert last.working / GIB == pytest.approx(peak, abs=0.04 if last.sampling > last.activations else 0.2)
    assert (last.context + last.communicators) / GIB == pytest.approx(outside, abs=0.17 if tp == 4 else 0.07)


@pytest.mark.parametrize(
    ("engine", "cache", "peak", "outside"),
    [("vllm-2025", 41.94, 5.64, 0.13), ("vllm-0.17", 45.34, 2.23, 0.13), ("vllm-0.19", 45.23, 2.23, 0.25)],
)
def test_one_model_under_three_releases(engine: str, cache: float, peak: float, outside: float) -> None:
    """Qwen3-14B on H100 under 0.16, 0.17 and 0.18: nothing is sorted, then graphs are captured in the profile."""
    job = Serving(input_tokens=4096, output_tokens=4096, memory_fraction=0.95)
    memory = ask("qwen3-14b", job, engine=engine).memory
    assert memory.cache_budget / GIB == pytest.approx(cache, abs=0.06)
    assert memory.working / GIB == pytest.approx(peak, abs=0.03)
    assert memory.context / GIB == pytest.approx(outside, abs=0.005)


@pytest.mark.parametrize(
    ("engine", "model", "device", "plan", "bytes_per_logit", "row", "left"),
    [
        # Triton's sampler has a row of logits for each multiprocessor, FlashInfer's none; another runner has neither.
        ("vllm-0.17", "llama-3.1-8b", "h100", Plan(), 14.0, 4.0, 0.0),
        ("vllm-0.21", "llama-3.1-8b", "a100", Plan(), 14.0, 4.0, 0.97e6),
        ("vllm-0.22", "llama-3.1-8b", "h100", Plan(), 14.0, 0.0, 0.97e6),
        ("vllm-0.22", "qwen3-8b", "h100", Plan(), 2.0, 0.0, 0.0),
        ("vllm-0.23", "llama-3.1-8b", "h100", Plan(), 2.0, 0.0, 0.0),
        ("vllm-0.23", "gemma-2-9b", "h100", Plan(), 14.0, 0.0, 0.97e6),
        ("vllm-0.24", "llama-3.1-8b", "h100", Plan(), 2.0, 0.0, 0.0),
        ("vllm-0.24", "gemma-2-9b", "h100", Plan(), 14.0, 0.0, 0.97e6),
        ("vllm-0.26", "gemma-2-9b", "h100", Plan(), 2.0, 0.0, 0.0),
        ("vllm-0.26", "qwen3-30b-a3b", "h100", Plan(), 14.0, 0.0, 0.97e6),
        ("vllm-0.28", "gemma-2-9b", "h100", Plan(), 6.125, 0.0, 0.0),
        ("vllm-0.28", "qwen3-next-80b-a3b", "h200", Plan(tp=2), 14.0, 0.0, 0.0),
        ("vllm-0.32", "qwen3-30b-a3b", "h100", Plan(), 6.125, 0.0, 0.0),
        ("vllm", "llama-3.1-8b", "h100", Plan(), 18.125, 0.0, 0.0),
        # A communicator has run before the first look at the memory; on ROCm nothing is captured in the profile.
        ("vllm-0.19", "llama-3.1-8b", "h100", Plan(tp=2), 14.0, 4.0, 0.0),
        ("vllm-0.19", "llama-3.1-8b", "h100", Plan(pp=2), 14.0, 4.0, 0.0),
        ("vllm-0.19", "llama-3.1-8b", "mi300x", Plan(), 14.0, 4.0, 0.0),
    ],
)
def test_what_sampling_and_captured_graphs_take_by_release(
    engine: str, model: str, device: str, plan: Plan, bytes_per_logit: float, row: float, left: float
) -> None:
    """What 512 sequences take over 8, whose rows are no more than there are multiprocessors."""
    few, many = (
        ask(model, Serving(max_sequences=n, max_batched_tokens=2048), plan, device, engine=engine) for n in (8, 512)
    )
    cores, vocab = many.case.cluster.device.cores, many.case.model.vocab
    more = many.memory.sampling - few.memory.sampling
    assert more == pytest.approx(vocab * (504 * bytes_per_logit + (min(cores, 512) - 8) * row))
    assert many.memory.context == pytest.approx(cores * (1.05e6 + left))


@pytest.mark.parametrize(
    ("engine", "model", "weights", "estimated"),
    [
        ("vllm-0.21", "qwen3-8b", "", True), ("vllm-0.22", "qwen3-8b", "", False),
        ("vllm-0.22", "qwen3-8b", "fp8", True),
        ("vllm-0.23", "llama-3.1-8b", "", False), ("vllm-0.23", "llama-3.1-8b", "fp8", True),
        ("vllm-0.24", "llama-3.1-8b", "fp8", False), ("vllm-0.24", "qwen3-30b-a3b", "", True),
        ("vllm-0.28", "gemma-2-9b", "fp8", False), ("vllm-0.32", "gemma-2-9b", "", True),
    ],
)  # fmt: skip
def test_the_second_runner_sets_no_memory_aside_for_graphs(
    engine: str, model: str, weights: str, estimated: bool
) -> None:
    """From 0.22 to 0.28 it captures graphs behind a cache sized without them; what it runs is the release's."""
    memory = ask(model, Serving(weights=weights), engine=engine).memory
    assert (memory.graphs > 0) is estimated


def test_bytes_and_tokens_of_the_cache_that_a_launch_states() -> None:
    """Bytes whatever share of the memory they are, as long as they are there; tokens as many as fit at most."""
    token = 2 * 32 * 8 * 128 * 2
    stated = ask("llama-3.1-8b", Serving(kv_cache_memory=20 * GIB, memory_fraction=0.3))
    assert stated.fits and stated.kv_cache_tokens == 20 * GIB // token // 16 * 16
    crowded = ask("llama-3.1-8b", Serving(kv_cache_memory=200 * GIB)).memory
    assert crowded.limit == pytest.approx(ask("llama-3.1-8b", Serving(memory_fraction=1.0)).memory.limit)
    for engine in ("sglang", "tensorrt-llm"):
        tokens = (
            ask("llama-3.1-8b", Serving(max_total_tokens=n), engine=engine).kv_cache_tokens for n in (65536, 2**30)
        )
        few, many = tokens
        assert few == 65536 and many == ask("llama-3.1-8b", Serving(), engine=engine).kv_cache_tokens
    for name, wrong in (("kv_cache_memory", -1.0), ("max_total_tokens", -1)):
        with pytest.raises(InputError, match=name):
            ask("llama-3.1-8b", Serving(**{name: wrong}))


@pytest.mark.parametrize(
    ("engine", "device", "plan", "expected"),
    [
        ("vllm", "h100", Plan(), 0.0),
        ("vllm", "h100", Plan(tp=2), 0.45e9 + 512 * 2**20),
        ("vllm", "b200", Plan(tp=8), 0.45e9 + 512 * 2**20),
        ("vllm-0.26", "h100", Plan(tp=4), 0.45e9 + 512 * 2**20),
        ("vllm-0.24", "h100", Plan(tp=4), 0.45e9 + 3 * 512 * 2**20),
        ("vllm-0.19", "h100", Plan(tp=4), 0.45e9 + 3 * 512 * 2**20),
        ("vllm-2025", "h100", Plan(tp=4), 0.45e9),
        # Compiled and captured alone, on devices with multicast alone, between ranks of tp alone.
        ("vllm-eager", "h100", Plan(tp=4), 0.45e9),
        ("vllm", "a100", Plan(tp=4), 0.45e9),
        ("vllm", "nvidia-rtx-pro-6000-blackwell-server-edition", Plan(tp=2), 0.45e9),
        ("vllm", "h100", Plan(pp=2), 0.0),
        ("sglang", "a100", Plan(pp=2), 0.45e9),
    ],
)
def test_fused_all_reduces_have_a_workspace(engine: str, device: str, plan: Plan, expected: float) -> None:
    """One of FlashInfer, rounded up to 512 MiB, and three of them before mnnvl was the backend of a node."""
    report = ask("llama-3.1-8b", Serving(), plan, device, engine=engine)
    assert report.memory.communicators == pytest.approx(expected)


@pytest.mark.parametrize(
    ("engine", "model", "device", "weights", "plan", "row_elements"),
    [
        # Of each of 8 choices, 2,048 wide; gate and up 1,536, what goes back in 768.
        ("vllm", "qwen3-30b-a3b", "h100", "", Plan(), 8 * (2048 + 2048)),
        # 14,336 gate and up of half of the experts' width, in 7,168 of it; two choices.
        ("vllm", "mixtral-8x7b", "h100", "", Plan(tp=2), 2 * (14336 + 7168)),
        ("vllm", "deepseek-v3", "h200", "fp8-block", Plan(tp=8), 8 * (7168 + 7168)),
        # FlashInfer's of FP8 in blocks with expert parallelism, of mxfp4 on Hopper and on Blackwell; none of 2025.
        ("vllm", "deepseek-v3", "h200", "fp8-block", Plan(tp=8, ep=8), 0),
        ("vllm", "gpt-oss-20b", "h100", "", Plan(), 0),
        ("vllm", "qwen3-30b-a3b", "b200", "", Plan(), 0),
        ("vllm-2025", "qwen3-30b-a3b", "h100", "", Plan(), 0),
        ("vllm", "llama-3.1-8b", "h100", "", Plan(), 0),
    ],
)
def test_experts_keep_a_workspace_while_tokens_are_sampled(
    engine: str, model: str, device: str, weights: str, plan: Plan, row_elements: int
) -> None:
    """Rows of a step of 8,192 tokens in 16 bits (16,384 on B200), beside hidden states and what sampling takes."""
    job = Serving(weights=weights, max_sequences=256, max_batched_tokens=8192)
    report = ask(model, job, plan, device, engine=engine)
    case = report.case
    sampling = case.engine.memory.sampler_bytes_per_logit * 256 * case.model.vocab
    step = 8192 * 2 * (case.model.hidden + row_elements)
    library = 8519680 if device == "a100" else 32 * 2**20
    assert report.memory.sampling == pytest.approx(sampling + step + library)


@pytest.mark.parametrize(
    ("engine", "model", "device", "weights", "plan", "running", "kept"),
    [
        # FlashInfer's experts have rows for all choices in a call, with groups of all their tokens.
        ("vllm", "deepseek-v3", "h200", "fp8-block", Plan(tp=8, ep=8), 8 * (7168 + 7168), 0),
        ("vllm", "deepseek-v3", "h200", "fp8-block", Plan(dp=8, ep=8), 8 * (7168 + 8 * (7168 + 7168)), 0),
        ("vllm", "deepseek-v3", "h200", "fp8-block", Plan(tp=4, dp=2, ep=8), 2 * (7168 + 8 * (7168 + 7168)), 0),
        # Triton's keep them.
        ("vllm", "qwen3-30b-a3b", "h100", "", Plan(dp=8, ep=8), 8 * 2048, 8 * 8 * (2048 + 2048)),
        ("vllm-0.19", "qwen3-30b-a3b", "h100", "", Plan(dp=8, ep=8), 8 * 2048, 8 * 8 * (2048 + 2048)),
    ],
)
def test_groups_of_attention_gather_each_others_tokens(
    engine: str, model: str, device: str, weights: str, plan: Plan, running: int, kept: int
) -> None:
    """Every rank has those of all, of steps of 16,384 tokens in 16 bits, beside its own in the residual stream."""
    job = Serving(weights=weights, max_sequences=64, max_batched_tokens=16384)
    report = ask(model, job, plan, device, engine=engine)
    stream = report.case.model.hidden
    assert report.memory.activations == pytest.approx(16384 * 2 * (stream + running + kept) + 2**25)


def test_todays_vllm_has_tables_of_penalties_for_every_sequence() -> None:
    """A count of 4 bytes and a bit for each token of the vocabulary (vllm/v1/worker/gpu/sample/penalties.py)."""
    job = Serving(max_sequences=1024)
    new, old = (ask("qwen3-8b", job, engine=engine).memory.sampling for engine in ("vllm", "vllm-0.21"))
    new += 4 * 151_936 * 132  # rows of Triton's sampler
    assert new - old == pytest.approx(1024 * 151_936 * (4 + 1 / 8))


@pytest.mark.parametrize("device", ["mi300x", "h100"])
def test_nothing_is_sorted_whatever_the_vendor(device: str) -> None:
    """Triton's kernels mask logits in place (vllm/v1/sample/ops/topk_topp_triton.py), on AMD's devices too."""
    memory = ask("llama-3.1-8b", Serving(max_sequences=1024), device=device, engine="vllm-0.19").memory
    assert memory.sampling < 15 * 1024 * 128_256 + 2**27


@pytest.mark.parametrize(
    ("model", "plan", "method", "stated", "most"),
    [
        ("llama-3.1-8b", Plan(), "ngram", 0, 48),
        ("llama-3.1-8b", Plan(), "ngram", 100, 100),
        ("llama-3.1-8b", Plan(), "", 0, 4096),
        ("deepseek-v4-flash", Plan(tp=8), "mtp", 0, 256),
        # Of all groups of attention together.
        ("deepseek-v2-lite", Plan(dp=4, ep=4), "ngram", 0, 12),
    ],
)
def test_sglang_runs_fewer_requests_where_it_guesses(
    model: str, plan: Plan, method: str, stated: int, most: int
) -> None:
    """max_running_requests is 48 with speculation unless it is said (srt/arg_groups/speculative_hook.py)."""
    asked = Workload(
        input_tokens=Length(mean=500), output_tokens=Length(mean=20), arrivals=Arrivals(rate=0.5), count=20
    )
    guesses = {"speculative_method": method, "num_speculative_tokens": 2, "acceptance_rate": 0.6} if method else {}
    options = LoadOptions(serving=ServingOptions(engine="sglang"))
    cluster = Cluster.parse(f"{plan.tp * max(plan.dp, 1)}xh200-sxm-141gb")
    report = serve(load_model(model), cluster, plan, asked, Serving(max_sequences=stated, **guesses), options)
    assert report.policy.max_sequences == most


@pytest.mark.parametrize(
    ("engine", "model", "plan", "mib"),
    [
        ("vllm", "llama-3.1-8b", Plan(), 131072 * 128 * 2 / 2**20),
        ("vllm", "llama-3.1-8b", Plan(tp=2), 131072 * 128 * 2 / 2**20),
        ("sglang", "llama-3.1-8b", Plan(), 131072 * 128 * 4 / 2**20),
        ("vllm", "llama-4-scout", Plan(tp=4), 2.5 * 1024),  # 10,485,760 positions
        ("vllm", "gemma-3-4b", Plan(), 576),  # 8 times 131,072 in layers without a window, and those of the others
        ("vllm", "gemma-3-1b", Plan(), 16),
        ("vllm", "glm-4-9b", Plan(), 0),  # heads rotated in part
        ("tensorrt-llm", "llama-3.1-8b", Plan(), 0),
    ],
)
def test_tables_of_cosines_and_sines(engine: str, model: str, plan: Plan, mib: float) -> None:
    """Each rank of each stage holds those of all positions of the model, longer where they are scaled linearly."""
    own = find_engine(engine)
    bare = replace(own, memory=replace(own.memory, rotary_element_bytes=0.0))
    with_tables, without = (
        ask(model, Serving(), plan, "h200", engine=one).weights_bytes_per_gpu for one in (own, bare)
    )
    assert with_tables - without == pytest.approx(mib * 2**20, abs=1)


@pytest.mark.parametrize(
    ("engine", "weights", "plan", "element"),
    [
        ("vllm", "", Plan(tp=8), 2.0),  # the checkpoint's FP8 in blocks is widened for decoding
        ("vllm", "bf16", Plan(tp=8), 0.0),  # views of what is loaded
        ("vllm", "nvfp4", Plan(tp=8), 0.0),  # whose attention stays in 16 bits
        ("vllm", "int4", Plan(tp=8), 2.0),
        ("sglang", "", Plan(tp=8), 2.0),
        ("sglang", "bf16", Plan(tp=8), 2.0),
        ("sglang", "fp8", Plan(tp=8), 1.0),
        ("tensorrt-llm", "", Plan(tp=8), 0.0),
    ],
)
def test_up_projections_of_latents_are_kept_twice(engine: str, weights: str, plan: Plan, element: float) -> None:
    """A copy that decoding multiplies queries and outputs by: 0.24 GiB of DeepSeek-V3 on each of eight ranks."""
    own = find_engine(engine)
    bare = replace(own, memory=replace(own.memory, absorbed_copies=()))
    job = Serving(weights=weights)
    both = (ask("deepseek-v3", job, plan, "b200", engine=one).weights_bytes_per_gpu for one in (own, bare))
    with_copies, without = both
    assert with_copies - without == pytest.approx(61 * 16 * 256 * 512 * element, abs=1)


@pytest.mark.parametrize(
    ("model", "job", "cache"),
    [
        # 0.20, trtllm-bench: github.com/NVIDIA/TensorRT-LLM issue 6294.
        ("llama-3.1-8b", {"kv_cache": "fp8", "max_sequences": 4096, "max_batched_tokens": 23552,
                          "memory_fraction": 0.8}, 52.51),
        # 2026-09, by itself: pull 18523.
        ("gemma-3-27b", {}, 42.4),
    ],
)  # fmt: skip
def test_the_cache_of_tensorrt_llm_is_what_a_step_and_its_sequences_leave(
    model: str, job: dict[str, Any], cache: float
) -> None:
    """GiB on one H100 with weights in fp8; a launch that leaves max_batch_size out runs 2,048."""
    asked = Serving(weights="fp8", input_tokens=128, output_tokens=28, **job)
    report = ask(model, asked, engine="tensorrt-llm")
    assert report.memory.cache_budget / GIB == pytest.approx(cache, rel=0.025)
    stated = replace(asked, max_sequences=asked.max_sequences or 2048)
    assert ask(model, stated, engine="tensorrt-llm").memory.cache_budget == report.memory.cache_budget
