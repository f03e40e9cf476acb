"""Attention kernels of engines: the parts by hand, compiled kernels by head size, and laws of their sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.cost import Chip
from shardwise.cost._attention import (
    DECODE_PARTS,
    PROMPT_PARTS,
    Cached,
    Prompt,
    costed_seconds,
    decode_parts,
    kernel_costs,
    prompt_parts,
    seen_pairs,
)
from shardwise.hardware import find_device

CHIP = Chip(flops=1e15, bytes_per_second=1e12, cores=100.0)


def prompt(sequences: Any = 2.0, queries: Any = 256.0, past: Any = 0.0, window: Any = 0.0) -> Prompt[Any]:
    """Return a prompt of 8 query heads and 2 key-value heads of 128 elements in 16 bits."""
    return Prompt(sequences=sequences, queries=queries, past=past, heads=8.0, kv_heads=2.0, pair_flops=512,
                  token_bytes=512, edge_bytes=sequences * queries * 8 * 512, window=window)  # fmt: skip


def test_parts_of_a_prompt_by_hand() -> None:
    """Two sequences of 256 tokens: 16 heads of two tiles, half of the pairs, every byte once."""
    parts = dict(zip(PROMPT_PARTS, prompt_parts(CHIP, prompt(), False), strict=True))
    assert parts["pairs"] == pytest.approx(2 * 8 * 512 * 256 * 257 / 2 / 1e15)
    assert parts["tiles"] == pytest.approx(32 * 128 * 64 * 512 / 1e15)
    assert parts["waves"] == 1
    assert parts["cache"] == pytest.approx(2 * 2 * 256 * 512 / 1e12)
    assert parts["longest"] == pytest.approx(128 * 256 * 512 * 100 / 1e15)
    assert parts["masked"] == 0


def test_packed_heads_fill_a_tile_of_few_queries() -> None:
    """One new token of 4 heads a group: eight tiles of one row where heads do not share, two where they do."""
    apart, packed = (prompt_parts(CHIP, prompt(1.0, 1.0, 100.0), packs)[2] for packs in (False, True))
    assert apart == pytest.approx(4 * packed)


def test_a_window_leaves_pairs_out_and_says_which() -> None:
    """What a window masks is a part of its own: kernels that do not skip it pay for it."""
    whole, windowed = (prompt_parts(CHIP, prompt(window=w), False) for w in (0.0, 64.0))
    assert windowed[1] + windowed[-1] == pytest.approx(whole[1])
    assert windowed[6] < whole[6]
    assert seen_pairs(256.0, 64) == pytest.approx(64 * 65 / 2 + 192 * 64)


def test_parts_over_a_cache_by_hand() -> None:
    """150 items on 100 cores: the cache once, or two whole waves of it."""
    work = Cached(sequences=75.0, items=150.0, group=4.0, tokens=2048.0, pair_flops=512, item_bytes=512, edge_bytes=0.0)
    parts = dict(zip(DECODE_PARTS, decode_parts(CHIP, work), strict=True))
    assert parts["cache"] == pytest.approx(150 * 512 * 2048 / 1e12)
    assert parts["products"] == pytest.approx(150 * 16 * 512 * 2048 / 1e15)
    assert (parts["waves"], parts["first"], parts["far"]) == (2, 1, 0.125)
    assert parts["floor"] == parts["cache"]
    assert parts["rounded"] == pytest.approx(parts["cache"] * 2 / 1.5)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize(("kind", "low", "high"), [("prefill", 0.35, 1.0), ("decode", 0.5, 1.05)])
def test_long_kernels_reach_a_share_of_the_peak(engine: str, kind: str, low: float, high: float) -> None:
    """On H100 a long prompt runs at 0.35 to 1 of the peak FLOPs, a long cache streams at 0.5 to 1.05 of the memory."""
    device = find_device("h100-sxm-80gb").device
    chip: Chip[Any] = Chip(
        flops=device.peak_flops("bf16"), bytes_per_second=device.memory_bytes_per_second, cores=float(device.num_cores)
    )
    kernel = kernel_costs(device, kind, (engine, "bf16"), 128, False)
    assert kernel is not None
    parts: tuple[Any, ...]
    if kind == "prefill":
        work = Prompt(sequences=8.0, queries=8192.0, past=0.0, heads=32.0, kv_heads=8.0, pair_flops=512,
                      token_bytes=512, edge_bytes=8 * 8192 * 32 * 512.0)  # fmt: skip
        parts = prompt_parts(chip, work, kernel.packs)
    else:
        cached = Cached(sequences=64.0, items=512.0, group=4.0, tokens=16384.0, pair_flops=512, item_bytes=512,
                        edge_bytes=64 * 32 * 512.0)  # fmt: skip
        parts = decode_parts(chip, cached)
    assert low < parts[1] / costed_seconds(kernel, parts) < high


def test_columns_of_parts_equal_numbers() -> None:
    """Arrays of two shapes give what the shapes give one by one."""
    device = find_device("b200-sxm-180gb").device
    kernel = kernel_costs(device, "prefill", ("vllm", "bf16"), 128, False)
    assert kernel is not None
    both = costed_seconds(kernel, prompt_parts(CHIP, prompt(np.array([1.0, 8.0]), np.array([64.0, 4096.0])), True))
    one = [costed_seconds(kernel, prompt_parts(CHIP, prompt(*shape), True)) for shape in ((1.0, 64.0), (8.0, 4096.0))]
    assert both.tolist() == pytest.approx(one)


def test_a_head_size_without_a_kernel_runs_the_next_larger() -> None:
    """Heads of 96 run the kernel of 128; types and devices that were not measured have none."""
    device = find_device("h200-sxm-141gb").device
    given = (device, "decode", ("vllm", "bf16"))
    assert kernel_costs(*given, 96, False) == kernel_costs(*given, 128, False)
    assert kernel_costs(*given, 128, True) != kernel_costs(*given, 128, False)
    assert kernel_costs(device, "decode", ("vllm", "int4"), 128, False) is None
    assert kernel_costs(find_device("mi300x").device, "decode", ("vllm", "bf16"), 128, False) is None
