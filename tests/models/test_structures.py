"""The whole structure of every model of the catalogue and of every configuration that was counted: each field of it.

Counts do not see windows, rotations, activations or how weights are written. One sum a model and a family says which of
them a change reads otherwise; what it does so on purpose is stored anew: `python tests/models/test_structures.py`.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from shardwise.models import load_model, model_from_config, model_names

DATA = Path(__file__).parents[1] / "data/models/structures.json"
COUNTED: dict[str, list[dict[str, Any]]] = json.loads(DATA.with_name("param_counts.json").read_text())["random"]


def said(value: Any) -> str:
    """Return a value as text: of a record its name and the fields that are not empty."""
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((one.name, getattr(value, one.name)) for one in fields(value))
        return f"{type(value).__name__}({', '.join(f'{name}={said(one)}' for name, one in pairs if one)})"
    return f"[{' '.join(map(said, value))}]" if isinstance(value, tuple) else str(value)


def sums() -> dict[str, dict[str, str]]:
    """Return a sum of every model of the catalogue, and of the random configurations of every family."""
    named = {name: said(load_model(name)) for name in model_names()}
    families = {
        family: "\n".join(said(model_from_config(one["config"])) for one in rows) for family, rows in COUNTED.items()
    }
    return {
        kind: {name: f"{zlib.crc32(text.encode()):08x}" for name, text in texts.items()}
        for kind, texts in (("catalogue", named), ("families", families))
    }


def test_every_field_of_a_model_is_what_it_was() -> None:
    """Every mixer, feed-forward, norm, window and switch of the catalogue and of 2,000 configurations is as it was."""
    stored, found = json.loads(DATA.read_text()), sums()
    for kind in stored:
        assert [name for name, one in stored[kind].items() if found[kind].get(name) != one] == [], kind


if __name__ == "__main__":
    DATA.write_text(json.dumps(sums(), indent=0) + "\n")
