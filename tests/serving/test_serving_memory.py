"""Bytes that follow from a model's sizes alone, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.serving_cases import ask
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import Model, catalogue, load_model, model_from_config
from shardwise.plans import Plan, Serving
from shardwise.serving import InferReport, ServingOptions, infer

FULL = Serving(input_tokens=1000, output_tokens=24)  # 1,024 tokens: whole blocks of every engine


@pytest.mark.parametrize(
    ("model", "plan", "token_bytes"),
    [
        ("deepseek-v3", Plan(tp=8), (512 + 64) * 2 * 61),  # arXiv:2405.04434 section 2.1: 70,272, the same at every tp
        ("deepseek-v3", Plan(tp=16), 70_272),
        ("llama-2-7b", Plan(), 2 * 32 * 128 * 2 * 32),
        ("llama-2-70b", Plan(), 2 * 8 * 128 * 2 * 80),
        ("llama-2-70b", Plan(tp=8), 2 * 1 * 128 * 2 * 80),
        ("llama-2-70b", Plan(tp=16), 2 * 1 * 128 * 2 * 80),
        ("llama-2-70b", Plan(tp=2, pp=4), 2 * 4 * 128 * 2 * 20),
    ],
)
def test_cache_of_one_token(model: str, plan: Plan, token_bytes: int) -> None:
    """Keys and values of one token take K and V of the rank's heads in every layer of its stage."""
    assert ask(model, FULL, plan).kv_cache_bytes_per_gpu == 1024 * token_bytes


@pytest.mark.parametrize(
    ("engine", "model", "windowed", "whole", "width"),
    [
        # 62 layers of 16 heads of 128, 52 of which read 1,024 tokens; 24 of 8 heads of 64, 12 of which read 128.
        ("vllm", "gemma-3-27b", 52, 10, 2 * 16 * 128),
        ("sglang", "gemma-3-27b", 0, 62, 2 * 16 * 128),
        ("tensorrt-llm", "gemma-3-27b", 0, 62, 2 * 16 * 128),
        ("tensorrt-llm", "gpt-oss-20b", 0, 24, 2 * 8 * 64),
        ("tensorrt-llm-windowed", "gpt-oss-20b", 12, 12, 2 * 8 * 64),
        ("vllm", "gpt-oss-20b", 12, 12, 2 * 8 * 64),
        ("llama.cpp-2024", "gemma-3-27b", 0, 62, 2 * 16 * 128),
        ("llama.cpp-swa-full", "gemma-3-27b", 0, 62, 2 * 16 * 128),
    ],
)
def test_engines_without_a_pool_of_windows_keep_every_token(
    engine: str, model: str, windowed: int, whole: int, width: int
) -> None:
    """SGLang has one pool of all layers for Gemma 3, and TensorRT-LLM's max_attention_window is the whole length."""
    window = {"gemma-3-27b": 1024, "gpt-oss-20b": 128}[model]
    report = ask(model, Serving(input_tokens=8000, output_tokens=192), engine=engine)
    assert report.kv_cache_bytes_per_gpu == 2 * width * (8192 * whole + window * windowed)
    kept = f"windows: {engine} keeps every token in layers that read a window"
    assert (kept in report.assumptions) == (not windowed)


@pytest.mark.parametrize(
    ("model", "layers", "cells", "width"),
    [("gemma-3-27b", (52, 10), 1536, 16 * 128), ("gpt-oss-20b", (12, 12), 768, 8 * 64)],
)
def test_llama_cpp_keeps_windows_and_a_physical_batch(
    model: str, layers: tuple[int, int], cells: int, width: int
) -> None:
    """n_swa + n_ubatch 512 cells of every layer with a window, in steps of 256 (llama-kv-cache-iswa.cpp)."""
    report = ask(model, Serving(batch=2, input_tokens=8000, output_tokens=192), engine="llama.cpp")
    assert report.kv_cache_bytes_per_gpu == 2 * 2 * 2 * width * (layers[0] * cells + layers[1] * 8192)
    # --ubatch-size 2048.
    asked = Serving(input_tokens=8000, output_tokens=192, max_batched_tokens=2048)
    more = ask(model, asked, engine="llama.cpp").kv_cache_bytes_per_gpu - report.kv_cache_bytes_per_gpu / 2
    assert more == 2 * 2 * width * layers[0] * 1536


@pytest.mark.parametrize(
    ("device", "asked", "kv_cache", "latent"),
    [
        ("h200", "", "", 2 * 576),
        ("h200", "fp8", "fp8", 656),
        ("b200", "", "fp8", 576),
        ("b200", "bf16", "bf16", 2 * 576),
    ],
)
def test_sglang_chooses_the_cache_of_sparse_latents(device: str, asked: str, kv_cache: str, latent: int) -> None:
    """DeepSeek-V3.2 in FP8 from Blackwell on, bare for trtllm-gen; Hopper has scales, the indexer adds 132 bytes."""
    report = ask("deepseek-v3.2", replace(FULL, kv_cache=asked), Plan(tp=8), device, engine="sglang")
    assert report.job.kv_cache == kv_cache
    assert report.kv_cache_bytes_per_gpu == 1024 * 61 * (latent + 132)


@pytest.mark.parametrize(
    ("engine", "device", "asked", "latent"),
    [
        ("vllm", "h200", "", 2 * 576),
        ("vllm", "h200", "fp8", 656),
        # FLASHINFER_MLA_SPARSE on compute capability 10 reads plain rows, the kernels of 12 take FP8 unasked.
        ("vllm", "b200", "fp8", 576),
        ("vllm", "nvidia-rtx-pro-6000-blackwell-server-edition", "", 656),
    ],
)
def test_vllm_packs_sparse_latents_where_its_kernels_do(engine: str, device: str, asked: str, latent: int) -> None:
    """DeepSeek-V3.2's entries by device (vLLM 0.33.0 platforms/cuda.py and mla_attention.py)."""
    report = ask("deepseek-v3.2", replace(FULL, kv_cache=asked), Plan(tp=8), device, engine=engine)
    assert report.kv_cache_bytes_per_gpu == 1024 * 61 * (latent + 132)


@pytest.mark.parametrize(
    ("engine", "device", "asked", "entry"),
    [("vllm", "h200", "", 584), ("vllm", "b200", "", 584), ("tensorrt-llm", "b200", "bf16", 1024)],
)
def test_deepseek_v4_keeps_packed_entries_and_what_is_not_pooled_yet(
    engine: str, device: str, asked: str, entry: int
) -> None:
    """448 bytes of FP8, 64 elements in 16 bits, 8 bytes of scales; fp32 values and gates of 8 and of 128 tokens."""
    report = ask("deepseek-v4-flash", replace(FULL, kv_cache=asked), Plan(tp=8), device, engine=engine)
    windows = 43 * 128 * entry
    indexed = 21 * (1024 / 4 * (entry + 132) + 8 * 2 * 2 * 4 * (512 + 128))
    heavily = 20 * (1024 / 128 * entry + 128 * 2 * 4 * 512)
    assert report.kv_cache_bytes_per_gpu == windows + indexed + heavily


def test_deepseek_v41_keeps_entries_in_the_four_layers_that_others_read() -> None:
    """Windows of 40 layers, entries and keys of the indexer of 2, 2, 2 and 1 tokens, 8 rows of what is not pooled yet.

    Tables of n-grams are in FP8 with a scale of one byte for 32 elements: 264 bytes a row, of which a rank has an
    eighth (github.com/vllm-project/vllm vllm/models/deepseek_v41: attention.py, compressor.py, common/engram.py).
    """
    report = ask("deepseek-v4.1-flash", FULL, Plan(tp=8, ep=8), "h200", engine="vllm")
    assert report.job.kv_cache == "fp8"
    assert report.kv_cache_bytes_per_gpu == 40 * 128 * 584 + 1024 * 2.5 * (584 + 132) + 3 * 8 * 2 * 4 * 512
    config = catalogue()["deepseek-v4.1-flash"]["config"]
    none = model_from_config(config | {"engram_layer_ids": [], "engram_num_embeddings": []})
    asked = infer(none, Cluster.parse("8xh200"), Plan(tp=8, ep=8), FULL, ServingOptions(engine="vllm"))
    more = report.weights_bytes_per_gpu - asked.weights_bytes_per_gpu
    maps = 2 * (2 * 6144 * 5 * 5120 + 2 * 2 * 4 * 5120)
    assert more == pytest.approx(sum(config["engram_num_embeddings"]) * 264 / 8 + maps, rel=1e-9)


@pytest.mark.parametrize("tp", [1, 8])
def test_groups_of_a_state_are_copied_where_there_are_fewer_than_ranks(tp: int) -> None:
    """Granite 4.0 H small: 36 layers of 128 heads of 64 and one group of states, whose B and C every rank convolves."""
    report = ask("granite-4.0-h-small", FULL, Plan(tp=tp, etp=tp), "h200", engine="vllm")
    state = 128 // tp * 64 * 128 + 3 * (128 // tp * 64 + 2 * 128)
    assert report.kv_cache_bytes_per_gpu == 36 * 2 * state + 4 * 1024 * 2 * 2 * (8 // tp) * 128


def test_sglang_keeps_a_ring_for_each_request_of_deepseek_v4() -> None:
    """The ring of 128 tokens is no part of the pool of windows, whose tokens are a tenth of the others'."""
    job = Serving(input_tokens=8000, output_tokens=192)
    report = infer(
        load_model("deepseek-v4-flash"),
        Cluster.parse("8xh200"),
        Plan(tp=8),
        job,
        ServingOptions(engine="sglang").caching(True),
    )
    # Windows of 128 and 130 tokens that are not dropped yet need 2,580 tokens of the pool; 8,192 are asked.
    pool = 8192 * (21 / 4 * (584 + 132) + 20 / 128 * 584 + 43 / 10 * 584)
    rings = 21 * 8 * 2 * 2 * 4 * (512 + 128) + 20 * 128 * 2 * 4 * 512
    assert report.kv_cache_bytes_per_gpu == pytest.approx(pool + rings)


@pytest.mark.parametrize(
    ("engine", "device", "sequences", "graphs"),
    [
        # 51 sizes up to 512 in pieces, and whole where all sequences decode: 35 of up to 256; 17 sizes up to 112.
        ("vllm", "h100", 1024, 0.3e9 + 6.5e6 * (51 + 51)),
        ("vllm", "h100", 256, 0.3e9 + 6.5e6 * (51 + 35)),
        ("vllm", "h100", 56, 0.3e9 + 6.5e6 * (17 + 10)),
        # Up to 1,024 on compute capability 10.
        ("vllm", "b200", 1024, 0.3e9 + 6.5e6 * (83 + 83)),
        ("vllm-2025", "h100", 1024, 0.0),
        ("vllm", "trillium", 256, 0.0),
        ("sglang", "h100", 256, 0.0),
    ],
)
def test_captured_graphs_are_off_the_cache(engine: str, device: str, sequences: int, graphs: float) -> None:
    """VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is on since 0.20 (vllm/v1/worker/gpu_worker.py)."""
    job = replace(FULL, max_sequences=sequences)
    memory = ask("llama-3.1-8b", job, device=device, engine=engine).memory
    assert memory.graphs == pytest.approx(graphs)
    assert memory.beside_cache == pytest.approx(
        memory.weights + memory.working + memory.context + memory.communicators + graphs
    )


def test_an_fp8_cache_is_half() -> None:
    """The cache's format halves its bytes and leaves the weights alone."""
    r, half = (ask("llama-2-70b", Serving(batch=4, kv_cache=c), Plan(tp=8)) for c in ("bf16", "fp8"))
    assert half.kv_cache_bytes_per_gpu == r.kv_cache_bytes_per_gpu / 2
    assert half.weights_bytes_per_gpu == r.weights_bytes_per_gpu


@pytest.mark.parametrize(
    ("model", "weights", "tp", "expected"),
    [
        # 68,976,648,192 parameters, 161 norms of 8,192 that every rank holds.
        ("llama-2-70b", "bf16", 8, 2 * ((68_976_648_192 - 161 * 8192) / 8 + 161 * 8192)),
        ("llama-2-70b", "bf16", 1, 2 * 68_976_648_192),
        ("llama-2-7b", "bf16", 1, 2 * 6_738_415_616),
        # Linear layers in 8 bits; two tables of 32,000 x 8,192 and the norms in 16.
        ("llama-2-70b", "fp8", 1, 68_976_648_192 + 2 * 32000 * 8192 + 161 * 8192),
        ("llama-2-70b", "int4", 1, (68_976_648_192 - 2 * 32000 * 8192 - 161 * 8192) * (4 + 20 / 128) / 8
         + 2 * (2 * 32000 * 8192 + 161 * 8192)),
    ],
)  # fmt: skip
def test_weights_by_format(model: str, weights: str, tp: int, expected: float) -> None:
    """Weights on a rank are its share of the matrices in their format, all norms and angles of 4,096 positions."""
    loaded = ask(model, Serving(weights=weights), Plan(tp=tp)).weights_bytes_per_gpu
    assert loaded == pytest.approx(expected + 4096 * 128 * 2, rel=1e-12)


def test_experts_alone_take_their_format() -> None:
    """gpt-oss-120b in mxfp4 is within 1 % of its published 65.2 GB (huggingface.co/openai/gpt-oss-120b)."""
    assert ask("gpt-oss-120b", Serving(), engine="sglang").weights_bytes_per_gpu == pytest.approx(65.2e9, rel=0.01)


@pytest.mark.parametrize(
    ("model", "device", "gib"),
    [
        ("gpt-oss-20b", "h100-sxm-80gb", 13.47),  # github.com/llm-d/llm-d-benchmark empirical-vllm-memory-results.md
        ("gpt-oss-120b", "h100-sxm-80gb", 64.38),
        ("gpt-oss-20b", "a100-sxm-80gb", 13.72),  # start-up log of vLLM 0.19
    ],
)
def test_vllm_pads_experts_to_the_tiles_of_a_family(model: str, device: str, gib: float) -> None:
    """Weights of mxfp4 experts in vLLM's start-up log, whose sides of 2,880 become 3,072 or 2,944, to 0.5 %."""
    assert ask(model, Serving(), device=device).weights_bytes_per_gpu == pytest.approx(gib * 2**30, rel=0.005)


@pytest.mark.parametrize(
    ("model", "weights", "gib"),
    [
        ("llama-3-8b", "q4_k_m", 4.58),  # github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, sizes of GGUF files
        ("llama-3-70b", "q4_k_s", 37.58),
        ("llama-3-70b", "q4_k_m", 39.59),
        ("llama-3-70b", "q3_k_m", 31.91),
        ("llama-3-70b", "iq3_xxs", 25.58),
    ],
)
def test_mixtures_of_llama_cpp(model: str, weights: str, gib: float) -> None:
    """Files of llama.cpp's mixtures of types are within 0.3 % of their published sizes, head and embedding apart."""
    r = ask(model, Serving(weights=weights), engine="llama.cpp", device="h200-sxm-141gb")
    assert r.weights_bytes_per_gpu + r.memory.tables == pytest.approx(gib * 2**30, rel=0.003)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "tokens", "gib"),
    [
        (24, 1024, 16, 1, (128, 8), 3.43),  # github.com/NVIDIA/FasterTransformer docs/gpt_guide.md, A100, fp16
        (24, 1024, 16, 16, (512, 32), 4.80),
        (24, 2048, 32, 4, (128, 8), 5.49),
        (32, 4096, 32, 1, (128, 8), 15.55),
        (32, 4096, 32, 16, (512, 32), 22.17),
    ],
)
def test_buffers_of_fastertransformer(
    layers: int, hidden: int, heads: int, batch: int, tokens: tuple[int, int], gib: float
) -> None:
    """All buffers of a pass exist at once: the device's memory up to 16 sequences is within 6 % of the printed one."""
    model = Model.from_sizes(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn=4 * hidden, vocab_size=51200, tied=True,
        learned_positions=True,
    )  # fmt: skip
    job = Serving(batch=batch, input_tokens=tokens[0], output_tokens=tokens[1], weights="fp16")
    r = ask(model, job, engine="fastertransformer", device="a100-sxm-80gb")
    assert r.memory.needed == pytest.approx(gib * 2**30, rel=0.06)


def test_a_tied_table_is_held_twice_only_by_a_pipeline() -> None:
    """A model with tied tables holds one on one stage, and a copy on the last stage of a pipeline."""
    one, two = ask("gpt2-xl", Serving()), ask("gpt2-xl", Serving(), Plan(pp=2))
    table = 50257 * 1600 * 2
    stages = [m.weights for m in two.evaluation.memory]
    assert sum(stages) == pytest.approx(one.weights_bytes_per_gpu + table, rel=1e-9)


def test_a_larger_memory_never_unfits() -> None:
    """What fits in 80 GB fits in 141 GB, with more tokens of cache."""
    job = Serving(batch=16, input_tokens=2048, output_tokens=256)
    small, large = (ask("llama-3.1-8b", job, device=d) for d in ("h100-sxm-80gb", "h200-sxm-141gb"))
    assert small.fits and large.fits
    assert large.kv_cache_tokens > small.kv_cache_tokens


@pytest.mark.parametrize(("tp", "linear"), [(1, 54_272), (2, 37_888)])
def test_adapters_add_two_thin_matrices_to_every_linear_layer(tp: int, linear: int) -> None:
    """Queries, keys and values have a first matrix each; ranks split what their layers split (vllm/lora/layers.py)."""
    job = Serving(weights="fp16")
    plain, more = (ask("llama-3.2-3b", replace(job, adapter_rank=r), Plan(tp=tp)) for r in (0, 64))
    tables = 2 * (128_256 + 3_072)
    assert more.weights_bytes_per_gpu - plain.weights_bytes_per_gpu == 64 * 2 * (28 * linear + tables)
    assert more.kv_cache_tokens < plain.kv_cache_tokens


def test_adapters_lie_beside_modules_that_a_step_absorbs() -> None:
    """Latent attention folds its up-projection into others while decoding; its adapters stay two thin matrices."""
    plan, job = Plan(tp=8), Serving(batch=1, input_tokens=128, output_tokens=8)
    plain, more = (ask("deepseek-v3", replace(job, adapter_rank=r), plan).weights_bytes_per_gpu for r in (0, 16))
    assert 0 < more - plain < 0.2 * plain


def test_adapters_take_two_kernels_beside_every_product() -> None:
    """Time grows with adapters, their rank and how many of them a batch uses, never beyond one for each request."""
    job = Serving(batch=4, input_tokens=512, output_tokens=64)

    def answer(rank: int, count: int) -> InferReport:
        return ask("llama-3.1-8b", replace(job, adapter_rank=rank, adapters=count), Plan())

    plain, one, wide, several = (answer(*asked) for asked in ((0, 1), (16, 1), (64, 1), (16, 4)))
    assert plain.tpot_seconds < one.tpot_seconds < min(wide.tpot_seconds, several.tpot_seconds)
    assert plain.ttft_seconds < one.ttft_seconds
    assert answer(16, 8).tpot_seconds == several.tpot_seconds
    own = {name for name in one.evaluation.decode.operators if "lora" in name}
    assert own == {
        f"{part}.lora_{way}" for part in ("qkv", "out", "mlp.up", "mlp.down") for way in ("shrink", "expand")
    }


def test_several_adapters_take_several_times_the_room() -> None:
    """Room is set aside for every adapter that the engine may hold at once, and a number of them needs a rank."""
    sizes = [
        ask("llama-3.1-8b", Serving(adapter_rank=rank, adapters=count), Plan()).weights_bytes_per_gpu
        for rank, count in ((0, 1), (16, 1), (16, 4))
    ]
    assert sizes[2] - sizes[0] == 4 * (sizes[1] - sizes[0])
    with pytest.raises(InputError, match=r"adapters = 4.*adapter-rank"):
        ask("llama-3.1-8b", Serving(adapters=4), Plan())


def test_a_checkpoint_may_narrow_its_feed_forward_layers_alone() -> None:
    """Llama 3.1 405B in 8 bits as Meta publishes it keeps attention in 16: 71.9 of its 405.9 billion parameters."""
    all_narrow, some, wide = (
        ask("llama-3.1-405b", Serving(weights=w), Plan(tp=8)).weights_bytes_per_gpu for w in ("fp8", "fp8-ffn", "bf16")
    )
    attention = 126 * 16384 * (2 * 16384 + 2 * 1024)
    assert some - all_narrow == attention / 8
    assert all_narrow < some < wide


@pytest.mark.parametrize("engine", ["sglang", "vllm", "tensorrt-llm"])
def test_a_server_that_stands_beside_others_has_the_cache_of_one_alone(engine: str) -> None:
    """Two servers of sixteen attention groups: SGLang set memory aside for 32 groups, a fifth of the cache."""
    job = Serving(batch=1, input_tokens=2000, output_tokens=500)
    one, two = (ask("deepseek-v3", job, Plan(dp=dp, ep=16), "h200", engine=engine) for dp in (16, 32))
    assert one.kv_cache_tokens == two.kv_cache_tokens


@pytest.mark.parametrize(
    ("engine", "device", "least", "most"),
    [("vllm", "h100-sxm-80gb", 40e3, 70e3), ("vllm-0.32", "h100-sxm-80gb", 60e3, 100e3),
     ("vllm-0.11", "h100-sxm-80gb", 40e3, 70e3),
     ("vllm-2025", "h100-sxm-80gb", 0, 0)],
)  # fmt: skip
def test_gpt_oss_120b_has_room_on_one_h100_where_nothing_is_sorted(
    engine: str, device: str, least: float, most: float
) -> None:
    """FlashInfer samples 1,024 sequences in 14 bytes a logit, PyTorch's sort takes 38.5, more than the weights leave.

    vLLM 0.10.2 with FlashInfer served it to some 170 sequences of 400 tokens at once on one H100, at 0.9 of its memory
    (github.com/gpustack/gpustack docs/performance-lab/gpt-oss-120b/h100.md).
    """
    report = ask("gpt-oss-120b", Serving(input_tokens=217, output_tokens=202), device=device, engine=engine)
    assert least <= report.kv_cache_tokens <= most


@pytest.mark.parametrize(("device", "sequences"), [("h200-sxm-141gb", 1024), ("a100-sxm-80gb", 384), ("l40s", 128)])
def test_a_step_of_lmdeploy_has_so_many_tokens_of_prompts(device: str, sequences: int) -> None:
    """8,192 tokens of prompts are a step however many wait, and requests run at once by the name of the device."""
    few, many = (
        ask("llama-3.1-8b", Serving(batch=n, input_tokens=8192), device=device, engine="lmdeploy") for n in (1, 8)
    )
    assert few.memory.activations == many.memory.activations
    assert many.case.profiled.sequences == sequences
