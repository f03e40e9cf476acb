"""Attention kernels of engines: the parts by hand, compiled kernels by head size, and laws of their sums."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from shardwise.cost import Datasheet
from shardwise.cost._kernels import (
    DECODE_PARTS,
    PARTS,
    PROMPT_PARTS,
    DecodeAttention,
    KernelCosts,
    PrefillAttention,
    costed_seconds,
    decode_parts,
    kernel_costs,
    nearest_costs,
    part_costs,
    prompt_parts,
    runs_as,
    seen_pairs,
)
from shardwise.cost._tables import constants, last_cache_bytes
from shardwise.hardware import find_device

CHIP = Datasheet(flops=1e15, bytes_per_second=1e12, cores=100.0)


def prompt(sequences: Any = 2.0, queries: Any = 256.0, past: Any = 0.0, window: Any = 0.0) -> PrefillAttention[Any]:
    """Return a prompt of 8 query heads and 2 key-value heads of 128 elements in 16 bits."""
    return PrefillAttention(sequences=sequences, queries=queries, past=past, heads=8.0, kv_heads=2.0, pair_flops=512,
                  token_bytes=512, edge_bytes=sequences * queries * 8 * 512, window=window)  # fmt: skip


def test_parts_of_a_prompt_by_hand() -> None:
    """Two sequences of 256 tokens: 16 heads of two tiles that see 224 keys, half of the pairs, every byte once."""
    parts = dict(zip(PROMPT_PARTS, prompt_parts(CHIP, prompt(), "none"), strict=True))
    assert parts["pairs"] == pytest.approx(2 * 8 * 512 * 256 * 257 / 2 / 1e15)
    assert parts["visited"] == pytest.approx(32 * 128 * (256 + 128 + 64) / 2 * 512 / 1e15)
    assert parts["exponentials"] == pytest.approx(parts["visited"] / 2)
    assert parts["waves"] == 1
    assert (parts["tokens"], parts["swapped"]) == (512, 0)
    assert parts["cache"] == pytest.approx(2 * 2 * 256 * 512 / 1e12)
    assert parts["longest_tile"] == pytest.approx(128 * 256 * 512 * 100 / 1e15)
    assert parts["masked"] == 0


@pytest.mark.parametrize(("packs", "queries", "tiles"), [("none", 1, 8), ("one", 1, 2), ("one", 16, 8), ("all", 16, 2)])
def test_heads_of_a_group_share_a_tile_where_the_kernel_packs_them(packs: str, queries: float, tiles: float) -> None:
    """Eight heads in groups of four: eight tiles where heads do not share, two where they do."""
    parts = dict(zip(PROMPT_PARTS, prompt_parts(CHIP, prompt(1.0, queries), packs), strict=True))
    assert parts["visited"] == pytest.approx(tiles * 128 * (queries + 32) * 512 / 1e15)


def test_heads_of_one_new_token_are_copied_into_another_order() -> None:
    """Two sequences of two key-value heads with four query heads each: a copy; none of one sequence or of a prompt."""
    for shape, copies in (((2.0, 1.0), 1), ((1.0, 1.0), 0), ((2.0, 2.0), 0)):
        assert prompt_parts(CHIP, prompt(*shape), "one")[-1] == copies


def test_only_what_the_last_cache_cannot_hold_is_read_from_memory() -> None:
    """Half of what a kernel moves fits: half is cold; from twice the cache all of it is."""
    moved = 2 * 256 * (8 * 512 + 2 * 512) / 1e12
    for held, cold in ((0.0, 1.0), (0.5, 1.0), (0.75, 0.5), (1.0, 0.0)):
        chip = Datasheet(flops=1e15, bytes_per_second=1e12, cores=100.0, cached_bytes=held * moved * 1e12)
        parts = dict(zip(PROMPT_PARTS, prompt_parts(chip, prompt(), "none"), strict=True))
        assert parts["beyond_cache"] == pytest.approx(cold * moved)


def test_a_window_leaves_pairs_out_and_says_which() -> None:
    """What a window masks is a part of its own: kernels that do not skip it pay for it."""
    whole, windowed = (
        dict(zip(PROMPT_PARTS, prompt_parts(CHIP, prompt(queries=1024.0, window=w), "none"), strict=True))
        for w in (0.0, 64.0)
    )
    assert windowed["pairs"] + windowed["masked"] == pytest.approx(whole["pairs"])
    assert windowed["longest_tile"] == pytest.approx(whole["longest_tile"] * 256 / 1024)
    assert windowed["visited"] < whole["visited"]
    assert seen_pairs(256.0, 64) == pytest.approx(64 * 65 / 2 + 192 * 64)


def test_parts_over_a_cache_by_hand() -> None:
    """150 items on 100 cores: the cache once, two waves, half of what a core alone would take."""
    work = DecodeAttention(
        sequences=75.0, items=150.0, group=4.0, tokens=2048.0, pair_flops=512, item_bytes=512, edge_bytes=0.0
    )
    parts = dict(zip(DECODE_PARTS, decode_parts(CHIP, work), strict=True))
    assert parts["cache"] == pytest.approx(150 * 512 * 2048 / 1e12)
    assert parts["products"] == pytest.approx(150 * 16 * 512 * 2048 / 1e15)
    assert (parts["waves"], parts["first_1k_tokens"], parts["first_16k_tokens"]) == (2, 1, 0.125)
    assert parts["floor"] == parts["cache"]
    assert parts["item_on_a_core"] == pytest.approx(100 * 512 * 2048 / 1e12)
    assert (parts["unshared"], parts["swapped"], parts["sequences"]) == (0, 1, 75)


def test_groups_too_large_to_share_read_the_cache_a_head() -> None:
    """64 query heads an item: each reads at least 128 tokens for itself; 32 share what they read."""
    for group, reads in ((32.0, 0.0), (64.0, 64.0)):
        work = DecodeAttention(
            sequences=4.0, items=4.0, group=group, tokens=16.0, pair_flops=512, item_bytes=512, edge_bytes=0.0
        )
        parts = dict(zip(DECODE_PARTS, decode_parts(CHIP, work), strict=True))
        assert parts["unshared"] == pytest.approx(reads * 4 * 512 * 128 / 1e12)


def test_heads_without_a_group_compute_outside_the_matrix_units() -> None:
    """TensorRT-LLM has another kernel for one query head an item: its arithmetic counts, that of groups in tiles."""
    for group, alone in ((1.0, 1.0), (2.0, 0.0), (64.0, 0.0)):
        work = DecodeAttention(
            sequences=4.0, items=8.0, group=group, tokens=2048.0, pair_flops=512, item_bytes=512, edge_bytes=0.0
        )
        parts = dict(zip(DECODE_PARTS, decode_parts(CHIP, work), strict=True))
        assert parts["ungrouped"] == pytest.approx(alone * 8 * 512 * 2048 / 1e15)


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "h200-sxm-141gb"])
def test_groups_stream_an_8_bit_cache_faster_than_heads_alone(device: str) -> None:
    """64 sequences of 16,384 tokens and 8 key-value heads in 8 bits: groups of 4 at 0.75 of the memory or more."""
    found = find_device(device).device
    chip: Datasheet[Any] = Datasheet(
        flops=found.peak_flops("bf16"), bytes_per_second=found.memory_bytes_per_second, cores=float(found.num_cores)
    )
    kernel = kernel_costs(found, "decode", ("tensorrt-llm", "fp8"), 128, False)
    assert kernel is not None
    shares = []
    for group in (1.0, 4.0):
        work = DecodeAttention(sequences=64.0, items=512.0, group=group, tokens=16384.0, pair_flops=512, item_bytes=256,
                               edge_bytes=64 * 8 * group * 512.0)  # fmt: skip
        parts: tuple[Any, ...] = decode_parts(chip, work)
        shares.append(dict(zip(DECODE_PARTS, parts, strict=True))["cache"] / costed_seconds(kernel, parts))
    assert shares[1] > 0.75
    assert shares[0] < 0.85 * shares[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize(("kind", "low", "high"), [("prefill", 0.35, 1.0), ("decode", 0.5, 1.05)])
def test_long_kernels_reach_a_share_of_the_peak(engine: str, kind: str, low: float, high: float) -> None:
    """On H100 a long prompt runs at 0.35 to 1 of the peak FLOPs, a long cache streams at 0.5 to 1.05 of the memory."""
    device = find_device("h100-sxm-80gb").device
    chip: Datasheet[Any] = Datasheet(
        flops=device.peak_flops("bf16"), bytes_per_second=device.memory_bytes_per_second, cores=float(device.num_cores)
    )
    kernel = kernel_costs(device, kind, (engine, "bf16"), 128, False)
    assert kernel is not None
    parts: tuple[Any, ...]
    if kind == "prefill":
        work = PrefillAttention(sequences=8.0, queries=8192.0, past=0.0, heads=32.0, kv_heads=8.0, pair_flops=512,
                      token_bytes=512, edge_bytes=8 * 8192 * 32 * 512.0)  # fmt: skip
        parts = prompt_parts(chip, work, kernel.packs)
    else:
        cached = DecodeAttention(sequences=64.0, items=512.0, group=4.0, tokens=16384.0, pair_flops=512, item_bytes=512,
                        edge_bytes=64 * 32 * 512.0)  # fmt: skip
        parts = decode_parts(chip, cached)
    named = dict(zip(PROMPT_PARTS if kind == "prefill" else DECODE_PARTS, parts, strict=True))
    assert low < named["pairs" if kind == "prefill" else "cache"] / costed_seconds(kernel, parts) < high


def test_columns_of_parts_equal_numbers() -> None:
    """Arrays of two shapes give what the shapes give one by one."""
    device = find_device("b200-sxm-180gb").device
    kernel = kernel_costs(device, "prefill", ("vllm", "bf16"), 128, False)
    assert kernel is not None
    both = costed_seconds(kernel, prompt_parts(CHIP, prompt(np.array([1.0, 8.0]), np.array([64.0, 4096.0])), "one"))
    one = [costed_seconds(kernel, prompt_parts(CHIP, prompt(*shape), "one")) for shape in ((1.0, 64.0), (8.0, 4096.0))]
    assert both.tolist() == pytest.approx(one)


def test_a_head_size_without_a_kernel_runs_the_next_larger() -> None:
    """Heads of 96 run the kernel of 128, larger ones the largest; what was not measured has none."""
    heads = ("64", "128", "128w", "256w")
    for head, windowed, row in ((96, False, "128"), (48, False, "64"), (200, True, "256w"), (512, True, "256w")):
        assert runs_as(head, windowed, heads) == row
    assert runs_as(96, True, heads[:2]) == "128"
    device = find_device("h200-sxm-141gb").device
    assert kernel_costs(device, "decode", ("vllm", "int4"), 128, False) is None
    assert kernel_costs(find_device("mi300x").device, "decode", ("vllm", "bf16"), 128, False) is None


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("device", ["h100-sxm-80gb", "b200-sxm-180gb", "l40s", "rtx-pro-6000-server"])
def test_attention_takes_longer_with_every_size(device: str, kind: str) -> None:
    """Seconds do not fall with more sequences, tokens, heads or wider heads, for sizes never measured too."""
    found = find_device(device).device
    chip: Datasheet[Any] = Datasheet(
        flops=found.peak_flops("bf16"),
        bytes_per_second=found.memory_bytes_per_second,
        cores=float(found.num_cores),
        cached_bytes=last_cache_bytes(found),
    )
    for engine, windowed in product(("vllm", "sglang", "tensorrt-llm"), (False, True)):
        kernel = kernel_costs(found, kind, (engine, "bf16"), 128, windowed)
        assert kernel is not None

        def seconds(B: float, S: float, K: float, H: float, kernel: KernelCosts = kernel) -> float:
            if kind == "prefill":
                work = PrefillAttention(sequences=B, queries=S, past=0.0, heads=4 * K, kv_heads=K, pair_flops=4 * H,
                              token_bytes=4 * H, edge_bytes=16 * B * S * K * H)  # fmt: skip
                return float(costed_seconds(kernel, prompt_parts(chip, work, kernel.packs)))
            cached = DecodeAttention(sequences=B, items=B * K, group=4.0, tokens=S, pair_flops=4 * H, item_bytes=4 * H,
                            edge_bytes=16 * B * K * H)  # fmt: skip
            return float(costed_seconds(kernel, decode_parts(chip, cached)))

        for B, S, K, H in product((1.0, 7.0, 300.0), (64.0, 1000.0, 20000.0), (1.0, 6.0), (80.0, 128.0)):
            least = seconds(B, S, K, H) * (1 - 1e-9)
            grown = ((2 * B, S, K, H), (B, 2 * S, K, H), (B, S, 2 * K, H), (B, S, K, 1.5 * H))
            assert all(seconds(*shape) >= least for shape in grown)


def test_kernels_take_their_costs_from_those_of_the_family() -> None:
    """What a kernel takes is a cost of the part in its family, every cost is taken, and every kernel starts."""
    tables = [row.attention_table(kind) for row in constants().families.values() for kind in PARTS]
    for table in filter(None, tables):
        heads = [taken for rows in table.engines.values() for row in rows.values() for taken in row.heads.values()]
        assert all("start" in taken for taken in heads)
        for part, costs in table.costs.items():
            assert sorted({taken[part] for taken in heads if part in taken}) == list(range(len(costs)))
            assert list(costs) == sorted(costs)
            assert costs[0] > 0


def test_a_part_that_a_kernel_does_not_take_costs_nothing() -> None:
    """Costs stand in the order of the parts, each the one that the kernel takes, or zero."""
    found = part_costs("decode", {"start": [4e-6, 8e-6], "waves": [1e-6]}, {"start": 1, "waves": 0})
    expected = dict.fromkeys(DECODE_PARTS, 0.0) | {"start": 8e-6, "waves": 1e-6}
    assert dict(zip(DECODE_PARTS, found, strict=True)) == expected


def test_devices_without_tables_decode_by_their_nearest_relative() -> None:
    """MI300X takes the kernel of A100 by its own peaks, an engine without tables that of vLLM."""
    near, source = nearest_costs(find_device("mi300x").device, "tgi")
    assert near == kernel_costs(find_device("a100-sxm-80gb").device, "decode", ("vllm", "bf16"), 128, False)
    assert "a100" in source
