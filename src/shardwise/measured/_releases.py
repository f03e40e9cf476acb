"""Which engine answers for a launch that states its release, by the table of releases (engines.toml)."""

from __future__ import annotations

from shardwise.hardware import Device
from shardwise.measured._frameworks import NOTED, Table, release, released
from shardwise.measured._record import read
from shardwise.serving import find_engine


def engine_of_release(engine: str, version: str, device: Device | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the engine that a launch of another release runs as, and what of the launch that entry does not hold.

    `engine` is what the launch runs as in the newest release, which stays where the table has no other for `version`.

    >>> engine_of_release("vllm", "0.11.0"), engine_of_release("vllm", "0.33.1")
    (('vllm-0.11', ()), ('vllm', ()))
    >>> engine_of_release("sglang-prefix-cache", "0.5.4"), engine_of_release("vllm-synchronous", "0.25.0")
    (('sglang-0.5.7-prefix-cache', ()), ('vllm-0.26', ('synchronous',)))
    """
    own, table = find_engine(engine), read("engines.toml")
    plain = own.launch_of or own.name
    vendor, name = (device.vendor, device.name) if device else ("NVIDIA", "")
    facts = dict.fromkeys(NOTED, "") | {"vendor": vendor, "device": name}
    if not release(version) or _first(table, plain, version, facts) == plain:
        return own.name, ()
    noted = {word: table["launched"][word] for word in own.launched_with if word in table["launched"]}
    runs = _first(table, plain, version, facts | dict(noted.values()))
    row = find_engine(runs)
    covered = {*row.launched_with} | {word for word, (name, value) in noted.items() if _says(table, runs, name, value)}
    covered |= {"synchronous"} if row.host.scheduled_between else set()
    return row.name, tuple(word for word in own.launched_with if word not in covered)


def _first(table: Table, engine: str, version: str, facts: dict[str, str]) -> str:
    """Return what runs a release of an engine, the engine itself where no entry holds."""
    return next((str(row["runs"]) for row in released(table, engine, facts, version)), engine)


def _says(table: Table, runs: str, name: str, value: str) -> bool:
    """Return whether an entry of the table is of servers of which a fact holds."""
    return any(row["runs"] == runs and row.get(name) == value for row in table["release"])


def cells_of_engine(engine: str, version: str) -> dict[str, str]:
    """Return an engine of a release by the columns of rows: its word, its release, and what its launch says as notes.

    >>> cells_of_engine("vllm-eager", "0.11.0")
    {'engine': 'vllm', 'engine_version': '0.11.0', 'notes': 'launch=eager'}
    """
    own, facts = find_engine(engine), read("engines.toml")["launched"]
    notes = [f"{name}={value}" for name, value in (facts[word] for word in own.launched_with if word in facts)]
    notes += ["async_scheduling=0"] if "synchronous" in own.launched_with else []
    return {"engine": own.launch_of or own.name, "engine_version": version, "notes": "; ".join(notes)}
