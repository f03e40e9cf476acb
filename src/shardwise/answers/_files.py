"""Case files: a whole case (command, model, devices, flags) in TOML or JSON, read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._converters import fail
from shardwise.answers._typed import quoted
from shardwise.files import check_tree, read_json, read_toml

if TYPE_CHECKING:
    from shardwise.answers._inputs import Inputs


def read_case(path: str) -> dict[str, Any]:
    """Return the keys of a case file; dashes in keys become underscores. Raises `InputError` when it cannot be read."""
    table = read_json(path, "config") if path.endswith(".json") else read_toml(path, "config")
    if not isinstance(table, dict):
        raise fail("config", path, "must hold a table of keys", 'write for example tp = 8, or {"tp": 8}')
    check_tree(table, path, "config")
    case: dict[str, Any] = {}
    for key, value in table.items():
        word = key.replace("-", "_")
        if word in case:
            raise fail(word, str(value), f"stands twice in {path}", "keep one")
        case[word] = value
    return case


def write_case(path: str, case: dict[str, Any]) -> None:
    """Write a case to a file, JSON where its name ends in .json, TOML otherwise; raises `InputError` when it cannot."""
    table = {key: list(value) if isinstance(value, tuple) else value for key, value in case.items()}
    try:
        if path.endswith(".json"):
            text = json.dumps(table, indent=2) + "\n"
        else:
            import tomli_w

            text = tomli_w.dumps(table)
        data = text.encode("utf-8")
        with open(path, "wb") as file:
            file.write(data)
    except (OSError, ValueError) as error:
        raise fail(
            "save", path, f"cannot be written ({_reason(error)})", "give a file in a folder that exists"
        ) from None


def write_text(path: str, text: str) -> None:
    """Write a text to a file; raises `InputError` when it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        rule = f"cannot be written ({_reason(error)})"
        raise fail("write", path, rule, "give a file in a folder that exists") from None


def one_to_write(path: str, names: Sequence[str], what: str) -> str:
    """Return the only name that was found, to be written; raises `InputError` where there are more."""
    if len(names) != 1:
        raise fail("write", path, f"needs one {what}, and {len(names)} match", f"name one, such as {names[0]}")
    return names[0]


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split())


_LEFT_OUT = ("command", "model", "json", "width", "config", "save", "help", "plot", "timeline", "size", "dark",
             "from_args")  # fmt: skip


def command_words(command: str, values: Mapping[str, Any]) -> list[str]:
    """Return the words that say a case; pairs of flag and value are one word each, so that lines break between them.

    >>> command_words("train", {"model": "gpt2", "on": "8xh100", "tp": 8, "overlap": False})
    ['shardwise train gpt2', '--on 8xh100', '--tp 8', '--no-overlap']
    """
    first = ["shardwise", command, *([quoted(str(values["model"]))] if "model" in values else [])]
    lines = [" ".join(first)]
    for key, value in values.items():
        if key in _LEFT_OUT or value is None:
            continue
        dashed = key.replace("_", "-")
        if isinstance(value, bool):
            lines.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            every = value if key == "vary" else (value,)
            lines += [f"--{dashed} {quoted(_text(one))}" for one in every]
    if "from_args" in values:
        lines += ["--", *map(quoted, values["from_args"])]
    return lines


def _text(value: Any) -> str:
    """Return a value as a flag reads it back, to the last digit."""
    if isinstance(value, tuple):
        return ",".join("+".join(one) or "none" if isinstance(one, tuple) else str(one) for one in value) or "none"
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


def save_best(inputs: Inputs, command: str, case: Mapping[str, Any] | None) -> None:
    """Write the case of the best plan where it was asked for; there is nothing to write where none was found."""
    if "save_best" in inputs.values and case is not None:
        kept = {key: value for key, value in case.items() if key not in ("json", "width", "config", "help", "plot")}
        write_case(inputs.values["save_best"], {"command": command, **kept})
