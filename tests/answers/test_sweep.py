"""`shardwise sweep`: studies that are killed, run twice, changed, or run on Ray end in the same tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shardwise.answers._sweep import read_study, rows_of
from shardwise.answers._sweep_page import sweep_figure, sweep_page
from shardwise.cli import main
from shardwise.errors import InputError
from shardwise.search._study import StudyQuestion, StudyResult

polars = pytest.importorskip("polars")

STUDY = """
task = "train"
top = 2

[fixed]
seq_len = 512
tp = "1..2"
cp = 1
pp = 1
recompute = ["none"]
micro_batch = "1..2"

[grid]
model = ["gpt2", "gpt2-medium"]
on = ["2xa100-sxm-80gb", "4xh100-sxm-80gb"]
job = [{global_batch = 8}, {global_batch = 16}, {global_batch = 7}]
"""
QUESTIONS = 12


def _study(folder: Path, text: str = STUDY) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def _words(study: Path, out: Path, *more: str) -> list[str]:
    return ["sweep", str(study), "--out", str(out), *more]


def _tables(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.parquet"))}


def _parts(out: Path) -> list[Path]:
    return sorted(out.glob("parts/*/*.json"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A study that nothing disturbed, and its tables."""
    folder = tmp_path_factory.mktemp("undisturbed")
    study, out = _study(folder), folder / "out"
    assert main(_words(study, out, "--workers", "1")) == 0
    return study, _tables(out)


def test_a_table_has_a_row_for_each_plan_and_for_each_question_without_one(
    undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    """Rows say what was asked, the rank, the plan, its bands and the counts by law; a refusal says why."""
    _, tables = undisturbed
    assert set(tables) == {"gpt2.parquet", "gpt2-medium.parquet"}
    (tmp_path / "t.parquet").write_bytes(tables["gpt2.parquet"])
    rows = polars.read_parquet(tmp_path / "t.parquet").to_dicts()
    assert [row["rank"] for row in rows if row["global_batch"] == 8] == [1, 2, 1, 2]
    first = rows[0]
    assert first["plan_dp"] * first["plan_tp"] == first["devices"] == 2
    assert first["step_seconds_low"] < first["step_seconds"] < first["step_seconds_high"]
    counted = {one["law"]: one["count"] for one in first["rejected"]}
    assert sum(counted.values()) + first["fitting"] == first["plans"]


def test_a_driver_that_is_killed_at_any_point_goes_on_where_it_was(
    undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    """After kill -9 of the run at random points, and one that ends, tables are those of an undisturbed run."""
    study, tables = undisturbed
    out, random = tmp_path / "out", Random(7)
    words = [sys.executable, "-m", "shardwise", *_words(study, out, "--workers", "2")]
    for wanted in (1, 5):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while len(_parts(out)) < wanted and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(random.random() / 10)
        process.kill()
        process.wait()
    kept = {path: path.stat().st_mtime_ns for path in _parts(out)}
    assert kept
    assert main(_words(study, out, "--workers", "2")) == 0
    assert _tables(out) == tables
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def _children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def test_workers_that_are_killed_are_started_anew(undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """After kill -9 of workers at random points the run ends by itself with the same tables."""
    study, tables = undisturbed
    out, random = tmp_path / "out", Random(3)
    words = [sys.executable, "-m", "shardwise", *_words(study, out, "--workers", "2")]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    killed = 0
    while process.poll() is None:
        workers = _children(process.pid)
        if workers and killed < 4:
            time.sleep(random.random() / 4)
            try:
                os.kill(random.choice(workers), signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass
        time.sleep(0.02)
    assert process.returncode == 0
    assert killed
    assert _tables(out) == tables


def test_an_answer_that_is_not_whole_is_worked_out_again(
    undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    """A file that was cut off, as a full disk leaves it, or changed, or is a pipe or a device, counts as no answer."""
    study, tables = undisturbed
    out = tmp_path / "out"
    assert main(_words(study, out, "--workers", "1")) == 0
    first, second, third, fourth, *_ = _parts(out)
    first.write_bytes(first.read_bytes()[:40])
    second.unlink()
    third.write_text('[{"x": NaN}]', encoding="ascii")
    fourth.write_text(fourth.read_text().replace('"rank": 1', '"rank": 2'), encoding="ascii")
    for path, kind in zip(_parts(out)[3:5], (os.mkfifo, lambda at: os.symlink("/dev/zero", at)), strict=True):
        path.unlink()
        kind(path)
    for path in out.glob("*.parquet"):
        path.unlink()
    assert main(_words(study, out, "--workers", "1")) == 0
    assert _tables(out) == tables


def test_a_folder_is_held_by_one_run(undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """A second run on a folder is refused while the first one lasts."""
    from shardwise.search import StudyFolder

    study, _ = undisturbed
    with StudyFolder(tmp_path / "out").locked():
        words = [sys.executable, "-m", "shardwise", *_words(study, tmp_path / "out")]
        other = subprocess.run(words, capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert "is held by another run" in other.stderr


def test_a_study_that_changed_says_what_is_stale(
    undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers to questions that a study no longer has are counted, and are in no table."""
    out = tmp_path / "out"
    small = STUDY.replace('"gpt2", "gpt2-medium"', '"gpt2"').replace(", {global_batch = 7}", "")
    assert main(_words(_study(tmp_path, small), out, "--workers", "1")) == 0
    changed = small.replace("seq_len = 512", "seq_len = 256")
    capsys.readouterr()
    assert main([*_words(_study(tmp_path, changed), out, "--workers", "1"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["study"]["stale"], said["study"]["answered_before"], len(said["rows"])) == (4, 0, 8)


@pytest.mark.parametrize(("left", "tables", "more"), [(0, ["m.parquet"], "8 more in the tables"), (5, [], "8 more")])
def test_a_page_names_tables_where_there_are_some(left: int, tables: list[str], more: str) -> None:
    """Of a study that was interrupted, which has no tables yet, the other rows are not said to be in them."""
    rows = [{"model": "m", "rank": 1, "step_seconds": 2.0, "devices": 8} for _ in range(28)]
    result = StudyResult(rows=rows, left=left, tables=[*map(Path, tables)])
    page = sweep_page(result, [StudyQuestion.of({"model": "m"}, [])] * 33, ("model",), 80).plain()
    assert f" {more}\n" in page


@pytest.mark.parametrize("batches", ["{global_batch = 8}", "{global_batch = 8}, {global_batch = 32}"])
def test_what_is_still_asked_is_not_asked_again(
    batches: str, undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a study with fewer or more values of an axis, even one, old answers are taken: tables are those made anew."""
    small = STUDY.replace('"gpt2", "gpt2-medium"', '"gpt2"')
    short = small.replace("{global_batch = 8}, {global_batch = 16}, {global_batch = 7}", batches)
    assert main(_words(_study(tmp_path, short), tmp_path / "new", "--workers", "1")) == 0
    for first, then in ((small, short), (short, small)):
        out = tmp_path / str(len(first))
        assert main(_words(_study(tmp_path, first), out, "--workers", "1")) == 0
        capsys.readouterr()
        assert main([*_words(_study(tmp_path, then), out, "--workers", "1"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["study"]["answered_before"] == 2
        if then is short:
            assert _tables(out) == _tables(tmp_path / "new")


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ('[grid]\nmodle = ["gpt2"]', "modle"),
        ('[grid]\nmodel = "gpt2"', "must list the values"),
        ('task = "serve"', "is not a search"),
        ("top = 0", "at least 1"),
        ("top = 100000000", "at most 1,000"),
        ("", "grid: and fixed ask nothing"),
        ('[grid]\nmicro_batch = [1]\n"micro-batch" = [2]', "micro_batch: is set by two axes"),
        ("[grid]\na = [{tp = 1}]\nb = [{tp = 2}]", "tp: is set by two axes"),
        ('[fixed]\nmicro_batch = 1\n"micro-batch" = 2', "micro-batch: is set twice"),
        ('[grid]\nmodel = ["gpt2", "gpt2"]', "model = 'gpt2': is listed twice"),
        ("[grid]\nseed = [1, 2, 3]", "^seed = 1: [^\n]*$"),
        ("[fixed]\nworkers = 3", "no value that a study sets"),
        ("[sizes]\na = 1", "is not a part of a study"),
    ],
)
def test_a_study_that_cannot_be_asked_is_refused(wrong: str, word: str, tmp_path: Path) -> None:
    """A study is checked before anything is run."""
    with pytest.raises(InputError, match=word):
        read_study(str(_study(tmp_path, wrong)))


def test_a_full_disk_stops_the_study_and_keeps_what_was_answered(
    undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an answer cannot be written the command says so, leaves no half of it, and goes on later."""
    study, tables = undisturbed
    out, real, count = tmp_path / "out", os.replace, [0]

    def full(beside: str, path: str) -> None:
        count[0] += 1
        if count[0] == 4:
            raise OSError(28, "No space left on device")
        real(beside, path)

    monkeypatch.setattr(os, "replace", full)
    assert main(_words(study, out, "--workers", "1")) == 2
    assert len(_parts(out)) == 3
    assert not list(out.glob("parts/*/.*"))
    monkeypatch.undo()
    assert main(_words(study, out, "--workers", "1")) == 0
    assert _tables(out) == tables


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
@pytest.mark.parametrize("most_bytes", [900, 2000, 15000])
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_a_write_that_the_system_cuts_off_leaves_nothing_half(
    engine: str, most_bytes: int, undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    """Where the system refuses bytes of an answer or a table, what is kept is whole, and a run with room ends it."""
    if engine == "ray":
        pytest.importorskip("ray")
    study, tables = undisturbed
    out = tmp_path / "out"
    words = _words(study, out, "--workers", "2", "--engine", engine)
    code = "import resource, sys; from shardwise.cli import main; "
    code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, resource.RLIM_INFINITY)); "
    code += "sys.exit(main(sys.argv[1:]))"
    # Python does not look whether its own compiled files were cut off.
    around = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    whole = [sys.executable, "-c", code, *words]
    run = subprocess.run(whole, env=around, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "cannot be written (File too large); what was answered before is kept; make room and run" in run.stderr
    assert all(json.loads(path.read_text())["rows"] for path in _parts(out))
    assert not list(out.glob("parts/*/.*"))
    assert main(words) == 0
    assert _tables(out) == tables


def test_devices_of_ones_own_are_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A study takes the user's catalogue, which every process that answers reads."""
    own = tmp_path / "own"
    device = Path(str(resources.files("shardwise.hardware"))) / "catalogue" / "a100-sxm-80gb.toml"
    (own / "devices").mkdir(parents=True)
    text = device.read_text().replace('name = "a100-sxm-80gb"', 'name = "own-device"')
    (own / "devices" / "own-device.toml").write_text(text)
    study = _study(tmp_path, STUDY.replace('"2xa100-sxm-80gb", "4xh100-sxm-80gb"', '"2xown-device"'))
    words = [*_words(study, tmp_path / "out", "--workers", "1"), "--json"]
    assert main([*words, "--catalogue", str(own)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["rank"] for row in rows if row["global_batch"] != 7} == {1, 2}
    slower = text.replace("memory_bytes_per_second = [2.039e12", "memory_bytes_per_second = [1.039e12")
    assert slower != text
    (own / "devices" / "own-device.toml").write_text(slower)
    assert main([*words, "--catalogue", str(own)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["study"]["answered_before"] == 0
    assert [row["step_seconds"] for row in again["rows"]] != [row["step_seconds"] for row in rows]


@pytest.mark.parametrize(("name", "models", "questions"), [("landscape", 50, 50_000), ("co-design", 3, 192)])
def test_the_examples_are_studies(name: str, models: int, questions: int) -> None:
    """The studies of the examples ask so many questions about so many models, and the first one has an answer."""
    task, _, asked = read_study(str(Path(__file__).parents[2] / "examples" / "studies" / f"{name}.toml"))
    assert (len(asked), len({values["model"] for values in asked})) == (questions, models)
    assert rows_of((task, 1), asked[0])[0]["rank"] == 1


def test_deployments_are_swept_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A study of `infer` keeps the best deployment of each question with its batch."""
    text = 'task = "infer"\n[fixed]\ninput_tokens = 128\noutput_tokens = 16\nmodel = "gpt2"\nbatch = "1..8"\n'
    text += '[grid]\non = ["1xa100-sxm-80gb", "1xh100-sxm-80gb"]\n'
    assert main([*_words(_study(tmp_path, text), tmp_path / "out", "--workers", "1"), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert [row["rank"] for row in rows] == [1, 1]
    assert all(row["ttft_seconds"] > 0 and row["batch"] >= 1 for row in rows)


@pytest.mark.parametrize("name", ["raylet/raylet", "^ray::_called", "gcs_server", "import _ray"])
def test_ray_gives_the_same_tables(name: str, undisturbed: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """On a real Ray of this machine a node, a worker, the server or the driver of Ray that is killed is replaced."""
    pytest.importorskip("ray")
    study, tables = undisturbed
    out = tmp_path / "out"
    # Without processes that answer while Ray starts: there would be nothing left for Ray.
    code = "import sys; from shardwise.search import _ray; _ray._until = lambda *_: iter(()); "
    code += "from shardwise.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *_words(study, out, "--workers", "2", "--engine", "ray")]
    assert _killing(name, words, out, 1) == 0
    assert _tables(out) == tables


def _killing(name: str, words: list[str], out: Path, wanted: int) -> int:
    """Return the exit status of a run one of whose processes is killed once so many questions are answered."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    killed = False
    while process.poll() is None:
        if len(_parts(out)) >= wanted and not killed:
            found = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False)
            mine = [int(pid) for pid in found.stdout.split() if _descends(int(pid), process.pid)]
            if mine:
                os.kill(mine[0], signal.SIGKILL)
                killed = True
        time.sleep(0.02)
    assert killed
    return process.returncode


def _descends(pid: int, ancestor: int) -> bool:
    """Return whether a process was started by another, however far down."""
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(text.rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_study_of_numbers_that_are_none_is_refused(tmp_path: Path, value: str) -> None:
    """JSON has no such number to answer with."""
    with pytest.raises(InputError, match=r"price = .*finite"):
        read_study(str(_study(tmp_path, STUDY.replace("[grid]", f"[grid]\nprice = [1.0, {value}]"))))


def test_a_study_that_names_a_device_reads_no_end_of_it(tmp_path: Path) -> None:
    """What tells one question from another is read within limits, as every file is."""
    assert StudyQuestion.of({"from": "/dev/zero"}, []).name == StudyQuestion.of({"from": "/dev/zero"}, []).name


def test_a_study_is_drawn_over_what_it_varies() -> None:
    """Seconds are drawn over rates in their order, dollars over prices; each model has a line and a landscape."""
    rows = [
        {"rank": 1, "model": model, "on": "8xh100", "memory_bandwidth": rate, "price": price, "step_seconds": seconds,
         "usd": price * seconds}
        for model, slower in (("one", 1.0), ("other", 2.0))
        for rate, seconds in (("3.35TB/s", slower), ("900GB/s", 3 * slower))
        for price in (1.0, 2.0)
    ]  # fmt: skip
    figure = sweep_figure(rows, ("model", "on", "price", "memory_bandwidth"), "step_seconds")
    _, rates, prices, *others = figure.axes
    assert [axes.get_ylabel() for axes in (rates, prices)] == ["time of a step, seconds", "dollars"]
    assert [axes.get_title() for axes in others if axes.images] == ["one", "other"]
    assert [list(line.get_ydata()) for line in rates.lines] == [[3.0, 1.0], [6.0, 2.0]]
    assert [list(line.get_ydata()) for line in prices.lines] == [[1.0, 2.0], [2.0, 4.0]]


def _rows(models: int, devices: int) -> list[dict[str, Any]]:
    return [
        {"rank": 1, "model": f"model-{m}", "on": f"{count}xdevice-{d}", "step_seconds": (m + 1) * (d + 1) / count}
        for m in range(models)
        for d in range(devices)
        for count in (8, 16)
    ]


@pytest.mark.parametrize(
    ("models", "devices", "names"),
    [
        (2, 3, [f"model-{m} on device-{d}" for m in range(2) for d in range(3)]),
        (5, 3, [*(f"device-{d}" for d in range(3)), *(f"model-{m}" for m in range(5))]),
        (9, 3, [f"device-{d}" for d in range(3)]),
    ],
)
def test_many_lines_of_a_study_are_told_apart(models: int, devices: int, names: list[str]) -> None:
    """Few lines have a name each; of many the colour is the device and the marker the model, up to seven models."""
    figure = sweep_figure(_rows(models, devices), ("model", "on"), "step_seconds")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    looks = {(line.get_color(), line.get_marker()) for line in figure.axes[1].lines}
    assert len(looks) == (models * devices if models < 9 else devices)


def test_a_study_with_nothing_to_draw_over_has_bars_or_says_why() -> None:
    """Where neither devices nor a figure vary bars show the headline of each model; without a plan the plot says so."""
    one = [row for row in _rows(3, 1) if row["on"].startswith("8x")]
    _, bars = sweep_figure(one, ("model", "on"), "step_seconds").axes
    assert [bar.get_width() for bar in bars.patches] == [3 / 8, 2 / 8, 1 / 8]
    none = sweep_figure([{"rank": -1, "model": "one", "on": "8xdevice"}], ("model", "on"), "value")
    assert "there is nothing to draw" in " ".join(text.get_text() for text in none.axes[0].texts)


def test_a_question_that_was_refused_is_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all are refused the status is that of bad input; a file that was missing or that changed is read anew."""
    model = tmp_path / "model"
    text = f'[fixed]\nseq_len = 128\nglobal_batch = 8\nmodel = "{model.as_posix()}"\non = "2xa100-sxm-80gb"\n'
    words = [*_words(_study(tmp_path, text), tmp_path / "out", "--workers", "1"), "--json"]
    sizes = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert main(words) == 2
    assert "problem" in json.loads(capsys.readouterr().out)["rows"][0]
    seconds = []
    for layers in (12, 24):
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({**sizes, "n_layer": layers}))
        assert main(words) == 0
        seconds.append(json.loads(capsys.readouterr().out)["rows"][0]["step_seconds"])
    assert seconds[1] > 1.5 * seconds[0]
