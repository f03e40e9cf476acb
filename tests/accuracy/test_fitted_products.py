"""The calibration of narrow products finds which constants of the 16-bit form a type has of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accuracy.calibration import products
from accuracy.calibration.tables import Table
from shardwise.cost import constants

DEVICE = "h100-sxm-80gb"


def _form() -> dict[str, Any]:
    row = constants().families["hopper"].matmul["bf16"]
    return {name: float(getattr(row, name)) for name in products.START}


def _tables(**own: float) -> products.Groups:
    """Return products in 8 bits of two engines whose seconds are those of the form with some constants changed."""
    sizes = [(m, n, k) for m in (1, 16, 256, 4096) for n in (1024, 4096, 8192) for k in (512, 4096, 16384)]
    m, n, k = np.array(sizes, float).T
    found: products.Groups = {}
    for engine, factor in (("trtllm", 1.0), ("sglang", 0.8)):
        rows: Table = {"m": m, "n": n, "k": k, "held": 0 * m}
        name = products.ENGINES[engine]
        quantise = {name: {"start_seconds": 2e-6, "efficiency": 0.5}}
        row = _form() | products.NO_VECTORS | {"compute": 0.6 * factor, "quantise": quantise} | own
        rows["time_seconds"] = products.predicted(rows, (DEVICE, engine), row, "fp8")
        found[DEVICE, engine] = rows
    return found


def test_types_that_differ_in_rates_alone_state_no_constant_of_the_form() -> None:
    """Engines state their rate and bandwidth; the row for who names no engine lies between. No vector is faster."""
    row, apart = products.fit_narrow(_tables(), "fp8", _form())
    assert set(row) & (set(products.START) - set(products.OWN)) == set(products.NO_VECTORS)
    assert row["vector_wait_share"] == 1.0
    assert set(row["engines"]["sglang"]) == {"compute", "memory"}
    assert row["engines"]["sglang"]["compute"] < row["compute"] < row["engines"]["tensorrt-llm"]["compute"]
    assert np.median(np.abs(apart)) < 0.02


def test_what_differs_for_a_type_is_found() -> None:
    """A chain three times as long as that of 16 bits becomes the type's own constant."""
    longer = 3 * _form()["chain_seconds"]
    row, _ = products.fit_narrow(_tables(chain_seconds=longer), "fp8", _form())
    assert row["chain_seconds"] == pytest.approx(longer, rel=0.3)
