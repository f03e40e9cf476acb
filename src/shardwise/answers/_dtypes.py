"""`shardwise dtypes`: recipes of precision, formats of weights and caches, and presets of widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwise.answers._answer import Answer, nothing_found
from shardwise.answers._converters import fail
from shardwise.answers._files import write_text
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page
from shardwise.errors import InputError
from shardwise.plans import DTYPES, find_precision, precision_names, precision_to_toml
from shardwise.serving import cache_names, find_format, format_names


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise dtypes`."""
    inputs.problems.raise_if_any()
    search = inputs.get("search", "")
    rows = search_dtypes(search)
    if not rows:
        return nothing_found("dtypes", search, tuple(dict.fromkeys(row["name"] for row in search_dtypes())))
    if "write" in inputs.values:
        _write(inputs.values["write"], search, rows)
    return Answer(0, lambda: {"dtypes": rows}, lambda: dtypes_page(rows, width))


def _write(path: str, search: str, rows: list[dict[str, Any]]) -> None:
    """Write one recipe of training as a file of the user's catalogue."""
    found = [row for row in rows if row["kind"] == "training"]
    if len(found) != 1:
        rule = f"needs one recipe of training, and {len(found)} match {search!r}"
        raise fail("write", path, rule, "name one, such as bf16")
    write_text(path, precision_to_toml(find_precision(found[0]["name"])))


_HEADS = {
    "training": "RECIPES OF TRAINING, bytes of each copy of a parameter (--precision)",
    "weights": "FORMATS OF SERVED WEIGHTS (--weights)",
    "cache": "FORMATS OF THE KEY-VALUE CACHE (--kv-cache)",
    "preset": "PRESETS OF BITS (--dtype)",
}
_COLUMNS = {
    "training": ("compute", "weight", "activation", "gradient", "master", "state", "embedding"),
    "weights": ("bits", "bytes", "scope", "group", "compute"),
    "cache": ("bytes",),
    "preset": ("weights", "activations", "embedding"),
}


def search_dtypes(search: str = "") -> list[dict[str, Any]]:
    """Return a record of every data type whose name holds the words; an exact name is meant alone.

    >>> [(row["kind"], row["bytes"]) for row in search_dtypes("nvfp4")]
    [('weights', 0.5625), ('cache', 0.5625)]
    """
    rows = [*_recipes(), *_formats(), *_caches(), *_presets()]
    exact = [row for row in rows if row["name"] == search.strip().lower()]
    return exact or [row for row in rows if all(word in row["name"] for word in search.lower().split())]


def _recipes() -> list[dict[str, Any]]:
    found = []
    for name in precision_names():
        if name in DTYPES:
            continue
        precision = find_precision(name)
        widths = {key.removesuffix("_bytes"): value for key, value in asdict(precision).items() if "_bytes" in key}
        own = {"source": precision.note} if precision.note else {}
        found.append({"kind": "training", "name": name, "compute": precision.compute, **widths, **own})
    return found


def _formats() -> list[dict[str, Any]]:
    rows = []
    for name in format_names():
        form = find_format(name)
        more = {"bits": form.bits, "bytes": form.bytes, "scope": form.scope, "group": form.group}
        rows.append(
            {"kind": "weights", "name": name, **more, "compute": form.compute or "16 bits", "source": form.source}
        )
    return rows


def _caches() -> list[dict[str, Any]]:
    return [{"kind": "cache", "name": name, "bytes": size} for name, size in cache_names().items()]


def _presets() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, widths in DTYPES.items():
        trains = True
        try:
            find_precision(name)
        except InputError:
            trains = False
        rows.append({"kind": "preset", "name": name, **widths._asdict(), "trains": trains})
    return rows


def dtypes_page(rows: Sequence[dict[str, Any]], width: int = 80) -> Page:
    """Return data types as one table for each kind."""
    page = Page(width)
    for kind, head in _HEADS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        if not chosen:
            continue
        page.add((head, "bold"))
        columns = _COLUMNS[kind]
        table = [["name", *columns], *([row["name"], *(_say(row[c]) for c in columns)] for row in chosen)]
        page.table(table, right=tuple(range(1, len(columns) + 1)), header=True, indent=0)
        if len(chosen) == 1 and chosen[0].get("source"):
            page.note(str(chosen[0]["source"]), "dim")
        page.blank()
    page.add(("`shardwise dtypes NAME --write FILE` writes a recipe of training to change", "dim"))
    return page


def _say(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
