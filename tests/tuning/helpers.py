"""Goldens of fine-tuning and the cases that they are of."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ops.helpers import layout, on_cpu
from shardwise.models import Model, model_from_config
from shardwise.ops.layout import Layout

DATA = Path(__file__).parents[1] / "data/tuning"


@cache
def golden(name: str) -> dict[str, Any]:
    """A golden file, read once: configurations and runs."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def case_of(run: dict[str, Any]) -> tuple[Model, Layout[Any]]:
    """The model and the layout of a run of the goldens of saved bytes."""
    model = model_from_config(golden("activations")["configs"][run["model"]])
    stack = "transformers" if run["attention"] == "sdpa" else "transformers-eager"
    return model, on_cpu(layout({"B": run["B"], "S": run["S"]}, stack))
