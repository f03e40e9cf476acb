"""Attention over what an indexer picks: padded heads, few cores, and the small kernels around it."""

from __future__ import annotations

import pytest

from serving.serving_cases import ask
from shardwise.cost import Efficiencies
from shardwise.ledger.op import Op
from shardwise.plans import Plan, Serving
from shardwise.serving import InferReport
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._picked import PickedKernel, picked_kernel, picked_seconds
from shardwise.serving._sizes import sizes_of


def served(engine: str, on: str = "h200-sxm-141gb", **job: object) -> InferReport:
    """DeepSeek-V3.2 on eight devices."""
    job = {"batch": 1, "input_tokens": 2048, "output_tokens": 64, "weights": "fp8-block", **job}
    return ask("deepseek-v3.2", Serving(**job), Plan(tp=8), on, engine=engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "on", "cache", "heads", "cores"),
    [
        ("vllm-2025", "h200-sxm-141gb", "", 64, 1),
        ("vllm-2025", "b200-sxm-180gb", "", 128, 2),
        ("vllm-0.17", "h200-sxm-141gb", "", 64, 1),
        ("sglang-0.5.7", "b200-sxm-180gb", "fp8", 128, 0),
    ],
)
def test_heads_are_padded_by_release_and_device(engine: str, on: str, cache: str, heads: int, cores: int) -> None:
    """FlashMLA's kernels take 64 query heads on Hopper and 128 on Blackwell; those for 8-bit caches cut the picks."""
    kernel = picked_kernel(served(engine, on, kv_cache=cache).case)
    assert kernel and (kernel.heads, kernel.cores) == (heads, cores)
    assert kernel.head_flops == 2 * 2048 * (512 + 64 + 512)


@pytest.mark.parametrize(
    ("engine", "on", "cache"),
    [
        ("vllm", "b200-sxm-180gb", ""),
        ("vllm-0.17", "b200-sxm-180gb", ""),
        ("sglang-0.5.7", "h200-sxm-141gb", ""),
        ("sglang-0.5.13-trtllm-dsa", "b200-sxm-180gb", "fp8"),
        ("vllm-2025", "mi300x", ""),
    ],
)
def test_others_run_kernels_without_padding(engine: str, on: str, cache: str) -> None:
    """FlashInfer's and TensorRT-LLM's take heads as they are, FlashAttention 3 SGLang's 16-bit cache on Hopper."""
    assert picked_kernel(served(engine, on, kv_cache=cache).case) is None


def test_only_picked_latents_are_walked() -> None:
    """A model without an indexer runs no such kernel, and neither do imposed efficiencies."""
    dense = ask("deepseek-v3", Serving(weights="fp8-block"), Plan(tp=8), "h200-sxm-141gb", engine="vllm-2025")
    ideal = ask(
        "deepseek-v3.2", Serving(weights="fp8-block"), Plan(tp=8), "h200-sxm-141gb", engine="vllm-2025",
        efficiencies=Efficiencies(ideal=True),
    )  # fmt: skip
    assert picked_kernel(dense.case) is None
    assert picked_kernel(ideal.case) is None


def test_one_core_walks_all_picks_of_a_token() -> None:
    """A token of 64 padded heads takes 285 MFLOP of one of 78 cores at 0.647 of H20's 148 TFLOP/s: 233 us a layer."""
    attention, full, more = (
        served("vllm-2025", "h20", batch=batch).evaluation.decode.operators["attention"] / 61 for batch in (1, 78, 156)
    )
    walked = 64 * 2 * 2048 * 1088 / (0.647 * 148e12 / 78)
    assert attention == pytest.approx(walked, rel=0.02)
    # Fewer tokens than cores take as long as one, twice as many as cores twice as long.
    assert full == pytest.approx(attention, rel=0.001)
    assert more == pytest.approx(attention + walked, rel=0.001)


@pytest.mark.parametrize(
    ("cores", "rows", "batch", "seconds"),
    [
        (0.0, 2.0, 16.0, 2 * 64 * 1e6 / (0.5 * 1e12)),
        (0.0, 2.0, 65.0, 4 * 64 * 1e6 / (0.5 * 1e12)),
        (2.0, 5.0, 16.0, 64 * 1e6 / (0.5 * 1e12) * 10 / 2),
        (2.0, 6.0, 16.0, 2 * 64 * 1e6 / (0.5 * 1e12) * 10 / 2),
    ],
)
def test_picks_are_walked_after_a_start(cores: float, rows: float, batch: float, seconds: float) -> None:
    """Tiles of 64 heads on all of 10 cores, or each on two of them in waves; both after a small kernel has started."""
    kernel = PickedKernel(heads=64.0, cores=cores, share=0.5, head_flops=1e6, prompts_above=-1.0)
    op = Op(name="attention", kind="attention", region="attention.core", rows=rows, batch=batch, columns=0.0, inner=0.0,
            flops=0.0, forward_bytes=0.0, backward_flops=0.0, backward_bytes=0.0, weight_flops=0.0,
            weight_bytes=0.0)  # fmt: skip
    assert picked_seconds(kernel, (1e12, 10.0), 3e-6, op) == pytest.approx(seconds + 3e-6)


def test_small_kernels_of_an_indexer_and_the_choice_take_time() -> None:
    """Ten in vLLM, seventeen in SGLang before 0.5.14; before 0.18 one core chose among all keys."""
    long = {"input_tokens": 131072, "output_tokens": 2}
    old, new = (served(name, on="b200-sxm-180gb", **long) for name in ("vllm-0.17", "vllm-0.19"))
    chosen = old.evaluation.decode.operators["indexer.scores"] - new.evaluation.decode.operators["indexer.scores"]
    assert chosen / 61 == pytest.approx(131072 * 3.5e-10, rel=0.01)
    few, many = (served(name, kv_cache="") for name in ("sglang", "sglang-0.5.13"))
    beside = many.evaluation.decode.operators["indexer.scores"] - few.evaluation.decode.operators["indexer.scores"]
    assert beside / 61 == pytest.approx((17 - 6) * 2.2e-6, rel=0.01)


def test_what_was_counted_for_latents_is_charged_to_them_alone() -> None:
    """DeepSeek-V4's indexer picks compressed entries in kernels of its own, which were not counted."""
    own = engine_cost_model((case := served("vllm").case), sizes_of(case.model, case.plan, case.job, case.domains))
    other = ask("deepseek-v4-flash", Serving(), Plan(tp=8), "h200-sxm-141gb", engine="vllm").case
    costs = engine_cost_model(other, sizes_of(other.model, other.plan, other.job, other.domains))
    assert (own.engine.attention.indexer_kernels, costs.engine.attention.indexer_kernels) == (10, 0)
