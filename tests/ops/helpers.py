"""Layouts and goldens that the tests of ledgers share."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import find_stack

DATA = Path(__file__).parents[1] / "data/ops"
ONE: dict[str, Any] = {"tp": 1, "tp2": 1, "cp": 1, "ep": 1, "etp": 1, "panels": 1}


@cache
def golden(name: str) -> dict[str, Any]:
    """A golden file, read once: configurations and runs."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def layout(work: dict[str, Any] | None = None, stack: str = "megatron", **more: Any) -> Layout[Any]:
    """A layout: degrees and choices by name, one device and two sequences of 64 tokens unless said."""
    degrees = {name: more.pop(name, size) for name, size in ONE.items()}
    sizes = {"B": 2, "S": 64, "context": 0, **(work or {})}
    return lay_out(ParallelSizes(**degrees), TokenBatch(**sizes), LayoutOptions(stack=find_stack(stack), **more))


def on_cpu(y: Layout[Any]) -> Layout[Any]:
    """The same layout where LayerNorm keeps statistics as wide as its input, as PyTorch's CPU kernel does."""
    stack = replace(y.choices.stack, layernorm_statistics_bytes=y.a)
    return lay_out(y.degrees, y.work, replace(y.choices, stack=stack))
