"""What kinds of kernels cost on a processor that does not hide arithmetic behind memory."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost import Efficiencies, rates_of
from shardwise.cost._operators import head_share, kernel_seconds
from shardwise.cost._tables import constants, family_of
from shardwise.cost._tiles import MEASURED_KERNELS, AttentionBlocks, blocked_flops, kind_of
from shardwise.hardware import find_device
from shardwise.ledger.op import Op
from shardwise.models import Mamba2
from shardwise.ops.core import AttentionCore, fused
from shardwise.ops.count import WHOLE
from shardwise.ops.elementwise import norm
from shardwise.ops.inputs import LayoutOptions, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.ops.ssm import mamba2
from shardwise.plans import find_stack

CPU = find_device("cpu-epyc-zen4-2core").device


def layout(stack: str, batch: int = 1, seq_len: int = 512) -> Layout[float]:
    """Return a layout in fp32."""
    work = TokenBatch(B=batch, S=seq_len, context=0, activation_bytes=4, weight_bytes=4, dtype="fp32")
    return lay_out(WHOLE, work, LayoutOptions(stack=find_stack(stack)))


@settings(deadline=None)
@given(st.integers(1, 100_000), st.booleans())
def test_blocks_never_charge_less_than_the_pairs_that_attend(keys: int, backward: bool) -> None:
    """Whole blocks of keys hold at least the pairs that a causal mask leaves."""
    assert blocked_flops(AttentionBlocks(512.0, 20.0, 10.0), 1.0, (float(keys), (keys + 1) / 2), backward) >= 1.0


@pytest.mark.parametrize(("short", "long"), [(128, 512), (512, 2048), (1024, 16384)])
def test_longer_sequences_waste_less_of_a_block(short: int, long: int) -> None:
    """What blocks charge beside the attended pairs falls with the length."""
    blocks = AttentionBlocks(512.0, 20.0, 10.0)
    late, early = (blocked_flops(blocks, 1.0, (float(keys), (keys + 1) / 2), False) for keys in (long, short))
    assert late < early


def test_a_gpu_charges_attention_and_kernels_as_its_own_tables_say() -> None:
    """Devices without rates by kind have no blocks and stream at one rate."""
    rates = rates_of(find_device("l40s").device, "bf16", 0.0, Efficiencies())
    assert not rates.attention_blocks.keys
    assert rates.bandwidth_shares.rate(3.0, "activation") == 3.0


# github.com/NVIDIA/cudnn-frontend: milliseconds of causal attention, heads of 128, by cuDNN's release: H200 of 16 heads
# under 9.1 (benchmark/benchmark_results.csv, 2024-05, from its TFLOP/s), 64 heads under 9.19, GB200 and GB300 with two
# sequences of 64 heads under 9.22 (benchmark/sdpa_benchmark_training/results/llama3.1).
CUDNN = [
    ("h200-sxm-141gb", "", 64, 4096, 0.5069, 1.5491),
    ("h200-sxm-141gb", "", 32, 8192, 0.9597, 2.9650),
    ("h200-sxm-141gb", "", 16, 32768, 7.6182, 22.0069),
    ("h200-sxm-141gb", "cudnn-9.19", 64, 2048, 0.142, 0.464),
    ("h200-sxm-141gb", "cudnn-9.19", 64, 8192, 1.708, 5.083),
    ("h200-sxm-141gb", "cudnn-9.19", 64, 32768, 25.566, 75.688),
    ("gb200", "cudnn-9.19", 128, 4096, 0.391, 1.198),
    ("gb200", "cudnn-9.19", 128, 16384, 5.150, 16.554),
    ("gb300", "cudnn-9.19", 128, 8192, 1.185, 3.832),
    ("gb300", "cudnn-9.19", 128, 32768, 18.014, 59.024),
]


def passes(device: str, kernel: str, rows: int, keys: int, met: float, dims: int) -> tuple[float, float]:
    """Return milliseconds of attention forward and backward, whose queries meet so many keys in the mean."""
    rates = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies(), (kernel, "", ""))
    share, flops = head_share(dims, rates.pair_dims), 4 * rows * keys * met * dims
    ahead, back = (
        blocked_flops(rates.attention_blocks, each * flops, (float(keys), met), bool(late)) / (rate * share)
        + rates.attention_start
        for late, (each, rate) in enumerate(
            ((1.0, rates.attention_forward_flops), (2.5, rates.attention_backward_flops))
        )
    )
    return 1e3 * ahead, 1e3 * back


@pytest.mark.parametrize(("device", "kernel", "rows", "keys", "forward", "backward"), CUDNN)
def test_attention_takes_what_its_library_was_measured_at(
    device: str, kernel: str, rows: int, keys: int, forward: float, backward: float
) -> None:
    """One device alone is within 13 % of each time of the tables, and within 7 % of both together."""
    ahead, back = passes(device, kernel, rows, keys, (keys + 1) / 2, 128)
    assert ahead == pytest.approx(forward, rel=0.13) and back == pytest.approx(backward, rel=0.13)
    assert ahead + back == pytest.approx(forward + backward, rel=0.07)


# The same page, 9.19 (windows of 1,024) and 9.22: two sequences of 64 and 128 heads of 64 values, whose queries see the
# last tokens of a window alone (results/h200_919_only_cudnn, gb200_919_only_cudnn and gb300_919_only_cudnn at df73764,
# results/gpt_oss). No constant rests on them: the keys more for each query are those of whole causal sequences.
WINDOWS = [
    ("h200-sxm-141gb", 128, 1024, 2048, 0.166, 0.488),
    ("h200-sxm-141gb", 128, 1024, 32768, 3.021, 9.045),
    ("gb200", 128, 1024, 2048, 0.104, 0.230),
    ("gb200", 128, 1024, 32768, 1.711, 4.099),
    ("gb300", 128, 1024, 2048, 0.089, 0.221),
    ("gb300", 128, 1024, 32768, 1.448, 3.930),
    ("gb200", 256, 128, 2048, 0.109, 0.237),
    ("gb200", 256, 128, 16384, 0.822, 1.818),
    ("gb300", 256, 128, 2048, 0.104, 0.227),
    ("gb300", 256, 128, 16384, 0.790, 1.712),
]


@pytest.mark.parametrize(("device", "rows", "window", "keys", "forward", "backward"), WINDOWS)
def test_a_window_saves_less_than_the_keys_that_it_hides(
    device: str, rows: int, window: int, keys: int, forward: float, backward: float
) -> None:
    """Keys that a query is charged beside those it meets are as many with a window: within 9 % of the tables."""
    met = window - window * (window - 1) / 2 / keys
    assert sum(passes(device, "cudnn-9.19", rows, keys, met, 64)) == pytest.approx(forward + backward, rel=0.09)


# The same page, no mask: 64 and 128 rows of 128 values.
SQUARES = [
    ("h200-sxm-141gb", 64, 2048, 0.217, 0.681),
    ("h200-sxm-141gb", 64, 8192, 3.182, 9.262),
    ("gb200", 128, 2048, 0.192, 0.611),
    ("gb200", 128, 8192, 2.483, 7.831),
]


@pytest.mark.parametrize(("device", "rows", "keys", "forward", "backward"), SQUARES)
def test_a_whole_square_wastes_as_many_keys_as_its_causal_half(
    device: str, rows: int, keys: int, forward: float, backward: float
) -> None:
    """Queries that see every key are within 12 % of the tables."""
    ahead, back = passes(device, "cudnn-9.19", rows, keys, float(keys), 128)
    assert ahead + back == pytest.approx(forward + backward, rel=0.12)


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "a100-sxm-80gb", "mi300x"])
@pytest.mark.parametrize("which", ["forward", "input"])
def test_packed_documents_take_as_long_as_sequences_of_their_own(device: str, which: str) -> None:
    """Eight documents of 512 tokens in one sequence cost attention what eight sequences of 512 do."""
    rates = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies())

    def seconds(batch: int, tokens: int, density: float) -> float:
        work = TokenBatch(B=batch, S=tokens, context=0, activation_bytes=2, weight_bytes=2, density=density)
        y = lay_out(WHOLE, work, LayoutOptions(stack=find_stack("megatron")))
        core = AttentionCore(heads=32, kv_heads=8, key_dim=128, value_dim=128)
        return kernel_seconds(rates, fused(y, core, ()), which)

    assert seconds(1, 4096, 513 / 4097) == pytest.approx(seconds(8, 512, 1.0), rel=0.01)


@pytest.mark.parametrize(
    ("keys", "older", "newer"), [(8192, 5.846, 4.692), (16384, 20.161, 16.476), (32768, 75.344, 61.740)]
)
def test_narrow_attention_of_the_next_blackwell_is_faster_than_its_peak(keys: int, older: float, newer: float) -> None:
    """GB300 over B200 in 8 bits is within 3 % of cuDNN 9.13's tables (github.com/NVIDIA/cudnn-frontend 0b1577c)."""
    b200, gb300 = (sum(passes(name, "fp8", 128, keys, keys / 2, 128)) for name in ("b200-sxm-180gb", "gb300"))
    assert b200 / gb300 == pytest.approx(older / newer, rel=0.03)


# github.com/ROCm/aiter op_tests/cpp/mha/README.md at 0403bcd: TFLOP/s of causal attention on MI300X, 8 sequences of 64
# heads of 128 and 8 of keys, backward with sums in fp32.
AITER = [(2048, 452.03, 347.89), (4096, 509.255, 402.18), (8192, 550.67, 432.715)]


@pytest.mark.parametrize(("keys", "forward", "backward"), AITER)
def test_attention_of_instinct_takes_what_its_maker_measured(keys: int, forward: float, backward: float) -> None:
    """Either pass of CDNA 3 is within 2 % of AITER's own table from 2,048 tokens on."""
    flops = 4 * 512 * keys * (keys / 2) * 128
    ahead, back = passes("mi300x", "", 512, keys, (keys + 1) / 2, 128)
    assert 1e9 * ahead == pytest.approx(flops / forward, rel=0.02)
    assert 1e9 * back == pytest.approx(2.5 * flops / backward, rel=0.02)


def test_grouped_products_of_instinct_take_what_its_maker_measured() -> None:
    """The means of both passes on MI355X are within 3 % of Primus-Turbo's table of DeepSeek-V3's experts (pull 252)."""
    rates = rates_of(find_device("mi355x").device, "bf16", 0.0, Efficiencies())
    ahead, back = list[float](), list[float]()
    for experts, n, k in ((b, *shape) for b in (8, 16, 32) for shape in ((4096, 7168), (7168, 2048))):
        flops, moved = 2.0 * experts * 4096 * n * k, 2.0 * experts * (4096 * (n + k) + n * k)
        op = Op(name="up", kind="grouped", region="mlp", rows=4096, columns=n, inner=k, batch=experts, flops=flops,
                forward_bytes=moved, backward_flops=flops, backward_bytes=moved, weight_flops=flops,
                weight_bytes=moved)  # fmt: skip
        ahead.append(flops / kernel_seconds(rates, op, "forward"))
        back.append(2 * flops / (kernel_seconds(rates, op, "input") + kernel_seconds(rates, op, "weight")))
    assert mean(ahead) == pytest.approx(1164.77e12, rel=0.03)
    assert mean(back) == pytest.approx(1091.87e12, rel=0.03)


def test_a_norm_in_steps_takes_longer_than_a_fused_one() -> None:
    """On a CPU the same norm costs more where the framework writes it out."""
    rates = rates_of(CPU, "fp32", 0.0, Efficiencies())
    steps, fused = (
        kernel_seconds(rates, norm(y, "norm1", 512, "rmsnorm", y.residual("input", 512, "")), "forward")
        for y in (layout("pytorch-cpu"), layout("pytorch"))
    )
    assert steps > fused


def test_every_kind_of_the_constants_is_one_that_operators_have() -> None:
    """The kinds with a rate of their own are those that kernels are measured for."""
    known = {kind for kind, _ in MEASURED_KERNELS.values()}
    for dtype, kinds in constants().families["cpu"].memory.kinds_by_type.items():
        assert set(kinds) <= known, dtype


def test_other_processors_take_the_constants_of_the_measured_one_and_say_so() -> None:
    """A CPU that was not measured is priced like the one that was, with a note."""
    other = find_device("cpu-generic").device
    assert family_of(CPU) == "cpu"
    assert family_of(other) == "cpu-other"
    assert "Zen 4" in rates_of(other, "fp32", 0.0, Efficiencies()).assumptions[0]
    assert not rates_of(CPU, "fp32", 0.0, Efficiencies()).assumptions


def test_ideal_kernels_have_neither_kinds_nor_blocks() -> None:
    """Where all efficiencies are one, kinds do not differ."""
    rates = rates_of(CPU, "fp32", 0.0, Efficiencies(ideal=True))
    assert not rates.attention_blocks.keys
    assert not rates.bandwidth_shares.shares


def test_operators_are_told_apart_by_what_they_do() -> None:
    """A norm of one kernel and one in steps are different kinds."""
    kinds = [
        kind_of(norm(y, "norm1", 8, "rmsnorm", y.residual("input", 8, "")))
        for y in (layout("pytorch-cpu"), layout("pytorch"))
    ]
    assert kinds == ["norm in steps", "norm"]


@pytest.mark.parametrize(("tokens", "tokens_per_second"), [(8192, 12.62e6), (16384, 12.92e6), (32768, 11.80e6)])
def test_a_chunked_scan_takes_what_its_kernels_were_measured_to(tokens: int, tokens_per_second: float) -> None:
    """mamba_ssm's forward kernels on one H100 (vllm-project/vllm pull 27299): 0.55 of the streaming rate on Hopper."""
    work = TokenBatch(B=1, S=tokens, context=0, dtype="bf16")
    y = lay_out(WHOLE, work, LayoutOptions(stack=find_stack("megatron")))
    mixer = Mamba2(heads=128, head_dim=64, groups=1, state=128, conv=4, chunk=256)
    (scan,) = [op for op in mamba2(y, mixer, 4096, y.residual("norm1.output", 4096, "norm1")) if op.kind == "scan"]
    rates = rates_of(find_device("h100-sxm-80gb").device, "bf16", 0.0, Efficiencies())
    assert kernel_seconds(rates, scan, "forward") == pytest.approx(tokens / tokens_per_second, rel=0.1)
