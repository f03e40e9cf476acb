"""The catalogue: one small TOML file a device, one file of other names; finding a device reads only what it needs."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from shardwise.errors import InputError
from shardwise.files import read_toml
from shardwise.hardware._clouds import instance_names
from shardwise.hardware._device import Device
from shardwise.hardware._links import find_link
from shardwise.hardware._quantity import fail, nearest
from shardwise.hardware._toml import device_from_table, in_file
from shardwise.records import dataclass
from shardwise.user_catalogue import OwnFile, find_own, note_of, own_files

_HERE = Path(__file__).parent
_FOLDER = _HERE / "catalogue"
_PLAIN = re.compile(r"[a-z0-9.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A device that was found by name, and what had to be assumed to find it."""

    device: Device
    assumptions: tuple[str, ...]


def device_names() -> tuple[str, ...]:
    """Return the names of all devices in the catalogue and of the user's, sorted.

    >>> "h100-sxm-80gb" in device_names()
    True
    """
    return tuple(sorted({*(path.stem for path in _FOLDER.glob("*.toml")), *(own.name for own in own_files("devices"))}))


def find_device(name: str) -> Lookup:
    """Return the device with this name, another name of it, or the name that a driver prints.

    >>> find_device("NVIDIA H100 80GB HBM3").device.name
    'h100-sxm-80gb'
    >>> find_device("h100").assumptions
    ('h100 taken as h100-sxm-80gb: the SXM5 board with 80 GB is the common one',)
    """
    if not isinstance(name, str):
        fail("device", name, "must be the name of a device", "write a name such as h100-sxm-80gb")
    own = find_own("devices", name.strip())
    if own is not None:
        return Lookup(device=_own_device(own), assumptions=(note_of(own),))
    return _find(re.sub(r"[\s_]+", "-", name.strip().lower()))


@cache
def _own_device(file: OwnFile) -> Device:
    return load_device(file.path)


def load_device(path: str | Path) -> Device:
    """Return the device that a TOML file describes; the format is that of the catalogue, see `device_to_toml`."""
    place = Path(path)
    device = device_from_table(read_toml(place, "device"), place.name)
    try:
        find_link(device.fast_link)
    except InputError as error:
        raise InputError(in_file(place.name, error.problems)) from None
    return device


@cache
def other_names() -> dict[str, tuple[str, str]]:
    """Return other names of devices: name -> (catalogue name, what is assumed by taking it so, or "")."""
    table = read_toml(_HERE / "other_names.toml")
    return {name: (str(device), "") for name, device in _strings(table, "same").items()} | {
        name: (row["device"], f"{name} taken as {row['device']}: {row['because']}")
        for name, row in _rows(table, "assumed").items()
    }


@cache
def _find(name: str) -> Lookup:
    if _PLAIN.fullmatch(name) and os.path.isfile(_FOLDER / f"{name}.toml"):
        return Lookup(device=_read(name), assumptions=())
    others = other_names()
    if name not in others:
        known = nearest(name, {*device_names(), *others, *instance_names()})
        fail("device", name, "is neither a device nor a cloud instance that is known", f"use {known}, or a TOML file")
    target, assumption = others[name]
    return Lookup(device=_read(target), assumptions=(assumption,) if assumption else ())


@cache
def _read(name: str) -> Device:
    return device_from_table(read_toml(_FOLDER / f"{name}.toml"), f"{name}.toml")


def _strings(table: dict[str, object], key: str) -> dict[str, object]:
    found = table[key]
    return found if isinstance(found, dict) else {}


def _rows(table: dict[str, object], key: str) -> dict[str, dict[str, str]]:
    return {name: row for name, row in _strings(table, key).items() if isinstance(row, dict)}
