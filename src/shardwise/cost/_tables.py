"""The stored constants: what `accuracy.calibration` fitted, and what single sources state, merged by family.

constants.toml is written by the calibration, with the rows and the residual beside every entry, and cpu.toml by
`accuracy.measuring --fit` from kernels of its own; priors.toml holds what no table covers, each with its source.
They are read once, into records (`_records`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.cost._load import record
from shardwise.cost._records import CollectiveFit, Constants, Family, Gemm, Rules
from shardwise.files import own_table
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
    return own_table(__file__, name)


def stored() -> dict[str, Any]:
    """Return the tables of the files as one; a family that extends another holds what it does not state itself."""
    table = merged(merged(completed(_read("constants.toml")), _read("priors.toml")), _read("cpu.toml"))
    return {name: _whole(table, name) for name in table}


# Tables that are no family of devices: of networks, of all families, and what experts share before it is spread.
_OTHERS = ("network", "passes", "shared")


@cache
def constants() -> Constants:
    """Return every stored constant; raises `ValueError` for a key that no record has, or one that is missing.

    >>> constants().families["hopper"].memory.cached_bytes
    50000000.0
    """
    table = stored()
    families = {name: record(Family, row, name) for name, row in table.items() if name not in _OTHERS}
    verbs = {verb: record(CollectiveFit, row, f"network.{verb}") for verb, row in table["network"]["verbs"].items()}
    rules = {name: row for name, row in table["passes"].items() if name != "devices"}
    return Constants(families=families, network=verbs, rules=record(Rules, rules, "passes"))


def completed(table: dict[str, Any]) -> dict[str, Any]:
    """Return fitted constants by family, each row with what it leaves out to others.

    Products of other types take the form of those in 16 bits, kernels of experts what all kernels of experts share.

    >>> rows = {"bf16": {"compute": 0.8, "depth": 9.0, "source": "a table"}, "fp8": {"compute": 0.7}}
    >>> completed({"hopper": {"matmul": rows}})["hopper"]["matmul"]["fp8"]
    {'compute': 0.7, 'depth': 9.0}
    """
    shared = table.get("shared", {}).get("experts", {})
    return {family: rows if family == "shared" else _with_shared(rows, shared) for family, rows in table.items()}


def _with_shared(rows: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    types = rows.get("matmul", {})
    form = {name: value for name, value in types.get("bf16", {}).items() if isinstance(value, (int, float))}
    found = {"matmul": {dtype: form | row for dtype, row in types.items()}} if types else {}
    experts = {
        engine: {t: {k: shared | row for k, row in kernels.items()} for t, kernels in by_type.items()}
        for engine, by_type in rows.get("experts", {}).items()
    }
    return rows | found | ({"experts": experts} if experts else {})


def _whole(table: dict[str, Any], name: str) -> dict[str, Any]:
    row = table[name]
    return merged(_whole(table, row["extends"]), row) if "extends" in row else row


def family_of(device: Device) -> str:
    """Return the family of constants that covers a device, "generic" when none does.

    >>> from shardwise.hardware import find_device
    >>> family_of(find_device("h100-sxm-80gb").device)
    'hopper'
    """
    for family, row in constants().families.items():
        if any(device.name == d or device.name.startswith(d + "-") for d in row.devices):
            return family
    return "generic"


def family_with(kind: str, family: str) -> str:
    """Return a family if kernels of a kind were measured on it, else the one that stands in for it.

    Source: `passes.stand_in` of priors.toml.

    >>> family_with("decode_kernels", "hopper"), family_with("decode_kernels", "cdna")
    ('hopper', 'ampere')
    """
    return family if getattr(constants().families[family], kind) else constants().rules.stand_in.family


def last_cache_bytes(device: Device) -> float:
    """Return bytes of the last cache: those that a device states, else those of its family's measured one, else 0.

    >>> from shardwise.hardware import find_device
    >>> [last_cache_bytes(find_device(name).device) for name in ("h100-sxm-80gb", "l4", "tpu-v5e")]
    [50000000.0, 48000000.0, 0.0]
    """
    if device.knows("last_cache_bytes"):
        return float(device.last_cache_bytes)
    return constants().families[family_of(device)].memory.cached_bytes


def bandwidth_of(device: Device) -> float:
    """Return bytes a second of a device's memory that constants of its family are shares of.

    GDDR memory holds the check bits of errors among the data, where they are on: a sixteenth of what is read. The rest
    counts by what the measured device of the family keeps of its datasheet's. Source: `passes.checked_memory` of
    priors.toml.

    >>> from shardwise.hardware import find_device
    >>> [f"{bandwidth_of(find_device(name).device):.4g}" for name in ("rtx-4090", "l40s", "a40", "a100-sxm-80gb")]
    ['1.075e+12', '8.64e+11', '6.525e+11', '2.039e+12']
    """
    rule = constants().rules.checked_memory
    own, measured = device.name in rule.devices, family_of(device) in rule.families
    return device.memory_bytes_per_second * float(rule.share ** (own - measured))


def matmul_row(family: str, dtype: str) -> tuple[Gemm, str]:
    """Return the fit for a data type, or the nearest one of the family with the word of what stands in."""
    rows = constants().families[family].matmul
    if dtype in rows:
        return rows[dtype], ""
    if dtype == "fp16" and "bf16" in rows:
        return rows["bf16"], ""
    wide = "fp8" if dtype in ("int8", "fp4", "int4") else "bf16"
    if wide in rows:
        return rows[wide], f"{dtype} matrix products use the {wide} efficiency of {family}"
    generic = constants().families["generic"].matmul
    return generic[wide], f"{dtype} matrix products use the generic {wide} efficiency"
