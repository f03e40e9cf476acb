"""Types of values in tables of kernels: what each is priced by is there."""

from __future__ import annotations

import pytest

from accuracy.kernels.types import cache_width, types_of
from shardwise.cost import constants
from shardwise.errors import InputError
from shardwise.hardware import find_device
from shardwise.measured._record import Record
from shardwise.serving import find_format

PRODUCTS, EXPERTS = types_of("products"), types_of("experts")


@pytest.mark.parametrize("name", [*PRODUCTS, *EXPERTS])
def test_every_type_has_a_peak_that_some_device_states(name: str) -> None:
    """A type is priced against a peak, so some device has it: A100 that of int8, B200 that of four bits."""
    peak = {**PRODUCTS, **EXPERTS}[name].peak
    assert any(peak in find_device(d).device.matrix_flops for d in ("a100-sxm-80gb", "b200-sxm-180gb"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_type_have_constants_in_some_family(name: str) -> None:
    """What a type names as its constants was fitted; fp16 takes those of bf16."""
    row = PRODUCTS[name].row
    assert row == "fp16" or any(row in family.matmul for family in constants().families.values())


def test_types_of_both_tables_are_the_same_type() -> None:
    """Experts and products of one name have weights of the same bytes."""
    assert {n: t for n, t in EXPERTS.items() if n in PRODUCTS} == {n: t for n, t in PRODUCTS.items() if n in EXPERTS}


def test_inputs_are_stored_with_the_scales_of_their_format() -> None:
    """A type of four bits has a scale for every 16 elements of inputs as of weights."""
    assert PRODUCTS["nvfp4"].input_bytes == PRODUCTS["nvfp4"].weight_bytes == find_format("nvfp4").bytes
    assert PRODUCTS["int8_wo"].input_bytes == 2 * PRODUCTS["int8_wo"].weight_bytes


def test_a_cache_is_as_wide_as_its_format() -> None:
    """Types of 8 bits take a byte whatever they are called; one that nobody has is refused and never taken for 16."""
    widths = [cache_width(Record({"kv_dtype": word})) for word in ("fp8", "fp8_e4m3", "int8", "fp16", "")]
    assert widths == [1, 1, 1, 2, 2]
    with pytest.raises(InputError, match="kv_dtype = 'fp7': is not a type of caches"):
        cache_width(Record({"kv_dtype": "fp7"}))
