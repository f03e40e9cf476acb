"""The stored constants: what `accuracy.calibration` fitted, and what single sources state, merged by family.

constants.toml is written by the calibration, with the rows and the residual beside every entry, and cpu.toml by
`accuracy.measuring --fit` from kernels of its own; priors.toml holds what no table covers, each with its source.
They are read once, into records (`_records`), those of a family when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from shardwise.cost._records import CollectiveFit, Constants, DeviceFamily, Gemm
from shardwise.cost._shared import SharedConstants
from shardwise.errors import near
from shardwise.files import own_table
from shardwise.hardware import Device
from shardwise.records import dataclass, replace


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return two nested tables as one; where both state a value the second holds.

    >>> merged({"a": {"b": 1}}, {"a": {"c": 2}})
    {'a': {'b': 1, 'c': 2}}
    """
    table = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(table.get(key), dict)
        table[key] = merged(table[key], value) if both else value
    return table


def _read(name: str) -> dict[str, Any]:
    return own_table(__file__, name)


@cache
def stored() -> dict[str, Any]:
    """Return the tables of the files as one; a family that extends another holds what it does not state itself."""
    table = merged(merged(completed(_read("constants.toml")), _read("priors.toml")), _read("cpu.toml"))
    return {name: _whole(table, name) for name in table}


# Tables that are no family of devices: of networks, of all families, and what experts share before it is spread.
_OTHERS = ("network", "passes", "shared")


def _families() -> dict[str, dict[str, Any]]:
    """Return the tables of families of devices as they are stored."""
    return {name: row for name, row in stored().items() if name not in _OTHERS}


class _Families(Mapping[str, DeviceFamily]):
    """The constants of families, each family read when it is first asked for: an answer needs two of a dozen."""

    def __init__(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._rows, self._read = rows, dict[str, DeviceFamily]()

    def __getitem__(self, name: str) -> DeviceFamily:
        if name not in self._read:
            self._read[name] = record(DeviceFamily, self._rows[name], name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@cache
def constants() -> Constants:
    """Return every stored constant; a key that no record has, or one that is missing, is a `ValueError` when read.

    >>> constants().families["hopper"].memory.cached_bytes
    50000000.0
    """
    table = stored()
    verbs = {verb: record(CollectiveFit, row, f"network.{verb}") for verb, row in table["network"]["verbs"].items()}
    rules = {name: row for name, row in table["passes"].items() if name != "devices"}
    return Constants(families=_Families(_families()), network=verbs, rules=record(SharedConstants, rules, "passes"))


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
    filled = {"matmul": {dtype: form | row for dtype, row in types.items()}} if types else {}
    experts = {
        engine: {t: {k: shared | row for k, row in kernels.items()} for t, kernels in by_type.items()}
        for engine, by_type in rows.get("experts", {}).items()
    }
    return rows | filled | ({"experts": experts} if experts else {})


def _whole(table: dict[str, Any], name: str) -> dict[str, Any]:
    row = table[name]
    return merged(_whole(table, row["extends"]), row) if "extends" in row else row


def family_of(device: Device) -> str:
    """Return the family of constants that covers a device, "generic" when none does.

    >>> from shardwise.hardware import find_device
    >>> family_of(find_device("h100-sxm-80gb").device)
    'hopper'
    """
    return _family_named(device.chip)


@cache
def _family_named(name: str) -> str:
    covers = ((family, row.get("devices", ())) for family, row in _families().items())
    own = (family for family, known in covers if any(name == d or name.startswith(d + "-") for d in known))
    return next(own, "generic")


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
    own, measured = device.chip in rule.devices, family_of(device) in rule.families
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
        row = rows[wide]
        if dtype == "fp32":  # what tensor cores of a device reach beyond those of its family says nothing of its others
            shares = {device: min(share, 1.0) for device, share in row.steady_state_by_device.items()}
            row = replace(row, steady_state_by_device=shares)
        return row, f"{dtype} GEMMs use the {wide} efficiency of {family}"
    generic = constants().families["generic"].matmul
    return generic[wide], f"{dtype} GEMMs use the generic {wide} efficiency"


T = TypeVar("T")
Convert: TypeAlias = Callable[[Any, str], Any]
# What may stand beside any constant for whoever reads the file.
_SAID = frozenset({"date", "residual", "source"})
_OF_ONE = ("_source", "_residual")


@dataclass(frozen=True, slots=True)
class _Spec:
    """How a class of records is read: its fields, those that must be stated, and the one that takes what is left."""

    converts: Mapping[str, Convert]
    required: tuple[str, ...]
    rest: str


def record(cls: type[T], row: Mapping[str, Any], where: str) -> T:
    """Return the record that a table states; raises `ValueError` with the place and the nearest key that is known.

    >>> from shardwise.cost._shared import PowerConstants
    >>> record(PowerConstants, {"exponent": 0.25, "source": "a page", "date": "2026-11"}, "power").exponent
    0.25
    >>> record(PowerConstants, {"exponents": 0.25}, "power")
    Traceback (most recent call last):
    ...
    ValueError: power: exponents is no constant of PowerConstants; exponent may be meant
    """
    spec = _spec_of(cls)
    values, rest = {}, {}
    for key, value in row.items():
        if key in spec.converts and key != spec.rest:
            values[key] = spec.converts[key](value, f"{where}.{key}")
        elif spec.rest and isinstance(value, Mapping):
            rest[key] = value
        elif key not in _SAID and not _is_source(key, spec.converts):
            raise _unknown(key, cls, spec, where)
    if spec.rest:
        values[spec.rest] = spec.converts[spec.rest](rest, where)
    if missing := [name for name in spec.required if name not in values]:
        raise ValueError(f"{where}: {', '.join(missing)} of {cls.__name__} is not stated")
    return cls(**values)


def _unknown(key: str, cls: type[Any], spec: _Spec, where: str) -> ValueError:
    close = near(key, spec.converts)
    hint = f"; {close[0]} may be meant" if close else ""
    return ValueError(f"{where}: {key} is no constant of {cls.__name__}{hint}")


def _is_source(key: str, known: Mapping[str, Any]) -> bool:
    """Return whether a key says where a constant of the record comes from, or what its fit leaves."""
    base = next((key.removesuffix(end) for end in _OF_ONE if key.endswith(end)), "")
    return bool(base) and any(base in name for name in known)


_SPECS: dict[Any, _Spec] = {}


def _spec_of(cls: type[Any]) -> _Spec:
    """Return how a class is read, worked out once."""
    if cls not in _SPECS:
        _SPECS[cls] = _made(cls)
    return _SPECS[cls]


def _made(cls: type[Any]) -> _Spec:
    hints = get_type_hints(cls)
    own = fields(cls)
    converts = {one.name: _partial(cls) if one.metadata.get("partial") else _convert(hints[one.name]) for one in own}
    needed = (one.name for one in own if one.default is MISSING and one.default_factory is MISSING)
    rest = next((one.name for one in own if one.metadata.get("rest")), "")
    return _Spec(converts, tuple(needed), rest)


def _partial(cls: type[Any]) -> Convert:
    """Return what reads tables that each state some fields of a record."""

    def read(value: Any, where: str) -> dict[str, dict[str, Any]]:
        return {name: changes(cls, row, f"{where}.{name}") for name, row in value.items()}

    return read


def changes(cls: type[Any], row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a record that a table states, each read as the record's."""
    spec = _spec_of(cls)
    unknown = [
        key for key in row if key not in spec.converts and key not in _SAID and not _is_source(key, spec.converts)
    ]
    if unknown:
        raise _unknown(unknown[0], cls, spec, where)
    return {key: spec.converts[key](value, f"{where}.{key}") for key, value in row.items() if key in spec.converts}


def _names_a_source(name: str, entries: Mapping[str, Any]) -> bool:
    """Return whether a name says where another entry comes from."""
    return any(name.endswith(end) and name.removesuffix(end) in entries for end in _OF_ONE)


def _convert(hint: Any) -> Convert:
    """Return what reads a value of a type: numbers, words, flags, records, tables of them, tuples."""
    if hint is Any:
        return lambda value, where: value
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (only,) = (one for one in inner if one is not NoneType)
        return _convert(only)
    if is_dataclass(hint):
        kind: Any = hint
        return lambda value, where: record(kind, value, where)
    if origin is not None and issubclass(origin, Mapping):
        each = _convert(inner[1])
        return lambda value, where: {
            name: each(one, f"{where}.{name}") for name, one in value.items() if not _names_a_source(name, value)
        }
    if origin is tuple:
        each = _convert(inner[0])
        return lambda value, where: tuple(each(one, where) for one in value)
    return _plain(hint)


def _plain(kind: Any) -> Convert:
    """Return what reads a number, a word or a flag, and refuses another."""
    accepted = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}[kind]

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{where}: {value!r} is no {kind.__name__}")
        return kind(value)

    return read
