"""What is read of people's files: regular ones up to a size, whatever their name leads to."""

from __future__ import annotations

import json
import ntpath
import os
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
from command_line import bounded_work, run
from shardwise.errors import InputError
from shardwise.files import (
    JSON_BYTES,
    WRITTEN_BYTES,
    below,
    file_name,
    own_table,
    parse_json,
    read_file,
    read_json,
    read_toml,
)

TRAIN = ["train", "gpt2", "--on", "8xh100"]
# Every way in which the command line reads a file; FILE stands for it.
WAYS = {
    "case": ["train", "--config", "FILE"],
    "case by ending": ["--config", "FILE.json"],
    "model": ["train", "FILE.json", "--on", "8xh100"],
    "cluster": ["train", "gpt2", "--on", "FILE.toml"],
    "launch script": ["train", "--from", "FILE", "--on", "8xh100"],
    "settings of DeepSpeed": ["train", "gpt2", "--from", "FILE.json", "--on", "8xh100"],
    "settings of accelerate": ["import", "FILE.yaml"],
    "import": ["import", "FILE"],
    "measurements": ["validate", "FILE.csv"],
    "comparison": ["compare", "FILE.toml", "FILE.toml"],
}


def words_of(way: str, path: Path) -> list[str]:
    """Return the words of a way to read a file."""
    return [word.replace("FILE", str(path)) for word in WAYS[way]]


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Fail where something waits for ever."""
    signal.alarm(120)
    yield
    signal.alarm(0)


def endings(way: str) -> Iterator[str]:
    """Return how the names end that a way reads."""
    yield from {word.removeprefix("FILE") for word in WAYS[way] if word.startswith("FILE")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["fifo", "zero", "random", "folder", "link to a fifo"])
def test_only_regular_files_are_read(tmp_path: Path, way: str, kind: str) -> None:
    """A pipe, a device, a link to one and a folder are refused at once, wherever a file is named."""
    for ending in endings(way):
        path = tmp_path / f"odd{ending}"
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link to a fifo":
            os.mkfifo(tmp_path / f"pipe{ending}")
            path.symlink_to(tmp_path / f"pipe{ending}")
        else:
            path.symlink_to(f"/dev/{'zero' if kind == 'zero' else 'random'}")
    with bounded_work():
        done = run(*words_of(way, tmp_path / "odd"))
        assert done.status == 2, done.out
        assert "cannot be read" in done.err or "holds no config.json" in done.err or "is not a file" in done.err


def test_a_file_that_waits_for_its_next_line_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A regular file that has nothing yet, as the kernel's log, is refused and not taken for an empty one."""
    path, (reads, writes) = tmp_path / "log", os.pipe()
    path.write_text("")
    os.set_blocking(reads, False)
    monkeypatch.setattr(os, "open", lambda *_: reads)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat(path))
    with pytest.raises(InputError, match="holds nothing yet"):
        read_file(path, 100)
    os.close(writes)


@pytest.mark.parametrize("way", ["case", "case by ending", "launch script", "settings of accelerate", "measurements"])
@pytest.mark.parametrize("content", [b"#", b"[", b"a\n", b'"', b"$("])
def test_a_file_of_any_size_is_answered_within_seconds(tmp_path: Path, way: str, content: bytes) -> None:
    """Twenty million bytes of one kind are refused, by their size or by what they are, within seconds."""
    for ending in endings(way):
        (tmp_path / f"big{ending}").write_bytes(content * (20_000_000 // len(content)))
    with bounded_work():
        done = run(*words_of(way, tmp_path / "big"))
        assert done.status == 2
        assert len(done.err) < 20_000


HARD = {
    "model.json": ['{"a":' * 50_000, "[" * 100_000, '{"model_type": ' + "9" * 5000 + "}", '{"hidden_size": 1e999999}'],
    "case.toml": [
        ".".join(["a"] * 50_000) + " = 1",
        "[" + ".".join(["a"] * 50_000) + "]",
        "x = {" + ".".join(["a"] * 50_000) + " = 1}",
        "x = " + "[" * 50_000,
        "x = " + "{a=" * 50_000,
        'x = "' + '\\"' * 400_000 + "." * 100,
        "tp = " + "9" * 500_000,
        "tp = 0x" + "f" * 500_000,
        "tokens = '" + "9" * 200_000 + "!'",
        "fast_bandwidth = '" + "1" + " " * 200_000 + "!'",
        "\n".join(f"[t{n}]" for n in range(50_000)),
        "\n".join(f"k{n} = 1" for n in range(900)),
        "\n".join(f"k{n} = 1" for n in range(50_000)),
    ],
    "run.csv": ['"' * 1_000_000, "," * 1_000_000, "device,m,n,k,time_seconds\n" + "a,1\n" * 1_000_000],
}


@pytest.mark.parametrize(("name", "content"), [(name, text) for name, texts in HARD.items() for text in texts])
def test_files_that_are_hard_to_parse_are_answered_within_seconds(tmp_path: Path, name: str, content: str) -> None:
    """Depth, long keys, digits and quotes are refused at once."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    commands = {
        "model.json": [["train", str(path), "--on", "8xh100"], ["--config", str(path)], ["import", str(path)]],
        "case.toml": [["train", "--config", str(path), "--json"], ["train", "gpt2", "--on", str(path)]],
        "run.csv": [["validate", str(path)]],
    }
    for words in commands[name]:
        with bounded_work():
            done = run(*words)
            assert done.status == 2, done.out + done.err
            assert len(done.err + done.out) < 40_000


def test_a_file_that_just_fits_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    """The limit is the last size that is read."""
    path = tmp_path / "x"
    path.write_bytes(b"a" * 100)
    assert read_file(path, 100) == b"a" * 100
    with pytest.raises(InputError, match="larger than 99 bytes"):
        read_file(path, 99)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    """A link to a regular file is a file, as the caches of model hubs have them."""
    (tmp_path / "blob").write_text('{"a": 1}', encoding="utf-8")
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    assert read_json(tmp_path / "config.json") == {"a": 1}


def test_keys_that_stand_twice_are_named(tmp_path: Path) -> None:
    """JSON with a key twice is refused by name wherever it is read, at any depth."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "n_layer": 2, "n_layer": 3}', encoding="utf-8")
    for words in (["train", str(path), "--on", "8xh100"], ["train", "--config", str(path)], ["import", str(path)]):
        assert "n_layer twice" in run(*words).err
    with pytest.raises(InputError, match="inner twice"):
        parse_json('{"a": [{"inner": 1, "inner": 1}]}', "file")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda x: st.lists(x, max_size=5) | st.dictionaries(st.text(max_size=20), x, max_size=5),
        max_leaves=20,
    )
)
@settings(derandomize=True)
def test_json_without_twins_is_read_as_python_does(tree: object) -> None:
    """What is read equals what the standard library reads."""
    assert parse_json(json.dumps(tree), "file") == tree


def test_dots_in_values_and_comments_are_no_keys(tmp_path: Path) -> None:
    """Many dots in numbers, text and comments are read."""
    path = tmp_path / "a.toml"
    path.write_text("a = [" + "1.5, " * 100 + "]\nb = '" + "a." * 100 + "' # " + "x. " * 100 + "\n", encoding="utf-8")
    assert len(read_toml(path)["a"]) == 100
    assert WRITTEN_BYTES < JSON_BYTES


def test_a_file_names_others_only_below_itself(tmp_path: Path) -> None:
    """A name that leads out of the folder, by dots, from the root or by a link, is refused unless told to follow."""
    inside, outside = tmp_path / "in", tmp_path / "out.json"
    inside.mkdir()
    outside.write_text("{}", encoding="utf-8")
    (inside / "link.json").symlink_to(outside)
    source = str(inside / "a.yaml")
    assert below(source, "sub/b.json") == os.path.join(str(inside), "sub/b.json")
    for named in ("../out.json", str(outside), "link.json", "sub/../../out.json"):
        with pytest.raises(InputError, match="not below"):
            below(source, named)
        assert below(source, named, follow=True)


CLUSTER = 'num_devices = 8\ndevice = "../mine.toml"\n'


def test_each_file_that_names_another_keeps_below_itself(tmp_path: Path) -> None:
    """A cluster's device, accelerate's file of DeepSpeed and a script's checkpoint lie elsewhere with --follow only."""
    folder = tmp_path / "deep"
    folder.mkdir()
    run("devices", "h100-sxm-80gb", "--write", str(tmp_path / "mine.toml"))
    (folder / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ../ds.json\n"
    (folder / "a.yaml").write_text(text, encoding="utf-8")
    script = "python a.py --num-layers 2 --hidden-size 64 --use-checkpoint-args --load /etc\n"
    (folder / "run.sh").write_text(script, encoding="utf-8")
    for words in (
        ["train", "gpt2", "--on", str(folder / "cluster.toml"), "--micro-batch", "1"],
        ["import", str(folder / "a.yaml")],
        ["import", str(folder / "run.sh")],
    ):
        assert "--follow" in run(*words).err
        assert "--follow" not in run(*words, "--follow").err


MANY = {
    "flags": ["train", "gpt2", "--on", "8xh100", *(f"--x{n}" for n in range(50_000))],
    "words": ["train", "gpt2", "--on", "8xh100", *["w"] * 50_000],
    "items": ["train", "gpt2", "--on", "8xh100", "--document-lengths", ",".join(["8"] * 300_000)],
    "arguments": ["train", "--on", "8xh100", "--", "--num-layers", "2", *(f"--xy{n}q" for n in range(50_000))],
    "columns": ["validate", "FILE"],
}


@pytest.mark.parametrize("name", MANY)
def test_many_of_anything_are_refused_within_seconds(tmp_path: Path, name: str) -> None:
    """Fifty thousand flags, words, arguments or columns cost no comparison each, and few are named."""
    path = tmp_path / "m.csv"
    path.write_text(",".join(f"c{n}" for n in range(200_000)) + "\n1\n", encoding="utf-8")
    with bounded_work():
        done = run(*(word.replace("FILE", str(path)) for word in MANY[name]))
        assert done.status == 2
        assert len(done.err) < 20_000


def test_a_row_of_more_stages_than_layers_is_refused_at_once(tmp_path: Path) -> None:
    """Layers are not cut into a hundred million pieces for a cell that nobody meant."""
    path = tmp_path / "m.csv"
    head = "metric,value,model,device,seq_len,num_gpus,tp,pp,global_batch,micro_batch,framework"
    path.write_text(f"{head}\nmfu,0.4,gpt2,a100,1024,8,1,100000000,64,8,pytorch\n", encoding="utf-8")
    with bounded_work():
        assert run("validate", str(path)).status == 1


def test_paths_of_windows_are_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, drives and shares of Windows stay below a file or are refused, with its own rules of paths."""
    monkeypatch.setattr("shardwise.files.os.path", ntpath)
    monkeypatch.setattr(ntpath, "realpath", ntpath.normpath)
    assert below(r"C:\runs\a.yaml", r"zero\ds.json") == r"C:\runs\zero\ds.json"
    for outside in (r"..\ds.json", r"D:\ds.json", r"C:\ds.json", r"\\host\share\ds.json", r"zero\..\..\ds.json"):
        with pytest.raises(InputError, match="not below it"):
            below(r"C:\runs\a.yaml", outside)


def test_no_other_machine_is_called_to_refuse_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that a file names is refused by its letters: to look for it would tell its host who asks."""
    monkeypatch.setattr("shardwise.files.os.path", ntpath)
    monkeypatch.setattr(ntpath, "realpath", lambda path: pytest.fail(path) if "host" in path else ntpath.normpath(path))
    for share in (r"\\host\share\ds.json", r"//host/share/ds.json", r"\\?\UNC\host\share\ds.json"):
        with pytest.raises(InputError, match="not below it"):
            below(r"C:\runs\a.yaml", share)


@pytest.mark.parametrize(
    "said", ["con", "NUL.8b", "com1", "a:b", "a\\..\\b", "..", "-rf", "a?*b", "", "x" * 900, "aux ."]
)
def test_what_is_written_for_a_model_has_a_name_that_every_system_takes(said: str) -> None:
    """A model named as a device, a drive or a flag is written to a file in the folder that was asked for."""
    for ending in (".sh", ".toml"):
        name = file_name(said, ending)
        path = PureWindowsPath("C:/out") / name
        assert path.parent == PureWindowsPath("C:/out") and path.name == name and len(name) < 120
        assert name.endswith(ending) and not set(name) & set('<>:"/\\|?*') and name[0] not in "-.~"
        assert name.partition(".")[0].strip().lower() not in ("con", "nul", "com1", "aux")


def test_tables_of_the_package_are_read_as_tomllib_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table of the package reads the same from TOML, when it is compiled, and from what was kept of that."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    for path in Path(shardwise.__file__).parent.rglob("*.toml"):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        assert own_table(str(path), path.name) == table == own_table(str(path), path.name)
    assert list(tmp_path.rglob("vllm.toml.*.pyc"))


def test_a_table_that_changed_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of a table is not used once its file says something else, and cannot be changed by who reads it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "kept"))
    file = tmp_path / "one.toml"
    for text in ("a = [1]", "a = [12]"):
        file.write_text(text, encoding="utf-8")
        for _ in range(2):
            found = own_table(str(file), "one.toml")
            assert found == tomllib.loads(text)
            found["a"].append(3)
