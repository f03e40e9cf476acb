"""Case files: what is saved is what is loaded, flags override the file, and any command reads it."""

from __future__ import annotations

import json
import re
import shlex
import string
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from shardwise.answers import _commands, _converters
from shardwise.answers._files import command_words, read_case, write_case
from shardwise.answers._inputs import WRITTEN, Inputs, read_values
from shardwise.answers._run import case_of, scan, split

CASE = [
    "train",
    "llama-3.1-8b",
    "--on",
    "8xh100",
    "--tp",
    "2",
    "--micro-batch",
    "2",
    "--global-batch",
    "64",
    "--tokens",
    "1.5T",
    "--no-overlap",
]
_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(lambda t: t.strip())
_WORD = st.text(string.ascii_lowercase, min_size=1, max_size=8)
_BY_KIND: dict[int, st.SearchStrategy[Any]] = {
    id(_converters.SWITCH): st.booleans(),
    id(_converters.TEXT): _TEXT,
    id(_converters.FILE): _TEXT,
    id(_converters.ARGUMENTS): st.lists(_WORD, min_size=1, max_size=4).map(tuple),
    id(_converters.WORDS): st.lists(_WORD, min_size=1, max_size=4),
    id(_converters.VARIED): st.lists(st.sampled_from(["tp=1,2", "seq_len=4096..8192"]), min_size=1, max_size=2),
    id(_converters.ORDER): st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]),
    id(_converters.PLACES): st.just("tp=2,dp=4"),
    id(_converters.CHANCE): st.sampled_from([0.5, 0.9]),
    id(_converters.WHOLES): st.lists(st.integers(0, 99), min_size=1, max_size=4),
    id(_converters.RAW): st.one_of(st.integers(1, 10**6), st.sampled_from(["25GB/s", "400Gb/s", "80GiB"])),
    id(_converters.COUNT): st.floats(1, 1e20),
    id(_converters.RATIO): st.floats(1, 100),
    id(_converters.FRACTION): st.floats(0.001, 1),
    id(_converters.PART): st.one_of(st.just(0.0), st.floats(1e-12, 1)),
    id(_converters.SECONDS): st.floats(0.001, 1e9),
    id(_converters.RATE_OF_FAILURE): st.floats(1e-9, 100),
    id(_converters.BANDWIDTH): st.floats(1, 1e20),
    id(_converters.FLOPS): st.floats(1, 1e20),
    id(_converters.BYTES): st.floats(1e6, 1e20),
}


def _values(kind: _converters.Converter) -> st.SearchStrategy[Any]:
    if id(kind) in _BY_KIND:
        return _BY_KIND[id(kind)]
    if kind.word == "A+B+...":
        return st.lists(_WORD, min_size=1, max_size=4)
    if kind.word.startswith("{"):
        return st.sampled_from(kind.word[1:-1].split(","))
    return st.integers(1, 8)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[str, Inputs]:
    """A command and values for some of its flags, as if they had been read."""
    name = draw(st.sampled_from(["train", "infer", "count"]))
    command = _commands.command(name)
    keys = [k for k, f in command.flags.items() if f.group != "output" and k not in ("rows", "follow")]
    chosen = draw(st.lists(st.sampled_from(keys), unique=True, max_size=12))
    raw = {key: draw(_values(command.flags[key].kind)) for key in chosen}
    found = Inputs()
    read_values({"model": "m", "on": "1xh100", **raw}, command, found)
    assert not found.problems.items
    return name, found


@pytest.mark.parametrize("ending", ["toml", "json"])
@given(case=inputs())
@settings(max_examples=30, deadline=None)
def test_what_is_saved_is_what_is_loaded(ending: str, case: tuple[str, Inputs]) -> None:
    """Saving a case and loading it is the identity, in both formats."""
    name, before = case
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"case.{ending}")
        write_case(path, case_of(name, before))
        loaded = read_case(path)
    assert loaded.pop("command") == name
    after = Inputs()
    read_values(loaded, _commands.command(name), after)
    assert after.values == before.values
    assert not after.problems.items


@given(case=inputs())
@settings(max_examples=30, deadline=None)
def test_the_words_of_a_case_say_the_case(case: tuple[str, Inputs]) -> None:
    """A case written as a command line and read again is the same case, to the last digit."""
    name, before = case
    words = shlex.split(" ".join(command_words(name, before.values)))
    assert words[:2] == ["shardwise", name]
    command = _commands.command(name)
    ours, behind = split(words)
    found = scan(ours[2:], command)
    after = Inputs(problems=found.problems)
    read_values({"model": found.words[0], **found.given, **({"from_args": behind} if behind else {})}, command, after)
    assert not after.problems.items
    # What the cluster reads with its unit stays text on a command line.
    as_text = {key for key, flag in command.flags.items() if flag.kind is _converters.RAW}
    expected = {key: str(value) if key in as_text else value for key, value in before.values.items()}
    assert after.values == expected


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_saved_case_gives_the_same_answer(ending: str, tmp_path: Path) -> None:
    """A case read from its file is answered as its flags were; the file is plain TOML or JSON."""
    path = tmp_path / f"case.{ending}"
    first = run(*CASE, "--save", str(path), "--json")
    assert run("train", "--config", str(path), "--json").tree == first.tree
    assert run("--config", str(path), "--json").tree == first.tree
    text = path.read_text("utf-8")
    table = tomllib.loads(text) if ending == "toml" else json.loads(text)
    assert table == {
        "command": "train",
        "model": "llama-3.1-8b",
        "on": "8xh100",
        "tp": 2,
        "micro_batch": 2,
        "global_batch": 64,
        "tokens": 1.5e12,
        "overlap": False,
    }


def test_saving_again_changes_nothing(tmp_path: Path) -> None:
    """Loading a file and saving it gives the same bytes."""
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    run(*CASE, "--save", str(one))
    run("train", "--config", str(one), "--save", str(two))
    assert one.read_bytes() == two.read_bytes()


def test_flags_override_the_file(tmp_path: Path) -> None:
    """A flag wins over the file, and so does the model."""
    path = str(tmp_path / "case.toml")
    run(*CASE, "--save", path)
    tree = run("train", "gpt2", "--config", path, "--tp", "4", "--seq-len", "1024", "--json").tree
    assert (tree["model"], tree["plan"]["tp"], tree["plan"]["micro_batch"]) == ("gpt2", 4, 2)


def test_dashes_and_lists_are_read(tmp_path: Path) -> None:
    """Keys may be written with dashes, and lists as lists or as text."""
    path = tmp_path / "case.toml"
    head = 'model = "llama-3.1-8b"\non = "8xh100"\npp = 2\nglobal-batch = "64"\n'
    path.write_text(head + "stage-layers = [15, 17]\nmodules = ['layernorm']\n", encoding="utf-8")
    tree = run("train", "--config", str(path), "--json").tree
    assert tree["plan"]["stage_layers"] == [15, 17]
    assert tree["plan"]["modules"] == ["layernorm"]
    assert tree["job"]["global_batch"] == 64


@pytest.mark.parametrize("command", ["infer", "count", "explain"])
def test_any_command_reads_any_case(command: str, tmp_path: Path) -> None:
    """A training case can be counted, explained or served: keys that a command does not take are left out."""
    path = str(tmp_path / "case.toml")
    run(*CASE, "--save", path)
    assert run(command, "--config", path, "--json").status == 0


def test_keys_that_are_left_out_are_said(tmp_path: Path) -> None:
    """What a command does not use of a file is listed among the assumptions."""
    path = str(tmp_path / "case.toml")
    run(*CASE, "--save", path)
    said = run("infer", "--config", path, "--json").tree["assumptions"]
    assert "micro_batch: in the case file, not used by infer" in said


def test_nothing_is_saved_of_a_case_that_is_wrong(tmp_path: Path) -> None:
    """A case with problems leaves no file behind; one that does not fit does."""
    wrong, big = tmp_path / "wrong.toml", tmp_path / "big.toml"
    assert run(*CASE, "--pp", "3", "--save", str(wrong)).status == 2
    assert not wrong.exists()
    assert run("train", "llama-3.1-70b", "--on", "1xh100", "--save", str(big)).status == 1
    assert big.exists()


@pytest.mark.parametrize("key", [*WRITTEN, "follow"])
def test_a_case_writes_no_file_and_allows_itself_nothing(key: str, tmp_path: Path) -> None:
    """A case of someone else's could overwrite any file of whoever asks it: the command says what is written."""
    case, other = tmp_path / "case.toml", tmp_path / "other.svg"
    value = "true" if key == "follow" else f"'{other}'"
    case.write_text(f'command = "train"\nmodel = "gpt2"\non = "1xh100"\n{key} = {value}\n')
    assert run("--config", str(case), "--json").fields == [key]
    assert not other.exists()


@pytest.mark.parametrize(("key", "name"), [("model", "model.json"), ("on", "cluster.toml"), ("from", "run.sh")])
def test_a_case_names_files_below_it_or_below_where_it_is_asked(key: str, name: str, tmp_path: Path) -> None:
    """Files elsewhere are read where --follow says so; those beside the case as they are."""
    (tmp_path / "inner").mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    texts = {
        "model.json": json.dumps(config | {"intermediate_size": 128, "vocab_size": 100}),
        "cluster.toml": 'device = "h100-sxm-80gb"\n[[tiers]]\nname = "a"\nsize = 8\nbandwidth = "9G"\nlatency = "1us"',
        "run.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --vocab-size 100",
    }
    (tmp_path / name).write_text(texts[name])
    rest = {"model": "gpt2", "on": "8xh100"} if key != "from" else {"on": "8xh100"}
    lines = [f"{one} = {json.dumps(value)}" for one, value in (rest | {key: str(tmp_path / name)}).items()]
    for folder, follow, status in (("inner", (), 2), ("inner", ("--follow",), 0), ("", (), 0)):
        case = tmp_path / folder / "case.toml"
        case.write_text("\n".join(["command = 'train'", "seq_len = 64", *lines]))
        done = run("--config", str(case), "--json", *follow)
        assert done.status == status, done.out
        assert status == 0 or done.fields == [key]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('command = "plan train"', 'command = "plan" and what = "train"'),
        ('command = "plan serve"', 'command = "plan" and what = "serve"'),
        ("", "command: is missing"),
    ],
)
def test_a_file_without_a_command_of_one_word_is_told_how_to_say_it(text: str, says: str, tmp_path: Path) -> None:
    """A command with its kind is two keys of a file, and a file that has none is told what is missing."""
    path = tmp_path / "case.toml"
    path.write_text(f'{text}\nmodel = "gpt2"\non = "1xh100"\n')
    done = run("--config", str(path))
    assert done.status == 2 and says in done.err


@pytest.mark.parametrize("command", ['"bake"', '["train"]', "3", "{a = 1}"])
@pytest.mark.parametrize("words", [("train",), ()])
def test_a_command_that_is_none_is_a_problem_of_the_file(words: tuple[str, ...], command: str, tmp_path: Path) -> None:
    """It is said with all else that is wrong where a command stands on the line too, and is never a fault of ours."""
    path = tmp_path / "case.toml"
    path.write_text(f'command = {command}\nmodel = "gpt2"\non = "1xh100"\nbogus = 3\ntp = "x"\n')
    done = run(*words, "--config", str(path))
    assert done.status == 2
    assert "command = " in done.err and "is not a command; use one of train" in done.err.replace(
        "did you mean train? ", ""
    )
    if words:
        assert "bogus = 3: is not a key of a case file; `shardwise schema` prints all keys" in done.err
        assert "tp = 'x'" in done.err


def test_only_close_words_are_asked_back(tmp_path: Path) -> None:
    """A key that is spelt wrong is named, and one that is like no other is not taken for any."""
    path = tmp_path / "case.toml"
    path.write_text('model = "gpt2"\non = "1xh100"\nmicro_bach = 1\nzzz = 1\ntensor_parallel = 8\n')
    lines = run("train", "--config", str(path)).err.splitlines()
    asked = [re.findall(r"did you mean (.*?)\?", line) for line in lines]
    assert asked == [["micro_batch"], [], ["tp"]]
