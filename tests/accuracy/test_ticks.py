"""Tables of Blackwell state whole ticks of its clock: what follows from that, and where there are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accuracy.kernels.ticks import Ticks, ticks_of
from shardwise.hardware import find_device

KERNELS = st.floats(1e-7, 1e-3)
TABLES = st.builds(Ticks, st.sampled_from([0.0, 2e-6]), st.integers(1, 6), st.integers(2, 20), st.floats(0, 1e-5))


@given(TABLES, KERNELS, KERNELS)
def test_a_longer_kernel_is_never_stated_shorter(table: Ticks, a: float, b: float) -> None:
    """Whole ticks grow with the kernel, and so does the last replay."""
    short, long = sorted((a, b))
    assert table.stated(short) <= table.stated(long)


@given(TABLES, KERNELS)
def test_a_kernel_is_one_of_those_that_its_table_states_so(table: Ticks, seconds: float) -> None:
    """The cell moves with the last replay, which ends off the ticks, by half of its share of one; it is above zero."""
    stated = table.stated(seconds)
    low, high = table.kernel(stated)
    slack = table.seconds / table.kernels / table.replays / 2 + 1e-12
    assert min(low, 0.1 * stated) > 0
    assert low - slack <= max(seconds, 0.1 * stated) <= high + slack


def test_kernels_within_one_tick_are_stated_alike() -> None:
    """Attention of 8.3 and of 10.1 us on B200 is stated as 11 us; only the last of 20 replays tells them apart."""
    b200 = find_device("b200-sxm-180gb").device
    table = ticks_of("attention", "sglang", b200)
    assert table.stated(10.1e-6) - table.stated(8.3e-6) == pytest.approx(1.8e-6 / 20)
    assert table.stated(10.3e-6) - table.stated(10.1e-6) > 1.9e-6


@pytest.mark.parametrize(
    ("table", "engine", "device"),
    [("attention", "vllm", "h100-sxm-80gb"), ("gemm", "trtllm", "l40s"), ("moe", "vllm", "gb200"),
     ("attention", "vidur", "b300"), ("memory", "", "b200-sxm-180gb")],
)  # fmt: skip
def test_other_devices_and_tables_state_what_kernels_take(table: str, engine: str, device: str) -> None:
    """Hopper and Ada have no ticks, tables of experts show none, and other laboratories time otherwise."""
    found = ticks_of(table, engine, find_device(device).device, "bf16", 1e6)
    assert found.stated(3.3e-6) == 3.3e-6
    assert found.kernel(3.3e-6) == (3.3e-6, 3.3e-6)


def test_a_table_that_calls_kernels_from_the_host_has_no_ticks() -> None:
    """Others replay as many copies of a product as their collector makes."""
    b200 = find_device("b200-sxm-180gb").device
    assert not ticks_of("gemm", "vllm", b200, "fp8_block", 1e6).seconds
    assert ticks_of("gemm", "vllm", b200, "fp8", 1e6).kernels == 6
    assert ticks_of("gemm", "trtllm", b200, "fp8", 63e6).kernels == 2
