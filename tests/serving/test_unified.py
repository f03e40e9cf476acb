"""Attention in Triton's kernel for heads of several sizes and for sinks: who runs it, its tiles, what contexts cost."""

from __future__ import annotations

import pytest

from serving.serving_cases import ask
from shardwise.cost import Efficiencies
from shardwise.ledger.op import Op
from shardwise.plans import Serving
from shardwise.serving import InferReport
from shardwise.serving._unified import KeyTiles, UnifiedKernel, unified_kernels, with_unified

H100, B200 = "h100-sxm-80gb", "b200-sxm-180gb"


def served(model: str, on: str, engine: str, tokens: int = 1024) -> InferReport:
    """One sequence on one device."""
    return ask(model, Serving(batch=1, input_tokens=tokens, output_tokens=16), device=on, engine=engine)


@pytest.mark.parametrize(
    ("model", "on", "engine", "runs"),
    [
        ("gemma-4-e4b", H100, "vllm-0.23", True),
        ("gemma-4-e4b", B200, "vllm-0.19", True),
        ("gemma-4-e4b", H100, "vllm-0.24", False),
        ("gemma-4-e4b", B200, "vllm", False),
        ("gemma-4-e4b", "l40s", "vllm", True),
        ("gemma-4-e4b", "gb10", "vllm-0.28", True),
        ("gemma-4-e4b", H100, "sglang", False),
        ("gemma-3-27b", "l40s", "vllm", False),
        ("llama-3.1-8b", "l40s", "vllm", False),
        ("gpt-oss-20b", "l40s", "vllm", True),
        ("gpt-oss-20b", "a100-sxm-80gb", "vllm-0.11", True),
        ("gpt-oss-20b", "rtx-pro-6000-workstation", "vllm-0.14", True),
        ("gpt-oss-20b", "rtx-pro-6000-workstation", "vllm", False),
        ("gpt-oss-20b", H100, "vllm-0.11", False),
        ("gpt-oss-20b", B200, "vllm", False),
    ],
)
def test_heads_of_several_sizes_and_sinks_run_in_one_kernel(model: str, on: str, engine: str, runs: bool) -> None:
    """Several sizes up to vLLM 0.23 everywhere, then where FlashAttention 4 is not; sinks where none of 3 and 4 is."""
    assert bool(unified_kernels(served(model, on, engine).case)) is runs


def test_imposed_efficiencies_run_no_kernel() -> None:
    """Ideal kernels are no tiles."""
    ideal = ask(
        "gemma-4-e4b", Serving(batch=1, input_tokens=64, output_tokens=2), device=H100, engine="vllm-0.23",
        efficiencies=Efficiencies(ideal=True),
    )  # fmt: skip
    assert not unified_kernels(ideal.case)


def test_tiles_are_those_of_the_source() -> None:
    """Windows of 1,024 have tiles of 32 keys (26B); blocks of heads of 512 fill a core of 100 KiB alone."""
    small, large = unified_kernels(served("gemma-4-26b-a4b", H100, "vllm-0.23").case)
    assert (small.elements, small.token.keys, large.token.keys, large.prompt.keys) == (512, 32, 16, 32)
    assert (small.prompt.resident, large.prompt.resident) == (2, 2)
    # 16 sequences of 8 key-value heads, of which layers with the whole context have two.
    assert (small.segmented_blocks, large.segmented_blocks) == (128, 32)
    assert [one.token.keys for one in unified_kernels(served("gemma-4-e4b", H100, "vllm-0.23").case)] == [16, 16]
    small, large = unified_kernels(served("gemma-4-e4b", "gb10", "vllm").case)
    assert (small.prompt.resident, large.prompt.resident, large.token.resident) == (2, 1, 2)
    (only,) = unified_kernels(served("gpt-oss-20b", "l40s", "vllm").case)
    assert (only.group, only.prompt.resident, only.segmented_blocks) == (8, 5, 128)


@pytest.mark.parametrize(
    ("on", "hertz"),
    [
        ("a100-sxm-80gb", 1.41e9),
        ("a40", 1.74e9),
        ("l4", 2.04e9),
        ("l40s", 2.52e9),
        ("h100-pcie-80gb", 1.75e9),
        ("v100-sxm-32gb", 1.53e9),
        ("mi300x", 2.1e9),
    ],
)
def test_tiles_take_cycles_of_the_device(on: str, hertz: float) -> None:
    """Boost clocks of NVIDIA's and AMD's datasheets, against 1.98 GHz of H100 SXM: no card has that of another."""
    own, of_h100 = (unified_kernels(served("gemma-4-e4b", name, "vllm-0.23").case)[0].token for name in (on, H100))
    assert own.seconds / of_h100.seconds == pytest.approx(1.98e9 / hertz, rel=5e-3)


@pytest.mark.parametrize(
    ("model", "on", "engine", "before", "longer"),
    [
        ("gemma-4-e4b", H100, "vllm-0.19", 4096, 0.93e-3),
        ("gemma-4-e4b", H100, "vllm-0.19", 16384, 2.54e-3),
        ("gemma-4-e4b", B200, "vllm-0.21", 16384, 2.535e-3),
        ("gemma-4-26b-a4b", B200, "vllm-0.21", 8192, 1.105e-3),
    ],
)
def test_tokens_before_cost_what_was_measured(model: str, on: str, engine: str, before: int, longer: float) -> None:
    """mistral.rs' report, above 512 tokens before: nothing of it is the bytes of the cache, and B200 takes as long."""
    first, last = (served(model, on, engine, tokens).tpot_seconds for tokens in (512, before))
    assert last - first == pytest.approx(longer, rel=0.25)


def test_prompts_take_what_all_blocks_take() -> None:
    """Gemma-4-E2B on GB10, 39,811 tokens in vLLM 0.27.1: 7.77 s (inference-atlas); FlashAttention's tiles: 3.6 s."""
    assert served("gemma-4-e2b", "gb10", "vllm-0.28", 39811).ttft_seconds == pytest.approx(7.77, rel=0.15)


def test_long_contexts_of_sinks_take_what_was_measured() -> None:
    """gpt-oss-20b behind 129,000 tokens on RTX PRO 6000 (Millstone AI, 2026-01): 21.4 s, then 9.5 ms a token."""
    found = served("gpt-oss-20b", "rtx-pro-6000-workstation", "vllm-0.14", 129000)
    assert found.ttft_seconds == pytest.approx(21.4, rel=0.2)
    assert found.tpot_seconds == pytest.approx(9.48e-3, rel=0.2)


def test_guesses_are_verified_without_segments() -> None:
    """Up to vLLM 0.32 a step of several tokens walks each context whole, which costs more than two guesses gain."""

    def token(engine: str, **guess: object) -> float:
        job = Serving(batch=1, input_tokens=32768, output_tokens=16, **guess)  # type: ignore[arg-type]
        return ask("gpt-oss-20b", job, device="l40s", engine=engine).tpot_seconds

    guess = {"speculative_method": "ngram", "num_speculative_tokens": 3, "acceptance_length": 2.5}
    assert token("vllm-0.32") == pytest.approx(token("vllm"))
    assert token("vllm-0.32", **guess) > token("vllm-0.32") > 1.5 * token("vllm", **guess)


def test_many_sequences_are_not_cut() -> None:
    """Beyond 128 blocks of a key-value head each walks its keys alone: two more sequences cost a step."""

    def step(batch: int) -> float:
        job = Serving(batch=batch, input_tokens=8192, output_tokens=16)
        return ask("gemma-4-e4b", job, device="h200-sxm-141gb", engine="vllm-0.23").tpot_seconds

    assert step(66) > 1.05 * step(64)


KERNEL = UnifiedKernel(
    elements=256.0,
    group=4.0,
    rows=16.0,
    token=KeyTiles(keys=16.0, seconds=1e-6, resident=4.0),
    prompt=KeyTiles(keys=32.0, seconds=2e-6, resident=2.0),
    segments=16.0,
    segmented_blocks=128.0,
    tokens=1.0,
)


def walked(queries: float, seen: float, sequences: float = 1.0) -> float:
    """Seconds of 8 query heads on 10 cores, of queries that each see so many keys; a small kernel starts in 3 us."""
    rows, heads = queries * sequences, 8.0
    op = Op(name="attention", kind="attention", role="attention", region="attention.core", rows=rows, inner=256.0,
            batch=heads, columns=seen, context=seen, flops=2 * 256 * rows * heads * seen, forward_bytes=0.0,
            backward_flops=0.0, backward_bytes=0.0, weight_flops=0.0, weight_bytes=0.0)  # fmt: skip
    return with_unified((KERNEL,), (10.0, 3e-6), queries == 1, op, 0.0)


def test_blocks_of_a_prompt_walk_what_they_see_and_a_tile_more() -> None:
    """A block of 16 rows has 4 queries of 4 heads: 20 blocks run at a time, more in turn, fewer no sooner."""
    assert walked(4.0, 320.0) == pytest.approx(11 * 2e-6 + 3e-6)
    assert walked(160.0, 320.0) == pytest.approx(160 * 8 / 16 / 20 * 11 * 2e-6 + 3e-6)


def test_tokens_walk_segments_of_one_tile_at_least() -> None:
    """Up to 128 blocks a context is cut into 16 segments, none under a tile, and a second kernel adds them up."""
    assert walked(1.0, 64.0) == pytest.approx(1e-6 + 2 * 3e-6)
    assert walked(1.0, 16 * 16 * 5.0) == pytest.approx(5 * 1e-6 + 2 * 3e-6)
    # 100 blocks of 80 tiles share 40 places; 200 walk whole contexts in tiles of prompts, 20 at a time.
    assert walked(1.0, 1280.0, 50.0) == pytest.approx(100 * 80 / 40 * 1e-6 + 2 * 3e-6)
    assert walked(1.0, 1280.0, 100.0) == pytest.approx(200 / 20 * 40 * 2e-6 + 3e-6)
