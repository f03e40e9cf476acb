"""Which constants rows take from others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shardwise.cost import ExpertsFit, constants
from shardwise.cost._tables import completed

WIDE = {"compute": 0.8, "depth": 40.0, "source": "a table", "by_device": {"gh200-96gb": 1.02}}


def _products(**types: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = completed({"hopper": {"matmul": {"bf16": WIDE, **types}}})["hopper"]["matmul"]
    return found


def test_narrow_types_take_the_form_of_16_bits() -> None:
    """A type has the constants of 16 bits that it does not state, but neither their source nor factors of devices."""
    assert _products(fp8={"compute": 0.6})["fp8"] == {"compute": 0.6, "depth": 40.0}
    assert _products(fp8={"compute": 0.6, "depth": 9.0})["fp8"] == {"compute": 0.6, "depth": 9.0}
    assert _products()["bf16"] == WIDE


def test_kernels_of_experts_share_what_they_do_not_state() -> None:
    """A kernel's own constant stands before that of all kernels."""
    kernels = {"one": {"compute": 0.5}, "two": {"compute": 0.6, "memory": 0.3}}
    table = {"shared": {"experts": {"memory": 0.9}}, "ada": {"experts": {"vllm": {"bf16": kernels}}}}
    found = completed(table)
    assert found["ada"]["experts"]["vllm"]["bf16"]["one"] == {"memory": 0.9, "compute": 0.5}
    assert found["ada"]["experts"]["vllm"]["bf16"]["two"] == {"memory": 0.3, "compute": 0.6}
    assert found["shared"] == table["shared"]


def test_every_stored_kernel_of_experts_is_whole() -> None:
    """No kernel of the stored constants lacks one of the form, its own or shared."""
    for table in constants().values():
        for types in table.get("experts", {}).values() if "devices" in table else ():
            for kernels in types.values():
                for row in kernels.values():
                    assert {f.name for f in fields(ExpertsFit)} <= row.keys()
