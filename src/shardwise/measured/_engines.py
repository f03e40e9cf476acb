"""Which engine runs a row, by its word and its release (engines.toml).

What reads words takes its table, so that a table with more entries is read alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from shardwise.hardware import Device
from shardwise.measured._record import Record, read, refuse
from shardwise.serving import find_engine

Table: TypeAlias = Mapping[str, Any]
FIXED = ("static", "single_stream")
"""Modes of files in which a batch starts and ends together."""


def engine_of(table: Table, record: Record, device: Device) -> str:
    """Return the name of the engine that ran a row; what stands in for another, or for no release, is said."""
    word, version = record.text("engine").lower(), record.text("engine_version")
    if not word:
        if not record.says("weight_dtype"):
            raise refuse("engine", None, "is not stated, and neither is the precision")
        return record.taken("engine")
    found: str | None = table["words"].get(word)
    if found is None:
        raise refuse("engine", word, f"is not an engine that is modelled: {', '.join(table['words'])}")
    if found != word and word not in table["spellings"]["words"]:
        record.assume(f"engine {word}: overheads of {found}")
    for row in table["foreign"]:
        if re.fullmatch(row["engine"], found) and re.fullmatch(row["device"], device.name):
            raise refuse("engine", word, f"is another one on {device.name}: {row['says']}")
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
