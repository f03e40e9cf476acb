"""From a table of a TOML file to a record: a key that the record does not have, or lacks, is an error."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from shardwise.records import dataclass

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

    >>> from shardwise.cost._records import Power
    >>> record(Power, {"exponent": 0.25, "source": "a page", "date": "2026-11"}, "power").exponent
    0.25
    >>> record(Power, {"exponents": 0.25}, "power")
    Traceback (most recent call last):
    ...
    ValueError: power: exponents is no constant of Power; exponent may be meant
    """
    spec = _spec_of(cls)
    found, rest = {}, {}
    for key, value in row.items():
        if key in spec.converts and key != spec.rest:
            found[key] = spec.converts[key](value, f"{where}.{key}")
        elif spec.rest and isinstance(value, Mapping):
            rest[key] = value
        elif key not in _SAID and not _beside(key, spec.converts):
            raise _unknown(key, cls, spec, where)
    if spec.rest:
        found[spec.rest] = spec.converts[spec.rest](rest, where)
    if missing := [name for name in spec.required if name not in found]:
        raise ValueError(f"{where}: {', '.join(missing)} of {cls.__name__} is not stated")
    return cls(**found)


def _unknown(key: str, cls: type[Any], spec: _Spec, where: str) -> ValueError:
    near = difflib.get_close_matches(key, spec.converts, 1)
    hint = f"; {near[0]} may be meant" if near else ""
    return ValueError(f"{where}: {key} is no constant of {cls.__name__}{hint}")


def _beside(key: str, known: Mapping[str, Any]) -> bool:
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
    unknown = [key for key in row if key not in spec.converts and key not in _SAID and not _beside(key, spec.converts)]
    if unknown:
        raise _unknown(unknown[0], cls, spec, where)
    return {key: spec.converts[key](value, f"{where}.{key}") for key, value in row.items() if key in spec.converts}


def _said_of(name: str, entries: Mapping[str, Any]) -> bool:
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
            name: each(one, f"{where}.{name}") for name, one in value.items() if not _said_of(name, value)
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
