"""Recorded programs kept on disk, so that a question asked again does not record its formulas again.

One file of JSON for each recording, under a name made of all that it reads and of the files of the package: numbers
and the names of operations, nothing that could be run. A file that was changed, cut off or damaged is recorded anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field, fields, is_dataclass
from functools import lru_cache
from typing import Any

from shardwise.errors import InputError
from shardwise.files import read_file
from shardwise.records import dataclass
from shardwise.search._program import Program

VARIABLE = "SHARDWISE_CACHE"
MOST_BYTES = 64 << 20
"""Most bytes of all files: the oldest go."""
_MOST_FILE = 16 << 20
_PREFIX, _ENDING = "recorded-", ".json"


def cache_folder() -> str:
    """Return where recordings are kept, nothing where they are not: `SHARDWISE_CACHE`, a folder or "off", decides.

    Left out, it is the folder of shardwise in the cache of the user (XDG base directory specification).
    """
    own = os.environ.get(VARIABLE)
    if own is not None:
        return "" if own in ("", "0", "off") else os.path.expanduser(own)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a path that is not absolute is to be ignored; so is a home that nobody has.
    cache = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")
    return os.path.join(cache, "shardwise") if os.path.isabs(cache) else ""


@dataclass(slots=True)
class Recordings:
    """Programs of one recording by name: those that were kept, and those that were recorded since (`changed`)."""

    path: str
    programs: dict[str, Program] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    changed: bool = False

    def put(self, name: str, program: Program) -> Program:
        """Keep a program that was recorded."""
        self.programs[name], self.changed = program, True
        return program

    def write(self) -> None:
        """Write what was recorded since, if anything; a folder that cannot be written to stays as it is."""
        if not (self.path and self.changed):
            return
        self.changed = False
        try:
            trees = {name: program.to_plain() for name, program in self.programs.items()}
            data = json.dumps({"words": self.words, "programs": trees}, separators=(",", ":")).encode()
        except (TypeError, ValueError):
            return
        if len(data) > _MOST_FILE:
            return
        folder = os.path.dirname(self.path)
        temporary = f"{self.path}.{os.getpid()}"
        with suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(_sum(data) + b"\n" + data)
                os.replace(temporary, self.path)
            finally:
                with suppress(OSError):
                    os.remove(temporary)
            _bound(folder)


def recordings_of(key: object) -> Recordings:
    """Return what is kept of a recording, nothing where it is asked for the first time or cannot be read."""
    folder = cache_folder()
    name = fingerprint((_package(), key)) if folder else ""
    if not name:
        return Recordings("")
    recordings = Recordings(os.path.join(folder, _PREFIX + name + _ENDING))
    with suppress(InputError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        if os.path.exists(recordings.path):
            total, _, data = read_file(recordings.path, _MOST_FILE + 100).partition(b"\n")
            if total == _sum(data):
                tree = json.loads(data)
                programs = {str(one): Program.of_plain(stored) for one, stored in tree["programs"].items()}
                recordings.words.update(tree["words"])
                recordings.programs.update(programs)
    return recordings


def _sum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _bound(folder: str) -> None:
    """Remove the oldest recordings of a folder where all take too many bytes."""
    with os.scandir(folder) as entries:
        kept = [one for one in entries if one.name.startswith(_PREFIX) and one.is_file(follow_symlinks=False)]
    ages = sorted((one.stat().st_mtime_ns, one.stat().st_size, one.path) for one in kept)
    left = sum(size for _, size, _ in ages)
    for _, size, path in ages:
        if left <= MOST_BYTES:
            return
        os.remove(path)
        left -= size


@lru_cache(maxsize=1)
def _package() -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and times of the files of the package: where a formula or a constant changes, they do."""
    return tuple(sorted(_stamps(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))


def _stamps(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for one in entries:
            if one.is_dir():
                if one.name != "__pycache__":
                    yield from _stamps(one.path)
            else:
                about = one.stat()
                yield one.path, about.st_size, about.st_mtime_ns


def fingerprint(value: object) -> str:
    """Return a name for a value made of records, texts and numbers, the same in every process; "" for anything else.

    Fields that records do not compare by do not count.

    >>> fingerprint((1, "a")) == fingerprint((1, "a")), fingerprint((1, "a")) == fingerprint((1.0, "a"))
    (True, False)
    """
    try:
        return hashlib.sha256(_text_of(value, {}).encode()).hexdigest()[:32]
    except TypeError:
        return ""


def _text_of(value: Any, known: dict[int, str]) -> str:
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    text_of = known.get(id(value))
    if text_of is None:
        text_of = known[id(value)] = _tree_text(value, known)
    return text_of


def _tree_text(value: Any, known: dict[int, str]) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ",".join([_text_of(one, known) for one in value]) + ")"
    if isinstance(value, dict):
        return "{" + ",".join([f"{_text_of(k, known)}:{_text_of(v, known)}" for k, v in value.items()]) + "}"
    if isinstance(value, frozenset):
        return "<" + ",".join(sorted(_text_of(one, known) for one in value)) + ">"
    if is_dataclass(value) and not isinstance(value, type):
        text = ",".join([_text_of(getattr(value, f.name), known) for f in fields(value) if f.compare])
        # Records that come often are told by their sum: a model is dozens of layers.
        return f"{type(value).__name__}[{hashlib.sha256(text.encode()).hexdigest() if len(text) > 100 else text}]"
    raise TypeError(type(value))
