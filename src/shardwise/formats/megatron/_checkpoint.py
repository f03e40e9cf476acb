"""The arguments that a checkpoint of Megatron-LM keeps, read without torch.

`torch.save` writes a zip archive whose member data.pkl is a pickle in which tensors are references; only that member
is read, and no class of it is ever made: a few plain ones are let through, all others become an inert stand-in.
Source: megatron/training/checkpointing.py load_args_from_checkpoint, 2026-08.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from shardwise.errors import InputError, Problem, bounded
from shardwise.files import below, read_text
from shardwise.formats._launch import Launch
from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import UNSET, by_name, facts, from_mapping

MOST_BYTES = 64 * 1024 * 1024
_PLAIN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): SimpleNamespace,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}
_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}


class _Inert:
    """Stands for anything that a pickle makes and that is not needed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Take a list's item and forget it."""

    def extend(self, values: object) -> None:
        """Take a list's items and forget them."""


class _Unpickler(pickle.Unpickler):
    """Makes nothing but plain values."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a plain class, the name of a data type, or the stand-in."""
        if module == "torch" and name in ("float32", "bfloat16", "float16", "uint8"):
            return f"torch.{name}"
        if name == "AttnBackend":
            return lambda value: _BACKENDS.get(value, "auto")
        return _PLAIN.get((module, name), _Inert)

    def persistent_load(self, pid: object) -> Any:
        """Return the stand-in of a tensor's storage."""
        return _Inert()


def read(folder: str) -> dict[str, Any]:
    """Return the arguments of the latest checkpoint in a folder by name; raises `InputError` where there are none."""
    path = _file(folder)
    try:
        with zipfile.ZipFile(path) as archive:
            member = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
            if member.file_size > MOST_BYTES:
                raise _fail(path, "holds a pickle larger than arguments are")
            with bounded("--use-checkpoint-args", path):
                state = _Unpickler(io.BytesIO(archive.read(member))).load()
    except InputError:
        raise
    except (OSError, zipfile.BadZipFile, StopIteration, pickle.UnpicklingError, EOFError, ValueError, TypeError,
            AttributeError, IndexError, KeyError) as error:  # fmt: skip
        raise _fail(path, f"cannot be read ({type(error).__name__})") from None
    args = state.get("args") if isinstance(state, Mapping) else None
    if not isinstance(args, SimpleNamespace):
        raise _fail(path, "keeps no arguments")
    # Arguments are words, numbers and lists of them; deeper ones could repeat each other without end.
    return {name: value for name, value in vars(args).items() if _is_flat(value)}


def _is_flat(value: object) -> bool:
    items = value if isinstance(value, (list, tuple)) else ()
    return not any(isinstance(item, (list, tuple, Mapping, set, frozenset)) for item in items)


def _fail(path: str, rule: str) -> InputError:
    return InputError([Problem("--use-checkpoint-args", path, rule, "give the arguments, or leave it out")])


def _file(folder: str) -> str:
    """Return the file of the latest checkpoint that keeps the arguments."""
    try:
        word = read_text(os.path.join(folder, "latest_checkpointed_iteration.txt"), 100).strip()
    except InputError:
        raise _fail(folder, "is not a folder of checkpoints that can be read here") from None
    name = f"iter_{int(word):07d}" if word.isdigit() else "release"
    inside = os.path.join(folder, name)
    for part in ("common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt"):
        if os.path.isfile(path := os.path.join(inside, part)):
            return path
    rule = "has neither common.pt nor mp_rank_00: later formats keep the arguments where only torch can read them"
    raise _fail(inside, rule)


def take(reader: Reader, launch: Launch) -> None:
    """Put the arguments of the checkpoint where --use-checkpoint-args has Megatron-LM take them."""
    if not (reader.flag("use_checkpoint_args") or reader.flag("use_mp_args_from_checkpoint_args")):
        return
    folder = str(reader.given.values.get("load") or "")
    if not folder or UNSET in folder:
        reader.problems.add("--load", folder or None, "is needed with --use-checkpoint-args", "name the folder")
        return
    with reader.problems.collect():
        place = folder if launch.follow else below(launch.source, folder, field="--load")
        _merge(reader, read(place), folder)


def _merge(reader: Reader, kept: Mapping[str, Any], folder: str) -> None:
    names = facts()["checkpoint"]
    wins = set(names["wins"]) if reader.flag("use_checkpoint_args") else set()
    wins |= set(names["parallel"]) if reader.flag("use_mp_args_from_checkpoint_args") else set()
    stored = from_mapping({name: kept[name] for name in kept if name in wins | set(names["fills"])})
    for name in wins & set(kept):
        if name not in stored.values and name in reader.given.values:
            del reader.given.values[name]
    values = {name: value for name, value in stored.values.items() if name in wins or name not in reader.given.values}
    reader.given.values |= values
    reader.given.options |= {name: by_name()[name].option for name in values}
    reader.assume(f"{len(values)} arguments: of the checkpoint in {folder}")
