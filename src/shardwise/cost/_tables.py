"""The stored constants: what `benchmarks/calibrate.py` fitted, and what single sources state, merged by family.

constants.toml is written by the calibration, with the rows and the residual beside every entry, and cpu.toml by
`benchmarks/measure.py --fit` from kernels of its own; priors.toml holds what no table covers, each with its source.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from shardwise.hardware import Device


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return two nested tables as one; where both state a value the second holds.

    >>> merged({"a": {"b": 1}}, {"a": {"c": 2}})
    {'a': {'b': 1, 'c': 2}}
    """
    found = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("shardwise.cost").joinpath(name).read_text(encoding="utf-8"))


@cache
def constants() -> dict[str, Any]:
    """Return the table of constants by family; a family that extends another holds what it does not state itself."""
    table = merged(merged(_read("constants.toml"), _read("priors.toml")), _read("cpu.toml"))
    return {name: _whole(table, name) for name in table}


def _whole(table: dict[str, Any], name: str) -> dict[str, Any]:
    row = table[name]
    return merged(_whole(table, row["extends"]), row) if "extends" in row else row


def family_of(device: Device) -> str:
    """Return the family of constants that covers a device, "generic" when none does.

    >>> from shardwise.hardware import find_device
    >>> family_of(find_device("h100-sxm-80gb").device)
    'hopper'
    """
    for family, row in constants().items():
        if any(device.name == d or device.name.startswith(d + "-") for d in row.get("devices", ())):
            return family
    return "generic"


def matmul_row(table: dict[str, Any], family: str, dtype: str) -> tuple[dict[str, Any], str]:
    """Return the fit for a data type, or the nearest one of the family with the word of what stands in."""
    rows = table[family]["matmul"]
    if dtype in rows:
        return rows[dtype], ""
    if dtype == "fp16" and "bf16" in rows:
        return rows["bf16"], ""
    wide = "fp8" if dtype in ("int8", "fp4", "int4") else "bf16"
    if wide in rows:
        return rows[wide], f"{dtype} matrix products use the {wide} efficiency of {family}"
    return table["generic"]["matmul"][wide], f"{dtype} matrix products use the generic {wide} efficiency"
