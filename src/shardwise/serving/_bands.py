"""How far to trust a serving prediction: the spread of published batches over it, by device family and engine."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from shardwise.cost import Band


@cache
def bands() -> dict[str, dict[str, Band]]:
    """Return every band: by quantity, then by family and engine, by family, and "other" for the rest."""
    text = resources.files("shardwise.serving").joinpath("bands.toml").read_text(encoding="utf-8")
    return {name: {key: Band(**row) for key, row in rows.items()} for name, rows in tomllib.loads(text).items()}


def band_of(quantity: str, family: str, engine: str, kernels: str = "") -> Band:
    """Return the band of a quantity for an engine on a device family, or the nearest wider one.

    A version of an engine without a band takes that of the engine whose `kernels` it runs.

    >>> band_of("tpot_seconds", "hopper", "vllm").rows > 100
    True
    """
    rows = bands()[quantity]
    names = (f"{family}.{engine}", f"{family}.{kernels}", family, "other")
    return next(rows[name] for name in names if name in rows)
