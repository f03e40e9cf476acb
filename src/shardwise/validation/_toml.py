"""The tables of this package: rules, frameworks, engines, types, and how tables of measurements were taken."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def read(file: str) -> dict[str, Any]:
    """Return what a TOML file of this package holds.

    >>> read("tables.toml")["ticks"]["seconds"]
    2.048e-06
    """
    return tomllib.loads(resources.files("shardwise.validation").joinpath(file).read_text(encoding="utf-8"))
