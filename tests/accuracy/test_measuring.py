"""The measuring script: its tables, its fits, and on machines with PyTorch a run of tiny sizes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from accuracy.measuring import fit
from accuracy.measuring.tables import Tables
from accuracy.published import KINDS
from shardwise.hardware import find_device
from shardwise.measured import validate
from shardwise.measured._run import kind_of

ROOT = Path(__file__).parents[2]
CPU = find_device("cpu-epyc-zen4-2core").device


def test_tables_refuse_columns_that_they_do_not_have() -> None:
    """A misspelt column is an error, not a lost figure."""
    with pytest.raises(ValueError, match="speed"):
        Tables().add("kernels_gemm", speed=1)


@pytest.mark.parametrize("table", ["training", "inference", "kernels_gemm", "kernels_memory", "kernels_moe",
                                   "kernels_attention_prefill", "op_efficiency"])  # fmt: skip
def test_files_are_told_apart_by_validate(tmp_path: Path, table: str) -> None:
    """Every file that is written is recognised by its columns."""
    from accuracy.measuring.tables import COLUMNS

    assert kind_of(set(COLUMNS[table]), KINDS).name in table.replace("kernels_attention_prefill", "attention")


def test_a_rate_and_a_start_are_found_again() -> None:
    """Kernels that stream at a rate after a start give that rate and that start."""
    moved = np.array([1e5, 1e6, 1e7, 1e8])
    rows = {
        "op": np.array(["add_forward"] * 4), "dtype": np.array(["fp32"] * 4), "spread": np.zeros(4),
        "bytes_total": moved, "time_seconds": moved / 5e10 + 7e-6,
    }  # fmt: skip
    rate, start = fit.streams(rows, CPU, "fp32")["add", "forward"]
    assert rate == pytest.approx(5e10, rel=0.01)
    assert start == pytest.approx(7e-6, rel=0.05)


def test_the_stored_constants_are_a_file_that_the_fit_writes() -> None:
    """The header of the stored file is that of the script."""
    assert fit.TARGET.read_text(encoding="utf-8").startswith(fit.HEADER.splitlines()[0][:40])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_tiny_run_writes_rows_that_are_predicted(tmp_path: Path) -> None:
    """Rows of training steps and batches of tiny models are read and predicted."""
    words = ("--quick", "--device", "cpu", "--only", "steps,memory,inference", "--key", CPU.name)
    done = subprocess.run(
        [sys.executable, "-m", "accuracy.measuring", tmp_path, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = validate([str(tmp_path / f"{name}_own.csv") for name in ("training", "inference")])
    assert found.coverage == 1.0, [row.reason for row in found.rows]
