"""Seconds of operators: a smooth roofline over tiles, and the same for columns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accuracy.kernels.products import AT_HIGHEST_CLOCK
from command_line import run
from laws.helpers import tried
from shardwise.cost import Efficiencies, kernel_seconds, op_seconds, rates_of
from shardwise.cost._operators import blend, gemm_seconds, matmul_seconds
from shardwise.cost._power import steady_state_rate
from shardwise.cost._rates import attention_dtype, gemm_rates
from shardwise.cost._tables import constants, family_of, matmul_row
from shardwise.errors import InputError
from shardwise.hardware import find_device
from shardwise.ledger.op import Op, Tensor
from shardwise.ledger.traced import Traced, leaf, plain, tracing
from shardwise.models import Model
from shardwise.ops.count import whole_layout
from shardwise.ops.head import head

H100 = find_device("h100-sxm-80gb").device
RATES = rates_of(H100, "bf16", 5e-6, Efficiencies())
IDEAL = rates_of(H100, "bf16", 5e-6, Efficiencies(ideal=True))


def product(m: Any, n: Any, k: Any, **more: Any) -> Op[Any]:
    """Return the operator of an (m, k) by (k, n) product."""
    flops, moved = 2 * m * n * k, 2 * (m * k + n * k + m * n)
    values = {
        "name": "product",
        "kind": "matmul",
        "region": "mlp",
        "flops": flops,
        "forward_bytes": moved,
        "backward_flops": flops,
        "backward_bytes": moved,
        "weight_flops": flops,
        "weight_bytes": moved,
        "rows": m,
        "columns": n,
        "inner": k,
    }
    return Op(**(values | more))


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.floats(1.5, 8))
@tried(40)
def test_a_smooth_maximum_lies_between_the_larger_and_the_sum(a: float, b: float, sharpness: float) -> None:
    """Blending compute and memory time is at least the larger, at most their sum, and symmetric."""
    both = blend(a, b, sharpness)
    assert max(a, b) * (1 - 1e-12) <= both <= (a + b) * (1 + 1e-12)
    assert both == pytest.approx(blend(b, a, sharpness))


def test_an_ideal_device_is_its_roofline() -> None:
    """With efficiencies of one a product takes its FLOPs at peak where they bind, its bytes where they do."""
    wide, thin = product(8192, 8192, 8192), product(1, 8192, 8192)
    assert op_seconds(IDEAL, wide).forward == pytest.approx(wide.flops / 989e12, rel=0.01)
    assert op_seconds(IDEAL, thin).forward == pytest.approx(thin.forward_bytes / 3.35e12, rel=0.01)


def test_a_large_product_runs_near_its_fitted_efficiency() -> None:
    """A product of 8192 cubed comes within a tenth of the achievable rate, and never above it."""
    op = product(8192, 8192, 8192)
    reached = op.flops / op_seconds(RATES, op).forward
    assert 0.9 * RATES.matmul_flops < reached < RATES.matmul_flops
    assert RATES.matmul_flops <= constants().families["hopper"].matmul["bf16"].compute * 989e12


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
@tried(40)
def test_backward_passes_are_products_of_the_same_size(m: int, n: int, k: int) -> None:
    """The gradients of a product turn its m, n and k, and cost about the same where all are large."""
    seconds = op_seconds(RATES, product(m, n, k))
    assert min(seconds.forward, seconds.backward_input, seconds.backward_weight) > 0
    swapped = op_seconds(RATES, product(m, k, n))
    assert seconds.backward_input == pytest.approx(swapped.forward)
    turned = op_seconds(RATES, product(k, n, m))
    assert seconds.backward_weight == pytest.approx(turned.forward / RATES.weight_gradient)


@pytest.mark.parametrize("kind", ["matmul", "grouped", "attention", "memory", "scan", "none"])
@pytest.mark.parametrize("which", ["forward", "input", "weight"])
def test_columns_of_two_equal_two_numbers(kind: Any, which: str) -> None:
    """Every kind of operator and every pass accepts arrays of length two."""
    rows = [(4096, 1024, 512), (100, 3000, 7000)]
    columns = [np.array(x, float) for x in zip(*rows, strict=True)]
    batch = np.array([1.0, 1.0])
    found = kernel_seconds(RATES, product(*columns, kind=kind, batch=batch), which)
    assert found.dtype == np.float64
    one_by_one = [kernel_seconds(RATES, product(*row, kind=kind), which) for row in rows]
    assert found.tolist() == pytest.approx(one_by_one, rel=1e-12)


def test_whole_tiles_are_charged() -> None:
    """One row more than a wave of tiles costs a wave more, never less than the FLOPs themselves."""
    rows = 128 * 132
    fits, spills = (matmul_seconds(RATES, product(m, 128, 4096), 1.0) for m in (rows, rows + 1))
    assert spills >= fits
    assert matmul_seconds(RATES, product(1, 128, 4096), 1.0) < fits


def test_two_products_of_activations_make_the_gradient_of_a_core() -> None:
    """Unfused attention has two gradients, each a product of the forward's size, and no weight gradient."""
    core = product(2048, 2048, 128, region="attention.core", batch=32, weight_flops=0, weight_bytes=0)
    core = replace(core, backward_flops=2 * core.flops, backward_bytes=2 * core.forward_bytes)
    seconds = op_seconds(RATES, core)
    one = op_seconds(RATES, product(2048, 128, 2048, batch=32)).forward
    assert seconds.backward_input == pytest.approx(2 * one)
    assert seconds.backward_weight == 0


def test_measured_fp32_sets_the_rate_without_matrix_units() -> None:
    """A T4 of 70 W multiplies fp32 at half of its datasheet's rate, and fp16 at the clock that watts leave for long."""
    t4 = find_device("t4").device
    rates = rates_of(t4, "fp16", 0.0, Efficiencies())
    assert rates.vector_flops == 4.3e12 < t4.vector_flops
    assert rates.matmul_flops == 2.4e13
    fit = constants().families["turing"].attention
    assert rates.attention_forward_flops == pytest.approx(0.57 * fit.forward * t4.peak_flops("fp16"))
    assert rates_of(t4, "fp16", 0.0, Efficiencies(ideal=True)).vector_flops == 0


def test_operands_that_are_not_aligned_leave_the_matrix_units() -> None:
    """A product whose rows start between loads of 16 bytes takes at least its FLOPs at the vector rate."""
    whole = product(2048, 2048, 104, region="attention.core", batch=16, weight_flops=0, flops=32 * 2048 * 2048 * 104)
    split = replace(whole, vector_units=True)
    assert kernel_seconds(RATES, split, "forward") == whole.flops / H100.vector_flops
    assert kernel_seconds(RATES, split, "forward") > 2 * kernel_seconds(RATES, whole, "forward")
    assert kernel_seconds(IDEAL, split, "forward") == kernel_seconds(IDEAL, whole, "forward")


@pytest.mark.parametrize("which", ["forward", "input", "weight"])
@pytest.mark.parametrize(("device", "slower"), [("h100-sxm-80gb", 3.53), ("a100-sxm-80gb", 1.0)])
def test_rows_between_loads_leave_the_kernels_of_hopper(device: str, slower: float, which: str) -> None:
    """On Hopper a product with such rows runs on Ampere's kernels, as measured; no other family's were measured."""
    rates = rates_of(find_device(device).device, "bf16", 5e-6, Efficiencies())
    whole = product(9472, 1152, 588)
    split = replace(whole, unaligned=1.0)
    assert kernel_seconds(rates, split, which) == pytest.approx(slower * kernel_seconds(rates, whole, which), rel=0.02)
    assert kernel_seconds(IDEAL, split, which) == kernel_seconds(IDEAL, whole, which)


@pytest.mark.parametrize(
    ("stack", "vocab", "unaligned"),
    [
        ("pytorch", 50257, 1),
        ("nanotron", 50257, 1),
        ("pytorch", 50304, 0),
        ("megatron", 50257, 0),
        ("maxtext", 50257, 0),
    ],
)
def test_a_vocabulary_that_nothing_pads_leaves_logits_between_loads(stack: str, vocab: int, unaligned: int) -> None:
    """Rows of 50,257 logits in 16 bits start between loads, unless the trainer or the compiler pads them."""
    model, y = replace(Model.load("gpt2"), vocab=vocab), whole_layout(1, 64, stack=stack)
    assert head(y, model)[0].unaligned == unaligned
    serving = replace(y, work=replace(y.work, phase="prefill"))
    assert head(serving, model)[0].unaligned == 0


@pytest.mark.parametrize("which", ["forward", "input", "weight"])
def test_products_that_run_apart_each_move_the_input(which: str) -> None:
    """Queries, keys and values one by one take longer than together, and their input gradients are added up."""
    joint = product(16384, 6144, 4096, parts=(4096, 1024, 1024))
    apart = replace(joint, apart=4)
    parts = [product(16384, n, 4096) for n in joint.parts]
    added = 4 * 2 * 16384 * 4096 / RATES.memory_bytes + RATES.memory_start if which == "input" else 0.0
    alone = sum(kernel_seconds(RATES, part, which) for part in parts) + added
    assert kernel_seconds(RATES, apart, which) > kernel_seconds(RATES, joint, which)
    assert kernel_seconds(RATES, apart, which) == pytest.approx(alone, rel=0.01)


def test_launches_hide_behind_long_kernels() -> None:
    """An eager launch shows on a short kernel and hides behind a long one."""
    short, long = (product(1, 1, 1, kind="memory", forward_bytes=b) for b in (1e3, 1e9))
    quiet = rates_of(H100, "bf16", 0.0, Efficiencies())
    assert op_seconds(RATES, short).forward - op_seconds(quiet, short).forward == pytest.approx(5e-6, rel=0.01)
    assert op_seconds(RATES, long).forward == op_seconds(quiet, long).forward


def test_short_streams_stay_in_the_last_cache() -> None:
    """Kernels of a few MB run above the rate of the memory, of what backward kept from it; long ones never do."""

    def rate(moved: float, kept: float, which: str) -> float:
        saves = (Tensor(name="kept", size_bytes=kept, born="mlp"),)
        op = product(1, 1, 1, kind="memory", forward_bytes=moved, backward_bytes=moved, saves=saves)
        return moved / (kernel_seconds(RATES, op, which) - RATES.memory_start)

    assert RATES.memory_bytes < rate(4e7, 4e7, "forward") <= 132 * 38e9
    assert rate(4e7, 4e7, "input") == pytest.approx(RATES.memory_bytes)
    assert RATES.memory_bytes < rate(4e7, 2e7, "input") < rate(4e7, 0, "input")
    assert rate(1e9, 0, "forward") == pytest.approx(RATES.memory_bytes)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("h100-sxm-80gb", "fp8", "bf16"),
        ("h100-sxm-80gb", "fp32", "fp32"),
        ("b200-sxm-180gb", "fp4", "bf16"),
        ("v100-sxm-32gb", "fp16", "fp16"),
    ],
)
def test_attention_stays_in_sixteen_bit(device: str, dtype: str, expected: str) -> None:
    """Narrow products leave the attention core in 16 bit; wider ones take it along."""
    assert attention_dtype(find_device(device).device, dtype) == expected


def test_imposed_efficiencies_replace_the_fit() -> None:
    """What the user imposes is what is achieved: fractions of the peak, or rates."""
    half = rates_of(H100, "bf16", 0.0, Efficiencies(compute=0.5, memory=0.25))
    assert half.matmul_flops == half.attention_forward_flops == half.grouped_flops == 0.5 * 989e12
    assert half.matmul_bytes == half.memory_bytes == 0.25 * 3.35e12
    rate = rates_of(H100, "bf16", 0.0, Efficiencies(matmul_flops_per_second=6e14, memory_bytes_per_second=2e12))
    assert (rate.matmul_flops, rate.matmul_bytes) == (6e14, 2e12)
    with pytest.raises(InputError) as error:
        rates_of(H100, "bf16", 0.0, Efficiencies(matmul_flops_per_second=-1.0))
    assert [p.field for p in error.value.problems] == ["matmul_flops_per_second"]


def test_rates_explain_where_they_come_from() -> None:
    """While tracing, every rate is a named number with the source of its fit."""
    with tracing():
        rates = rates_of(H100, "bf16", 0.0, Efficiencies())
        seconds: Any = op_seconds(rates, product(leaf("m", 64), leaf("n", 64), leaf("k", 64))).forward
    assert isinstance(rates.matmul_flops, Traced)
    assert "aiconfigurator" in rates.matmul_flops.source
    assert plain(seconds) == op_seconds(rates_of(H100, "bf16", 0.0, Efficiencies()), product(64, 64, 64)).forward


@pytest.mark.parametrize(
    ("device", "family"),
    [
        ("a100-sxm-80gb", "ampere"),
        ("h200-sxm-141gb", "hopper"),
        ("gb200", "blackwell"),
        ("l40s", "ada"),
        ("rtx-pro-6000-server", "blackwell-gddr"),
        ("v100-sxm-32gb", "volta"),
        ("t4", "turing"),
        ("p100-sxm-16gb", "pascal"),
        ("mi250", "cdna2"),
        ("mi300x", "cdna"),
        ("mi355x", "cdna4"),
        ("apple-m5-max-40core", "apple-m4"),
        ("apple-m3-ultra-80core", "generic"),
        ("gaudi2", "gaudi"),
    ],
)
def test_devices_find_their_family(device: str, family: str) -> None:
    """A device takes the fits of its family; one that was not measured says so, and one that was does not."""
    found = find_device(device).device
    assert family_of(found) == family
    notes = rates_of(found, "fp16", 0.0, Efficiencies()).assumptions
    words = ("no kernel measurements", "are the middle of other families", "are CDNA 3's")
    assert any(word in note for note in notes for word in words) == (
        family in ("generic", "apple-m4", "volta", "turing", "pascal", "cdna2", "cdna", "cdna4")
    )


def test_weights_of_thor_stream_nearer_to_its_datasheet() -> None:
    """Products of every type read 0.93 of Thor's bandwidth, where other devices without a table read 0.83."""
    thor, orin = (find_device(name).device for name in ("jetson-agx-thor", "jetson-agx-orin"))
    for dtype in ("bf16", "fp8", "fp4"):
        share = rates_of(thor, dtype, 0.0, Efficiencies()).matmul_bytes / thor.memory_bytes_per_second
        assert share == pytest.approx(0.93, abs=0.001)
    share = rates_of(orin, "fp16", 0.0, Efficiencies()).matmul_bytes / orin.memory_bytes_per_second
    assert share == pytest.approx(0.83)


def test_a_data_type_without_a_rate_is_refused() -> None:
    """Nothing is emulated: bf16 on a V100 is a problem, not a guess."""
    with pytest.raises(InputError) as error:
        rates_of(find_device("v100-sxm-32gb").device, "bf16", 0.0, Efficiencies())
    assert error.value.problems[0].field == "dtype"
    assert math.isfinite(rates_of(find_device("v100-sxm-32gb").device, "fp16", 0.0, Efficiencies()).matmul_flops)


def test_narrow_products_pay_for_their_casts() -> None:
    """Under fp8 the input and the gradient of the output are cast, four bytes an element; nothing else is."""
    narrow = rates_of(H100, "fp8", 0.0, Efficiencies())
    free = replace(narrow, cast_traffic=0.0)
    op = product(4096, 1024, 512)
    paid, bare = op_seconds(narrow, op), op_seconds(free, op)
    assert paid.forward - bare.forward == pytest.approx(4 * 4096 * 512 / narrow.memory_bytes)
    assert paid.backward_input - bare.backward_input == pytest.approx(4 * 4096 * 1024 / narrow.memory_bytes)
    assert paid.backward_weight == bare.backward_weight


def test_products_that_stay_wide_run_at_the_rate_of_sixteen_bits() -> None:
    """Beside 8-bit products one in bf16 takes the seconds that it takes in a bf16 run, and casts nothing."""
    narrow = rates_of(H100, "fp8", 5e-6, Efficiencies())
    assert op_seconds(narrow, product(4096, 8192, 4096, dtype="bf16")) == op_seconds(RATES, product(4096, 8192, 4096))


@pytest.mark.parametrize(
    ("device", "slower"),
    [("b200-sxm-180gb", True), ("h100-sxm-80gb", True), ("gb200", False), ("a100-sxm-80gb", False)],
)
def test_devices_of_a_busy_node_keep_less_of_a_rate_measured_alone(device: str, slower: bool) -> None:
    """Products, attention and experts of B200 and H100 slow down where eight share a node; racks on liquid do not."""
    alone, busy = (
        rates_of(find_device(device).device, "bf16", 0.0, Efficiencies(), node_busy=t) for t in (False, True)
    )
    for name in ("matmul_flops", "attention_forward_flops", "attention_backward_flops", "grouped_flops"):
        assert (getattr(busy, name) < getattr(alone, name)) == slower, name
    assert busy.memory_bytes == alone.memory_bytes


@pytest.mark.parametrize(
    ("device", "share"),
    [("h100-pcie-80gb", 0.90), ("b100-sxm-192gb", 0.97), ("a30", 0.94), ("gh200-96gb", 1.0)],
)
def test_fewer_watts_for_a_peak_leave_less_of_it(device: str, share: float) -> None:
    """A device never measured keeps the family's lasting share of its peak, less where it has fewer watts for it."""
    found = find_device(device).device
    row = matmul_row(family_of(found), "bf16")[0]
    assert steady_state_rate(row, found) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("device", "teraflops"), [("l20", 110e12), ("l40", 166e12), ("rtx-4090", 164.5e12)])
def test_cards_of_half_the_rate_of_l40s_reach_it(device: str, teraflops: float) -> None:
    """Products last at 105 to 115 TFLOP/s on L20 (CUDA-Learn-Notes), 163 to 166 on RTX 4090; L40 keeps L20's share."""
    reached = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies()).matmul_flops
    assert float(reached) == pytest.approx(teraflops, rel=0.02)


@pytest.mark.parametrize(
    ("device", "dtype", "library", "kept"),
    [("h100-sxm-80gb", "fp8", "cuda-12.8", 0.928), ("h200-sxm-141gb", "fp8", "cuda-12.8", 0.928),
     ("h100-sxm-80gb", "fp8", "", 0.9), ("h100-sxm-80gb", "bf16", "", 1.0), ("b200-sxm-180gb", "fp8", "", 1.0)],
)  # fmt: skip
def test_forward_passes_in_8_bits_add_up_in_the_tensor_cores(
    device: str, dtype: str, library: str, kept: float
) -> None:
    """On Hopper training steps, whose gradients add outside of them, keep 7 % less than serving, 10 in old cuBLAS."""
    found, none = find_device(device).device, Efficiencies()
    steps = rates_of(found, dtype, 0.0, none, ("", "", library)).matmul_flops
    forward = rates_of(found, dtype, 0.0, none, ("", "", "forward")).matmul_flops
    assert float(steps) / float(forward) == pytest.approx(kept)


def test_the_head_stays_in_sixteen_bits_in_training() -> None:
    """Megatron-Core and torchtitan leave the output head out of 8-bit training; fp32 runs have it in fp32."""
    model = Model.load("llama-3-8b")
    for dtype, wide in (("fp8", "bf16"), ("fp4", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")):
        y = whole_layout(1, 128)
        y = replace(y, work=replace(y.work, phase="train", dtype=dtype))
        assert head(y, model)[0].dtype == wide


def test_an_older_attention_kernel_is_slower() -> None:
    """FlashAttention is slower than FlashAttention-2, and that than the best kernel of the device."""
    rates = [rates_of(H100, "bf16", 0.0, Efficiencies(), (kernel, "", "")) for kernel in ("flash-1", "flash-2", "")]
    assert [r.attention_forward_flops for r in rates] == sorted(r.attention_forward_flops for r in rates)
    assert rates[0].attention_forward_flops < rates[1].attention_forward_flops < rates[2].attention_forward_flops


def test_an_older_library_is_slower_where_another_was_measured() -> None:
    """Products in 16 bits on Hopper, alone and beside narrower ones; A100 has the same kernels under both."""
    for dtype, device in (("bf16", H100), ("fp8", H100), ("bf16", find_device("a100-sxm-80gb").device)):
        rates = [rates_of(device, dtype, 0.0, Efficiencies(), ("", "", name)) for name in ("", "cuda-12.8")]
        older, newer = ((one.wide or one).matmul_flops for one in rates)
        assert older < newer if device is H100 else older == newer


def test_products_cut_along_k_fill_the_device() -> None:
    """One tile of a long inner dimension is cut over the cores: far less than one core would take for all of it."""
    alone = 2 * 128 * 128 * 2**20 / (RATES.matmul_flops / 132)
    assert matmul_seconds(RATES, product(128, 128, 2**20), 1.0) < alone / 20


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_longer_product_never_takes_less_time(device: str, dtype: str) -> None:
    """Doubling the inner dimension, or the rows beyond a wave, makes a product longer."""
    rates = rates_of(find_device(device).device, dtype, 0.0, Efficiencies())
    for m in (1, 64, 1024, 16384):
        times = [
            matmul_seconds(rates, product(m, 4096, k), 2.0 * (m * k + 4096 * k + m * 4096)) for k in (512, 1024, 8192)
        ]
        assert times == sorted(times)


def test_short_replays_run_at_a_higher_clock() -> None:
    """A table replays a product of microseconds before power lowers the clock; a model runs on and has no such time."""
    row = replace(constants().families["hopper"].matmul["bf16"], **AT_HIGHEST_CLOCK, ramp_seconds=0.0)
    table, model = (gemm_rates(H100, "bf16", r, Efficiencies()) for r in (replace(row, launches=36), row))
    shapes = {n: (float(n), float(n), float(n), 1.0) for n in (2048, 65536)}
    gain = {n: gemm_seconds(model, s, 6.0 * n * n) / gemm_seconds(table, s, 6.0 * n * n) for n, s in shapes.items()}
    assert gain[2048] > 1.1
    assert gain[65536] == pytest.approx(1.0, abs=0.01)


def test_what_stays_in_the_cache_is_not_read_again() -> None:
    """A product that fits the last cache finds its input there, and its output where that is kept; others nothing."""
    cached = replace(RATES, corrections=replace(RATES.corrections, cached_bytes=5e7, cached_share=0.0))
    bare = replace(cached, corrections=replace(cached.corrections, cached_bytes=0.0))
    both = replace(cached, corrections=replace(cached.corrections, keeps_outputs=True))
    small, large = ((float(m), 512.0, 512.0, 1.0) for m in (8192, 2**20))
    seconds = [gemm_seconds(r, small, 2.0 * (8192 * 1024 + 2**18)) for r in (both, cached, bare)]
    assert seconds[0] < seconds[1] < 0.98 * seconds[2]
    assert gemm_seconds(both, large, 2.0 * 2**30) == gemm_seconds(bare, large, 2.0 * 2**30)


@given(st.integers(1, 4096), st.integers(1, 8192), st.integers(1, 16384), st.sampled_from(["m", "n", "k"]))
@tried(80)
def test_more_of_any_dimension_never_makes_a_product_shorter(m: int, n: int, k: int, which: str) -> None:
    """Tiles, cuts along the inner dimension, waits, caches: whatever is chosen, a larger product takes no less."""
    more = {"m": m, "n": n, "k": k} | {which: {"m": m, "n": n, "k": k}[which] + 64}
    for device in ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s", "rtx-pro-6000-server"):
        rates = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies())
        first, second = (matmul_seconds(rates, op, op.forward_bytes) for op in (product(m, n, k), product(**more)))
        assert second >= first * (1 - 1e-9), device


def test_a_wait_for_loads_is_hidden_by_other_tiles_and_cut_with_the_inner_dimension() -> None:
    """A tile alone waits for each load of a long inner dimension, at most until cutting pays; full waves hide it."""
    still = replace(RATES, tiling=replace(RATES.tiling, chain_flops=0.0))
    gain = {
        shape: gemm_seconds(RATES, (*shape, 1.0), 1.0) - gemm_seconds(still, (*shape, 1.0), 1.0)
        for shape in ((16.0, 128.0, 1024.0), (16.0, 128.0, 65536.0), (8192.0, 8192.0, 1024.0))
    }
    alone, cut, waves = gain.values()
    assert 0.5e-6 < alone < 3e-6
    assert cut < 16 * alone
    assert waves < alone


def test_one_row_is_a_vector_product_on_some_devices() -> None:
    """A single row waits less for its loads on A100, whose library has a kernel for vectors, than two rows do."""
    rates = rates_of(find_device("a100-sxm-80gb").device, "bf16", 0.0, Efficiencies())
    one, two = (gemm_seconds(rates, (m, 64.0, 512.0, 1.0), 2.0 * 64 * 512) for m in (1.0, 2.0))
    assert one < 0.8 * two


def test_an_engine_has_products_of_its_own() -> None:
    """Narrow products of an engine take its own constants, and those of the family where it has none."""
    row = constants().families["hopper"].matmul["fp8"]
    own, shared = (gemm_rates(H100, "fp8", row, Efficiencies(), engine) for engine in ("vllm", ""))
    assert own.matmul_flops / shared.matmul_flops == pytest.approx(row.engines["vllm"]["compute"] / row.compute)
    assert own.matmul_start == shared.matmul_start


@pytest.mark.parametrize(
    ("precision", "given"), [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", "fp8"), ("bf16", "fp32")]
)
def test_a_peak_of_another_type_neither_speeds_nor_slows_a_run(precision: str, given: str) -> None:
    """Power is shared by the peak of the type that runs: another type's changes nothing, and the answer says so."""
    words = ("train", "llama-3.1-8b", "--on", "8xh20", "--precision", precision, "--global-batch", "64", "--json")
    plain, other = run(*words).tree, run(*words, f"--peak-flops.{given}", "2P").tree
    assert other["step_seconds"] == plain["step_seconds"]
    assert f"peak_flops.{given}: no effect, GEMMs run in {precision}" in other["assumptions"]
    own = run(*words, f"--peak-flops.{precision}", "2P").tree
    assert own["step_seconds"] < plain["step_seconds"]
    assert not any("no effect" in one for one in own["assumptions"])
