"""What was measured on a machine becomes a device of the user's catalogue, and predictions use it by name."""

from __future__ import annotations

import csv
import importlib.util
import math
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from json_keys import TABLE, spelt
from json_keys import rows as rows_of

from command_line import run
from shardwise.answers import _measure
from shardwise.cost import Efficiencies, rates_of
from shardwise.hardware import device_to_toml, load_device
from shardwise.measuring import Clock, Machine, Measurement, _clock, describe, device_of, timed

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
    monkeypatch.setattr(_measure, "is_installed", lambda name: True)
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
    monkeypatch.setattr(_measure, "is_installed", lambda name: False)
    found = run("measure", "--out", str(tmp_path / "mine"))
    assert found.status == 2
    assert "shardwise[torch]" in found.err
    assert not (tmp_path / "mine").exists()


class FakeGpu:
    """PyTorch on a GPU whose products and copies take what a rate says; calls only move its own clock."""

    float32, bfloat16, __version__ = 4, 2, "2.9"

    def __init__(self, memory_bytes: float = 80e9, flops: float = 6e14, bandwidth: float = 3e12) -> None:
        self.now, self.flops, self.bandwidth, self.most = 0.0, flops, bandwidth, 0
        properties = SimpleNamespace(
            name="NVIDIA H100 80GB HBM3", total_memory=memory_bytes, multi_processor_count=132, L2_cache_size=50 * 2**20
        )
        self.cuda = SimpleNamespace(
            is_available=lambda: True, synchronize=lambda: None, Event=lambda enable_timing: FakeEvent(self),
            get_device_properties=lambda index: properties,
        )  # fmt: skip

    def get_num_threads(self) -> int:
        """Threads of the host."""
        return 8

    def randn(self, count: int, device: str) -> FakeTensor:
        """A tensor of so many values."""
        return FakeTensor(self, (count,), 4)

    def ones(self, count: int, device: str, pin_memory: bool) -> FakeTensor:
        """A tensor on the GPU, of which the largest is remembered."""
        assert device == "cuda" and not pin_memory
        self.most = max(self.most, 4 * count)
        return FakeTensor(self, (count,), 4)


class FakeEvent:
    """A mark on the clock of a GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        """Take the time."""
        self.at = self.gpu.now

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds between two marks."""
        return 1e3 * (end.at - self.at)


class FakeTensor:
    """Sizes and a width, and what its products and copies take."""

    def __init__(self, gpu: FakeGpu, sides: tuple[int, ...], width: int) -> None:
        self.gpu, self.sides, self.width = gpu, sides, width

    def numel(self) -> int:
        """How many values it has."""
        return math.prod(self.sides)

    def __getitem__(self, part: slice) -> FakeTensor:
        return FakeTensor(self.gpu, (part.stop,), self.width)

    def view(self, sides: tuple[int, ...]) -> FakeTensor:
        """The same values with other sides."""
        return FakeTensor(self.gpu, sides, self.width)

    def to(self, dtype: int, copy: bool) -> FakeTensor:
        """A copy in another type."""
        return FakeTensor(self.gpu, self.sides, dtype)

    def t(self) -> FakeTensor:
        """The transpose."""
        return FakeTensor(self.gpu, self.sides[::-1], self.width)

    def __matmul__(self, other: FakeTensor) -> None:
        (m, k), (_, n) = self.sides, other.sides
        rate = self.gpu.flops if self.width == 2 else self.gpu.flops / 15
        self.gpu.now += max(2.0 * m * n * k / rate, self.width * (m * k + n * k + m * n) / self.gpu.bandwidth)

    def copy_(self, other: FakeTensor, non_blocking: bool) -> None:
        """Read and write as many bytes."""
        self.gpu.now += 2.0 * 4 * self.numel() / self.gpu.bandwidth


def test_a_gpu_is_timed_by_its_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of the GPU time its kernels, no copy takes more than half of its memory, and its name finds the rates."""
    memory_bytes = 8e9  # less than what is copied where there is more
    gpu = FakeGpu(memory_bytes)
    monkeypatch.setitem(sys.modules, "torch", gpu)  # type: ignore[arg-type]
    monkeypatch.setattr(_measure, "is_installed", lambda name: True)
    monkeypatch.setattr(_clock, "_NOISE", {})
    found = run("measure", "--out", str(tmp_path), "--name", "lab", "--json").tree
    facts = {name: fact["value"] for name, fact in found["facts"].items()}
    assert facts["achieved_bytes_per_second"] == pytest.approx(gpu.bandwidth, rel=1e-3)
    assert facts["achieved_flops.bf16"] == pytest.approx(gpu.flops, rel=0.1)
    assert 4 * gpu.most <= memory_bytes / 2
    words = ("train", "llama-3.2-1b", "--on", "1xlab", "--catalogue", str(tmp_path), "--json")
    known = run(*words[:3], "1xh100-sxm-80gb", "--json").tree["step_seconds"]
    assert run(*words).tree["step_seconds"] == pytest.approx(known, rel=0.3)


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
