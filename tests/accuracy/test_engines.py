"""Which engine runs a row, and what engines do at once where nobody says it."""

from __future__ import annotations

import pytest

from accuracy.published import Published
from shardwise.hardware import Cluster, find_device
from shardwise.measured._frameworks import engine_of
from shardwise.measured._record import Record
from shardwise.models import Model
from shardwise.plans import Plan, Serving
from shardwise.records import replace
from shardwise.serving import ServingOptions, engine_names, engine_on, infer
from shardwise.serving._sizes import sizes_of
from shardwise.serving._static_share import memory_share
from shardwise.serving.load import limits_of, policy_of


@pytest.mark.parametrize(
    ("cells", "device", "name"),
    [
        ({"engine": "vllm", "engine_version": "0.2.1"}, "a100-sxm-80gb", "vllm-0.2"),
        ({"engine": "vllm", "engine_version": "0.6.1"}, "a100-sxm-80gb", "vllm-v0"),
        ({"engine": "vllm", "engine_version": "0.6.1"}, "mi300x", "vllm-rocm-0.6"),
        ({"engine": "vllm", "engine_version": "0.6.6"}, "mi300x", "vllm-v0"),
        ({"engine": "vllm", "engine_version": "0.11.0"}, "mi300x", "vllm-0.13"),
        ({"engine": "vllm", "engine_version": "0.11.0"}, "h100-sxm-80gb", "vllm-0.11"),
        ({"engine": "vllm", "engine_version": "0.11.1"}, "h100-sxm-80gb", "vllm-0.13"),
        ({"engine": "vllm", "engine_version": "0.14.0"}, "mi300x", "vllm-0.14"),
        ({"engine": "vllm", "engine_version": "0.14.1"}, "h200-sxm-141gb", "vllm-0.14"),
        ({"engine": "vllm", "engine_version": "0.15.0"}, "h200-sxm-141gb", "vllm-2025"),
        ({"engine": "vllm", "engine_version": "0.33.0"}, "mi300x", "vllm"),
        ({"engine": "vllm", "engine_version": "0.11.0", "notes": "sampler=flashinfer"}, "h100-sxm-80gb", "vllm-0.11"),
        ({"engine": "vllm", "engine_version": "0.10.1", "notes": "sampler=flashinfer"}, "h100-sxm-80gb",
         "vllm-0.10-flashinfer"),
        ({"engine": "vllm", "engine_version": "0.8.4", "notes": "sampler=flashinfer"}, "h100-sxm-80gb",
         "vllm-0.8.4-flashinfer"),
        ({"engine": "vllm", "engine_version": "0.8.5", "notes": "sampler=sorting"}, "a100-sxm-80gb",
         "vllm-0.8.5-sorting"),
        ({"engine": "vllm", "engine_version": "0.12.0", "notes": "sampler=flashinfer"}, "h100-sxm-80gb",
         "vllm-0.13-flashinfer"),
        ({"engine": "vllm", "engine_version": "0.14.0", "notes": "sampler=flashinfer"}, "h100-sxm-80gb",
         "vllm-0.14-flashinfer"),
        ({"engine": "vllm", "engine_version": "0.15.0", "notes": "sampler=flashinfer"}, "h100-sxm-80gb",
         "vllm-flashinfer"),
        ({"engine": "vllm", "engine_version": "0.15.1", "notes": "sampler=sorting"}, "h100-sxm-80gb", "vllm-sorting"),
        ({"engine": "vllm", "engine_version": "0.14.1", "notes": "sampler=sorting"}, "h100-sxm-80gb",
         "vllm-0.14-sorting"),
        ({"engine": "vllm", "engine_version": "0.11.1", "notes": "sampler=sorting"}, "h100-sxm-80gb",
         "vllm-0.13-sorting"),
        ({"engine": "vllm", "engine_version": "0.10.2", "notes": "sampler=sorting"}, "h100-sxm-80gb",
         "vllm-0.10-sorting"),
        ({"engine": "vllm", "serving_mode": "static"}, "h100-sxm-80gb", "vllm-v0"),
        ({"engine": "vllm", "serving_mode": "memory_log"}, "h100-sxm-80gb", "vllm-2025"),
        ({"engine": "vllm", "engine_version": "0.10.2"}, "h100-sxm-80gb", "vllm-0.10"),
        ({"engine": "vllm", "engine_version": "0.16.0"}, "h100-sxm-80gb", "vllm-2025"),
        ({"engine": "vllm", "engine_version": "0.17.0"}, "h100-sxm-80gb", "vllm-0.17"),
        ({"engine": "vllm", "engine_version": "0.20.2"}, "h100-sxm-80gb", "vllm-0.21"),
        ({"engine": "vllm", "engine_version": "0.19.2rc1"}, "h100-sxm-80gb", "vllm-0.19"),
        ({"engine": "vllm", "engine_version": "0.22.1"}, "h100-sxm-80gb", "vllm-0.22"),
        ({"engine": "vllm", "engine_version": "0.23.1"}, "h100-sxm-80gb", "vllm-0.23"),
        ({"engine": "vllm", "engine_version": "0.24.0"}, "h100-sxm-80gb", "vllm-0.24"),
        ({"engine": "vllm", "engine_version": "0.26.0"}, "h100-sxm-80gb", "vllm-0.26"),
        ({"engine": "vllm", "engine_version": "0.28.0"}, "h100-sxm-80gb", "vllm-0.28"),
        ({"engine": "vllm", "engine_version": "0.32.0"}, "h100-sxm-80gb", "vllm-0.32"),
        ({"engine": "vllm", "engine_version": "2023-09"}, "a100-sxm-40gb", "vllm-0.2"),
        ({"engine": "vllm", "engine_version": "2024-06"}, "mi300x", "vllm-rocm-0.6"),
        ({"engine": "vllm", "engine_version": "Nov 2024"}, "h100-sxm-80gb", "vllm-v0"),
        ({"engine": "vllm", "engine_version": "0.8.3", "notes": "core=v0"}, "h100-sxm-80gb", "vllm-v0"),
        ({"engine": "sglang", "engine_version": "0.5.16", "notes": "prefix_cache=on"}, "h200-sxm-141gb",
         "sglang-0.5.21-prefix-cache"),
        ({"engine": "sglang", "engine_version": "0.5.22", "notes": "prefix_cache=on"}, "h200-sxm-141gb",
         "sglang-prefix-cache"),
        ({"engine": "sglang", "engine_version": "0.5.10.post1"}, "gb300", "sglang-0.5.11"),
        ({"engine": "sglang", "engine_version": "0.5.9", "notes": "prefix_cache=on"}, "h200-sxm-141gb",
         "sglang-0.5.9-prefix-cache"),
        ({"engine": "sglang", "engine_version": "0.5.9", "notes": "block_gemms=flashinfer"}, "b300",
         "sglang-0.5.9-flashinfer"),
        ({"engine": "sglang", "engine_version": "0.5.11", "notes": "prefix_cache=on"}, "gb300",
         "sglang-0.5.11-prefix-cache"),
        ({"engine": "sglang", "engine_version": "0.5.12"}, "gb300", "sglang-0.5.13"),
        ({"engine": "sglang", "engine_version": "0.5.12", "notes": "block_gemms=flashinfer"}, "b300",
         "sglang-0.5.13-flashinfer"),
        ({"engine": "sglang", "engine_version": "0.5.23", "notes": "block_gemms=flashinfer"}, "b300",
         "sglang-flashinfer"),
        ({"engine": "vllm", "engine_version": "Jul 2025"}, "h100-sxm-80gb", "vllm-0.10"),
        ({"engine": "sglang", "engine_version": "latest of 2025-10"}, "h200-sxm-141gb", "sglang-0.5.7"),
        ({"engine": "sglang", "engine_version": "latest of 2025-09"}, "h200-sxm-141gb", "sglang-0.5.2"),
        ({"engine": "sglang", "engine_version": "0.4.8", "notes": "prefix_cache=on"}, "h100-sxm-80gb",
         "sglang-0.5.2-prefix-cache"),
        ({"engine": "vllm", "engine_version": "0.8.3"}, "mi300x", "vllm-0.8.4"),
        ({"engine": "vllm", "engine_version": "0.8.5.post1"}, "a100-sxm-80gb", "vllm-0.8.5"),
        ({"engine": "vllm", "engine_version": "0.8.5"}, "mi300x", "vllm-0.13"),
        ({"engine": "vllm", "engine_version": "0.9.0"}, "a100-sxm-80gb", "vllm-0.10"),
        ({"engine": "sglang", "engine_version": "latest of 2026-11"}, "h200-sxm-141gb", "sglang"),
        ({"engine": "vllm", "engine_version": "2026-02 (a fork)"}, "h100-sxm-80gb", "vllm-2025"),
        ({"engine": "vllm", "engine_version": "2026-11"}, "h100-sxm-80gb", "vllm"),
        ({"engine": "vllm", "serving_mode": "static"}, "gb200", "vllm"),
        ({"engine": "vllm", "serving_mode": "static", "engine_version": "0.7.3"}, "gb200", "vllm-v0"),
        ({"engine": "trtllm", "serving_mode": "static"}, "h100-sxm-80gb", "tensorrt-llm-0.11"),
        ({"engine": "trtllm", "serving_mode": "static"}, "b200-sxm-180gb", "tensorrt-llm"),
        ({"engine": "trtllm", "engine_version": "0.6.1"}, "h100-sxm-80gb", "tensorrt-llm-0.7"),
        ({"engine": "trtllm", "engine_version": "0.8.0"}, "h100-sxm-80gb", "tensorrt-llm-0.9"),
        ({"engine": "trtllm", "engine_version": "2024-05"}, "h100-sxm-80gb", "tensorrt-llm-0.9"),
        ({"engine": "trtllm", "engine_version": "Mar 2025"}, "h100-sxm-80gb", "tensorrt-llm-0.12"),
        ({"engine": "trtllm", "engine_version": "0.10.0"}, "h100-sxm-80gb", "tensorrt-llm-0.9"),
        ({"engine": "trtllm", "engine_version": "0.20.0"}, "h100-sxm-80gb", "tensorrt-llm-0.12"),
        ({"engine": "trtllm", "engine_version": "1.2.0"}, "h100-sxm-80gb", "tensorrt-llm"),
        ({"engine": "vllm", "engine_version": "0.18.0", "notes": "launch=eager"}, "gb200", "vllm-2025-eager"),
        ({"engine": "trtllm", "engine_version": "1.2.0", "notes": "experts=trtllm"}, "gb200", "tensorrt-llm-generated"),
    ],
)  # fmt: skip
def test_the_release_tells_the_engine(cells: dict[str, str], device: str, name: str) -> None:
    """A word and a release name an engine of the package, and so do fixed batches of no release, by their device."""
    assert engine_of(Published.engines, Record(cells), find_device(device).device) == name


def test_every_engine_has_limits() -> None:
    """Whatever the engine, some sequences run at once, and no step holds fewer tokens than it is cut to."""
    device = find_device("h100-sxm-80gb").device
    for name in engine_names():
        limits = limits_of(name, device)
        assert limits.sequences > 0
        assert limits.tokens(100_000) == limits.step_tokens


@pytest.mark.parametrize(
    ("name", "server", "offline"),
    [("b200-sxm-180gb", 16384, 16384), ("h200-sxm-141gb", 8192, 16384), ("a100-sxm-80gb", 2048, 8192),
     ("l40s", 2048, 8192)],
)  # fmt: skip
def test_large_devices_and_the_entry_point_make_larger_steps(name: str, server: int, offline: int) -> None:
    """From 70 and from 160 GiB of memory vLLM takes a larger step, but not on A100, and so it does without a server."""
    device = find_device(name).device
    assert [limits_of("vllm", device, alone).step_tokens for alone in (False, True)] == [server, offline]


@pytest.mark.parametrize(
    ("asked", "names", "sequences"),
    [
        ("vllm==0.8.4", ("h100-pcie-80gb", "h100-nvl-94gb", "h200-sxm-141gb", "gh200-96gb"), 1024),
        ("vllm==0.8.4", ("a100-sxm-80gb", "b200-sxm-180gb", "mi300x", "h20", "h800-sxm-80gb", "l40s"), 256),
        ("vllm==0.8.5", ("a100-sxm-80gb", "b200-sxm-180gb", "mi300x", "h20", "h100-sxm-80gb"), 1024),
        ("vllm==0.8.5", ("a100-sxm-40gb", "l40s"), 256),
        ("vllm==0.9.0", ("a100-sxm-80gb",), 256),
    ],
)
def test_the_first_releases_of_v1_asked_for_the_name_of_the_device(
    asked: str, names: tuple[str, ...], sequences: int
) -> None:
    """H100 and H200 by name to 0.8.4, 70 GiB of memory in 0.8.5, which A100 is out of since 0.9."""
    for name in names:
        device = find_device(name).device
        found = [limits_of(engine_on(asked, device).name, device, alone) for alone in (False, True)]
        steps = [8192, 16384] if sequences == 1024 else [2048, 8192]
        assert [one.step_tokens for one in found] == steps, name
        assert {one.sequences for one in found} == {sequences}, name


@pytest.mark.parametrize("sampler", ["sorting", "flashinfer"])
@pytest.mark.parametrize("release", ["0.8.4", "0.8.5"])
def test_what_samples_changes_no_limit_of_a_release(release: str, sampler: str) -> None:
    """A100-80GB ran 2,048 tokens and 256 sequences in 0.8.4, four times as many in 0.8.5, whatever samples."""
    device = find_device("a100-sxm-80gb").device
    names = [f"vllm-{release}", f"vllm-{release}-{sampler}"]
    alone, sampled = ([limits_of(name, device, one) for one in (False, True)] for name in names)
    assert sampled == alone
    assert policy_of(names[1], device, 16, 8192) == policy_of(names[0], device, 16, 8192)
    assert alone[0].step_tokens == (2048 if release == "0.8.4" else 8192)


@pytest.mark.parametrize(
    ("name", "count", "model", "share"),
    [("h100-sxm-80gb", 1, "llama-3.1-8b", 0.83), ("h100-sxm-80gb", 8, "llama-3.1-70b", 0.812),
     ("h100-sxm-80gb", 8, "deepseek-v3", 0.799), ("h200-sxm-141gb", 8, "llama-3.1-70b", 0.893),
     ("b200-sxm-180gb", 8, "llama-3.1-70b", 0.849)],
)  # fmt: skip
def test_the_static_share_of_sglang_is_arithmetic(name: str, count: int, model: str, share: float) -> None:
    """What server_args.py of SGLang 0.5.23 sets aside for chunks and graphs, to the third digit of the share."""
    cluster, plan = Cluster.parse(f"{count}x{name}"), Plan(tp=count)
    report = infer(Model.load(model), cluster, plan, Serving(batch=1, input_tokens=64, output_tokens=8),
                   ServingOptions(engine="sglang"))  # fmt: skip
    case = report.case
    found = memory_share(case, sizes_of(case.model, plan, case.job, case.domains))
    assert found == pytest.approx(share, abs=1.6e-3)
    assert found == round(found, 3)


@pytest.mark.parametrize(
    ("cluster", "model", "plan", "sequences", "share"),
    [
        # Groups of attention: 2 + 8 x 4.5 MiB for each of 512 sequences of the largest captured step.
        ("8xh200", "deepseek-v3", Plan(tp=1, dp=8, ep=8), 0, 0.758),
        ("8xh200", "deepseek-v3", Plan(tp=4, dp=2, ep=8), 0, 0.854),
        # Two stages capture no prompts.
        ("8xh100", "llama-3.1-70b", Plan(tp=4, pp=2), 0, 0.818),
        # No captured step is larger than what may run.
        ("8xh100", "llama-3.1-70b", Plan(tp=8), 64, 0.823),
        # Decays a channel capture no prompts, of any number; 10 GiB at least are left.
        ("8xh200", "kimi-linear-48b-a3b", Plan(tp=8), 0, 0.896),
    ],
)  # fmt: skip
def test_the_static_share_of_sglang_follows_the_layout(
    cluster: str, model: str, plan: Plan, sequences: int, share: float
) -> None:
    """memory_hook.py and cuda_graph_hook.py of SGLang 0.5.23, by hand from 143,771 and 81,559 MiB."""
    job = Serving(batch=1, input_tokens=64, output_tokens=8, max_sequences=sequences)
    report = infer(Model.load(model), Cluster.parse(cluster), plan, job, ServingOptions(engine="sglang"))
    assert report.memory_share == pytest.approx(share, abs=1.6e-3)


@pytest.mark.parametrize(
    ("cluster", "model", "plan", "guesses", "share"),
    [
        # 9.5 GiB and half a one a rank of 81,559 MiB, stages among them.
        ("1xh100", "llama-3.1-8b", Plan(), 0, 0.874),
        ("8xh100", "llama-3.1-70b", Plan(tp=8), 0, 0.831),
        ("8xh100", "llama-3.1-70b", Plan(tp=4, pp=2), 0, 0.831),
        ("1xh100", "llama-3.1-8b", Plan(), 3, 0.849),
        # 12 GiB and as much a rank of 143,771 MiB; 4 more with groups of attention, whose ranks are the server's.
        ("8xh200", "deepseek-v3", Plan(tp=8), 0, 0.886),
        ("8xh200", "deepseek-v3", Plan(dp=8, ep=8), 0, 0.858),
        # 2.8 and a tenth a rank of the 24,080 MiB that a driver leaves; 32 whatever the ranks of more than 160 GiB.
        ("2xrtx-4090", "llama-3.2-1b", Plan(tp=2), 0, 0.872),
        ("8xb200", "llama-3.1-70b", Plan(tp=8), 0, 0.821),
    ],
)  # fmt: skip
def test_the_static_share_of_sglang_before_0_5_3_is_of_the_memory(
    cluster: str, model: str, plan: Plan, guesses: int, share: float
) -> None:
    """server_args.py of SGLang 0.4.10 and 0.5.2, by hand, as of a release that is asked for."""
    job = Serving(batch=1, input_tokens=64, output_tokens=8)
    if guesses:
        job = replace(job, speculative_method="ngram", num_speculative_tokens=guesses, acceptance_rate=0.5)
    report = infer(Model.load(model), Cluster.parse(cluster), plan, job, ServingOptions(engine="sglang==0.5.2"))
    assert report.memory_share == pytest.approx(share, abs=1.6e-3)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("rtx-4090", 2048, 4096), ("a100-sxm-40gb", 8192, 4096), ("h100-sxm-80gb", 8192, 8192),
     ("b200-sxm-180gb", 16384, 16384)],
)  # fmt: skip
def test_sglang_before_0_5_3_cuts_prompts_otherwise(name: str, old: int, new: int) -> None:
    """2,048 tokens below 35 GiB and 8,192 below 160 in server_args.py of 0.4.10 and 0.5.2, 4,096 to 60 GiB since."""
    device = find_device(name).device
    found = [policy_of(engine_on(one, device).name, device, 1, 8192) for one in ("sglang==0.5.2", "sglang")]
    assert [one.step_tokens for one in found] == [old, new]


@pytest.mark.parametrize(("chunk", "share"), [(0, 0.758), (1024, 0.758), (2048, 0.672)])
def test_the_static_share_of_sglang_counts_the_chunk_of_all_groups(chunk: int, share: float) -> None:
    """8 groups of attention with 1,024 tokens each are --chunked-prefill-size 8192, which it takes unless told."""
    job = Serving(batch=1, input_tokens=64, output_tokens=8, max_batched_tokens=chunk)
    report = infer(Model.load("deepseek-v3"), Cluster.parse("8xh200"), Plan(dp=8, ep=8), job,
                   ServingOptions(engine="sglang"))  # fmt: skip
    assert report.memory_share == pytest.approx(share, abs=1.6e-3)


@pytest.mark.parametrize(
    ("device", "tp", "expected"), [("h100", 8, 1.3e9), ("b200", 2, 1.3e9), ("a100", 8, 0.45e9), ("h100", 1, 0.0)]
)
def test_the_process_groups_of_sglang_take_more_where_nvlink_reduces(device: str, tp: int, expected: float) -> None:
    """1.0 to 2.0 GiB on Hopper with NVSwitch, 0.4 and less over PCIe, before the weights are loaded."""
    report = infer(Model.load("llama-3.1-70b"), Cluster.parse(f"{tp}x{device}"), Plan(tp=tp), Serving(weights="int4"),
                   ServingOptions(engine="sglang"))  # fmt: skip
    assert report.memory.communicators == expected


@pytest.mark.parametrize(("engine", "expected"), [("sglang", 1.3e9), ("vllm", 0.45e9), ("tensorrt-llm", 0.45e9)])
def test_groups_of_attention_that_share_experts_have_communicators(engine: str, expected: float) -> None:
    """Their ranks are process groups as those of tensor parallelism are; copies that share nothing have none."""
    job, cluster = Serving(batch=1, input_tokens=64, output_tokens=8), Cluster.parse("8xh200")
    options = ServingOptions(engine=engine)
    spread = infer(Model.load("deepseek-v3"), cluster, Plan(dp=8, ep=8), job, options)
    apart = infer(Model.load("qwen3-30b-a3b"), cluster, Plan(dp=8), job, options)
    assert (spread.memory.communicators, apart.memory.communicators) == (expected, 0.0)


def test_nothing_is_set_aside_for_graphs_that_are_not_captured() -> None:
    """512 MiB, 1.5 for each token of a chunk of 4,096 and 128 for a rank are left free (--disable-cuda-graph)."""
    job, options = Serving(batch=1, input_tokens=64, output_tokens=8), ServingOptions(engine="sglang-eager")
    report = infer(Model.load("llama-3.2-1b"), Cluster.parse("1xrtx-4090"), Plan(), job, options)
    usable = report.case.cluster.device.usable_memory_bytes / 2**20
    assert report.memory_share == round(1 - (512 + 1.5 * 4096 + 128) / usable, 3)


def test_the_static_share_of_sglang_is_of_what_is_free_before_the_weights() -> None:
    """Context and communicators are gone by then (distributed/bootstrap.py, measure_pre_model_load_memory)."""
    job = Serving(input_tokens=64, output_tokens=8, memory_fraction=0.5)
    report = infer(
        Model.load("llama-3.1-8b"), Cluster.parse("2xh100"), Plan(tp=2), job, ServingOptions(engine="sglang")
    )
    memory = report.memory
    free = report.case.cluster.device.usable_memory_bytes - memory.context - memory.communicators
    assert memory.cache_budget == pytest.approx(0.5 * free - memory.weights)


@pytest.mark.parametrize(("length", "tokens"), [(1024, 2048), (16384, 16384), (65536, 2048)])
def test_prompts_ran_whole_before_v1(length: int, tokens: int) -> None:
    """Before V1 a step held a whole prompt, but of contexts of more than 32,768 tokens."""
    assert limits_of("vllm-v0", find_device("a100-sxm-80gb").device).tokens(length) == tokens
