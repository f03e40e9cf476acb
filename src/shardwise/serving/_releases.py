"""Which entry of engines.toml answers for an engine that is named with its release, by the table of releases.

Functions take the table that they read, so that a table with more entries is read alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from shardwise.errors import InputError, Problem
from shardwise.files import own_table
from shardwise.hardware import Device
from shardwise.records import replace
from shardwise.serving._engine import Engine, engine_names, find_engine

ReleaseTable: TypeAlias = Mapping[str, Any]

STATED = ("sampler", "experts", "launch", "core", "prefix_cache", "sparse_attention", "block_gemms")
"""Facts of a server, beside its release, each of which may tell an engine."""


@cache
def release_table() -> ReleaseTable:
    """Return releases.toml: the releases of engines, and what a launch says by the fact that it states.

    >>> release_table()["launched"]["eager"]
    ['launch', 'eager']
    """
    return own_table(__file__, "releases.toml")


def released(
    table: ReleaseTable, engine: str, facts: Mapping[str, str], version: str, mode: str = ""
) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of the table of releases that hold for an engine, of which the first counts."""
    yield from (row for row in table["release"] if row["engine"] == engine and _holds(row, facts, version, mode))


def _holds(row: Mapping[str, Any], facts: Mapping[str, str], version: str, mode: str) -> bool:
    """Return whether an entry of the table of releases holds: for a release, its month, or the mode of a row."""
    if any(row[name] != value for name, value in facts.items() if name in row):
        return False
    if "below" not in row and "unstated" not in row:
        return True
    if not version:
        return mode in row.get("unstated", ()) and not re.fullmatch(row.get("not_on", ""), facts["device"])
    stated, month = release(version), month_of(version)
    return () < stated < release(row.get("below", "")) or "" < month < row.get("before", "")


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of an engine's release, of an image of it too; empty where the text holds none.

    >>> release("0.6.1"), release("rocm6.3.1_py3.12_vllm_0.6.6"), release("dynamo-0.8.1")
    ((0, 6, 1), (0, 6, 6), ())
    """
    match = re.search(r"vllm[-_:. ]*v?(\d+(?:\.\d+)+)", version.lower()) or re.match(r"v?(\d+(?:\.\d+)+)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


def month_of(version: str) -> str:
    """Return the month of a build that is named by its date alone; empty where the text names none.

    >>> month_of("2026-02 (a fork)"), month_of("Jul 2025"), month_of("latest of 2025-09"), month_of("0.11.0")
    ('2026-02', '2025-07', '2025-09', '')
    """
    if match := re.match(r"(?:latest of )?(20\d\d-[01]\d)", version):
        return match[1]
    match = re.match(rf"({'|'.join(_MONTHS)})[a-z]* (20\d\d)", version.lower())
    return f"{match[2]}-{_MONTHS.index(match[1]) + 1:02}" if match else ""


def engine_of_release(engine: str, version: str, device: Device | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the engine that a launch of another release runs as, and what of the launch that entry does not hold.

    `engine` is what the launch runs as in the newest release, which stays where the table has no other for `version`.

    >>> engine_of_release("vllm", "0.11.0"), engine_of_release("vllm", "0.33.1")
    (('vllm-0.11', ()), ('vllm', ()))
    >>> engine_of_release("sglang-prefix-cache", "0.5.4"), engine_of_release("vllm-synchronous", "0.25.0")
    (('sglang-0.5.7-prefix-cache', ()), ('vllm-0.26', ('synchronous',)))
    """
    own, table = find_engine(engine), release_table()
    plain = own.launch_of or own.name
    vendor, name = (device.vendor, device.name) if device else ("NVIDIA", "")
    facts = dict.fromkeys(STATED, "") | {"vendor": vendor, "device": name}
    if not release(version) or _first(table, plain, version, facts) == plain:
        return own.name, ()
    noted = {word: table["launched"][word] for word in own.launched_with if word in table["launched"]}
    runs = _first(table, plain, version, facts | dict(noted.values()))
    row = find_engine(runs)
    covered = {*row.launched_with} | {word for word, (name, value) in noted.items() if _says(table, runs, name, value)}
    covered |= {"synchronous"} if row.host.scheduled_between else set()
    return row.name, tuple(word for word in own.launched_with if word not in covered)


def _first(table: ReleaseTable, engine: str, version: str, facts: dict[str, str]) -> str:
    """Return what runs a release of an engine, the engine itself where no entry holds."""
    return next((str(row["runs"]) for row in released(table, engine, facts, version)), engine)


def _says(table: ReleaseTable, runs: str, name: str, value: str) -> bool:
    """Return whether an entry of the table is of servers of which a fact holds."""
    return any(row["runs"] == runs and row.get(name) == value for row in table["release"])


# As pip installs a release, or its maker tags it: vllm==0.12.0+cu129, sglang@v0.5.4.post1, trtllm-1.1.0rc5.
_NAMED = re.compile(r"(.*?\w)[-=@: ]+v?(\d+\.\d+(?:\.\d+)*\w*(?:\.(?:post|dev)\d+)*(?:\+[\w.]+)?)")
_RANGE = re.compile(r"(.*?\w) *(?:[<>~!]=?|={2,3})[<>~!= ]*v?(\d+(?:\.\d+)*).*")
"""Specifiers of pip that hold for more than one release (packaging.python.org, version specifiers)."""


def engine_on(engine: Engine | str, device: Device | None = None) -> Engine:
    """Return an engine by its name, or the entry that covers the release that is named, on a device where it matters.

    An entry's own name is that entry. Raises `InputError` with known names.

    >>> engine_on("vllm==0.12.0").name, engine_on("vllm-0.12").asked_as, engine_on("trtllm").name
    ('vllm-0.13', 'vLLM 0.12', 'tensorrt-llm')
    """
    if isinstance(engine, Engine):
        return engine
    named = _NAMED.fullmatch(engine.strip().lower()) if isinstance(engine, str) else None
    if named is None or engine in engine_names():
        _refuse_range(engine)
        return find_engine(engine)
    try:
        own = find_engine(named[1])
    except InputError:
        return find_engine(engine)  # which lists the names that are known
    runs, lost = engine_of_release(own.name, named[2], device)
    return replace(find_engine(runs), asked_as=f"{own.title} {named[2]}", not_taken=not_taken(own.name, runs, lost))


def _refuse_range(engine: str) -> None:
    """Raise `InputError` where a known engine is named with a range of releases, as pip takes it."""
    if isinstance(engine, str) and (many := _RANGE.fullmatch(engine.strip().lower())):
        try:
            own = find_engine(many[1])
        except InputError:
            return  # the engine is what is not known
        remedy = f"name one release, such as {own.name}=={many[2]}, or {own.name} for the newest"
        raise InputError([Problem("engine", engine, "names many releases, or none", remedy)])


def not_taken(engine: str, runs: str, lost: Sequence[str]) -> tuple[str, ...]:
    """Return what an engine is launched with that the entry which answers for its release does not hold.

    >>> not_taken("vllm-synchronous", "vllm-0.26", ("synchronous",))
    ('engine vllm-0.26: what vllm-synchronous is launched with (synchronous) is not taken',)
    """
    return tuple(f"engine {runs}: what {engine} is launched with ({word}) is not taken" for word in lost)


def release_notes(engine: Engine) -> tuple[str, ...]:
    """Return what is said of an engine that was named with its release, nothing of others.

    >>> release_notes(engine_on("vllm==0.12.0")), release_notes(engine_on("vllm"))
    (('engine vllm-0.13: its entry covers vLLM 0.12.0',), ())
    """
    covers = (f"engine {engine.name}: its entry covers {engine.asked_as}",) if engine.asked_as else ()
    return (*covers, *engine.not_taken)
