"""Which constants rows take from others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shardwise.cost import Efficiencies, ExpertsFit, constants, family_of, gemm_rates, last_cache_bytes, rates_of
from shardwise.cost._operators import gemm_seconds
from shardwise.cost._tables import completed, stored
from shardwise.hardware import find_device

WIDE = {"compute": 0.8, "depth": 40.0, "source": "a table", "by_device": {"gh200-96gb": 1.02}}


def _products(**types: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = completed({"hopper": {"matmul": {"bf16": WIDE, **types}}})["hopper"]["matmul"]
    return found


def test_narrow_types_take_the_form_of_16_bits() -> None:
    """A type has the constants of 16 bits that it does not state, but neither their source nor factors of devices."""
    assert _products(fp8={"compute": 0.6})["fp8"] == {"compute": 0.6, "depth": 40.0}
    assert _products(fp8={"compute": 0.6, "depth": 9.0})["fp8"] == {"compute": 0.6, "depth": 9.0}
    assert _products()["bf16"] == WIDE


def test_kernels_of_experts_share_what_they_do_not_state() -> None:
    """A kernel's own constant stands before that of all kernels."""
    kernels = {"one": {"compute": 0.5}, "two": {"compute": 0.6, "memory": 0.3}}
    table = {"shared": {"experts": {"memory": 0.9}}, "ada": {"experts": {"vllm": {"bf16": kernels}}}}
    found = completed(table)
    assert found["ada"]["experts"]["vllm"]["bf16"]["one"] == {"memory": 0.9, "compute": 0.5}
    assert found["ada"]["experts"]["vllm"]["bf16"]["two"] == {"memory": 0.3, "compute": 0.6}
    assert found["shared"] == table["shared"]


def test_every_stored_kernel_of_experts_is_whole() -> None:
    """No kernel of the stored constants lacks one of the form, its own or shared.

    Rows of experts without a token follow from an engine's source, and no table is searched for them.
    """
    form = {f.name for f in fields(ExpertsFit)} - {"empty_rows"}
    for table in stored().values():
        for types in table.get("experts", {}).values() if "devices" in table else ():
            for kernels in types.values():
                for row in kernels.values():
                    assert form <= row.keys()


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("a100-sxm-80gb", 40),
        ("h100-sxm-80gb", 50),
        ("h200-sxm-141gb", 50),
        ("b200-sxm-180gb", 126),
        ("b300", 126),
        ("gb200", 126),
        ("gb300", 126),
        ("l40s", 96),
        ("rtx-pro-6000-server", 128),
    ],
)
def test_devices_whose_kernels_were_measured_have_the_cache_of_their_family(name: str, megabytes: int) -> None:
    """Constants were fitted with the family's size: a device of the tables states that one, or none."""
    device = find_device(name).device
    assert last_cache_bytes(device) == constants().families[family_of(device)].memory.cached_bytes == megabytes * 1e6


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [("a10g-24gb", 6), ("rtx-3090", 6), ("a30", 24), ("l4", 48), ("rtx-4090", 72), ("gb10", 24), ("t4", 4)],
)
def test_the_last_cache_is_that_of_the_device(name: str, megabytes: int) -> None:
    """A device that states its last cache does not take that of the large device of its family."""
    device = find_device(name).device
    assert last_cache_bytes(device) == megabytes * 1e6 < constants().families[family_of(device)].memory.cached_bytes


def test_a_last_cache_that_is_not_stated_is_that_of_the_family() -> None:
    """A device without a figure takes its family's, one of a family without a figure has none, one's own file wins."""
    assert last_cache_bytes(find_device("h20").device) == constants().families["hopper"].memory.cached_bytes
    tpu = find_device("tpu-v5p").device
    assert last_cache_bytes(tpu) == 0.0
    assert last_cache_bytes(tpu.with_values({"last_cache_bytes": 7e6}, "a device file", "2026")) == 7e6


@pytest.mark.parametrize("name", ["a10g-24gb", "l4"])
def test_a_smaller_last_cache_holds_fewer_inputs(name: str) -> None:
    """A product between the sizes of two caches reads its input from memory with the smaller one; others are alike."""
    own = find_device(name).device
    family = constants().families[family_of(own)]
    as_large = own.with_values({"last_cache_bytes": family.memory.cached_bytes}, "its family's", "2026")
    row = family.matmul["bf16"]
    small, large = (gemm_rates(d, "bf16", row, Efficiencies()) for d in (own, as_large))
    between = 0.85 * last_cache_bytes(as_large)
    for moved, alike in ((0.85 * last_cache_bytes(own), True), (between, False), (2 * between, True)):
        shape = (moved / 4 / 2048, 1024.0, 2048.0, 1.0)
        seconds = [gemm_seconds(rates, shape, moved) for rates in (small, large)]
        assert (seconds[0] == seconds[1]) == alike and seconds[0] >= seconds[1]


@pytest.mark.parametrize(
    ("name", "share"), [("rtx-4090", 16 / 15), ("l40s", 1.0), ("a40", 15 / 16), ("rtx-a6000", 1.0)]
)
def test_memory_that_checks_its_errors_in_line_is_slower(name: str, share: float) -> None:
    """Products and streams of any work read at what a card keeps beside what its family's measured one does."""
    device = find_device(name).device
    found, table = rates_of(device, "bf16", 0.0, Efficiencies()), constants().families[family_of(device)]
    for rate, fitted in (
        (found.memory_bytes, table.memory.efficiency),
        (found.matmul_bytes, table.matmul["bf16"].memory),
    ):
        assert float(rate) == pytest.approx(share * fitted * device.memory_bytes_per_second)


@pytest.mark.parametrize("name", ["rtx-4090", "a40"])
def test_a_bandwidth_that_the_user_states_is_taken_as_it_is(name: str) -> None:
    """A share of the datasheet, a measured rate and an ideal device know nothing of check bits."""
    device = find_device(name).device
    for imposed, wanted in (
        (Efficiencies(memory=0.5), 0.5 * device.memory_bytes_per_second),
        (Efficiencies(memory_bytes_per_second=3e11), 3e11),
        (Efficiencies(ideal=True), device.memory_bytes_per_second),
    ):
        assert float(rates_of(device, "bf16", 0.0, imposed).memory_bytes) == wanted
