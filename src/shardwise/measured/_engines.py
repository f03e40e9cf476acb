"""Which engine runs a row, by its word and its release, and what engines do at once by default (engines.toml).

What reads words takes its table, so that a table with more entries is read alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.hardware import Device
from shardwise.measured._record import Record, refuse
from shardwise.measured._rules import read
from shardwise.serving import find_engine

Table: TypeAlias = Mapping[str, Any]
FIXED = ("static", "single_stream")
"""Modes of files in which a batch starts and ends together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an engine runs at once unless it is told otherwise: sequences, and tokens of a step (0: whole prompts).

    Prompts of up to `whole_prompts` tokens run in a step of their own, longer ones are cut. Memory is set aside for the
    sampling of `set_aside` sequences.
    """

    sequences: int
    set_aside: int
    step_tokens: int = 0
    whole_prompts: int = 0

    def tokens(self, length: int) -> int:
        """Return the tokens of the largest step over contexts of a length, 0 where prompts are never cut.

        >>> Limits(sequences=256, set_aside=256, step_tokens=2048, whole_prompts=32768).tokens(4096)
        4096
        """
        return max(length, self.step_tokens) if length <= self.whole_prompts else self.step_tokens


def engine_of(table: Table, record: Record, device: Device) -> str:
    """Return the name of the engine that ran a row; what stands in for another, or for no release, is said."""
    word, version = record.text("engine").lower(), record.text("engine_version")
    if not word:
        return record.taken("engine")
    found: str | None = table["words"].get(word)
    if found is None:
        raise refuse("engine", word, f"is not an engine that is modelled: {', '.join(table['words'])}")
    if found != word and word not in table["spellings"]["words"]:
        record.assume(f"engine {word}: overheads of {found}")
    unstated = not version and record.text("serving_mode") in FIXED
    told = {"device": device.name, "vendor": device.vendor, "sampler": record.notes.get("sampler", "")}
    for row in table["release"]:
        if row["engine"] == found and _holds(row, told, release(version), unstated):
            if "says" in row:
                stated = version or "of a version that is not stated, in fixed batches"
                record.assume(f"{find_engine(found).title} {stated}: {row['says']}")
            return str(row["runs"])
    return found


def _holds(row: dict[str, Any], told: dict[str, str], stated: tuple[int, ...], unstated: bool) -> bool:
    """Return whether an entry of the table of releases holds for a row."""
    if any(row[name] != value for name, value in told.items() if name in row):
        return False
    if "below" not in row and "unstated" not in row:
        return True
    if unstated:
        return row.get("unstated", False) and not re.fullmatch(row["not_on"], told["device"])
    return () < stated < release(row.get("below", ""))


def engine_named(table: Table, word: str) -> str:
    """Return the engine of the package that a file's word means, the word itself where none is known.

    >>> engine_named(read("engines.toml"), "trtllm")
    'tensorrt-llm'
    """
    return str(table["words"].get(word.lower(), word))


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of an engine's release, of an image of it too; empty where the text holds none.

    >>> release("0.6.1"), release("rocm6.3.1_py3.12_vllm_0.6.6"), release("dynamo-0.8.1")
    ((0, 6, 1), (0, 6, 6), ())
    """
    found = re.search(r"vllm[-_:. ]*v?(\d+(?:\.\d+)+)", version.lower()) or re.match(r"v?(\d+(?:\.\d+)+)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def limits_of(engine: str, device: Device) -> Limits:
    """Return what an engine runs at once on a device unless it is told otherwise.

    >>> from shardwise.hardware import find_device
    >>> devices = (find_device(name).device for name in ("h100-sxm-80gb", "a100-sxm-80gb"))
    >>> [limits_of("vllm", device).sequences for device in devices]
    [1024, 256]
    """
    row = next(one for one in read("engines.toml")["limits"] if re.fullmatch(one["engines"], engine))
    large = row.get("large")
    if large and device.memory_bytes >= large["memory_bytes"] and not re.fullmatch(large["except"], device.name):
        row = row | large
    stated = {name: row[name] for name in ("sequences", "step_tokens", "whole_prompts") if name in row}
    profiled = row["sequences"] if "step_tokens" in row else read("engines.toml")["set_aside"]["sequences"]
    return Limits(set_aside=profiled, **stated)


def narrows_cache(engine: str, weights: str) -> bool:
    """Return whether an engine keeps its cache in 8 bits for weights of a format unless it is told otherwise.

    >>> [narrows_cache(engine, "fp8") for engine in ("tensorrt-llm", "vllm")]
    [True, False]
    """
    row = read("engines.toml")["narrow_cache"]
    return bool(re.fullmatch(row["engines"], engine) and re.fullmatch(row["weights"], weights))


def served_step_tokens() -> int:
    """Return the tokens of a step in which a server runs prompts and tokens of other requests together."""
    return int(read("engines.toml")["serving"]["step_tokens"])
