"""How far two measured runs of a deployment agree, on rows that say so by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from accuracy import repeats
from accuracy.files import shipped


def _file(folder: Path, rows: list[dict[str, str]]) -> str:
    """Write rows of closed loops under the columns of a shipped file."""
    with open(shipped()[0], encoding="utf-8") as file:
        columns = next(csv.reader(file))
    path = folder / "rows.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def _point(case: str, release: str, flight: int, tpot: float) -> list[dict[str, str]]:
    """Return the rows of a loop whose first tokens take as long as the others."""
    row = {
        "case_id": case, "unit": "s", "model": "llama-3.1-8b", "device": "h100-sxm-80gb", "num_gpus": "1", "tp": "1",
        "engine": "vllm", "engine_version": release, "serving_mode": "online", "concurrency": str(flight),
        "input_tokens": "100", "output_tokens": "100", "quality": "medium", "source": "one",
        "notes": f"origin={case[0]}",
    }  # fmt: skip
    return [{**row, "metric": metric, "value": str(tpot)} for metric in ("ttft", "tpot")]


def test_a_run_serves_at_the_latency_of_another_what_its_curve_says(tmp_path: Path) -> None:
    """10 and 20 ms at one and four requests are 150 tokens a second at 15 ms, where the other run served 133."""
    first = [*_point("a1", "0.10", 1, 0.01), *_point("a4", "0.10", 4, 0.02)]
    file = _file(tmp_path, [*first, *_point("b2", "0.11", 2, 0.015)])
    assert [*repeats.ratios([file], "vllm", False)] == [pytest.approx(150 / (2 / 0.015))]
    assert [*repeats.ratios([file], "vllm", True)] == []
    assert [*repeats.ratios([file], "sglang", False)] == []
    assert [line.split(",")[0].split() for line in repeats.lines([file], "vllm")] == [["another", "run", "1", "rows"]]
