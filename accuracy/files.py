"""The tables of this folder: what sources document, how tables of kernels were taken, and the shipped measurements."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


@cache
def read(file: str) -> dict[str, Any]:
    """Return what a TOML file of this folder holds.

    >>> read("kernels/tables.toml")["ticks"]["seconds"]
    2.048e-06
    """
    return tomllib.loads((HERE / file).read_text(encoding="utf-8"))


def shipped() -> tuple[str, ...]:
    """Return the files of published measurements of this folder.

    >>> all(path.endswith(".csv") for path in shipped())
    True
    """
    return tuple(str(path) for path in sorted((HERE / "data").glob("*.csv")) if not path.name.startswith("devices"))
