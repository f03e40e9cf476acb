"""What is kept for backward: tensors by name, and what recompute drops, reads and hands on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.ledger.op import Op, Tensor, Weight, within
from shardwise.ledger.saved import POLICIES, Checkpoint, keep, recomputed_ops, recomputed_shares, tensor_bytes
from shardwise.plans import CHECKPOINT_POLICIES

Rows = tuple[tuple[str, Any, str], ...]


def _op(name: str, region: str, saves: Rows, reads: Rows = ()) -> Op[Any]:
    def tensors(rows: Rows) -> tuple[Tensor[Any], ...]:
        return tuple(Tensor(name=n, size_bytes=s, born=b) for n, s, b in rows)

    return Op(
        name=name,
        kind="memory",
        region=region,
        flops=0,
        forward_bytes=0,
        backward_flops=0,
        backward_bytes=0,
        weight_flops=0,
        weight_bytes=0,
        rows=0,
        columns=0,
        inner=0,
        saves=tensors(saves),
        reads=tensors(reads),
    )


X, N, Q, OUT = ("x", 8.0, ""), ("normed", 8.0, "norm"), ("q", 16.0, "attention"), ("out", 4.0, "attention.core")
# A norm, a projection, a core that reads the projection, and a projection of its output.
BLOCK = (
    _op("norm", "norm", (X,), (X,)),
    _op("qkv", "attention", (N,), (N,)),
    _op("core", "attention.core", (Q, OUT), (Q,)),
    _op("proj", "attention", (OUT,), (OUT,)),
)


# The same block with a projection that is a product, and an addition behind it that saves nothing.
ENDING = (*BLOCK[:3], replace(BLOCK[3], kind="matmul"), _op("add", "attention", ()))


def _names(tensors: tuple[Tensor[Any], ...]) -> set[str]:
    return {t.name for t in tensors}


@pytest.mark.parametrize(
    ("units", "kept", "dropped"),
    [
        ((), {"x", "normed", "q", "out"}, set()),
        # Only the core runs again: it reads q from outside; the projection behind it still keeps its output.
        ((Checkpoint(("attention.core",)),), {"x", "normed", "q", "out"}, set()),
        ((Checkpoint(("attention",)),), {"x", "normed"}, {"q", "out"}),
        ((Checkpoint(("",)),), {"x"}, {"normed", "q", "out"}),
        ((Checkpoint(("norm",)),), {"x", "normed", "q", "out"}, set()),
        # Discarding the norm's output drops what the projection would keep.
        ((Checkpoint(("norm",), discards_output=True),), {"x", "q", "out"}, {"normed"}),
        ((Checkpoint(("norm", "attention")),), {"x"}, {"normed", "q", "out"}),
    ],
)
def test_recompute_drops_what_is_born_within(units: Any, kept: set[str], dropped: set[str]) -> None:
    """A unit keeps what it reads from outside and drops what is born within; others keep what they save."""
    found = keep(BLOCK, units)
    assert _names(found.kept) == kept
    assert _names(found.dropped) == dropped


@pytest.mark.parametrize(
    ("ops", "unit", "again"),
    [
        (ENDING, Checkpoint(("",)), ["norm", "qkv", "core", "proj", "add"]),
        (ENDING, Checkpoint(("",), stops_early=True), ["norm", "qkv", "core"]),
        # What saves its own output has to run.
        (BLOCK, Checkpoint(("",), stops_early=True), ["norm", "qkv", "core", "proj"]),
        (ENDING, Checkpoint(("attention.core",), stops_early=True), ["core"]),
        (ENDING, Checkpoint(("mlp",), stops_early=True), []),
    ],
)
def test_recompute_may_stop_at_the_last_saved_tensor(ops: Any, unit: Checkpoint, again: list[str]) -> None:
    """A unit that stops early leaves out its last product, whose inputs are saved before it runs, and what follows."""
    assert [op.name for op in recomputed_ops(ops, (unit,))] == again


def test_a_tensor_is_never_both_kept_and_dropped() -> None:
    """What one operator still keeps is not dropped by another."""
    for region in ("", "norm", "attention", "attention.core"):
        for discards in (False, True):
            found = keep(BLOCK, (Checkpoint((region,), discards_output=discards),))
            assert not _names(found.kept) & _names(found.dropped)


def test_bytes_are_of_distinct_tensors() -> None:
    """A tensor that two operators save counts once, for numbers and for columns."""
    assert tensor_bytes(keep(BLOCK).kept) == 36.0
    sizes = np.array([1.0, 2.0])
    ops = [_op(n, "a", (("t", sizes, ""),)) for n in ("one", "two")]
    assert tensor_bytes(keep(ops).kept).tolist() == [1.0, 2.0]
    assert tensor_bytes(()) == 0


@pytest.mark.parametrize(
    ("path", "region", "expected"),
    [("a.b", "a", True), ("a", "a.b", False), ("ab", "a", False), ("a", "", True), ("", "a", False), ("", "", True)],
)
def test_regions_nest_by_their_path(path: str, region: str, expected: bool) -> None:
    """A path lies in the regions it starts with, whole words alone."""
    assert within(path, region) is expected


def _product(name: str, parts: tuple[int, ...], last: bool = False) -> Op[Any]:
    weight = Weight(name=f"{name}.weight", elements=1, whole=1)
    one = replace(_op(name, "mlp", (("y" if last else "x", 8.0, "mlp" if last else ""),)), kind="matmul")
    return replace(one, weights=(weight,), columns=sum(parts), parts=parts, output_bytes=10.0 * sum(parts))


def test_every_policy_that_can_be_asked_for_is_known() -> None:
    """The words of a setting are those of the ledger."""
    assert set(POLICIES) == set(CHECKPOINT_POLICIES)


def test_a_policy_by_operator_keeps_every_second_product() -> None:
    """Of three joint products the first and third are kept and do not run again; of two more the second."""
    ops = (_product("qkv", (4, 1, 1)), _product("out", (2,)), _product("down", (3,), last=True))
    unit = Checkpoint(("",), policy=POLICIES["second-matmuls"])
    kept = {t.name: t.size_bytes for t in keep(ops, (unit,)).kept}
    assert kept == {"x": 8.0, "qkv.result": 50.0, "out.result": 0.0, "down.result": 30.0}
    again = recomputed_shares(ops, (unit,))
    assert [again[id(op)] for op in ops] == pytest.approx([1 / 6, 1, 0])


def test_a_compiler_keeps_no_result_that_only_a_sum_reads() -> None:
    """The last product's result is left out where the unit prunes."""
    ops = (_product("up", (4, 4)), _product("down", (3,), last=True))
    names = {t.name for t in keep(ops, (Checkpoint(("",), policy=POLICIES["second-matmuls"], prunes=True),)).kept}
    assert names == {"x", "up.result"}


def test_a_compiler_runs_no_frozen_product_again_whose_result_only_a_sum_reads() -> None:
    """The frozen last product is left out where the unit prunes: what its adapter saves does not need it."""
    up, down = (replace(_product(name, (4,)), saves=()) for name in ("up", "down"))
    beside = [_product("lora_A", (1,)), _product("lora_B", (4,), last=True)]
    ops = [up, down, *(replace(op, weights=(replace(op.weights[0], adapter=True),)) for op in beside)]
    for prunes, again in ((False, ["up", "down", "lora_A"]), (True, ["up", "lora_A"])):
        found = recomputed_ops(ops, (Checkpoint(("",), stops_early=True, prunes=prunes),))
        assert [op.name for op in found] == again
