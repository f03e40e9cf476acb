"""Programs that are kept on disk give the same answers as recorded ones, and what is kept is bounded and checked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise import plan_training
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Serving, Training
from shardwise.records import replace
from shardwise.search import (
    SearchOptions,
    SearchSpace,
    _composition,
    _recorded,
    _recordings,
    _serving_table,
    plan_serving,
)

MODELS = {"dense": "gpt2", "experts": "qwen3-30b-a3b"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recordings that is not there yet."""
    monkeypatch.setenv(_recordings.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def _asked(model: str = "gpt2") -> list[Any]:
    """Return what a question answers that no earlier question of this process prepared."""
    _composition._recorded.cache_clear()
    space = SearchSpace(recompute=("none", "full"), sharding=("none",), orders=(("tp", "tp2", "cp", "dp", "pp"),))
    job = Training(seq_len=512, global_batch=16)
    found = plan_training(load_model(model), Cluster.parse("8xh100-sxm-80gb"), job, space)
    _composition._recorded.cache_clear()
    return [found.partial.top.entries, found.partial.front.plans(), found.counts, found.partial.rejected]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What the question about the smaller model answers, and the file that it leaves."""
    kept = tmp_path_factory.mktemp("recorded") / "kept"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(_recordings.VARIABLE, str(kept))
        answer = _asked()
    (path,) = kept.iterdir()
    return answer, path


@pytest.fixture
def kept(recorded: tuple[list[Any], Path], folder: Path) -> tuple[list[Any], Path]:
    """The same answer, and the file in a folder of its own."""
    folder.mkdir()
    return recorded[0], Path(shutil.copy2(recorded[1], folder))


@pytest.mark.parametrize("kind", MODELS)
def test_kept_programs_answer_as_recorded_ones(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A question asked again records nothing and has the same plans, to the last bit."""
    first = _asked(MODELS[kind])

    def recorded(*args: object) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(_composition, "blocks_of", recorded)
    monkeypatch.setattr(_recorded, "_recorded", recorded)
    assert _asked(MODELS[kind]) == first
    assert len(list(folder.iterdir())) == 1


def test_deployments_asked_again_record_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment asked again is answered to the last bit; another chance to fit is another recording."""
    words = load_model("gpt2"), Cluster.parse("2xh100-sxm-80gb"), Serving(input_tokens=64, output_tokens=8)
    first = plan_serving(*words)

    def recorded(*args: object) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(_serving_table, "evaluate", recorded)
    assert plan_serving(*words).best[0].request_seconds == first.best[0].request_seconds
    with pytest.raises(AssertionError, match="recorded again"):
        plan_serving(*words, options=SearchOptions(risk=0.5))


@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda d: d.replace(b"multiply", b"subtract"), lambda d: b""]
)
def test_a_damaged_recording_is_made_anew(kept: tuple[list[Any], Path], damage: Any) -> None:
    """A file that was cut off, changed or emptied is not read, and is replaced."""
    first, path = kept
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert _asked() == first
    assert path.read_bytes() == whole


@pytest.mark.parametrize("change", [{"count": 1}, {"kept": []}, {"words": ["system"]}, {"given": {}}])
def test_a_recording_that_tells_of_no_program_is_made_anew(
    kept: tuple[list[Any], Path], change: dict[str, Any]
) -> None:
    """A file with the right sum that names other operations or places is not run."""
    import json

    first, path = kept
    tree = json.loads(path.read_bytes().partition(b"\n")[2])
    tree["programs"] = {name: {**told, **change} for name, told in tree["programs"].items()}
    data = json.dumps(tree).encode()
    path.write_bytes(_recordings._sum(data) + b"\n" + data)
    assert _asked() == first


def test_nothing_is_kept_where_it_is_switched_off(
    recorded: tuple[list[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "off" no file is written or read, and a folder that nobody can write to is no fault."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(_recordings.VARIABLE, "off")
    assert _asked() == recorded[0]
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(_recordings.VARIABLE, str(tmp_path / "file"))
    assert _asked() == recorded[0]


def test_the_cache_of_the_user_is_where_the_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`XDG_CACHE_HOME` counts where it is absolute, else the home's own."""
    monkeypatch.delenv(_recordings.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for given, wanted in (("/var/c", "/var/c/shardwise"), ("here", "/home/me/.cache/shardwise")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert _recordings.cache_folder() == wanted


def test_the_oldest_recordings_go(kept: tuple[list[Any], Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files together stay within their bytes, the newest kept; files of others are left alone."""
    one = kept[1]
    size = one.stat().st_size
    for age in range(4):
        old = folder / f"recorded-{age}.json"
        old.write_bytes(b"0" * size)
        os.utime(old, (age + 1, age + 1))
    (folder / "other.txt").write_bytes(b"0" * size)
    monkeypatch.setattr(_recordings, "MOST_BYTES", 3 * size)
    _recordings._bound(str(folder))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["other.txt", "recorded-2.json", "recorded-3.json", one.name]
    )


def test_a_recording_is_of_all_that_it_reads(folder: Path) -> None:
    """Another model, device or package has a file of its own."""
    _asked()
    _asked("qwen3-30b-a3b")
    assert len(list(folder.iterdir())) == 2
    key = (load_model("gpt2"), 1.0)
    assert _recordings.fingerprint(key) == _recordings.fingerprint((load_model("gpt2"), 1.0))
    assert _recordings.fingerprint(key) != _recordings.fingerprint((replace(key[0], hidden=8), 1.0))
    assert _recordings.fingerprint(object()) == ""
