"""Frames: every legal plan as a row that `train` and `infer` agree with, read by other libraries through Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.frames import Frame

CLUSTER = sw.Cluster.parse("8xh100-sxm-80gb")
JOB = sw.Training(seq_len=2048, global_batch=64)
SPACE = sw.SearchSpace(schedule=("1f1b", "interleaved"), recompute=("none", "full"))


@pytest.fixture(scope="module")
def found() -> sw.TrainingResult:
    """A search of some hundreds of plans."""
    options = sw.SearchOptions(stack="megatron", prune=False)
    return sw.plan_training(sw.load_model("llama-3.1-8b"), CLUSTER, JOB, SPACE, options)


def test_a_row_is_what_train_answers(found: sw.TrainingResult) -> None:
    """Seconds and bytes of a row are those of `train` for the plan that its fields say."""
    plans = found.frame()
    assert len(plans) == found.counts.legal
    assert (plans["step_seconds"] > 0).all()
    own = (
        "tp",
        "cp",
        "pp",
        "vpp",
        "dp",
        "micro_batch",
        "sequence_parallel",
        "cp_kind",
        "schedule",
        "sharding",
        "recompute",
    )
    for at in np.random.default_rng(1).integers(0, len(plans), 12):
        row = {name: plans[name][at] for name in own}
        plan = sw.Plan(**{name: value.item() if hasattr(value, "item") else value for name, value in row.items()})
        report = sw.train(found.grid.case.model, CLUSTER, plan, JOB, sw.TrainingOptions(stack="megatron"))
        assert plans["step_seconds"][at] <= report.step_seconds * (1 + 1e-9)
        assert plans["device_bytes"][at] == pytest.approx(report.device_bytes, rel=1e-9)
        assert plans["fits"][at] == report.fits


def test_the_best_plan_is_the_best_row(found: sw.TrainingResult) -> None:
    """The least seconds among the rows that fit at the wanted chance are those of the best plan."""
    plans = found.frame()
    assert plans["step_seconds"][plans["fits_at_risk"]].min() == pytest.approx(found.best[0].step_seconds, rel=1e-9)


def test_deployments_are_rows_too() -> None:
    """A frame of deployments has a row a layout and batch, as `infer` answers it."""
    model = sw.load_model("llama-3.1-8b")
    rows = sw.frame(model, CLUSTER, sw.Serving(input_tokens=512, output_tokens=64))
    assert {"tp", "batch", "ttft_seconds", "usd"} <= set(rows)
    one = next(row for row in rows.rows() if row["tp"] == 8 and row["batch"] == 4)
    report = sw.infer(
        model, CLUSTER, sw.Plan(tp=8, pp=one["pp"], dp=0), sw.Serving(batch=4, input_tokens=512, output_tokens=64)
    )
    assert one["ttft_seconds"] == pytest.approx(report.ttft_seconds)


def test_a_space_of_the_other_kind_is_refused() -> None:
    """Training plans are no space of deployments, nor the reverse."""
    with pytest.raises(sw.InputError, match="training plans"):
        sw.frame(sw.load_model("gpt2"), CLUSTER, sw.Serving(), sw.SearchSpace())
    with pytest.raises(sw.InputError, match="deployments"):
        sw.frame(sw.load_model("gpt2"), CLUSTER, JOB, sw.ServingSpace())


COLUMNS: dict[str, Any] = {
    "tp": [1, 2, 4],
    "seconds": [0.5, None, 2.0],
    "word": ["a", None, "cc"],
    "fits": [True, False, True],
}


def test_rows_keep_what_is_not_known() -> None:
    """A value that is missing is empty in CSV and None in a row."""
    frame = Frame(COLUMNS)
    assert frame.rows()[1] == {"tp": 2, "seconds": None, "word": None, "fits": False}
    assert frame.to_csv() == "tp,seconds,word,fits\n1,0.5,a,True\n2,,,False\n4,2.0,cc,True\n"
    assert "<td>cc</td>" in frame._repr_html_()


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_other_libraries_read_a_frame_through_arrow(library: str) -> None:
    """Types, values and what is missing arrive through the Arrow interface, and memory is given back after."""
    from shardwise import frames

    module = pytest.importorskip(library)
    read = module.DataFrame if library == "polars" else module.table
    table = read(Frame(COLUMNS))
    told = table.to_dict(as_series=False) if library == "polars" else table.to_pydict()
    assert told == COLUMNS
    del table
    assert not frames._KEPT
