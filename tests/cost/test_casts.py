"""Casts of training in fewer than 16 bits: bytes by recipe and device, and who casts what is gathered."""

from __future__ import annotations

import pytest

from shardwise.cost import Casts, Efficiencies, op_seconds, rates_of
from shardwise.plans import find_scaling
from shardwise.records import replace
from tests.cost.test_operators import H100, product

# Type of products, recipe, whether they take turned copies, and bytes that are read and written for an element.
MOVED = (
    ("fp8", "delayed", True, 2 + 2),
    ("fp8", "delayed", False, 2 + 1),
    ("fp8", "tensorwise", True, 4 + 2),
    ("fp8", "tensorwise", False, 4 + 1),
    ("fp8", "blockwise", True, 2 + 2),
    ("fp8", "mxfp8", False, 2 + 2 * 33 / 32),
    ("fp4", "", False, 4 + 2 * 9 / 16),
)


@pytest.mark.parametrize(("dtype", "recipe", "turned", "moved"), MOVED)
def test_a_cast_reads_once_for_a_maximum_of_now_and_writes_the_copies_of_its_recipe(
    dtype: str, recipe: str, turned: bool, moved: float
) -> None:
    """TransformerEngine: a scale of now takes a pass of its own; a turned copy is written where products need one."""
    scaling = find_scaling(dtype, recipe)
    assert scaling is not None
    op = product(4096, 1024, 512)
    rates = rates_of(H100, "fp8", 0.0, Efficiencies())
    paid = op_seconds(replace(rates, casts=Casts.of(scaling, turned)), op)
    bare = op_seconds(replace(rates, cast_traffic=0.0), op)
    assert paid.forward - bare.forward == pytest.approx(moved * 4096 * 512 / rates.memory_bytes)
    assert paid.backward_input - bare.backward_input == pytest.approx(moved * 4096 * 1024 / rates.memory_bytes)


def test_a_rank_casts_its_part_of_what_is_gathered_and_turns_all_of_it() -> None:
    """Under sequence parallelism inputs are cast before they are gathered where outputs are split, and mirrored."""
    casts = Casts(read=4.0, copies=2.0, turned=1.0)
    outputs = replace(product(4096, 1024, 512), split="outputs", gathered_parts=4)
    inputs = replace(outputs, split="inputs")
    assert casts.moved(outputs, "forward") == casts.moved(inputs, "input") == (4 + 1) / 4 + 2
    assert casts.moved(outputs, "input") == casts.moved(inputs, "forward") == 4 + 2
    assert casts.moved(replace(outputs, gathered_parts=1), "forward") == 4 + 2
    assert replace(casts, copies=1.0, turned=0.0).moved(outputs, "forward") == (4 + 1) / 4
