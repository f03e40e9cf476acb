"""Reading a file of another system: what it is shows in its ending and its keys."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath

from shardwise.errors import InputError, Problem
from shardwise.formats._imported import Imported


def read_file(path: str | PathLike[str], variables: Mapping[str, str] | None = None, num_devices: int = 0) -> Imported:
    """Return the case of a file: .json is DeepSpeed's, .yaml accelerate's, any other a script for Megatron-LM.

    `variables` are those that the caller of a script would have set; `num_devices` replaces those of its launch.
    """
    name = fspath(path)
    text = read_text(name)
    if name.endswith(".json"):
        from shardwise.formats import deepspeed

        return deepspeed.read(text, name, num_devices)
    if name.endswith((".yaml", ".yml")):
        from shardwise.formats import fsdp

        return fsdp.read(text, name, num_devices)
    from shardwise.formats.megatron import read_script

    return read_script(text, name, variables, num_devices)


def read_text(path: str) -> str:
    """Return the text of a file; raises `InputError` where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError([Problem("from", path, f"cannot be read ({reason})", "give a file that exists")]) from None
