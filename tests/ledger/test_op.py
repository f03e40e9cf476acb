"""Operators, weights and tensors say what they are: no rule asks for their names."""

from __future__ import annotations

from typing import get_args

import pytest

from ops.helpers import layout
from shardwise.ledger.op import OpRole
from shardwise.models import Model
from shardwise.ops import blocks


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
