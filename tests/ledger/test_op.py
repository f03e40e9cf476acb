"""Operators, weights and tensors say what they are: no rule asks for their names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

import shardwise
from ops.helpers import layout
from shardwise.ledger.op import OpRole
from shardwise.models import Model
from shardwise.ops import blocks

SOURCE = Path(shardwise.__file__).parent
HOLDERS = {"op", "one_op", "w", "weight", "t", "tensor", "source"}
ASKS = {"startswith", "endswith", "split", "partition", "rpartition"}


def _is_name(node: ast.AST) -> bool:
    held = isinstance(node, ast.Attribute) and node.attr == "name"
    return held and isinstance(node.value, ast.Name) and node.value.id in HOLDERS  # type: ignore[attr-defined]


def _asks(node: ast.AST) -> bool:
    """Whether a node compares a name with words, or looks into it."""
    if isinstance(node, ast.Compare):
        words = any(isinstance(side, (ast.Constant, ast.Tuple)) for side in (node.left, *node.comparators))
        return words and any(map(_is_name, (node.left, *node.comparators)))
    return isinstance(node, ast.Attribute) and node.attr in ASKS and _is_name(node.value)


def test_no_rule_asks_for_the_name_of_an_operator_weight_or_tensor() -> None:
    """Names are for people: what a rule means is a role, a kind or a region."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"  # type: ignore[attr-defined]
        for package in ("ledger", "ops", "cost", "training", "serving", "search", "answers")
        for path in sorted((SOURCE / package).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if _asks(node)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3.2", "gpt-oss-20b", "qwen2-57b-a14b"])
def test_operators_have_the_roles_that_rules_ask_for(name: str) -> None:
    """Every layer has its norms, products, activation and additions by role, and each role is one of the list."""
    model, y = Model.load(name), layout()
    ops = [op for block in model.kinds for op in blocks.block_ops(y, block, model.hidden)]
    roles = {op.role for op in ops}
    assert roles <= set(get_args(OpRole))
    assert {"norm", "up", "activation", "down", "add", "out", "attention"} <= roles
    assert ("router" in roles) == ("dispatch" in roles) == ("combine" in roles) == model.has_experts
    assert all(w.role == op.role for op in ops for w in op.weights if op.role in ("up", "down") and w.kind == "matrix")
