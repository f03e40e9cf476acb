"""Reading a file of another system: what it is shows in its ending and its keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from os import PathLike, fspath

from shardwise import files
from shardwise.errors import InputError, Problem, bounded
from shardwise.formats._imported import Around, Imported

MOST_BYTES = {".json": files.JSON_BYTES, ".yaml": files.YAML_BYTES, ".yml": files.YAML_BYTES}
"""Most bytes of a file by its ending; of any other, a script's."""


def import_file(
    path: str | PathLike[str], variables: Mapping[str, str] | None = None, around: Around | None = None
) -> Imported:
    """Return the case of a file: .json is DeepSpeed's, .yaml accelerate's, any other a script for Megatron-LM.

    `variables` are those that the caller of a script would have set. Raises `InputError` with everything wrong.
    """
    name, around = fspath(path), around or Around()
    with bounded("from", name):
        return _imported(read_text(name), name, variables, around)


def _imported(text: str, name: str, variables: Mapping[str, str] | None, around: Around) -> Imported:
    if name.endswith((".json", ".yaml", ".yml")):
        if around.more:
            raise InputError([Problem("from_args", " ".join(around.more), f"cannot follow {name}", "leave it out")])
        if variables:
            said = ",".join(f"{key}={value}" for key, value in variables.items())
            raise InputError([Problem("set", said, f"has no effect: {name} is no script", "leave it out")])
        return _with_settings(_settings(name)(text, name, around), name)
    from shardwise.formats.megatron import read_script

    return read_script(text, name, variables, around)


def _with_settings(case: Imported, name: str) -> Imported:
    """Return a case, or raise `InputError` where its file has nothing but what its system does not know."""
    if case.unknown and not (case.understood or case.ignored or case.silent):
        rule = f"has no setting of {case.system}"
        raise InputError([Problem("from", name, rule, "give DeepSpeed's JSON, accelerate's YAML or a launch script")])
    return case


def _settings(name: str) -> Callable[[str, str, Around], Imported]:
    """Return the reader of a file of settings."""
    from shardwise.formats import deepspeed, fsdp

    return deepspeed.read if name.endswith(".json") else fsdp.read


def read_text(path: str) -> str:
    """Return the text of a file; raises `InputError` where it cannot be read."""
    text = files.read_text(path, MOST_BYTES.get(os.path.splitext(path)[1], files.WRITTEN_BYTES), "from")
    if not text.strip():
        raise InputError([Problem("from", path, "is empty", "give a file that holds settings or a script")])
    return text
