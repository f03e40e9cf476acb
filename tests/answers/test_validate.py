"""`shardwise validate`: keys, files, statuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from accuracy.files import shipped
from command_line import run

COLUMNS = ["case_id", "metric", "measured", "predicted", "relative_error", "low", "high", "status", "assumed"]


def ask(*words: str) -> tuple[int, str, str]:
    """Return the status and both outputs of `shardwise validate`."""
    done = run("validate", *words)
    return done.status, done.out, done.err


def file_of(name: str) -> str:
    """Return a shipped file by its name."""
    return next(path for path in shipped() if path.endswith(name))


def part_of(name: str, folder: Path) -> str:
    """Return a file of every 20th row of a shipped one: some of every kind of run, in a 20th of the time."""
    head, *rows = Path(file_of(name)).read_text(encoding="utf-8").splitlines()
    path = folder / name
    path.write_text("\n".join([head, *rows[::20]]) + "\n", encoding="utf-8")
    return str(path)


def test_json_has_the_stable_keys() -> None:
    """Coverage and the summary by source, metric and device are there for programs."""
    status, out, _ = ask(file_of("training_runs.csv"), "--json")
    tree = json.loads(out)
    assert status == 0
    assert tree["coverage"] > 0.9
    wanted = {"source", "metric", "device", "count", "bias", "median_abs_error", "p90_abs_error"}
    assert all(wanted <= row.keys() for row in tree["summary"])
    assert sum(row["count"] for row in tree["summary"]) == tree["rows"]["predicted"]
    assert {"metric", "source", "device", "family", "quality", "year"} == tree["tables"].keys()


def test_rows_are_written_as_csv(tmp_path: Path) -> None:
    """Every row of the files is in the CSV, with its prediction, interval and assumptions."""
    path = tmp_path / "rows.csv"
    files = [part_of(name, tmp_path) for name in ("inference_runs.csv", "inference_cpu.csv")]
    status, *_ = ask(*files, "--rows", str(path))
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert status == 0
    assert list(rows[0])[: len(COLUMNS)] == COLUMNS
    assert len(rows) == sum(len(Path(name).read_text().splitlines()) - 1 for name in files)
    made = [row for row in rows if row["status"] == "predicted"]
    assert all(float(row["predicted"]) >= 0 for row in made)  # nothing is left for a cache where a model does not fit


def test_report_and_plot_are_written(tmp_path: Path) -> None:
    """The HTML report stands alone, with its drawing inside, and the plot goes to a file."""
    report, plot = tmp_path / "report.html", tmp_path / "plot.svg"
    status, out, _ = ask(part_of("training_runs.csv", tmp_path), "--html", str(report), "--plot", str(plot))
    text = report.read_text(encoding="utf-8")
    assert status == 0
    assert text.startswith("<!DOCTYPE html>") and "<svg" in text and "What is assumed" in text
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert str(plot) in out


def test_errors_are_grouped_by_fields_that_exist(tmp_path: Path) -> None:
    """Fields to group by are those of rows; others are refused with the list."""
    status, out, _ = ask(part_of("training_runs.csv", tmp_path), "--by", "device,year")
    assert (status, "BY DEVICE, YEAR" in out) == (0, True)
    status, _, err = ask("--by", "colour")
    assert status == 2 and "colour" in err and "source" in err


@pytest.mark.parametrize("text", ["", "colour,size\nred,1\n", "\0\0\0"])
def test_files_that_are_not_measurements_are_refused(tmp_path: Path, text: str) -> None:
    """A file that cannot be read or recognised is bad input, said in one line."""
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="utf-8")
    status, _, err = ask(str(path))
    assert status == 2 and "x.csv" in err
    assert ask(str(tmp_path / "none.csv"))[0] == 2


def test_a_file_of_refused_rows_is_answered_with_one(tmp_path: Path) -> None:
    """Where no row can be predicted the status is 1, and the reasons are listed."""
    path = tmp_path / "rows.csv"
    path.write_text("case_id,metric,value,model,device,seq_len\na,step_time,1,x,y,2048\n", encoding="utf-8")
    status, out, _ = ask(str(path))
    assert (status, "REFUSED" in out) == (1, True)


def test_a_file_is_asked_for() -> None:
    """Without a file there is nothing to compare: the answer says what is wanted, with status 2."""
    status, _, err = ask()
    assert status == 2 and "files" in err and "CSV" in err
