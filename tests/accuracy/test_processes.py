"""Several processes predict published tables as one does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accuracy import processes
from accuracy.files import shipped
from accuracy.published import measured
from measured_rows import INFERENCE, TRAINING, write
from shardwise.measured import rows_csv

KERNEL_TABLES = [file for file in shipped() if file.endswith(("kernels_gemm.csv", "kernels_mla.csv"))]


def _files(folder: Path) -> list[str]:
    """Return tables of several kinds: configurations of several rows, a row that cannot be read, some without names."""
    training = [
        {**TRAINING, "case_id": f"mine-{tp}", "tp": tp, "dp": str(8 // int(tp)), "metric": metric}
        for tp in ("1", "2", "3")
        for metric in ("step_time", "peak_memory")
    ]
    serving = [{**INFERENCE, "case_id": "", "batch": batch} for batch in ("8", "16", "many")]
    return [write(folder, training, "training.csv"), write(folder, serving, "serving.csv"), *KERNEL_TABLES]


def test_two_processes_give_the_rows_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field of every row is the same, in the same order, whichever process predicted it; each did some."""
    files, where = _files(tmp_path), tmp_path / "pids"
    where.mkdir()
    compared = processes.compared

    def marked(*given: object) -> object:
        (where / str(os.getpid())).touch()
        return compared(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(processes, "PIECE_ROWS", 2)
    alone = measured(files)
    monkeypatch.setattr(processes, "compared", marked)
    several = processes.measured_by([*files, files[0]], 2)
    rows = processes.joined(several, files).rows
    assert rows == alone.rows and rows_csv(rows) == rows_csv(alone.rows)
    assert len(KERNEL_TABLES) == 2 and {row.status for row in rows} == {"predicted", "refused"}
    assert str(os.getpid()) not in {path.name for path in where.iterdir()}
    assert [row.case_id for row in several[files[1]].rows] == ["line 2", "line 3", "line 4"]


def test_one_short_table_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of one piece is predicted by the process that asks."""
    monkeypatch.setattr(processes, "ProcessPoolExecutor", None)
    file = write(tmp_path, [TRAINING])
    assert processes.measured_by([file], 8)[file].rows == measured([file]).rows
