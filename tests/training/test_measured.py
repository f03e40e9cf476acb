"""Predictions beside what was measured or traced: whole steps of transformers and of Megatron-LM."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from accuracy import korthikanti
from accuracy import transformers_steps as transformers

ROOT = Path(__file__).parents[2]
PEAKS_GIB = {"tp1-dp8": 69.1, "tp2-dp4": 55.7, "pp2-dp4": 49.8, "tp8": 28.8}


def rows(path: Path, key: str) -> list[dict[str, Any]]:
    """The rows of a data file."""
    found: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))[key]
    return found


@pytest.mark.parametrize(
    "row", rows(transformers.DATA, "run"), ids=lambda r: f"{r['model']}-{r['kind']}-{r['seq_len']}"
)
def test_step_peaks_are_those_of_the_memory_tracker(row: dict[str, Any]) -> None:
    """The peak of a whole transformers step is within 0.5 % of PyTorch's memory tracker."""
    assert transformers.predicted_bytes(row) == pytest.approx(row["peak_bytes"], rel=5e-3)


@pytest.mark.parametrize("setting", korthikanti.SETTINGS)
@pytest.mark.parametrize("row", rows(korthikanti.DATA, "model"), ids=lambda r: r["name"])
def test_step_times_are_those_of_table_5(row: dict[str, Any], setting: str) -> None:
    """Each step time of Korthikanti et al., Table 5, is met within 10 % with one set of A100 constants."""
    data = tomllib.loads(korthikanti.DATA.read_text(encoding="utf-8"))
    predicted = korthikanti.predicted_seconds(row, data, setting)
    assert predicted == pytest.approx(row[f"{setting}_seconds"], rel=0.10)


@pytest.mark.parametrize("case", PEAKS_GIB)
def test_peaks_of_megatron_2023_are_met_from_case_files(case: str) -> None:
    """The four allocated peaks of Megatron-LM pull request 482 are met within 2 % by one stack with no fitted term."""
    file = f"examples/megatron-2023/{case}.toml"
    command = [sys.executable, "-m", "shardwise", "train", "--config", file, "--json"]
    answer = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert answer["memory"]["peak_bytes"] / 2**30 == pytest.approx(PEAKS_GIB[case], rel=0.02)
