"""The structure of the source: a fact that rules ask for has one home, and modules import one way."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.plans import DEGREES, SHARDINGS, Stack
from shardwise.plans.schedules import RULES

SOURCE = Path(shardwise.__file__).parent
# What people call an operator, a weight or a tensor, in the code that has one in hand.
HOLDERS = {"op", "one_op", "w", "weight", "t", "tensor", "source"}
ASKS = {"startswith", "endswith", "split", "partition", "rpartition"}
PARTS = {
    "Attention", "CompressedAttention", "GatedDelta", "LatentAttention", "LightningAttention", "Mamba1", "Mamba2",
    "Mlstm", "MLP", "MoE", "RecurrentGate", "Rwkv", "ShortConv",
}  # fmt: skip
OVERLAP = {name for name in Stack.__dataclass_fields__ if name.startswith("overlap_")} | {"hides"}


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package by their paths."""
    return {str(p.relative_to(SOURCE)): ast.parse(p.read_bytes()) for p in sorted(SOURCE.rglob("*.py"))}


@cache
def every_node() -> dict[str, list[ast.AST]]:
    """All nodes of each module by its path."""
    return {path: [*ast.walk(tree)] for path, tree in trees().items()}


@cache
def nodes() -> tuple[tuple[str, Any], ...]:
    """What can ask for something, with the path of its module: comparisons, calls, attributes, tuples and imports."""
    kinds = (ast.Compare, ast.Call, ast.Attribute, ast.Tuple, ast.ImportFrom)
    return tuple((path, n) for path, every in every_node().items() for n in every if isinstance(n, kinds))


def places(asks: Callable[[Any], bool], *apart: str) -> list[str]:
    """Where nodes are of a kind, outside what `apart` names."""
    return [f"{path}:{node.lineno}" for path, node in nodes() if asks(node) and not path.startswith(apart)]


def words_of(node: ast.AST) -> set[object]:
    """The words that a comparison holds something against."""
    if not isinstance(node, ast.Compare):
        return set()
    found: set[object] = set()
    for side in (node.left, *node.comparators):
        parts = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
        found |= {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return found


def asks_of(node: ast.AST, attribute: str) -> bool:
    """Whether a comparison has an attribute, or a variable, of that name on one side."""
    sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    return any(getattr(side, "attr", getattr(side, "id", "")) == attribute for side in sides)


def _is_name(node: Any) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "name" and getattr(node.value, "id", "") in HOLDERS


def _asks_for_a_name(node: Any) -> bool:
    if isinstance(node, ast.Compare):
        words = any(isinstance(side, (ast.Constant, ast.Tuple)) for side in (node.left, *node.comparators))
        return words and any(map(_is_name, (node.left, *node.comparators)))
    return isinstance(node, ast.Attribute) and node.attr in ASKS and _is_name(node.value)


def _tests_a_part(node: Any) -> bool:
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "isinstance":
        return False
    kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
    return any(getattr(kind, "id", "") in PARTS for kind in kinds)


def _lists_degrees(node: Any) -> bool:
    words = [part.value for part in node.elts if isinstance(part, ast.Constant)] if isinstance(node, ast.Tuple) else []
    return len(words) >= 5 and len(words) == len(node.elts) and {*words} <= {*DEGREES}


def _tests_an_ending(node: Any) -> bool:
    """Whether the name of a field of a record decides: `f.name.endswith(...)`."""
    called = node.func if isinstance(node, ast.Call) else None
    held = called.value if isinstance(called, ast.Attribute) and called.attr in ASKS else None
    return isinstance(held, ast.Attribute) and held.attr == "name" and getattr(held.value, "id", "") in ("f", "field")


def _tests_a_label(node: Any) -> bool:
    return (asks_of(node, "label") and bool(words_of(node))) or (
        isinstance(node, ast.Attribute) and node.attr in ASKS and getattr(node.value, "attr", "") == "label"
    )


FACTS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    # What a rule means is a role, a kind or a region; names are for people, and for files of other systems.
    "the name of an operator, weight or tensor": (_asks_for_a_name, ("formats", "models", "measured", "hardware")),
    "the name of a field": (_tests_an_ending, ("search/_space.py", "answers")),
    "the label of a number": (_tests_a_label, ("answers/_train_page.py",)),
    # A schedule says what it is in its file and its row; formats translate its word.
    "the word of a schedule": (
        lambda node: asks_of(node, "schedule") and bool(words_of(node) & {*RULES}),
        ("training/schedules", "plans/schedules.py"),
    ),
    # Words with the same properties mean the same: what asks, asks for the properties.
    "the word of a sharding": (
        lambda node: (asks_of(node, "sharding") or asks_of(node, "kind")) and bool(words_of(node) & {*SHARDINGS[1:]}),
        ("plans/_plan.py", "formats/fsdp.py"),
    ),
    # Mixers and feed-forwards say their own sizes; `ops/block.py` dispatches, formats write another system's words.
    "the class of a mixer or a feed-forward": (
        _tests_a_part,
        ("models", "formats", "ops/block.py", "ops/feed_forward.py", "ops/count.py"),
    ),
    # Degrees in an order of their own stand where orders of axes do.
    "the degrees of a plan, listed": (
        _lists_degrees,
        ("plans/_plan.py", "cost/_imposed.py", "search/_serving_space.py", "formats/_exported.py"),
    ),
    # `ops/layout.py` marks a collective with what it hides behind; formats read and write a stack's settings.
    "what hides behind what": (
        lambda n: isinstance(n, ast.Attribute) and n.attr in OVERLAP and getattr(n.value, "id", "") not in ("c", "one"),
        ("ops/overlap.py", "ops/layout.py", "training/_overlap.py", "formats", "plans"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_is_asked_for_where_it_lives(fact: str) -> None:
    """No rule tests a word, a label or a class for what a typed property says."""
    asks, homes = FACTS[fact]
    assert places(asks, *homes) == []


# What any value may be called, and so says of none what it is.
VAGUE = {"found", "said", "told", "held", "beside", "taken"}


def _names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the names that nodes of a module give: of functions, parameters, variables and fields."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node.lineno, node.name.lstrip("_")
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def _types(path: str) -> Iterator[str]:
    """Yield the classes of a module and the names that it gives to types."""
    for node in every_node()[path]:
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in trees()[path].body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and re.match("_?[A-Z][A-Za-z]*[a-z]", target.id):
            yield target.id


def test_names_say_what_they_are() -> None:
    """No value is called by a participle that fits any value, and no class or type is defined twice."""
    named = ((path, line, name) for path, every in every_node().items() for line, name in _names(every))
    assert [f"{path}:{line}: {name}" for path, line, name in named if name in VAGUE] == []
    types = [name for path in trees() for name in _types(path)]
    assert sorted(name for name, count in Counter(types).items() if count > 1) == []


def _imports(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """Yield the imports of a module, those in functions too; what only type checkers see is not loaded."""
    for child in (one for part in ("body", "orelse", "handlers", "finalbody") for one in getattr(node, part, [])):
        if isinstance(child, ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _imports(child)


def _is_apart(path: str, module: str) -> bool:
    """Whether a module is private and of another package than the file of a path."""
    _, package, *rest = (*module.split("."), "")
    return package != Path(path).parts[0] and any(part.startswith("_") for part in rest)


def test_what_is_private_stays_where_it_is() -> None:
    """No package reads a private module of another, and no module a private name: packages export what others use."""
    read = [(path, node) for path, node in nodes() if isinstance(node, ast.ImportFrom)]
    assert [f"{path}: {node.module}" for path, node in read if _is_apart(path, node.module or "")] == []
    names = [(path, node.module, one.name) for path, node in read for one in node.names if one.name.startswith("_")]
    modules = {".".join(Path("shardwise", path).with_suffix("").parts) for path in trees()}
    assert [row for row in names if f"{row[1]}.{row[2]}" not in modules and row[2] != "__version__"] == []


def test_no_modules_import_one_another() -> None:
    """What modules import, when they are loaded or in a function, goes one way, inside packages too."""
    modules = {".".join(Path("shardwise", path).with_suffix("").parts): tree for path, tree in trees().items()}
    graph: dict[str, set[str]] = {}
    for name, tree in modules.items():
        names = ((f"{node.module}.{each.name}", f"{node.module}.__init__", node.module) for node in _imports(tree)
                 for each in node.names)  # fmt: skip
        graph[name] = {next(one for one in (*some, "") if one in modules or not one) for some in names} - {""}
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


def _writes_text_as_its_system_does(node: Any) -> bool:
    if not isinstance(node, ast.Call):
        return False
    mode = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "r"
    opened = getattr(node.func, "id", "") == "open" and isinstance(mode, str) and set("wax") & set(mode)
    told = {"encoding", "newline"} <= {one.arg for one in node.keywords}
    return getattr(node.func, "attr", "") == "write_text" or bool(opened and "b" not in mode and not told)


def test_text_is_written_alike_on_every_system() -> None:
    """Files of text have one kind of line end and one encoding, so that the same answer is the same bytes."""
    assert not places(_writes_text_as_its_system_does)
