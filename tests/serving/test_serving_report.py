"""What a report says: keys, trees that add up, verdicts, and problems of the input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from serving.serving_cases import ask, dense_block, model_of, moe_block
from shardwise.errors import InputError
from shardwise.hardware import Cluster, context_bytes, find_device
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions, find_format, format_names, infer
from shardwise.serving.load import serve

KEYS = (
    "fits", "ttft_seconds", "tpot_seconds", "request_seconds", "output_tokens_per_second", "weights_bytes_per_gpu",
    "kv_cache_bytes_per_gpu", "kv_cache_tokens", "max_concurrency", "usd_per_million_output_tokens",
    "prefill_tokens_per_second", "decode_tokens_per_second", "memory", "time", "assumptions",
)  # fmt: skip


@pytest.mark.parametrize("plan", [Plan(), Plan(tp=8), Plan(tp=2, pp=2, dp=2)])
def test_the_record_is_json_and_its_trees_add_up(plan: Plan) -> None:
    """Every promised key is there; operators, exposed messages and overhead sum to the phase."""
    job = Serving(batch=8, input_tokens=1000, output_tokens=64, max_batched_tokens=2048)
    record = json.loads(json.dumps(ask("llama-3.1-8b", job, plan).to_dict()))
    assert set(KEYS) <= record.keys()
    for name, phase in record["time"].items():
        waits = sum(axis["exposed"] for axis in phase["axes"].values())
        whole = sum(phase["operators"].values()) + waits + phase["overhead"] - phase["overlapped"]
        assert whole == pytest.approx(phase["seconds"]), name
    for stage in record["memory"]["stages"]:
        parts = sum(stage[c] for c in ("weights", "kv_cache", "working", "context", "communicators", "graphs"))
        assert parts == pytest.approx(stage["needed_bytes"])
    assert record["ttft_seconds"] == record["time"]["prefill"]["seconds"]
    assert any(note.startswith("memory budget") for note in record["assumptions"])


def test_only_the_axes_in_use_send_messages() -> None:
    """One device sends nothing; replicas add no axis: inference never gathers parameters."""
    job = Serving(batch=4, output_tokens=8)
    for plan, axes in (
        (Plan(), set()),
        (Plan(dp=4), set()),
        (Plan(tp=2, dp=2), {"tp"}),
        (Plan(tp=2, pp=2), {"tp", "pp"}),
    ):
        time = ask("llama-3.1-8b", job, plan).to_dict()["time"]
        assert set(time["prefill"]["axes"]) == set(time["decode"]["axes"]) == axes


def test_headlines_lie_in_their_intervals() -> None:
    """Every headline has a 10 to 90 % interval from published batches that contains it."""
    r = ask("llama-3.1-8b", Serving(batch=4, output_tokens=8))
    for name, (low, high) in r.interval.items():
        assert low <= getattr(r, name) <= high
        assert r.to_dict()["interval"][name] == {"low": low, "typical": r.typical[name], "high": high}


def test_a_tight_cache_is_less_certain_than_a_roomy_one() -> None:
    """Bytes beside the cache are what is uncertain: the less they leave, the wider the band of what the cache holds."""
    widths, chances = [], []
    for share in (0.95, 0.7, 0.5, 0.3):
        r = ask("llama-3.1-8b", Serving(batch=24, output_tokens=8, input_tokens=4000, memory_fraction=share))
        low, high = r.interval["kv_cache_tokens"]
        widths.append((high - low) / r.kv_cache_tokens)
        chances.append(r.chance_to_fit)
    assert widths == sorted(widths) and widths[-1] > 2 * widths[0]
    assert chances == sorted(chances, reverse=True) and chances[0] > 0.95 > chances[-1]


def test_what_leaves_a_fifth_of_a_card_free_fits() -> None:
    """Bytes beside published caches were at most a fifth more than predicted: 18 GiB of 24 are no gamble."""
    card, experts = Cluster.parse("rtx-4090"), load_model("qwen3-30b-a3b")
    job = Serving(input_tokens=4096, output_tokens=512, weights="q4_k_m")
    r = infer(experts, card, Plan(), job, ServingOptions(engine="llama.cpp"))
    assert r.short_by_bytes < -5e9 and r.chance_to_fit > 0.95


def test_what_does_not_fit_is_a_result() -> None:
    """A 70B model on one 80 GB device falls short by bytes that are named, dominated by weights, and holds nothing."""
    r = ask("llama-3.1-70b", Serving(batch=4))
    assert (r.fits, r.dominant, r.max_concurrency, r.kv_cache_tokens) == (False, "weights", 0, 0)
    assert r.short_by_bytes > 50e9
    assert r.capacity.longest_context == r.capacity.largest_decode_batch == 0


def test_a_batch_that_does_not_fit_says_which_would() -> None:
    """Too many requests for the cache leave a smaller batch that fits, and report it."""
    job = Serving(batch=512, input_tokens=4096, output_tokens=512, max_batched_tokens=8192)
    r = ask("llama-3.1-8b", job)
    assert not r.fits and r.dominant == "kv_cache"
    assert 0 < r.max_concurrency < 512
    assert ask("llama-3.1-8b", Serving(batch=r.max_concurrency, input_tokens=4096, output_tokens=512,
                                       max_batched_tokens=8192)).fits  # fmt: skip


def test_cost_is_price_over_rate() -> None:
    """Dollars per million output tokens are the devices' price over the output rate; without a price there is none."""
    job = Serving(batch=8, input_tokens=512, output_tokens=64)
    cluster = Cluster.parse("2xh100-sxm-80gb", {"price": 3.0})
    r = infer(load_model("llama-3.1-8b"), cluster, Plan(tp=2), job)
    assert r.usd_per_million_output_tokens == pytest.approx(2 * 3.0 / 3600 / r.output_tokens_per_second * 1e6)
    assert r.usd_per_million_input_tokens == pytest.approx(2 * 3.0 / 3600 / r.prefill_tokens_per_second * 1e6)


@pytest.mark.parametrize(
    ("plan", "job", "fields"),
    [
        (Plan(), {"batch": 0, "input_tokens": -1, "output_tokens": -2}, {"batch", "input_tokens", "output_tokens"}),
        (Plan(), {"weights": "int3", "kv_cache": "fp5"}, {"weights", "kv_cache"}),
        (Plan(), {"memory_fraction": 1.5, "expert_imbalance": 0.5}, {"memory_fraction", "expert_imbalance"}),
        (Plan(), {"prefix_tokens": 512}, {"prefix_tokens"}),
        (Plan(), {"compute": "fp4"}, {"dtype"}),
        (Plan(sharding="fsdp", recompute="full"), {}, {"sharding", "recompute"}),
        (Plan(schedule="gpipe", cp=2, micro_batch=4), {}, {"schedule", "cp", "micro_batch"}),
        (Plan(tp=3), {}, {"tp", "dp"}),
        (Plan(tp=6, dp=0), {}, {"tp"}),
        (Plan(ep=2), {}, {"ep"}),
        (Plan(dp=2), {"batch": 0}, {"dp", "batch"}),
        (Plan(), {"batch": True, "output_tokens": 1.5}, {"batch", "output_tokens"}),
    ],
)
def test_all_problems_are_reported_at_once(plan: Plan, job: dict[str, Any], fields: set[str]) -> None:
    """Bad input names every field, its value, the rule and the remedy."""
    with pytest.raises(InputError) as caught:
        infer(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), plan, Serving(**job))
    problems = caught.value.problems
    assert fields <= {p.field for p in problems}
    assert all(p.rule and p.remedy for p in problems)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    """Engines are named."""
    with pytest.raises(InputError, match="vllm"):
        ask("llama-3.1-8b", Serving(), engine="sonic")


def test_experts_are_spread_over_tensor_parallel_ranks() -> None:
    """A plan that says nothing of experts splits them as engines do, and says so; each rank holds its share."""
    model = model_of(moe_block(16, 2))
    one, four = ask(model, Serving()), ask(model, Serving(), Plan(tp=4))
    assert four.plan.etp == 4
    assert any(note.startswith("etp 4") for note in four.assumptions)
    experts = 8 * 16 * 3 * 2048 * 1024 * 2
    assert one.weights_bytes_per_gpu - four.weights_bytes_per_gpu >= 0.74 * experts
    spread = ask(model, Serving(), Plan(tp=4, ep=4))
    assert spread.plan.etp == 1
    assert spread.weights_bytes_per_gpu == four.weights_bytes_per_gpu


def test_small_all_reduces_take_the_one_shot_kernel() -> None:
    """Decode of a small batch at tp 8 is faster where the engine has a one-shot all-reduce."""
    job = Serving(batch=1, input_tokens=128, output_tokens=8)
    direct = ask("llama-3.1-70b", job, Plan(tp=8), engine="vllm").evaluation.decode.exposed["tp"]
    nccl = ask("llama-3.1-70b", job, Plan(tp=8), engine="fastertransformer").evaluation.decode.exposed["tp"]
    assert 160 * 4e-6 < direct < nccl


def test_formats_order_weights_by_their_bits() -> None:
    """Fewer bits make smaller weights; scales are counted."""
    model = model_of(dense_block())
    sizes = [ask(model, Serving(weights=w)).weights_bytes_per_gpu for w in ("fp32", "bf16", "fp8", "nvfp4", "mxfp4")]
    assert sizes[0] == 2 * sizes[1]
    assert sizes[1] > sizes[2] > sizes[3] > sizes[4]  # without experts all linear layers take the experts' format
    assert find_format("int4").bytes == 0.5 + 20 / 128 / 8
    assert all(find_format(name).source for name in format_names())


def test_a_quantised_checkpoint_sets_the_default() -> None:
    """DeepSeek-V3 is stored in fp8 and gpt-oss in mxfp4: nothing asked means their own format, products as they run."""
    v3 = infer(load_model("deepseek-v3"), Cluster.parse("8xh200-sxm-141gb"), Plan(tp=8), Serving())
    oss = ask("gpt-oss-20b", Serving(), device="a100-sxm-80gb")
    assert (v3.case.format.name, v3.case.compute) == ("fp8-block", "fp8")
    assert (oss.case.format.name, oss.case.compute) == ("mxfp4", "bf16")
    assert ask("llama-3.1-8b", Serving(weights="fp8"), device="a100-sxm-80gb").case.compute == "bf16"


def test_engines_spell_their_budget_in_their_own_way() -> None:
    """The same fraction leaves different room for the cache in vLLM, SGLang and TensorRT-LLM."""
    job = Serving(batch=8, memory_fraction=0.8, max_sequences=512)
    room = [
        ask("llama-3.1-8b", job, engine=e).kv_cache_budget_bytes_per_gpu for e in ("vllm", "sglang", "tensorrt-llm")
    ]
    usable = 85018877624
    weights = ask("llama-3.1-8b", job, engine="sglang").weights_bytes_per_gpu
    assert room[1] == pytest.approx(0.8 * (usable - context_bytes(find_device("h100-sxm-80gb").device)) - weights)
    assert len(set(room)) == 3


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "lmdeploy", "llama.cpp"])
def test_no_budget_is_more_than_the_device_has(engine: str) -> None:
    """Weights beyond the memory are short of all of it: a share of what is left is none of a shortage."""
    report = ask("llama-3.1-70b", Serving(), engine=engine)
    usable = report.case.cluster.device.usable_memory_bytes
    assert report.memory.limit <= usable
    assert report.to_dict()["short_by_bytes"] >= report.memory.needed - usable


def test_options_default_to_vllm() -> None:
    """The engine is an argument with a stated default."""
    assert ServingOptions().engine == "vllm"
    assert "engine vllm: vLLM" in ask("llama-3.1-8b", Serving()).assumptions


def test_what_people_see_of_a_step_is_all_of_its_operators() -> None:
    """Products, attention, ends and small operators of a step add up to its operators."""
    job = Serving(batch=4, input_tokens=512, output_tokens=64)
    cost = infer(load_model("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), job).evaluation.decode
    assert sum(cost.groups.values()) == pytest.approx(sum(cost.operators.values()))
    norms = sum(seconds for name, seconds in cost.operators.items() if "norm" in name)
    assert min(cost.groups.values()) > 0
    assert cost.groups["small"] >= norms


def test_the_cache_is_what_the_start_up_of_the_engine_leaves() -> None:
    """`infer`, `serve` and vLLM's profile run agree on the cache; a search tells the engine its batch, and says so."""
    model, cluster = load_model("gpt-oss-120b"), Cluster.parse("h100-sxm-80gb")
    job, other = Serving(input_tokens=1000, output_tokens=500), ServingOptions(engine="sglang")
    report = infer(model, cluster, Plan(), job)
    load = Workload(input_tokens=Length(mean=1000), output_tokens=Length(mean=500), arrivals=Arrivals(rate=0.5))
    assert report.kv_cache_tokens == serve(model, cluster, Plan(), replace(load, count=100)).base.kv_cache_tokens
    assert report.kv_cache_tokens < 90_000
    assert any("1,024 sequences" in said for said in report.assumptions)
    assert infer(model, cluster, Plan(), replace(job, max_sequences=1)).kv_cache_tokens > 100_000
    assert not any("sequences at once" in said for said in infer(model, cluster, Plan(), job, other).assumptions)


@pytest.mark.parametrize(
    ("model", "words"),
    [("qwen3-30b-a3b", "100 times"), ("mixtral-8x7b", "as popular as any other"), ("llama-3.1-8b", "")],
)
def test_how_experts_are_taken_to_be_chosen_is_said(model: str, words: str) -> None:
    """What is assumed of a router stands among the assumptions, of models with experts alone."""
    notes = [
        one for one in ask(model, Serving(batch=1, input_tokens=128, output_tokens=8)).assumptions if "routing" in one
    ]
    assert (len(notes) == 1 and words in notes[0]) if words else not notes
