"""Stored constants as records: what no record has, what is missing and what is of another type is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardwise.cost._records import AttentionTable, DeviceFamily, Gemm
from shardwise.cost._shared import ReplicaMessages
from shardwise.cost._tables import constants, record, stored

HOPPER = stored()["hopper"]


def changed(*path: str, **values: Any) -> dict[str, Any]:
    """Return the tables of Hopper with some values of one of them changed."""
    table: dict[str, Any] = copy.deepcopy(HOPPER)
    row = table
    for name in path:
        row = row[name]
    row |= values
    return table


@pytest.mark.parametrize(
    ("path", "values", "says"),
    [
        (("matmul", "bf16"), {"sharpnes": 2.0}, "hopper.matmul.bf16: sharpnes is no constant of Gemm; sharpness may"),
        (("matmul", "fp8", "engines", "vllm"), {"rampseconds": 1.0}, "engines.vllm: rampseconds is no constant"),
        (("matmul", "fp8"), {"colour_source": "a page"}, "colour_source is no constant of Gemm"),
        (("attention", "kernels", "flash-1"), {"forwards": 0.4}, "flash-1: forwards is no constant of AttentionFit"),
        (("memory",), {"keeps_output": True}, "keeps_outputs may be meant"),
        (("grouped",), {"compute": "half"}, "hopper.grouped.compute: 'half' is no float"),
        (("memory",), {"keeps_outputs": 1.0}, "hopper.memory.keeps_outputs: 1.0 is no bool"),
        (("fast", "all_reduce"), {"efficiency": True}, "True is no float"),
        ((), {"matmull": {}}, "hopper: matmull is no constant of DeviceFamily; matmul may be meant"),
    ],
)
def test_a_constant_that_no_record_has_is_refused(path: tuple[str, ...], values: dict[str, Any], says: str) -> None:
    """A misspelt key, one of another type, and a source of nothing are errors that name the place and what is near."""
    with pytest.raises(ValueError, match=says):
        record(DeviceFamily, changed(*path, **values), "hopper")


@pytest.mark.parametrize(
    ("kind", "missing"), [(Gemm, "memory"), (DeviceFamily, "grouped"), (ReplicaMessages, "longer")]
)
def test_a_constant_that_is_missing_is_refused(kind: type[Any], missing: str) -> None:
    """What a record needs is never taken for zero."""
    with pytest.raises(ValueError, match=rf"{missing}.* of {kind.__name__} is not stated"):
        record(kind, {}, "a table")


def test_a_part_of_attention_that_kernels_do_not_have_is_refused() -> None:
    """Costs of kernels stand under the names of their parts."""
    row = {"costs": {"start": [1e-6], "wave": [1e-6]}}
    with pytest.raises(ValueError, match="wave"):
        record(AttentionTable, row, "hopper.decode_kernels")


def test_every_table_of_the_files_is_read() -> None:
    """Each family of the files has a record, with as many types of GEMMs and kernels as are stored."""
    families = {name: row for name, row in stored().items() if "matmul" in row}
    assert constants().families.keys() == families.keys()
    for name, row in families.items():
        assert constants().families[name].matmul.keys() == row["matmul"].keys()
        assert constants().families[name].experts.keys() == row.get("experts", {}).keys()
