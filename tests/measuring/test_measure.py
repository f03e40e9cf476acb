"""What was measured on a machine becomes a device of the user's catalogue, and predictions use it by name."""

from __future__ import annotations

import csv
import importlib.util
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from json_keys import TABLE, spelt
from json_keys import rows as rows_of

from command_line import run
from shardwise.answers import _measure
from shardwise.cost import Efficiencies, rates_of
from shardwise.hardware import device_to_toml, load_device
from shardwise.measuring import Clock, Machine, Measurement, describe, device_of, timed

MACHINE = Machine(
    key="cpu-lab", device="cpu", full_name="A processor", cores=8, threads=8, hertz=0.0, memory_bytes=2**34,
    torch_version="2.4", keeps_memory=True,
)  # fmt: skip
TORCH = importlib.util.find_spec("torch") is not None


def rows(flops: float, bandwidth: float = 5e10) -> list[Measurement]:
    """Kernels of a machine that computes and copies at given rates, bf16 twice as fast."""
    found = [Measurement("copy", "fp32", 0, 0, 0, 2.0 * 2**28, 2.0 * 2**28 / bandwidth, 0.01, 0.0)]
    for dtype, rate in (("fp32", flops), ("bf16", 2 * flops)):
        for m in (1, 256, 1024, 2048):
            work = 2.0 * m * 4096 * 4096
            found.append(Measurement("product", dtype, m, 4096, 4096, 1e7, work / rate, 0.01, 0.0))
    return found


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A machine whose products take what the test says, without PyTorch."""
    rate = {"flops": 4e11}
    monkeypatch.setattr(_measure, "find_spec", lambda name: object())
    monkeypatch.setattr(_measure, "_machine", lambda name: replace(MACHINE, key=name or MACHINE.key))
    monkeypatch.setattr(_measure, "timed", lambda *given: rows(rate["flops"]))
    return rate


def rows_of_keys(name: str) -> list[list[str]]:
    """The rows of the reference of JSON keys of an answer."""
    answers = tomllib.loads(TABLE.read_text("utf-8"))["answer"]
    return list(rows_of(next(answer for answer in answers if answer["name"] == name)))


def step_seconds(folder: Path, name: str) -> float:
    """Seconds of a training step on a device of a folder."""
    words = ("train", "gpt2", "--on", f"1x{name}", "--global-batch", "1", "--precision", "fp32", "--json")
    tree = run(*words, "--catalogue", str(folder)).tree
    return float(tree["step_seconds"])


@pytest.mark.parametrize("flops", [2e10, 4e11, 1e12])
def test_the_rate_that_was_measured_is_found_again(flops: float) -> None:
    """Products at a rate give that rate within a tenth, copies their own exactly, and both are what a step meets."""
    device = device_of(MACHINE, rows(flops))
    rates = rates_of(device, "fp32", 0.0, Efficiencies())
    assert rates.matmul_flops == pytest.approx(flops, rel=0.1)
    assert rates.memory_bytes == pytest.approx(5e10)
    assert device.peak_flops("fp32") > rates.matmul_flops


def test_the_file_is_read_back_to_the_device(tmp_path: Path) -> None:
    """A device that was measured survives the catalogue's format, sources and all."""
    device = device_of(MACHINE, rows(4e11))
    (tmp_path / "cpu-lab.toml").write_text(device_to_toml(device))
    assert load_device(tmp_path / "cpu-lab.toml") == device


def test_a_gpu_of_the_catalogue_keeps_its_datasheet() -> None:
    """Only what kernels reach changes of a GPU that the catalogue has."""
    gpu = replace(MACHINE, key="h100-sxm-80gb-lab", device="cuda", full_name="NVIDIA H100 80GB HBM3")
    device = device_of(gpu, rows(3e14 / 2, 2.5e12))
    assert device.peak_flops("bf16") == 989e12
    assert device.memory_bytes_per_second == 3.35e12
    assert rates_of(device, "bf16", 0.0, Efficiencies()).matmul_flops == pytest.approx(3e14, rel=0.1)
    assert rates_of(device, "bf16", 0.0, Efficiencies()).memory_bytes == pytest.approx(2.5e12)


def test_a_gpu_that_nobody_knows_is_made_of_its_measurements() -> None:
    """A GPU without a datasheet has the rates that were measured and the peaks that they imply."""
    gpu = replace(MACHINE, key="oddity", device="cuda", full_name="Oddity 9000")
    assert rates_of(device_of(gpu, rows(1e13, 1e12)), "bf16", 0.0, Efficiencies()).matmul_flops == pytest.approx(
        2e13, rel=0.1
    )


def test_a_step_bound_by_products_follows_what_was_measured(tmp_path: Path, timer: dict[str, float]) -> None:
    """A machine of half the measured rate is predicted nearly twice as slow, by its name."""
    assert run("measure", "--out", str(tmp_path), "--name", "cpu-fast").status == 0
    timer["flops"] /= 2
    found = run("measure", "--out", str(tmp_path), "--name", "cpu-slow", "--json").tree
    assert found["files"] == [str(tmp_path / "devices" / "cpu-slow.toml"), str(tmp_path / "cpu-slow.csv")]
    keys = {key for row in rows_of_keys("measure") for key in spelt(row[0])}
    assert {key.partition(".")[0].removesuffix("[]") for key in keys} == found.keys() - {"schema"}
    assert {key.removeprefix("facts.*.") for key in keys if "*" in key} == found["facts"]["memory_bytes"].keys()
    with (tmp_path / "cpu-slow.csv").open() as file:
        assert len(list(csv.DictReader(file))) == found["kernels"] == 9
    assert 1.6 < step_seconds(tmp_path, "cpu-slow") / step_seconds(tmp_path, "cpu-fast") < 2.05


def test_a_name_that_exists_is_not_written_over(tmp_path: Path, timer: dict[str, float]) -> None:
    """What was measured before stays until its file is removed."""
    assert run("measure", "--out", str(tmp_path)).status == 0
    before = (tmp_path / "devices" / "cpu-lab.toml").read_text()
    timer["flops"] *= 3
    again = run("measure", "--out", str(tmp_path), "--json")
    assert (again.status, again.fields) == (2, ["name", "name"])
    assert (tmp_path / "devices" / "cpu-lab.toml").read_text() == before


def test_everything_wrong_with_a_folder_and_a_name_is_said(tmp_path: Path, timer: dict[str, float]) -> None:
    """A file in place of the folder and a name without constants are refused at once; a path is no name."""
    (tmp_path / "taken").write_text("")
    wrong = run("measure", "--out", str(tmp_path / "taken"), "--name", "lab", "--json")
    assert (wrong.status, wrong.fields) == (2, ["name", "out"])
    assert run("measure", "--out", str(tmp_path), "--name", "../cpu-lab", "--json").fields == ["name"]


def test_without_pytorch_the_remedy_is_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed or written where PyTorch is missing."""
    monkeypatch.setattr(_measure, "find_spec", lambda name: None)
    found = run("measure", "--out", str(tmp_path / "mine"))
    assert found.status == 2
    assert "shardwise[torch]" in found.err
    assert not (tmp_path / "mine").exists()


@pytest.mark.skipif(not TORCH, reason="PyTorch is not installed")
def test_this_machine_is_measured() -> None:
    """Small kernels of this machine are timed and make a device."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other tell of whatever else runs
    clock = Clock(device="cpu", rounds=2, sample_seconds=0.001, patience_seconds=0.0)
    found = timed(clock, [(128, 512, 512)], (2**22,))
    torch.set_num_threads(threads)
    assert [row.kernel for row in found] == ["copy", "product", "product"]
    device = device_of(describe("cpu"), found)
    assert all(rates_of(device, dtype, 0.0, Efficiencies()).matmul_flops > 0 for dtype in ("fp32", "bf16"))
