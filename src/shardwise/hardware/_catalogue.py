"""The catalogue: one small TOML file a device, one file of other names; finding a device reads only what it needs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from shardwise.errors import InputError, Problem, Problems, close_to, nearest, plain
from shardwise.field_types import typed
from shardwise.files import own_table, read_toml
from shardwise.hardware._clouds import instance_names
from shardwise.hardware._device import Device, Fact, find_link, read_field
from shardwise.hardware._quantity import fail
from shardwise.records import dataclass, replace
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


@typed
def load_device(path: str | Path) -> Device:
    """Return the device that a TOML file describes, in SI units; raises `InputError` with all that is wrong in it.

    The format is that of the catalogue, each fact with the key of its source, as `device_to_toml` writes it.

    >>> from shardwise.hardware import device_to_toml
    >>> file = getfixture("tmp_path") / "h100-sxm-80gb.toml"
    >>> _ = file.write_text(device_to_toml(find_device("h100-sxm-80gb").device))
    >>> load_device(file).memory_bytes_per_second
    3350000000000.0
    """
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
    table = own_table(__file__, "other_names.toml")
    return {name: (str(device), "") for name, device in _strings(table, "same").items()} | {
        name: (row["device"], f"{name} taken as {row['device']}: {row['because']}")
        for name, row in _rows(table, "assumed").items()
    }


_APPLE = re.compile(r"(apple-?)?(m\d+(-?(pro|max|ultra)\S*)?|mac\S*)")


# What stands before a name and tells no two devices apart; the memory's unit; the series of cards named by numbers.
_MAKERS = re.compile(r"^(nvidia-|geforce-|amd-|instinct-|radeon-|intel-|google-|cloud-|tesla-)+")
_SERIES = ("rtx-", "rx-", "tpu-", "tpu-v")


def spelled(name: str) -> str:
    """Return the name of a device or another name of it that a word means, empty where it means none.

    Makers, signs between letters and digits, a missing b of GB and the series of a numbered card do not matter.

    >>> spelled("m3max"), spelled("GeForce RTX 4090"), spelled("4090"), spelled("a100-80g"), spelled("frob")
    ('m3-max', 'rtx-4090', 'rtx-4090', 'a100-80gb', '')
    """
    name = re.sub(r"[\s_]+", "-", name.strip().lower())
    known = _spellings()
    plain = re.sub(r"(\d)g$", r"\1gb", _MAKERS.sub("", name))
    tried = (name, plain, *(series + plain for series in _SERIES if len(plain) > 2))
    return next((name_of for one in tried if (name_of := known.get(one.replace("-", "")))), "")


@cache
def _spellings() -> dict[str, str]:
    names = (*other_names(), *(path.stem for path in _FOLDER.glob("*.toml")))
    return {name.replace("-", ""): name for name in names}


@cache
def _find(name: str) -> Lookup:
    others = other_names()
    name = name if name in others else spelled(name) or name
    if _PLAIN.fullmatch(name) and os.path.isfile(_FOLDER / f"{name}.toml"):
        return Lookup(device=_read(name), assumptions=())
    if name not in others:
        # Apple's chips are called by fewer letters than tell them apart from other makers' devices.
        mac = [one for one in device_names() if one.startswith("apple-")] if _APPLE.fullmatch(name) else []
        mac = [one for one in mac if name.replace("-", "") in one.replace("-", "")] or mac
        names = {*device_names(), *others, *instance_names()}
        near = close_to(name, names)
        known = ", ".join(mac) or (nearest(name, near) if near else "a name that `shardwise devices` lists")
        fail("device", name, "is neither a device nor a cloud instance that is known", f"use {known}, or a TOML file")
    target, assumption = others[name]
    return Lookup(device=_read(target), assumptions=(assumption,) if assumption else ())


@cache
def _read(name: str) -> Device:
    return device_from_table(own_table(__file__, f"catalogue/{name}.toml"), f"{name}.toml")


def _strings(table: dict[str, object], key: str) -> dict[str, object]:
    values = table[key]
    return values if isinstance(values, dict) else {}


def _rows(table: dict[str, object], key: str) -> dict[str, dict[str, str]]:
    return {name: row for name, row in _strings(table, key).items() if isinstance(row, dict)}


_TEXTS = ("name", "full_name", "vendor", "fast_link")
_KEYS = (*_TEXTS, "like", "sources", "facts")
_PAIR = 'write [value, "key"] with key = ["source", "date"] under [sources]'
_BY_TYPE = ("matrix_flops", "achieved_flops")


def device_from_table(table: Mapping[str, object], where: str) -> Device:
    """Return the device of a table; every problem names the file (`where`) and the field."""
    if "tiers" in table:
        fail(where, None, "describes a cluster, not a device", "name the file without a number of devices before it")
    problems = Problems()
    for key in sorted(table.keys() - set(_KEYS)):
        problems.add(key, plain(table[key]), "is not a key of a device file", f"use {nearest(key, _KEYS)}")
    texts = {word: _text(table, word, problems) for word in _TEXTS}
    with problems.collect():
        texts["like"] = _like(table, texts["name"])
    sources = _sources(_sub(table, "sources", problems), problems)
    sources[""] = (f"stated in {where}", "undated")
    facts = []
    for name, entry in _flat(_sub(table, "facts", problems)).items():
        with problems.collect():
            facts.append(_fact(name, entry, sources))
    if not problems.items:
        with problems.collect():
            return Device(**texts, sources=tuple(facts))
    raise InputError(in_file(where, problems.items))


def _like(table: Mapping[str, object], name: str) -> str:
    """Return the device of the catalogue that a table names as its like, empty where it names none or itself."""
    stated = table.get("like", "")
    if not isinstance(stated, str):
        fail("like", stated, "must be the name of a device", 'write like = "h100-sxm-80gb", or leave it out')
    if not stated.strip():
        return ""
    try:
        like = _find(re.sub(r"[\s_]+", "-", stated.strip().lower())).device.name
    except InputError as error:
        raise InputError([replace(problem, field="like") for problem in error.problems]) from None
    return "" if like == name else like


def in_file(where: str, problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems with the file's name before the field.

    >>> [problem.field for problem in in_file("my.toml", [Problem("year", 0, "is wrong", "correct it")])]
    ['my.toml: year']
    """
    return [Problem(f"{where}: {p.field}", p.value, p.rule, p.remedy) for p in problems]


def device_to_toml(device: Device) -> str:
    """Return the device as the text of a TOML file that `load_device` reads back to an equal device.

    >>> from shardwise.hardware import find_device
    >>> print(device_to_toml(find_device("generic-8gb").device))
    name = "generic-8gb"
    ...
    """
    keys: dict[tuple[str, str], str] = {}
    for fact in device.sources:
        keys.setdefault((fact.source, fact.date), f"s{len(keys) + 1}")
    lines = [f"{word} = {_quote(getattr(device, word))}" for word in _TEXTS]
    if os.path.isfile(_FOLDER / f"{device.chip}.toml"):
        lines.append(f"like = {_quote(device.chip)}")
    lines += ["", "[sources]"]
    lines += [f"{key} = [{_quote(source)}, {_quote(date)}]" for (source, date), key in keys.items()]
    lines += ["", "[facts]"]
    for fact in device.sources:
        lines.append(f'{fact.field} = [{show_number(fact.value)}, "{keys[fact.source, fact.date]}"]')
    return "\n".join(lines) + "\n"


def show_number(value: float | bool) -> str:
    """Return the shortest TOML number that reads back to the same value.

    >>> show_number(3.35e12), show_number(True), show_number(108)
    ('3.35e12', 'true', '108')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or 1e-3 <= abs(value) < 1e5:
        return repr(value)
    digits = next(text for text in (f"{value:.{places}e}" for places in range(18)) if float(text) == value)
    mantissa, exponent = digits.split("e")
    return f"{mantissa}e{int(exponent)}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(table: Mapping[str, object], word: str, problems: Problems) -> str:
    text = table.get(word)
    if isinstance(text, str) and text.strip():
        return text
    problems.add(word, plain(text), "must be text that is not empty", f'write {word} = "..."')
    return ""


def _sub(table: Mapping[str, object], key: str, problems: Problems) -> Mapping[str, object]:
    sub = table.get(key, {})
    if isinstance(sub, Mapping):
        return sub
    problems.add(key, plain(sub), "must be a table", f"write [{key}]")
    return {}


def _flat(facts: Mapping[str, object]) -> dict[str, object]:
    """Return the facts with the sub-tables of data types spread out, as in matrix_flops.bf16."""
    flat: dict[str, object] = {}
    for name, entry in facts.items():
        if name in _BY_TYPE and isinstance(entry, Mapping):
            flat |= {f"{name}.{dtype}": one for dtype, one in entry.items()}
        else:
            flat[name] = entry
    return flat


def _sources(table: Mapping[str, object], problems: Problems) -> dict[str, tuple[str, str]]:
    sources = {}
    for key, entry in table.items():
        match entry:
            case [str(source), str(date)] if source.strip() and date.strip():
                sources[key] = (source, date)
            case _:
                rule, remedy = "must be the pair [source, date]", 'write ["datasheet", "2023-03"]'
                problems.add(f"sources.{key}", plain(entry), rule, remedy)
    return sources


def _fact(name: str, entry: object, sources: Mapping[str, tuple[str, str]]) -> Fact:
    pair = entry if isinstance(entry, list) else [entry, ""]
    if len(pair) != 2 or not isinstance(pair[1], str) or pair[1] not in sources:
        fail(name, entry, "must be a value with a source that is under [sources]", _PAIR)
    source, date = sources[pair[1]]
    return Fact(field=name, value=read_field(name, pair[0]), source=source, date=date)
