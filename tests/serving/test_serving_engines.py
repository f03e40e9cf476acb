"""What engines and their versions do beside kernels: hosts, launches, heads, pieces of prompts, splits."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from serving.serving_cases import ask
from shardwise.cost import constants
from shardwise.cost._kernels import kernel_costs
from shardwise.errors import InputError
from shardwise.hardware import Cluster, context_bytes, find_device
from shardwise.models import load_model
from shardwise.plans import Plan, Serving, find_stack
from shardwise.serving import ServingOptions, infer
from shardwise.serving._case import ServingQuestion, complete
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._engine import Engine, engine_names, engine_tables, find_engine
from shardwise.serving._formats import cache_names, format_names
from shardwise.serving._host import host_slowness, launches
from shardwise.serving._ledger import EngineStep, step_ledger
from shardwise.serving._policy import _policy_row, policy_of
from shardwise.serving._replayed import replayed_start
from shardwise.serving._sizes import sizes_of
from shardwise.serving._step import decode_cost
from shardwise.serving.load._steps import StepTable

JOB = Serving(batch=16, input_tokens=512, output_tokens=128)


def step(engine: str, model: str = "llama-3.1-8b", **changes: float) -> float:
    """Return seconds of the mean decode step of an engine with figures of host or attention changed, on one H100."""
    job = replace(JOB, batch=int(changes.pop("batch", 16)), input_tokens=int(changes.pop("input_tokens", 512)))
    plan = Plan(tp=int(changes.pop("tp", 1)))
    changed = find_engine(engine)
    for group in ("host", "attention"):
        own = {name: value for name, value in changes.items() if hasattr(getattr(changed, group), name)}
        changed = replace(changed, **{group: replace(getattr(changed, group), **own)})
    return ask(model, job, plan, "h100-sxm-80gb", engine=changed).tpot_seconds


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_says_where_its_figures_come_from(name: str) -> None:
    """Each figure of an engine that is not its neutral value has a source."""
    engine = find_engine(name)
    said = dict(engine.sources)
    figures = {
        f"{group}.{figure.name}"
        for group in ("host", "operators", "attention", "quantisation", "prefill")
        for figure in fields(getattr(engine, group))
        if figure.default is not MISSING and getattr(getattr(engine, group), figure.name) != figure.default
    }
    assert figures <= set(said)
    assert all(said.values())


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_has_a_policy(name: str) -> None:
    """A row of policies.toml says how it schedules; none takes another's because nobody wrote its own."""
    assert policy_of(name, find_device("h100-sxm-80gb").device, 16, 8192).source


@pytest.mark.parametrize("word", [{"step_seconds": 1e-3}, {"host": {"step_secnds": 1e-3}}], ids=str)
def test_a_figure_that_no_engine_has_is_an_error(word: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt key of the table, or one outside its group, is refused rather than left out."""
    table = {"engines": {"vllm": {**engine_tables()["engines"]["vllm"], **word}}}
    monkeypatch.setattr("shardwise.serving._engine.engine_tables", lambda: table)
    with pytest.raises(TypeError, match="step_sec"):
        find_engine.__wrapped__("vllm")


def test_a_word_that_no_policy_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt key of a row of policies.toml is refused rather than left out."""
    monkeypatch.setattr("shardwise.serving._policy._policy_row", lambda name: {**_policy_row(name), "balance": "turns"})
    with pytest.raises(TypeError, match="balance"):
        policy_of("vllm", find_device("h100-sxm-80gb").device, 16, 8192)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "exllama"])
def test_engines_and_trainers_have_the_same_context(engine: str) -> None:
    """A process of either takes as much of a device; vLLM's budget starts when its context stands."""
    for name in ("t4", "h100-sxm-80gb"):
        device = find_device(name).device
        served = [ask("qwen2.5-0.5b", JOB, Plan(), name, engine=find_engine(one)) for one in (engine, "vllm")]
        assert served[0].memory.context == find_stack("pytorch").context_bytes(device)
        assert served[1].memory.context < 0.4 * context_bytes(device)


def test_an_older_version_takes_what_it_does_not_state_from_the_engine() -> None:
    """An engine that extends another has its kernels and every figure that it does not name."""
    old, new = find_engine("vllm-v0"), find_engine("vllm")
    assert (old.kernels, old.memory.context_bytes, old.operators.fused) == (
        "vllm",
        new.memory.context_bytes,
        new.operators.fused,
    )
    assert old.host.step_seconds > new.host.step_seconds


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 64), st.integers(64, 4096))
def test_blocks_cost_the_host_by_sequence_and_context(batch: int, tokens: int) -> None:
    """A step is longer by the seconds of a block for each block of every sequence, and by nothing else."""
    engine = find_engine("vllm-v0")
    with_blocks = step("vllm-v0", batch=batch, input_tokens=tokens)
    without = step("vllm-v0", batch=batch, input_tokens=tokens, block_seconds=0.0)
    context = tokens + (JOB.output_tokens - 2) / 2
    assert with_blocks - without == pytest.approx(engine.host.block_seconds * batch * context / 16, rel=1e-6)


@pytest.mark.parametrize(("tp", "doublings"), [(1, 0), (2, 1), (4, 2), (8, 3)])
def test_workers_cost_the_host_each_time_they_double(tp: int, doublings: int) -> None:
    """Sending the inputs of a step to the workers costs the same each time that their number doubles."""
    added = step("vllm-v0", tp=tp) - step("vllm-v0", tp=tp, worker_doubling_seconds=0.0)
    assert added == pytest.approx(doublings * find_engine("vllm-v0").host.worker_doubling_seconds)


def test_only_grouped_heads_pay_for_kernels_that_do_not_share() -> None:
    """Where no group shares, models with one key-value head a query head cost what they cost before, others more."""
    for model, more in (("llama-2-7b", False), ("llama-3.1-8b", True)):
        alone = step("tensorrt-llm-0.9", model, batch=64, input_tokens=2048)
        shared = step("tensorrt-llm-0.9", model, batch=64, input_tokens=2048, shared_query_heads=1)
        assert (alone > 1.05 * shared) == more


@pytest.mark.parametrize(("model", "more"), [("llama-2-7b", False), ("llama-2-70b", True)])
def test_groups_of_eight_share_their_cache_from_xqa_on(model: str, more: bool) -> None:
    """TensorRT-LLM has XQA since 0.8: before, eight query heads read a cache eight times, and single ones as ever."""
    sizes = {"batch": 64, "input_tokens": 2048, "tp": 4}
    assert (step("tensorrt-llm-0.7", model, **sizes) > 1.2 * step("tensorrt-llm-0.9", model, **sizes)) == more


@pytest.mark.parametrize(
    ("engine", "device", "weights", "own_kernel"),
    [
        ("vllm", "a100-sxm-80gb", "int8-w8a8", True),
        ("sglang", "a100-sxm-80gb", "int8-w8a8", True),
        ("vllm", "h100-sxm-80gb", "fp8", False),
        ("vllm-v0", "h100-sxm-80gb", "fp8", True),
        ("vllm-v0", "a100-sxm-80gb", "fp8", False),
    ],
)
def test_inputs_that_nothing_fuses_take_a_kernel_before_each_product(
    engine: str, device: str, weights: str, own_kernel: bool
) -> None:
    """Integers of 8 bits take one in vLLM and SGLang, floats where nothing is compiled, widened weights none."""
    mine = find_engine(engine)
    fused = replace(mine, quantisation=replace(mine.quantisation, unfused_types=("fp4",)))
    job = replace(JOB, batch=1, weights=weights)
    alone, joined = (ask("llama-3.1-8b", job, Plan(), device, engine=one).tpot_seconds for one in (mine, fused))
    kernels = (alone - joined) / (4 * 32)
    assert 1e-6 < kernels <= 1.001 * mine.quantisation.kernel_seconds if own_kernel else kernels == 0


def test_kernels_that_do_not_share_count_elements() -> None:
    """A cache in 8 bits spares a kernel with one block a query head nothing: its cores widen what they read."""
    job = replace(JOB, batch=64, input_tokens=2048)

    def attention(engine: str, cache: str) -> float:
        report = ask("llama-3.1-8b", replace(job, kv_cache=cache), Plan(), engine=engine)
        return report.evaluation.decode.operators["attention"]

    assert attention("tensorrt-llm-0.9", "fp8") == pytest.approx(attention("tensorrt-llm-0.9", ""), rel=0.01)
    assert attention("tensorrt-llm", "fp8") < 0.7 * attention("tensorrt-llm", "")


@pytest.mark.parametrize(
    ("engine", "device", "cache", "slower"),
    [
        ("vllm-v0", "a100-sxm-80gb", "fp8", True),
        ("tensorrt-llm-0.9", "a100-sxm-80gb", "fp8", True),
        ("tensorrt-llm-0.9", "a100-sxm-80gb", "int8", False),
        ("vllm-v0", "l40s", "fp8", False),
        ("vllm", "a100-sxm-80gb", "fp8", False),
    ],
)
def test_caches_of_8_bit_floats_cost_what_their_device_cannot_convert(
    engine: str, device: str, cache: str, slower: bool
) -> None:
    """Kernels of 2024 widen an fp8 cache in software where the device has no instruction, and pay for every element."""
    job = replace(JOB, batch=64, input_tokens=2048)
    narrow, wide = (
        ask("llama-3.1-8b", replace(job, kv_cache=kind), Plan(), device, engine=engine) for kind in (cache, "")
    )
    times = [report.evaluation.decode.operators["attention"] for report in (narrow, wide)]
    assert (times[0] > 1.5 * times[1]) == slower


def test_windows_ran_on_kernels_that_do_not_share() -> None:
    """Before V1 vLLM has no FlashAttention with a window: Mistral pays for its groups."""

    def attention(model: str, batch: int, tokens: int = 1024) -> float:
        job = replace(JOB, batch=batch, input_tokens=tokens)
        return ask(model, job, Plan(), engine="vllm-v0").evaluation.decode.operators["attention"] / batch

    assert attention("mistral-7b-v0.1", 16, 3072) > 1.05 * attention("llama-3.1-8b", 16, 3072)
    assert attention("llama-3.1-8b", 32) < 1.05 * attention("llama-3.1-8b", 16)


def test_a_context_that_is_not_cut_keeps_one_core_busy_a_head() -> None:
    """One long sequence takes as long over 8 heads a rank as over 32, where each has a core to itself."""

    def attention(engine: str, tp: int) -> float:
        job = replace(JOB, batch=1, input_tokens=4096)
        report = ask("llama-2-7b", job, Plan(tp=tp), "a100-sxm-80gb", engine=engine)
        return report.evaluation.decode.operators["attention"]

    assert attention("tensorrt-llm-0.9", 4) == pytest.approx(attention("tensorrt-llm-0.9", 1), rel=0.3)
    assert attention("tensorrt-llm", 4) < attention("tensorrt-llm-0.9", 4)


def test_built_engines_read_the_whole_context_of_a_windowed_model() -> None:
    """TensorRT-LLM before 1.0 reads every token of Mistral 7B, and says so; later ones keep them, and read a window."""
    job = Serving(batch=1, input_tokens=20000, output_tokens=64)
    old, new = (ask("mistral-7b-v0.1", job, Plan(), engine=name) for name in ("tensorrt-llm-0.12", "tensorrt-llm"))
    assert old.kv_cache_bytes_per_gpu == new.kv_cache_bytes_per_gpu
    assert old.tpot_seconds > 1.15 * new.tpot_seconds
    assert old.ttft_seconds > new.ttft_seconds
    assert any("reads the whole context" in line for line in old.assumptions)


@pytest.mark.parametrize(("devices", "gain"), [(1, 1.0), (4, 4 * 4 / 7)])
def test_pieces_of_a_prompt_pass_a_layer_split_in_groups(devices: int, gain: float) -> None:
    """Four pieces over four devices take seven turns, and one device takes them one after another."""
    engine = find_engine("llama.cpp")
    engine = replace(engine, host=replace(engine.host, stage_seconds=0.0, layer_seconds=0.0, step_seconds=0.0))
    job = Serving(batch=1, input_tokens=2048, output_tokens=1)
    one = ask("llama-3.1-8b", job, Plan(), "rtx-3090", engine=engine).ttft_seconds
    split = ask("llama-3.1-8b", job, Plan(pp=devices), "rtx-3090", engine=engine).ttft_seconds
    assert one / split == pytest.approx(gain, rel=0.08)


@pytest.mark.parametrize(
    ("engine", "tokens", "output", "slower"),
    [("llama.cpp-2024", 512, 1, True), ("llama.cpp-2024", 1, 64, False), ("llama.cpp", 512, 1, False)],
)
def test_quantised_prompts_pay_for_weights_written_out(engine: str, tokens: int, output: int, slower: bool) -> None:
    """With many rows 4-bit weights cost llama.cpp more than 16-bit ones while it wrote them out, with one row less."""
    job = Serving(batch=1, input_tokens=tokens, output_tokens=output)
    times = [
        ask("llama-3.1-8b", replace(job, weights=weights), Plan(), "rtx-4090", engine=engine).request_seconds
        for weights in ("q4_k_m", "fp16")
    ]
    assert (times[0] > times[1]) == slower


def test_pcie_servers_have_peer_access() -> None:
    """Ranks of a PCIe node slow each other with less than their square root, whatever node its table came from."""
    report = ask("llama-3.1-8b", JOB, Plan(tp=8), "l40s", engine="tensorrt-llm")
    assert Cluster.parse("8xl40s").device.fast_link == "pcie"
    eight, two = (
        ask("llama-3.1-8b", JOB, Plan(tp=tp), "l40s", engine="tensorrt-llm").evaluation.prefill.exposed["tp"]
        for tp in (8, 2)
    )
    assert eight / two < 2 * 4 ** constants().rules.peer_access.crowding
    assert report.ttft_seconds > 0


def test_hopper_ran_the_kernels_of_ampere_before_flash_attention_3() -> None:
    """A decode step of vLLM before V1 on H100 takes attention's start from the table of A100, longer than its own."""
    older, newer = (
        ask("llama-3.1-8b", Serving(batch=1, input_tokens=512), device="h100-sxm-80gb", engine=engine)
        for engine in ("vllm-v0", "vllm")
    )
    ampere = kernel_costs(find_device("a100-sxm-80gb").device, "decode", ("vllm", "bf16"), 128, False)
    assert ampere is not None
    assert older.evaluation.decode.operators["attention"] > 32 * ampere.costs[0]
    assert older.evaluation.decode.operators["attention"] > 1.2 * newer.evaluation.decode.operators["attention"]
    assert older.evaluation.prefill.operators["attention"] == newer.evaluation.prefill.operators["attention"]


def test_sampling_one_step_after_another_moves_every_logit_again() -> None:
    """64 sequences over 128,256 words cost vLLM before V1 52 bytes a logit more than a maximum alone."""
    older, newer = (
        ask("llama-3.1-8b", Serving(batch=64), device="h100-sxm-80gb", engine=engine) for engine in ("vllm-v0", "vllm")
    )
    more = older.evaluation.decode.operators["sampling"] - newer.evaluation.decode.operators["sampling"]
    assert 52 * 64 * 128256 / 3.35e12 < more < 52 * 64 * 128256 / 2.0e12


def test_an_engine_without_windows_merges_layers_that_differ_in_them_alone() -> None:
    """Windows that an engine ignores leave one kind of layer: as many of them, each with a whole cache."""
    job = Serving(batch=4, input_tokens=8192, output_tokens=16)
    r, windowed = (ask("gemma-2-9b", job, engine=name) for name in ("tensorrt-llm-0.9", "vllm"))
    assert len(r.case.model.kinds) == 1 < len(windowed.case.model.kinds)
    assert r.kv_cache_bytes_per_gpu > windowed.kv_cache_bytes_per_gpu
    assert r.weights_bytes_per_gpu == windowed.weights_bytes_per_gpu


@pytest.mark.parametrize(
    ("device", "weights", "tokens", "tokens_per_second"),
    [("rtx-3090", "fp16", 512, 47.4), ("rtx-a6000", "fp16", 512, 40.71), ("rtx-3090", "q4_k_m", 512, 115.42),
     ("a40", "fp16", 4096, 33.06), ("rtx-3080", "q4_k_m", 1024, 106.4)],
)  # fmt: skip
def test_cards_of_ampere_with_gddr_stream_as_measured(
    device: str, weights: str, tokens: int, tokens_per_second: float
) -> None:
    """What a step of A100 loses of the tables' bandwidth, cards without its memory do not: tokens/s within 7 %.

    Llama-3-8B, llama.cpp (github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README).
    """
    job = Serving(batch=1, input_tokens=1, output_tokens=tokens, weights=weights)
    found = ask("llama-3-8b", job, Plan(), device, engine="llama.cpp-2024")
    assert found.tpot_seconds * tokens_per_second == pytest.approx(1, abs=0.07)


def test_routers_choose_in_kernels_of_their_own_where_experts_are_not_fused() -> None:
    """Beside the GEMM of a router llama.cpp runs one kernel of softmax and choice; tables of fused experts hold it.

    Both start from a replayed graph as kernels of the device's family were measured to.
    """
    job = Serving(batch=1, input_tokens=64, output_tokens=8)
    for engine, kernels in (("llama.cpp", 2), ("vllm", 1)):
        report = ask("qwen3-30b-a3b", job, Plan(), "h100-sxm-80gb", engine=engine)
        own = find_engine(engine)
        start = replayed_start(own, "hopper") or own.graphs.small_kernel_seconds
        each = float(report.evaluation.decode.roles["router"]) / len(report.case.model.layers)
        assert (kernels - 0.5) * start < each < (kernels + 2.5) * start, engine


def test_built_engines_multiply_8_bit_floats_faster_on_l40s() -> None:
    """Their own products reach more of the peak than PyTorch's there; other types and devices are as they are."""

    def seconds(engine: str, weights: str, device: str) -> float:
        job = Serving(batch=1, input_tokens=2048, weights=weights)
        return float(ask("llama-3.1-8b", job, device=device, engine=engine).evaluation.prefill.roles["up"])

    for weights, device, faster in (("fp8", "l40s", 1.2), ("bf16", "l40s", 1.0), ("fp8", "h100-sxm-80gb", 1.0)):
        built, later = (seconds(engine, weights, device) for engine in ("tensorrt-llm-0.12", "tensorrt-llm"))
        assert later / built == pytest.approx(faster, rel=0.06)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "tensorrt-llm-0.12"])
def test_long_prompts_in_8_bits_reach_what_the_tables_do(engine: str) -> None:
    """Products of 16,384 tokens on H100 keep 0.63 to 0.70 of the peak, as tables do that add in the tensor cores.

    A fiftieth less with the kernel that makes their inputs narrow.
    """
    job = Serving(batch=2, input_tokens=8192, weights="fp8")
    report = ask("llama-3.1-70b", job, Plan(tp=2), "h100-sxm-80gb", engine=engine)
    block = report.case.model.layers[0].feed_forward
    flops = 2 * 2 * 8192 * 80 * block.ffn * 2 * 8192 / 2
    assert 0.61 < flops / float(report.evaluation.prefill.roles["up"]) / 1979e12 < 0.70


@pytest.mark.parametrize(("engine", "device"), [("sglang-0.5.15", "h100-sxm-80gb"), ("tensorrt-llm", "gb200")])
def test_prompts_wait_for_python_to_launch_their_kernels(engine: str, device: str) -> None:
    """A short prompt on fast devices takes its launches, a long one its kernels, and decode steps replay graphs."""
    eager = find_engine(engine)
    graphs = replace(eager, host=replace(eager.host, eager_prompts=False))
    short, long = (Serving(input_tokens=tokens, output_tokens=9) for tokens in (64, 32768))
    case = ask("llama-3.1-70b", short, Plan(tp=8), device, engine=eager).case
    ledger = step_ledger(case, sizes_of(case.model, case.plan, case.job, case.domains), EngineStep(
        phase="prefill", sequences=1.0, tokens=64.0, context=0.0,
    ))  # fmt: skip
    least = launches(case, ledger) * eager.host.module_launch_seconds * host_slowness(case.cluster.device)
    for job, bound in ((short, True), (long, False)):
        late, ahead = (ask("llama-3.1-70b", job, Plan(tp=8), device, engine=one) for one in (eager, graphs))
        assert late.tpot_seconds == ahead.tpot_seconds
        assert (late.ttft_seconds > ahead.ttft_seconds) == bound
        assert late.ttft_seconds >= least


def test_python_takes_longer_to_call_experts_of_triton_kernels() -> None:
    """A short prompt of gpt-oss waits a millisecond a layer more on Hopper, where no graph holds its experts."""

    def first(engine: str, device: str) -> float:
        job = Serving(input_tokens=64, output_tokens=9, weights="mxfp4")
        return ask("gpt-oss-120b", job, Plan(tp=8), device, engine=find_engine(engine)).ttft_seconds

    for engine in ("tensorrt-llm", "sglang-0.5.15"):
        more = first(engine, "h200-sxm-141gb") - first(engine, "b200-sxm-180gb")
        assert more == pytest.approx(36 * 1.0e-3, rel=0.2), engine
    assert first("sglang", "h200-sxm-141gb") < 0.01


@pytest.mark.parametrize(
    ("model", "device", "pp", "captured"),
    [
        ("llama-3.1-70b", "h100-sxm-80gb", 1, True),
        ("llama-3.1-70b", "h100-sxm-80gb", 2, False),
        ("llama-3.1-70b", "mi300x", 1, False),
        ("gemma-3-27b", "h100-sxm-80gb", 1, True),
        ("gemma-4-31b", "h100-sxm-80gb", 1, False),
        ("deepseek-v3", "h200-sxm-141gb", 1, True),
        ("deepseek-v3", "b200-sxm-180gb", 1, False),
    ],
)
def test_sglang_replays_prompts_but_for_their_attention(model: str, device: str, pp: int, captured: bool) -> None:
    """Where today's SGLang captures prompts a short one waits for attention's launches alone, else for all of them."""
    job, plan = Serving(input_tokens=64, output_tokens=9), Plan(tp=8, pp=pp)
    today, before = (ask(model, job, plan, device, engine=find_engine(name)) for name in ("sglang", "sglang-0.5.15"))
    assert today.tpot_seconds == before.tpot_seconds
    assert (today.ttft_seconds < before.ttft_seconds) == captured
    assert (today.kv_cache_tokens < before.kv_cache_tokens) == captured


@pytest.mark.parametrize(
    ("model", "today", "before"),
    [("qwen3-next-80b-a3b", False, True), ("lfm2-1.2b", True, True), ("qwen3-8b", False, False)],
)
def test_states_beside_cached_prefixes_keep_sglang_from_scheduling_ahead(model: str, today: bool, before: bool) -> None:
    """A decode step then waits 0.74 ms, of models with states before 0.5.14, since then of those without buffers."""
    for name, waits in (("sglang", today), ("sglang-0.5.13", before)):
        plain, caching = find_engine(name), find_engine(f"{name}-prefix-cache")
        ahead = replace(caching, host=replace(caching.host, serial_families=""))
        job = Serving(input_tokens=64, output_tokens=9)
        tpots = [ask(model, job, Plan(), "b200-sxm-180gb", engine=one).tpot_seconds for one in (plain, ahead, caching)]
        assert tpots[0] == tpots[1]
        assert tpots[2] - tpots[1] == pytest.approx(0.74e-3 if waits else 0.0, abs=1e-9)


def test_sequences_of_sglang_took_fewer_states() -> None:
    """Three slots a request before 0.5.14, five where two more let steps be scheduled ahead."""
    room = {
        name: ask(
            "nemotron-3-nano-30b-a3b",
            Serving(input_tokens=500, output_tokens=500),
            Plan(),
            "b200-sxm-180gb",
            engine=name,
        )
        for name in ("sglang-prefix-cache", "sglang-0.5.13-prefix-cache")
    }
    fits = {name: report.max_concurrency for name, report in room.items()}
    assert fits["sglang-0.5.13-prefix-cache"] == pytest.approx(fits["sglang-prefix-cache"] * 5 / 3, rel=0.02)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_batches_of_a_search_are_captured_whatever_the_first_of_them_runs(engine: str) -> None:
    """Columns of batches share a case, whose own most sequences bound no decode step of theirs."""
    job = Serving(input_tokens=64, output_tokens=9, max_sequences=1)
    case = ask("qwen3-0.6b", job, Plan(), engine=find_engine(engine)).case
    ahead = replace(case, engine=replace(case.engine, host=replace(case.engine.host, eager_prompts=False)))
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    one = EngineStep(phase="decode", sequences=16.0, tokens=1.0, context=64.0)
    late, in_time = (decode_cost(some, sizes, one, engine_cost_model(some, sizes)) for some in (case, ahead))
    assert late.seconds == in_time.seconds


def test_sglang_loads_towers_of_llama_4_only_where_it_is_asked_to() -> None:
    """Its launch line of Llama 4 makes no tower, that of Gemma 3 does, and vLLM makes both."""
    towers = {
        (engine, model): ask(model, JOB, Plan(tp=8), engine=find_engine(engine)).case.tower_parameters > 0
        for engine in ("sglang", "vllm")
        for model in ("llama-4-scout", "gemma-3-27b")
    }
    assert [pair for pair, loaded in towers.items() if not loaded] == [("sglang", "llama-4-scout")]


@pytest.mark.parametrize(
    ("engine", "device", "tp", "captured"),
    [
        ("sglang", "h200-sxm-141gb", 2, 256),
        ("sglang", "h200-sxm-141gb", 8, 512),
        ("sglang", "l40s", 1, 32),
        ("vllm", "h200-sxm-141gb", 8, 512),
        ("vllm", "b200-sxm-180gb", 8, 1024),
    ],
)
def test_decode_steps_beyond_the_largest_captured_one_are_launched(
    engine: str, device: str, tp: int, captured: int
) -> None:
    """Up to the largest captured step the host adds nothing; one more takes no less than its kernels and messages."""
    job = Serving(input_tokens=64, output_tokens=9, max_sequences=4096)
    case = ask("qwen3-0.6b", job, Plan(tp=tp), device, engine=find_engine(engine)).case
    ahead = replace(case, engine=replace(case.engine, host=replace(case.engine.host, eager_prompts=False)))
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    for sequences, launched in ((captured, False), (captured + 1, True)):
        one = EngineStep(phase="decode", sequences=float(sequences), tokens=1.0, context=64.0)
        late, in_time = (decode_cost(some, sizes, one, engine_cost_model(some, sizes)) for some in (case, ahead))
        assert (late.seconds > in_time.seconds) == launched
        messages = 2 * case.model.num_layers * (tp > 1)
        calls = launches(case, step_ledger(case, sizes, one)) + messages
        assert not launched or late.seconds >= calls * case.engine.host.module_launch_seconds


@pytest.mark.parametrize("engine", ["tensorrt-llm", "sglang", "vllm"])
@pytest.mark.parametrize("captured", [0, 32])
def test_decode_steps_beyond_those_that_a_job_says_are_captured_are_launched(engine: str, captured: int) -> None:
    """With 0 every step takes its launches, with 32 those of 33 sequences and more."""
    job = Serving(input_tokens=64, output_tokens=9, max_sequences=4096)
    usual, stated = (
        {
            n: ask("qwen3-0.6b", replace(job, batch=n, captured_sequences=one), engine=engine).tpot_seconds
            for n in (1, 32, 33)
        }
        for one in (-1, captured)
    )
    assert all((stated[n] > 1.5 * usual[n]) == (n > captured) for n in usual), (usual, stated)
    assert all(stated[n] == usual[n] for n in usual if n <= captured)


def test_fewer_captured_sequences_leave_sglang_more_memory() -> None:
    """Each takes memory that is set aside for graphs (memory_hook.py of SGLang 0.5.23)."""
    budgets = [
        ask("llama-3.1-8b", Serving(captured_sequences=n), engine="sglang").kv_cache_tokens for n in (0, 64, 256, -1)
    ]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[2]


@pytest.mark.parametrize(
    ("engine", "field", "word", "device", "runs"),
    [
        ("vllm", "weights", "q4_k_m", "h100-sxm-80gb", False),
        ("vllm-2025", "weights", "q4_k_m", "h100-sxm-80gb", True),
        ("vllm", "kv_cache", "int8", "h100-sxm-80gb", False),
        ("sglang", "weights", "q4_k_m", "h100-sxm-80gb", True),
        ("tensorrt-llm", "weights", "nf4", "h100-sxm-80gb", False),
        ("tensorrt-llm", "weights", "nvfp4", "h100-sxm-80gb", False),
        ("tensorrt-llm", "weights", "nvfp4", "b200-sxm-180gb", True),
        ("tensorrt-llm", "weights", "fp8", "a100-sxm-80gb", False),
        ("tensorrt-llm", "kv_cache", "fp8", "a100-sxm-80gb", True),
        ("llama.cpp", "weights", "fp8", "h100-sxm-80gb", False),
        ("llama.cpp", "weights", "mxfp4", "h100-sxm-80gb", True),
        ("llama.cpp-2024", "weights", "mxfp4", "h100-sxm-80gb", False),
    ],
)
def test_an_engine_runs_its_own_formats(engine: str, field: str, word: str, device: str, runs: bool) -> None:
    """What an engine does not load, or not on such a device, is refused by name with what it does."""
    job = replace(Serving(input_tokens=100, output_tokens=2), **{field: word})  # type: ignore[arg-type]
    if runs:
        assert ask("llama-3.1-8b", job, device=device, engine=engine).fits
        return
    with pytest.raises(InputError) as refused:
        ask("llama-3.1-8b", job, device=device, engine=engine)
    (problem,) = refused.value.problems
    assert (problem.field, problem.value) == (field, word)
    assert "bf16" in problem.remedy
    assert word not in problem.remedy.split(", ")


@pytest.mark.parametrize(
    ("model", "word", "engine", "device"),
    [
        ("deepseek-v3", "nvfp4", "tensorrt-llm", "h100-sxm-80gb"),
        ("llama-3.1-8b", "mxfp4", "llama.cpp-2024", "h100-sxm-80gb"),
        ("llama-3.1-8b", "int4+attention=nvfp4", "tensorrt-llm", "h100-sxm-80gb"),
    ],
)
def test_formats_of_parts_are_those_that_an_engine_runs(model: str, word: str, engine: str, device: str) -> None:
    """A format that leaves parts of a model to others is refused for any of them that the engine does not load."""
    job = Serving(input_tokens=100, output_tokens=2, weights=word)
    with pytest.raises(InputError) as refused:
        ask(model, job, Plan(tp=8), device=device, engine=engine)
    (problem,) = refused.value.problems
    assert (problem.field, problem.value) == ("weights", word.partition("=")[2] or word)
    assert ask(model, job, Plan(tp=8), device="b200-sxm-180gb", engine="vllm").fits


def test_patterns_of_formats_name_formats() -> None:
    """Each pattern of an engine's formats matches one that is known: a word with a slip would refuse what it means."""
    for runs in (find_engine(name).formats for name in engine_names()):
        for patterns, names in ((runs.weights, format_names(False)), (runs.kv_cache, tuple(cache_names()))):
            assert all(any(re.fullmatch(one, name) for name in names) for one in patterns)


def test_16_bit_products_on_hopper_are_of_the_library_of_the_engine() -> None:
    """On H100 cuBLAS of CUDA 12.8 runs long products 5 % faster than that of 12.1, with which V0 was built."""
    job = Serving(batch=1, input_tokens=8192, output_tokens=1, max_batched_tokens=8192)

    def products(engine: str, device: str) -> float:
        report = ask("llama-3.1-8b", job, Plan(), device, engine=engine)
        return report.evaluation.prefill.groups["products"]

    today, before = (products(engine, "h100-sxm-80gb") for engine in ("vllm", "vllm-v0"))
    assert 1.03 < before / today < 1.055
    assert products("vllm", "a100-sxm-80gb") == pytest.approx(products("vllm-v0", "a100-sxm-80gb"))


def test_prompts_beyond_captured_sizes_are_launched_by_python() -> None:
    """Steps are replayed of up to 512 tokens (1,024 on B200), or twice the sequences that may run; none on TPUs."""

    def late(tokens: int, sequences: int, device: str = "b200", engine: str = "vllm") -> float:
        job = Serving(batch=1, input_tokens=tokens, output_tokens=2, max_sequences=sequences)
        return ask("qwen3-30b-a3b", job, Plan(), device, engine=engine).evaluation.prefill.overhead

    assert late(512, 256, "h100") < 2e-3 < 10e-3 < late(513, 256, "h100")
    assert late(1024, 1024) < 2e-3 < late(1025, 1024)
    assert late(128, 64) < 2e-3 < late(129, 64)
    assert late(513, 256, "trillium") < 2e-3
    assert late(100, 256, engine="vllm-2025-eager") > late(513, 256)


def test_eager_engines_launch_decode_steps_too() -> None:
    """A short decode step takes as long as its launches where nothing is captured."""
    pairs = (("vllm-2025", "vllm-2025-eager"), ("vllm", "vllm-eager"), ("sglang", "sglang-eager"))
    for pair in pairs:
        captured, eager = (step(engine, "qwen3-30b-a3b", batch=1) for engine in pair)
        assert eager > 2 * captured


def test_sorting_a_vocabulary_takes_what_was_measured() -> None:
    """Where requests keep the likeliest tokens alone vLLM 0.15 sorts all logits, 64 rows of 131,072 in 1.0 to 1.1 ms.

    Tables of github.com/vllm-project/vllm pulls 40376 and 51507; a row of 32,768 takes 0.09 ms launched from Python.
    """
    one, many = (step("vllm-sorting", batch=n) - step("vllm-2025", batch=n) for n in (1, 64))
    assert many * 131_072 / 128_256 == pytest.approx(1.05e-3, rel=0.1)
    assert 0.05e-3 < one < 0.1e-3


@pytest.mark.parametrize(("device", "model", "least"), [
    ("a100-sxm-80gb", "llama-3.1-8b", 7e-3), ("h100-sxm-80gb", "llama-3.1-8b", 0.0),
    ("a100-sxm-80gb", "deepseek-v2-lite", 0.0),
])  # fmt: skip
def test_sequences_beside_prompts_run_their_kernel(device: str, model: str, least: float) -> None:
    """FlashAttention 2 shares no reads among the heads of a group, nor cuts caches, where a query has two tokens.

    Each of 32 heads of 48 sequences of 670 tokens then has a tile of 64 rows, five more blocks of 128 keys of which
    take 3.3 ms of 32 layers at the peak of A100; FlashAttention 3 and latent attention stay as they are.
    """
    engine = find_engine("vllm-2025")
    apart = replace(engine, attention=replace(engine.attention, beside_prompts=()))
    job = Serving(batch=48, input_tokens=560, output_tokens=248)

    def seconds(engine: Engine) -> float:
        cluster = Cluster.parse(f"1x{device}")
        asked = ServingQuestion(model=load_model(model), cluster=cluster, plan=Plan(), job=job, engine=engine)
        return StepTable(complete(asked)[0], 64, 2048, 1024).mixed(48, 670, [(8, 560)])

    assert least <= seconds(engine) - seconds(apart) <= 1.5 * least


@pytest.mark.parametrize(
    ("engine", "family", "lacking"),
    [
        ("vllm", "bamba", True), ("vllm", "qwen", True), ("vllm", "jamba", False), ("vllm-0.23", "bamba", False),
        ("vllm-0.28", "mpt", False), ("vllm-0.32", "mpt", True),
        ("sglang", "zamba2", True), ("sglang", "falcon_h1", False), ("sglang", "olmo_hybrid", True),
    ],
)  # fmt: skip
def test_models_that_a_release_has_dropped_or_never_had(engine: str, family: str, lacking: bool) -> None:
    """An architecture of earlier releases is an error in vLLM 0.33.0; SGLang 0.5.23 has no class for these hybrids."""
    assert (family in find_engine(engine).formats.lacks) == lacking


@pytest.mark.parametrize(
    ("engine", "on", "plan", "split"),
    [
        ("llama.cpp", "2xrtx-3090", Plan(dp=0), (2, 1)),
        ("ollama", "4xrtx-4090", Plan(dp=0), (4, 1)),
        ("llama.cpp", "4xrtx-4090", Plan(dp=2), (2, 2)),
        ("llama.cpp", "4xrtx-4090", Plan(dp=4), (1, 4)),
        ("llama.cpp", "4xrtx-4090", Plan(tp=2, dp=0), (1, 2)),
        ("llama.cpp", "2x8xh100", Plan(dp=0), (8, 2)),
        ("vllm", "2xrtx-3090", Plan(dp=0), (1, 2)),
        ("llama.cpp-one-device", "2xrtx-3090", Plan(dp=0), (1, 2)),
    ],
)
def test_a_model_that_nobody_lays_out_is_split_as_the_engine_does(
    engine: str, on: str, plan: Plan, split: tuple[int, int]
) -> None:
    """llama.cpp cuts layers over the devices of a node (--split-mode layer), where vLLM would need replicas."""
    report = infer(load_model("llama-3.1-8b"), Cluster.parse(on), plan, JOB, ServingOptions(engine=engine))
    assert (report.plan.pp, report.plan.dp) == split
    assert report.plan.tp == plan.tp


@pytest.mark.parametrize("engine", ["llama.cpp-tensor", "llama.cpp-row"])
def test_launches_that_split_tensors_do_so_over_all_devices(engine: str) -> None:
    """--split-mode tensor and row without --tensor-split take the devices that there are."""
    report = infer(
        load_model("llama-3.1-8b"), Cluster.parse("2xrtx-3090"), Plan(dp=0), JOB, ServingOptions(engine=engine)
    )
    assert (report.plan.tp, report.plan.dp) == (2, 1)


# Devices, model, format, tokens a second of one sequence in 4 bits as --split-mode says: github.com/ggml-org/llama.cpp
# pull 19378 (2026), github.com/sudoingX/qwen38-mtp pull 24.
SPLIT = [
    ("rtx-4090", "gemma-4-31b", "q4_k_m", "layer", 43.81),
    ("rtx-4090", "gemma-4-31b", "q4_k_m", "tensor", 59.45),
    ("rtx-5060-ti-16gb", "qwen3.5-27b", "q4_k_m", "layer", 22.1),
    ("rtx-5060-ti-16gb", "qwen3.5-27b", "q4_k_m", "tensor", 37.1),
]


@pytest.mark.parametrize(("device", "model", "weights", "split", "measured"), SPLIT)
def test_two_cards_take_a_model_as_measured(device: str, model: str, weights: str, split: str, measured: float) -> None:
    """One token of llama.cpp on two cards, split by layers and by tensors, is near published runs."""
    plan = Plan(tp=2) if split == "tensor" else Plan(pp=2)
    job = Serving(batch=1, input_tokens=1, output_tokens=128, weights=weights)
    assert abs(ask(model, job, plan, device, engine="llama.cpp").tpot_seconds * measured - 1) <= 0.08


def test_the_server_of_mlx_runs_no_more_requests_than_it_decodes_at_once() -> None:
    """A Mac under more than it carries runs 32 (--decode-concurrency), as its own scheduler and not as another's."""
    done = run(
        "serve",
        "llama-3.1-8b",
        "--on",
        "m4-max",
        "--engine",
        "mlx",
        "--requests",
        "100",
        "--arrivals",
        "burst",
        "--json",
    )
    assert json.loads(done.out)["running"]["max"] == 32
    assert not any("no source" in note for note in json.loads(done.out)["assumptions"])
