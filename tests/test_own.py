"""One's own catalogue: files dropped into a folder are models, devices and precisions from then on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.hardware import device_names, device_to_toml, find_device
from shardwise.models import load_model, model_names
from shardwise.ops import count_parameters
from shardwise.plans import find_precision, precision_names, precision_to_toml
from shardwise.user_catalogue import VARIABLE, folders, use_catalogue

MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A catalogue of the user's, named by the variable; nothing of the machine's user is seen."""
    for kind in ("models", "devices", "precisions"):
        (tmp_path / kind).mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    yield tmp_path
    use_catalogue()


def test_a_model_is_a_file(folder: Path) -> None:
    """A config.json under a name or in a folder is a model by that name, however it is spelt, and says where from."""
    (folder / "models/Mine-4L.json").write_text(json.dumps(MODEL))
    (folder / "models/other").mkdir()
    (folder / "models/other/config.json").write_text(json.dumps({"source": "me", "config": MODEL}))
    for name in ("mine-4l", "Mine_4L", "other"):
        model = load_model(name, {"num_layers": 2})
        assert (model.hidden, model.num_layers) == (512, 2)
        assert any("from your catalogue: " in line for line in model.assumptions)
    assert {"mine-4l", "other", "gpt2"} <= set(model_names())


def test_a_model_may_be_its_sizes(folder: Path) -> None:
    """A file without a family states sizes, with their defaults."""
    (folder / "models/small.json").write_text('{"num_layers": 2, "hidden_size": 256, "gated": true}')
    model = load_model("small", {"vocab_size": 100})
    assert (model.name, model.vocab, model.num_layers) == ("small", 100, 2)


def test_a_file_wins_over_what_is_known_and_is_seen_at_once(folder: Path) -> None:
    """One's own gpt2 is taken in place of the catalogue's, its changes count, and without it all is as before."""
    known = count_parameters(load_model("gpt2"))
    path = folder / "models/gpt2.json"
    path.write_text(json.dumps(MODEL))
    small = count_parameters(load_model("gpt2"))
    path.write_text(json.dumps({**MODEL, "num_hidden_layers": 5}))
    assert count_parameters(load_model("gpt2")) > small
    path.unlink()
    assert count_parameters(load_model("gpt2")) == known > small


def test_a_device_is_a_file(folder: Path) -> None:
    """A device's file adds it to what clusters are made of."""
    text = device_to_toml(find_device("t4").device).replace('name = "t4"', 'name = "my-t4"', 1)
    (folder / "devices/my-t4.toml").write_text(text.replace("3.2e11", "6.4e11"))
    assert find_device("My T4").device.memory_bytes_per_second == 2 * find_device("t4").device.memory_bytes_per_second
    assert "my-t4" in device_names()
    done = run("train", "gpt2", "--on", "2xmy-t4", "--global-batch", "8", "--precision", "fp16")
    assert "my-t4 is from your catalogue" in " ".join(done.out.split())


def test_a_device_is_like_one_of_the_catalogue(folder: Path) -> None:
    """A device that says what it is like has its constants under any name, and only facts tell them apart.

    T4 has 1,024 threads a core, Ada an efficiency of its own and MI300X kernels of its own; none of the names says so.
    """
    for known in ("t4", "l40s", "mi300x", "h100-pcie-80gb"):
        text = device_to_toml(find_device(known).device)
        assert f'like = "{known}"' in text
        (folder / "devices/lab.toml").write_text(text.replace(f'name = "{known}"', 'name = "lab"'))
        for words in ("train gpt2 --global-batch 8 --precision fp16 --on", "infer gpt2 --batch 8 --on"):
            one, other = (run(*words.split(), f"2x{name}", "--json").tree for name in (known, "lab"))
            for key in ("step_seconds", "request_seconds", "memory", "evidence", "chance_to_fit"):
                assert one.get(key) == other.get(key), (known, key)
    (folder / "devices/lab.toml").write_text(
        text.replace("name = ", 'name = "lab" #').replace("like = ", 'like = "t5" #')
    )
    assert run("train", "gpt2", "--on", "1xlab", "--json").fields == ["lab.toml: like"]
    (folder / "devices/lab.toml").write_text(text.replace("name = ", 'name = "lab" #').replace("like = ", "like = 3 #"))
    assert run("train", "gpt2", "--on", "1xlab", "--json").fields == ["lab.toml: like"]


def test_less_power_of_a_variant_counts_beside_its_like(folder: Path) -> None:
    """A variant with fewer watts for its peak keeps less of a lasting rate than what it is like."""
    text = device_to_toml(find_device("h100").device).replace('name = "h100-sxm-80gb"', 'name = "lab"')
    (folder / "devices/lab.toml").write_text(text.replace("power_watts = [700.0", "power_watts = [350.0"))
    seconds = [
        run("train", "llama-2-7b", "--on", f"8x{name}", "--global-batch", "64", "--json").tree["step_seconds"]
        for name in ("h100-sxm-80gb", "lab")
    ]
    assert seconds[1] > 1.05 * seconds[0]


def test_a_device_of_no_family_has_links_of_some_kind(folder: Path) -> None:
    """A switch that reduces joins devices of a name that no constants know, too: the answer is one, not a fault."""
    text = device_to_toml(find_device("h100").device).replace('name = "h100-sxm-80gb"', 'name = "lab"')
    (folder / "devices/lab.toml").write_text(text.replace('like = "h100-sxm-80gb"\n', ""))
    done = run("train", "gpt2", "--on", "8xlab", "--global-batch", "8", "--json")
    assert done.status == 0
    assert "links use generic efficiencies" in done.tree["assumptions"]


def test_a_precision_is_a_file(folder: Path) -> None:
    """A recipe's file adds it to the precisions of training: wider gradients take the bytes that they say."""
    text = precision_to_toml(find_precision("bf16")).replace("gradient_bytes = 4", "gradient_bytes = 8")
    (folder / "precisions/wide.toml").write_text(text)
    assert "wide" in precision_names()
    train = ("train", "gpt2", "--on", "1xh100", "--global-batch", "4", "--json", "--precision")
    plain, wide = (run(*train, name).tree["memory"]["stages"][0]["categories"] for name in ("bf16", "wide"))
    assert wide["gradients"] == 2 * plain["gradients"]
    assert (wide["weights"], wide["optimizer"]) == (plain["weights"], plain["optimizer"])


def test_the_flag_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--catalogue` adds a folder to one run, is part of the command to copy, and leaves nothing behind."""
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/mine.json").write_text(json.dumps(MODEL))
    done = run("count", "mine", "--catalogue", str(tmp_path))
    assert done.status == 0, done.err
    assert f"--catalogue {tmp_path}" in done.out.replace("\\\n", "").replace("    ", " ")
    assert run("count", "mine").status == 2
    assert run("count", "gpt2", "--catalogue", str(tmp_path / "none"), "--json").fields == ["catalogue"]
    assert tmp_path not in folders()


@pytest.mark.parametrize("kind", ["models", "devices", "dtypes"])
def test_what_is_written_is_what_is_read(kind: str, folder: Path) -> None:
    """A thing that a listing wrote to a file of the user's is the same thing under a new name."""
    name, into = {
        "models": ("llama-3.2-1b", "models/copy.json"),
        "devices": ("h100-sxm-80gb", "devices/copy.toml"),
        "dtypes": ("fp8", "precisions/copy.toml"),
    }[kind]
    assert run(kind, name, "--write", str(folder / into)).status == 0
    if kind == "models":
        assert count_parameters(load_model("copy")) == count_parameters(load_model(name))
    elif kind == "devices":
        assert find_device("copy").device == find_device(name).device
    else:
        copied, known = find_precision("copy"), find_precision(name)
        assert (copied.compute, copied.master_bytes, copied.weight_bytes) == (known.compute, 4, known.weight_bytes)
    assert (
        any(row["name"] == "copy" or "copy" in row["name"] for row in run(kind, "copy", "--json").tree[kind])
        or kind == "devices"
    )
    assert run(kind, "-", "--write", str(folder / "x")).status in (1, 2)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("models/bad.json", "{", "count bad"),
        ("models/bad.json", "[]", "count bad"),
        ("models/bad.json", '{"model_type": "llama"}', "count bad"),
        ("models/bad.json", '{"hidden_size": 4}', "count bad"),
        ("devices/bad.toml", "name = 3", "train gpt2 --on 8xbad"),
        ("precisions/bad.toml", "compute = 3\nweight_bytes = -1\nlossy = 1", "train gpt2 --on 1xh100 --precision bad"),
        ("precisions/bad.toml", "=", "train gpt2 --on 1xh100 --precision bad"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(file: str, text: str, words: str, folder: Path) -> None:
    """A file that is broken, incomplete or wrong names what is wrong with it, and the run ends with status 2."""
    (folder / file).write_text(text)
    done = run(*words.split(), "--json")
    assert done.status == 2
    assert done.fields and "shardwise" not in done.fields


def test_a_folder_must_exist() -> None:
    """A folder that is named and is none is refused."""
    with pytest.raises(InputError):
        use_catalogue("/no/such/folder")
