"""What the packages above take of the cost of kernels and messages, and of plans."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import shardwise
from shardwise import cost

SOURCE = Path(shardwise.__file__).parent
ACCURACY = Path(__file__).parents[2] / "accuracy"


# What is imported from where, over one line or several.
IMPORT = re.compile(r"^ *from (shardwise[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


@cache
def imports(source: Path) -> list[tuple[Path, str, set[str]]]:
    """Return the modules and the names that every module below a folder imports."""
    return [
        (path, found[1], set(re.findall(r"\w+", found[2])))
        for path in source.rglob("*.py")
        for found in IMPORT.finditer(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("package", ["cost", "plans", "models", "hardware"])
def test_other_packages_use_the_surface_alone(package: str) -> None:
    """Nothing outside a package imports one of its private modules."""
    found = [
        f"{path.relative_to(SOURCE)}: {module}"
        for path, module, _ in imports(SOURCE)
        if SOURCE / package not in path.parents and module.startswith(f"shardwise.{package}._")
    ]
    assert not found


def test_the_surface_is_used() -> None:
    """Every name that is offered is imported by a package above, or by what measures accuracy."""
    used = {
        name
        for source in (SOURCE, ACCURACY)
        for path, module, names in imports(source)
        if SOURCE / "cost" not in path.parents and module == "shardwise.cost"
        for name in names
    }
    offered = {name for name, value in vars(cost).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert offered - used == set()
