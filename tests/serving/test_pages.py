"""Pages of one size for layers that keep different things."""

from __future__ import annotations

from collections import Counter

import pytest

from command_line import run
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import InferReport, ServingOptions, ServingQuestion, complete, find_engine, infer
from shardwise.serving._cache import SequenceCache
from shardwise.serving._capacity import pages_of
from shardwise.serving._memory import caches_of
from shardwise.serving._sizes import sizes_of
from shardwise.serving.load import LoadOptions, serve


def cache(token_bytes: float = 0.0, limit: int = 0, state: float = 0.0) -> SequenceCache[float]:
    """Return what a layer keeps."""
    return SequenceCache(token_bytes=token_bytes, limit=limit, constant_bytes=state)


@pytest.mark.parametrize(
    ("held", "gib", "printed"),
    [
        # Start-up logs of vLLM 0.19 and 0.20 on GB10: memory of the cache and the tokens printed for it.
        (
            {cache(8192.0, 1024): 25, cache(4096.0): 5},
            40.61,
            177_440,
        ),  # Gemma 4 26B-A4B: full layers have half the bytes
        ({cache(state=2146304.0): 30, cache(2048.0): 10}, 47.55, 623_040),  # Qwen3.6 35B-A3B: blocks of 1,056 tokens
    ],
)
def test_tokens_of_mixed_layers(held: dict[SequenceCache[float], int], gib: float, printed: int) -> None:
    """Tokens are blocks shared out over the groups, times the tokens of the smallest page: what vLLM prints."""
    pages = pages_of(Counter(held), 16)
    assert pages is not None
    assert pages.capacity_tokens(gib * 2**30) == pytest.approx(printed, rel=0.002)


def test_layers_that_are_alike_need_no_groups() -> None:
    """Layers that all grow with every token share one pool, whatever their width."""
    assert pages_of(Counter({cache(8192.0): 5, cache(4096.0): 5}), 16) is None
    assert pages_of(Counter({cache(state=100.0): 5}), 16) is None


@pytest.mark.parametrize(("name", "tp", "groups"), [("gemma-3-27b", 2, (1, 6)), ("gpt-oss-120b", 2, (1, 1))])
def test_sequences_of_windows(name: str, tp: int, groups: tuple[int, int]) -> None:
    """Under load as many sequences run at once as vLLM has blocks for: of a window no more than it sees."""
    model, cluster = load_model(name), Cluster.parse(f"{tp}xh100-sxm-80gb")
    arrivals = Arrivals(kind="burst")
    burst = Workload(input_tokens=Length(mean=8000), output_tokens=Length(mean=500), arrivals=arrivals, count=600)
    found = serve(model, cluster, Plan(tp=tp), burst, Serving(max_sequences=512))
    window = max(mixer.cost_breakpoints()[0] for block in model.kinds for mixer in block.mixers)
    blocks = found.base.kv_cache_tokens // 16 * sum(groups)
    each = [groups[0] * -(-tokens // 16) + groups[1] * (-(-(window - 1) // 16) + 1) for tokens in (8000, 8500)]
    most = max(trace.most_running for trace in found.traces)
    assert blocks // each[1] <= most <= blocks // each[0] + 1
    assert most == pytest.approx(found.base.max_concurrency, rel=0.08)


def test_spread_lengths_take_no_more_than_their_mean() -> None:
    """Windows take less of a longer sequence a token, so the room is that of the mean context, not of the longest."""
    model, cluster = load_model("gemma-3-27b"), Cluster.parse("2xh100-sxm-80gb")
    case = infer(model, cluster, Plan(tp=2), Serving(batch=1, input_tokens=16_000, output_tokens=500))
    rooms = [case.held_tokens(length) for length in (500, 2000, 8000, 16_500)]
    assert rooms == sorted(rooms)
    assert rooms[0] < rooms[-1] / 3


@pytest.mark.parametrize(
    ("name", "engine", "state"),
    [
        # Start-up logs of vLLM: blocks of 544 tokens of 2,048 bytes, padded by 1.49 % (0.11), of 1,056 (0.20), and of
        # 944 tokens that hold a key and a value of 576 elements each (LMCache's table for Kimi Linear).
        ("qwen3-next-80b-a3b", "vllm", 544 * 2048 / 1.0149),
        ("qwen3.6-35b-a3b", "vllm", 2146304),
        ("kimi-linear-48b-a3b", "vllm", 944 * 2304 / 1.0019),
        # 32 heads of 128 x 128 and three inputs of 8,192 channels: fp32 without a word of the file.
        ("qwen3-next-80b-a3b", "sglang", 32 * 128 * 128 * 4 + 3 * 8192 * 2),
        # The file's word is of the computation.
        ("qwen3.6-35b-a3b", "trtllm", 32 * 128 * 128 * 2 + 3 * 8192 * 2),
        ("nemotron-3-nano-30b-a3b", "trtllm", 64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2),
    ],
)
def test_bytes_of_a_state(name: str, engine: str, state: float) -> None:
    """A recurrent state is in the type that an engine takes from the model's file, or has of its own."""
    asked = ServingQuestion(
        model=load_model(name), cluster=Cluster.parse("1xh200"), plan=Plan(), job=Serving(batch=1), engine=engine
    )
    case = complete(asked)[0]
    layers = caches_of(case, sizes_of(case.model, case.plan, case.job, case.domains))
    assert max(cache.constant_bytes for layer in layers for cache in layer) == pytest.approx(state, rel=1e-3)


@pytest.mark.parametrize(
    ("engine", "cache", "token"),
    [("vllm", "fp8", 656), ("sglang", "fp8", 656), ("trtllm", "fp8", 576), ("vllm", "bf16", 1152), ("vllm", "", 1152)],
)
def test_bytes_of_sparse_latents(engine: str, cache: str, token: int) -> None:
    """DeepSeek-V3.2 in 8 bits is packed: 512 of latents, 16 of scales, 128 of what is rotated; keys of the indexer."""
    options = ServingOptions(engine=engine)
    job = Serving(batch=4, input_tokens=8000, output_tokens=192, kv_cache=cache)
    report = infer(load_model("deepseek-v3.2"), Cluster.parse("8xh200"), Plan(tp=8), job, options)
    assert report.kv_cache_bytes_per_gpu == 4 * 8192 * 61 * (token + 132)


@pytest.mark.parametrize(
    ("name", "engine", "prefix", "found"),
    [
        # 1,056 tokens of keys and values are as many bytes as a state.
        ("qwen3.6-35b-a3b", "vllm", 1000, 0),
        ("qwen3.6-35b-a3b", "vllm", 3000, 2 * 1056),
        ("qwen3.6-35b-a3b", "vllm-2025", 3000, 0),
        ("qwen3.6-35b-a3b", "sglang", 3000, 3000),
        ("gpt-oss-20b", "vllm-2025", 3000, 2992),
    ],
)
def test_prefixes_of_recurrent_layers(name: str, engine: str, prefix: int, found: int) -> None:
    """VLLM finds a state again at the end of a block alone, and before pull 50991 of 2026-08 not at all."""
    asked = Workload(
        input_tokens=Length(mean=4000), output_tokens=Length(mean=20), arrivals=Arrivals(rate=0.5), count=200,
        prefix_tokens=prefix,
    )  # fmt: skip
    options = LoadOptions(serving=ServingOptions(engine=engine))
    report = serve(load_model(name), Cluster.parse("1xh200"), Plan(), asked, Serving(), options)
    assert report.to_dict()["prefix_hit_share"] == pytest.approx(found / 4000)
    said = any("caches no prefixes of recurrent layers" in note for note in report.assumptions)
    assert said == (engine == "vllm-2025" and not found)


def test_more_sequences_than_blocks_of_states_are_refused() -> None:
    """A hybrid model does not start in vLLM with more sequences than blocks: that is said, no such launch written."""
    words = ["qwen3.6-35b-a3b", "--on", "1xh100-sxm-80gb", "--batch", "8", "--input-tokens", "1000"]
    told = [note for note in run("infer", *words, "--json").tree["assumptions"] if "blocks of states" in note]
    most = told[0].partition(":")[0].rpartition(" ")[2]
    refused = run("export", "vllm", *words, "--json")
    assert refused.status == 2 and refused.fields == ["max_sequences"]
    assert f"use {most}" in refused.out
    assert run("export", "vllm", *words, "--max-sequences", most).status == 0
    # Its cache is 3 groups of states and one of keys and values, blocks of 1,056 tokens.
    printed = run("infer", *words, "--json").tree["kv_cache_tokens"]
    assert printed // 1056 * 4 <= int(most) < (printed // 1056 + 1) * 4


def sglang(model: str, **job: int) -> InferReport:
    """Return a batch of 4,096 and 512 tokens on SGLang, on four H100."""
    asked = Serving(input_tokens=4096, output_tokens=512, batch=32, **job)
    return infer(
        load_model(model), Cluster.parse("4xh100-sxm-80gb"), Plan(tp=4), asked, ServingOptions(engine="sglang")
    )


def test_sglang_gives_windows_a_pool_of_their_own_beside_cached_prefixes() -> None:
    """Windows have 0.8 tokens for each of the 12 other layers of gpt-oss-20b, two heads of 64 on a rank."""
    plain, cached = (sglang("gpt-oss-20b", prefix_tokens=n) for n in (0, 1024))
    tokens = int(cached.kv_cache_budget_bytes_per_gpu / (2 * 2 * 64 * 2 * 12 * (1 + 0.8)))
    assert cached.kv_cache_tokens == tokens
    assert cached.max_concurrency == tokens // 4608
    # Without a prefix cache a sequence takes its window and what is not yet dropped behind it.
    assert plain.kv_cache_bytes_per_gpu == 32 * 2 * 2 * 64 * 2 * 12 * (4608 + 128 + 130)
    assert plain.max_concurrency > 1.7 * cached.max_concurrency


def test_sglang_counts_five_states_a_sequence_beside_cached_prefixes() -> None:
    """0.9 bytes of states for each of keys and values, and max_mamba_cache_size // 5 sequences (Qwen3-Next, tp 4)."""
    plain, cached = (sglang("qwen3-next-80b-a3b", prefix_tokens=n) for n in (0, 1024))
    state = 36 * (4 * 8 * 128 * 128 + 2 * 3 * (2 * 2048 + 4096) // 4)
    budget = cached.kv_cache_budget_bytes_per_gpu
    assert cached.max_concurrency == pytest.approx(budget * 0.9 / 1.9 / state / 5, abs=1.1)
    assert cached.kv_cache_tokens == pytest.approx(budget / 1.9 / (2 * 256 * 2 * 12), rel=1e-3)
    assert plain.kv_cache_bytes_per_gpu == 32 * (4608 * 2 * 256 * 2 * 12 + state)


def test_states_of_a_sequence_that_guesses() -> None:
    """SGLang keeps a state for each of four draft tokens beside its slots, vLLM one for each guess beside its own.

    Where vLLM caches prefixes of recurrent layers it keeps the state at the end of the last block, too.
    """
    plain = [find_engine(name) for name in ("vllm", "vllm-2025", "sglang")]
    engines = [*plain, *(one.caching() for one in plain)]
    assert [one.memory.states_of("qwen3_next", 3) for one in engines] == [4, 4, 5, 5, 4, 9]
    assert [one.memory.states_of("qwen3_next", 0) for one in engines] == [1, 1, 1, 2, 1, 5]


def test_a_load_that_repeats_prefixes_has_the_room_of_a_server_that_caches_them() -> None:
    """`serve` and `infer` agree on what SGLang holds, with prefixes and without."""
    arrivals = Arrivals(kind="poisson", rate=2.0)
    asked = {"input_tokens": Length(mean=4096), "output_tokens": Length(mean=512), "arrivals": arrivals, "count": 20}
    load = LoadOptions(serving=ServingOptions(engine="sglang"))
    for prefix in (0, 1024):
        workload = Workload(**asked, prefix_tokens=prefix)
        cluster = Cluster.parse("4xh100-sxm-80gb")
        held = serve(load_model("gpt-oss-20b"), cluster, Plan(tp=4), workload, options=load).base
        assert held.kv_cache_tokens == pytest.approx(
            sglang("gpt-oss-20b", prefix_tokens=prefix).kv_cache_tokens, rel=0.05
        )


def test_sglang_starts_with_as_many_sequences_as_their_states_have_room_for() -> None:
    """Without a prefix cache SGLang makes a state for each of --max-running-requests before it sizes its cache."""
    words = [
        "sglang",
        "qwen3-next-80b-a3b",
        "--on",
        "4xh100",
        "--tp",
        "4",
        "--input-tokens",
        "4096",
        "--output-tokens",
        "512",
        "--rate",
        "3/s",
    ]
    most = sglang("qwen3-next-80b-a3b").max_concurrency
    refused = run("export", *words)
    assert refused.status == 2 and f"use {most}, or fewer" in refused.err
    assert f"--max-running-requests {most} " in run("export", *words, "--max-sequences", str(most)).out
    assert "--max-running-requests 4096 " in run("export", *words, "--prefix-tokens", "1024").out
