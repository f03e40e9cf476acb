"""One's own catalogue: folders whose files add models, devices and precisions to those that are known.

A folder holds `models/NAME.json` (or `models/NAME/config.json`), `devices/NAME.toml` and `precisions/NAME.toml`. It is
named by `use_catalogue` (the command line's `--catalogue`), by the variable SHARDWISE_CATALOGUE (several with the
separator of paths), or is `shardwise` in the user's configuration folder; the first that has a name wins, and all win
over what is known without them.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import InputError, Problem

VARIABLE = "SHARDWISE_CATALOGUE"
KINDS = {"models": ".json", "devices": ".toml", "precisions": ".toml"}
_named: list[Path] = []


class OwnFile(NamedTuple):
    """One file of a folder: the name it gives, its path, and when it was changed, in nanoseconds."""

    name: str
    path: str
    changed: int


def use_catalogue(*folders: str | Path) -> None:
    """Look in these folders first from now on; none puts things back. Raises `InputError` for what is no folder.

    >>> use_catalogue()
    """
    paths = [Path(os.path.expanduser(folder)) for folder in folders if isinstance(folder, (str, os.PathLike))]
    remedy = "give a folder that holds models/, devices/ or precisions/"
    wrong = [Problem("catalogue", str(p), "is not a folder", remedy) for p in paths if not os.path.isdir(p)]
    others = [one for one in folders if not isinstance(one, (str, os.PathLike))]
    wrong += [Problem("catalogue", str(one), "is not the path of a folder", remedy) for one in others]
    if wrong:
        raise InputError(wrong)
    _named[:] = paths


def folders() -> tuple[Path, ...]:
    """Return the user's folders that exist, the first to be asked first."""
    homes = os.environ.get("XDG_CONFIG_HOME") or "~/.config", os.path.expanduser("~")
    asked = (*_named, *_paths(os.environ.get(VARIABLE, ""), *homes))
    return tuple(dict.fromkeys(one for one in asked if os.path.isdir(one)))


@lru_cache(maxsize=4)
def _paths(variable: str, config: str, home: str) -> tuple[Path, ...]:
    """Return the folders that the environment names; `home` is what `~` stands for in them."""
    named = [Path(os.path.expanduser(one)) for one in variable.split(os.pathsep) if one]
    return *named, Path(os.path.expanduser(config)) / "shardwise"


def own_files(kind: str) -> tuple[OwnFile, ...]:
    """Return the files of one kind in all folders, by name; of two with one name the first folder's."""
    files: dict[str, OwnFile] = {}
    for folder in folders():
        for path in _files(folder / kind, KINDS[kind]):
            name = path.parent.name if path.name == "config.json" else path.stem
            files.setdefault(plain(name), OwnFile(name.lower(), str(path), path.stat().st_mtime_ns))
    return tuple(sorted(files.values()))


def _files(folder: Path, ending: str) -> list[Path]:
    if not os.path.isdir(folder):
        return []
    nested = folder.glob("*/config.json") if ending == ".json" else ()
    return sorted([*folder.glob(f"*{ending}"), *nested])


_LEFT_OUT = str.maketrans("", "", "-_ ")


def plain(name: str) -> str:
    """Return a name as names are compared: without case, dashes, underscores and spaces.

    >>> plain("My_Model 7B")
    'mymodel7b'
    """
    return name.lower().translate(_LEFT_OUT)


def find_own(kind: str, name: str) -> OwnFile | None:
    """Return the user's file that a name means, or None."""
    files = own_files(kind)
    wanted = plain(name) if files else ""
    return next((one for one in files if plain(one.name) == wanted), None)


def note_of(file: OwnFile) -> str:
    """Return what an answer says of a thing that came from the user's catalogue."""
    return f"{file.name} is from your catalogue: {file.path}"
