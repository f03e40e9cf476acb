"""What the packages above take of the cost of kernels and messages, and of plans."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import pytest

import shardwise
from shardwise import cost

SOURCE = Path(shardwise.__file__).parent
ACCURACY = Path(__file__).parents[2] / "accuracy"


@cache
def imports(source: Path) -> list[tuple[Path, ast.ImportFrom]]:
    """Return the lines of every module below a folder that import names."""
    trees = ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in source.rglob("*.py"))
    return [(path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("package", ["cost", "plans"])
def test_other_packages_use_the_surface_alone(package: str) -> None:
    """Nothing outside a package imports one of its private modules."""
    found = [
        f"{path.relative_to(SOURCE)}: {node.module}"
        for path, node in imports(SOURCE)
        if SOURCE / package not in path.parents and (node.module or "").startswith(f"shardwise.{package}._")
    ]
    assert not found


def test_the_surface_is_used() -> None:
    """Every name that is offered is imported by a package above, or by what measures accuracy."""
    used = {
        name.name
        for source in (SOURCE, ACCURACY)
        for path, node in imports(source)
        if SOURCE / "cost" not in path.parents and node.module == "shardwise.cost"
        for name in node.names
    }
    offered = {name for name, value in vars(cost).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert offered - used == set()
