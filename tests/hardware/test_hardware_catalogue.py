"""The catalogue: every device loads, every number has a source and a date, and the numbers are sane and dense."""

from __future__ import annotations

import re
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest

from shardwise import hardware
from shardwise.errors import InputError
from shardwise.hardware import Device, device_names, device_to_toml, find_device, load_device, other_names
from shardwise.hardware._device import FIELDS, all_links

NAMES = device_names()
TB = 1e12

WANTED = (
    "p100-sxm-16gb v100-sxm-16gb v100-sxm-32gb v100-pcie-16gb v100-pcie-32gb t4 a100-sxm-40gb a100-sxm-80gb "
    "a100-pcie-40gb a100-pcie-80gb a10 a10g-24gb a30 a40 rtx-a6000 rtx-3090 rtx-4090 rtx-5090 rtx-6000-ada "
    "rtx-pro-6000-server l4 l40 l40s h100-sxm-80gb h100-pcie-80gb h100-nvl-94gb h100-sxm-96gb-hbm2e-500w "
    "h800-sxm-80gb h20 h200-sxm-141gb h200-nvl-141gb gh200-96gb b100-sxm-192gb b200-sxm-180gb gb200 b300 gb300 "
    "mi100-32gb mi210-64gb mi250 mi250-gcd mi250x mi250x-gcd mi300x mi300a mi325x mi350x mi355x tpu-v4 tpu-v5e "
    "tpu-v5p tpu-v6e tpu-v7 gaudi2 gaudi3 trainium1 trainium2 intel-max-1550 cpu-generic cpu-x86-2core"
)

# Names that published measurements, other tools and drivers use for devices.
FOREIGN = (
    "a100-80gb-unspecified a100-sxm-unstated a10g a800-sxm-80gb any apple-m1-7core apple-m1-max-32core "
    "apple-m2-ultra-76core apple-m3-max-40core arc-pro-b60 arc-pro-b60-dual arc-pro-b70 "
    "b200-sxm-180gb-power-limited blackwell-184gib-unstated gb10 generic-12gb generic-16gb generic-24gb "
    "generic-40gb generic-48gb generic-80gb generic-8gb gh200-144gb h100-80gb-unspecified h100-nvl-80gb "
    "inferentia2-core jetson-agx-orin rtx-3070 rtx-3080 rtx-3080-ti rtx-3090-ti rtx-4000-ada rtx-4070-ti "
    "rtx-3060 rtx-4060-ti rtx-4070 rtx-4070-super rtx-4070-ti-super rtx-4080-super rtx-5060-ti rtx-5070 rtx-5070-ti "
    "rtx-5080 a4000 rtx-a4500 m1-ultra m2-max m3-ultra m4 m4-max "
    "rtx-4080 rtx-5000-ada rtx-a5000 rtx-pro-4500 rx-7900-xtx sn40l tpu-v7x trainium1-core a10-pcie-28gb "
    "a10-pcie-40gb a10g-pcie-24gb a6000-48gb mi100-32gb mi210-64gb mi250-128gb mi250x-128gb v100-pcie-16gb "
    "jetson-thor m5 m5-pro m5-max m4-pro trn3 rtx-pro-5000 7900-xt "
    "strix-halo radeon-8060s gb200-nvl72 gb300-nvl72 h100 a100 v100 mi250x h200 b200"
)

# Published dense figures, read in the makers' documents: memory in GiB, TB/s, and TFLOP/s by data type.
PUBLISHED = [
    ("v100-sxm-32gb", 32, 0.900, {"fp16": 125}),
    ("t4", 16, 0.320, {"fp16": 65, "int8": 130}),
    ("a100-sxm-80gb", 80, 2.039, {"tf32": 156, "bf16": 312, "int8": 624}),
    ("a100-sxm-40gb", 40, 1.555, {"bf16": 312}),
    ("a30", 24, 0.933, {"bf16": 165, "int8": 330}),
    ("a40", 48, 0.696, {"bf16": 149.7, "int8": 299.3}),
    ("rtx-4090", 24, 1.008, {"bf16": 165.2, "fp8": 330.3}),
    ("rtx-4060", 8, 0.272, {"bf16": 30.2, "fp8": 60.5}),
    ("rtx-4070-super", 12, 0.5042, {"bf16": 71.0}),
    ("rtx-5070-ti", 16, 0.896, {"bf16": 87.9, "fp4": 703.2}),
    ("rtx-5080", 16, 0.96, {"bf16": 112.6, "fp4": 900.8}),
    ("rtx-a4000", 16, 0.448, {"bf16": 76.7}),
    ("radeon-ai-pro-r9700", 32, 0.640, {"fp16": 191, "fp8": 383, "int8": 383}),
    ("arc-b580", 12, 0.456, {"int8": 233}),
    ("l4", 24, 0.300, {"bf16": 121, "fp8": 242}),
    ("l40s", 48, 0.864, {"bf16": 362.05, "fp8": 733}),
    ("h100-sxm-80gb", 80, 3.35, {"tf32": 494.5, "bf16": 989, "fp8": 1979}),
    ("h100-pcie-80gb", 80, 2.0, {"bf16": 756.5, "fp8": 1513}),
    ("h20", 96, 4.0, {"bf16": 148, "fp8": 296}),
    ("h200-sxm-141gb", 141, 4.8, {"bf16": 989, "fp8": 1979}),
    ("b200-sxm-180gb", 180, 7.7, {"fp32": 75, "bf16": 2250, "fp8": 4500, "fp4": 9000}),
    ("b300", 268.59, 7.75, {"fp32": 75, "bf16": 2250, "fp8": 4500}),
    ("gb200", 185.03, 8.0, {"bf16": 2500, "fp8": 5000, "fp4": 10000}),
    ("mi250x", 128, 3.2768, {"bf16": 383}),
    ("mi300x", 192, 5.3, {"tf32": 653.7, "bf16": 1307.4, "fp8": 2614.9}),
    ("mi355x", 288, 8.0, {"bf16": 2500, "fp8": 5000, "fp4": 10100}),
    ("ryzen-ai-max-395", 128, 0.256, {"bf16": 59.39, "int8": 59.39}),
    ("tpu-v5e", 16, 0.819, {"bf16": 197, "int8": 394}),
    ("tpu-v6e", 32, 1.638, {"bf16": 918, "int8": 1836}),
    ("tpu-v7", 192, 7.38, {"bf16": 2307, "fp8": 4614}),
    ("gaudi2", 96, 2.46, {"bf16": 432, "fp8": 865}),
    ("trainium2", 96, 2.9, {"bf16": 667, "fp8": 1299}),
    ("trainium3", 144, 4.9, {"bf16": 671, "fp8": 2517}),
    ("rtx-pro-6000-max-q", 96, 1.792, {"fp32": 110, "fp4": 1755.5}),
    ("rtx-pro-5000-48gb", 48, 1.344, {"fp32": 65, "fp4": 1032}),
    ("rtx-pro-5000-72gb", 72, 1.344, {"fp32": 65, "fp4": 1032}),
    ("rtx-pro-4000", 24, 0.672, {"fp32": 46.9, "fp4": 645}),
    ("jetson-agx-thor", 128, 0.273, {"fp4": 1035, "bf16": 258.75}),
    ("apple-m4-pro-20core", 48, 0.273, {"fp16": 8.591}),
    ("apple-m3-ultra-60core", 256, 0.819, {"fp16": 21.47}),
    ("apple-m5-10core", 32, 0.153, {"fp32": 4.48, "fp16": 17.92}),
    ("apple-m5-pro-20core", 64, 0.307, {"fp16": 35.84}),
    ("apple-m5-max-32core", 36, 0.460, {"fp16": 57.34}),
    ("apple-m5-max-40core", 128, 0.614, {"fp16": 71.68}),
    ("rx-7900-xt", 20, 0.8, {"fp16": 103}),
]


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> Device:
    """Each device of the catalogue in turn."""
    return find_device(request.param).device


def test_catalogue_holds_the_devices_people_use() -> None:
    """The devices of published measurements and clouds are there, under the names expected."""
    assert len(NAMES) >= 45
    assert set(WANTED.split()) <= set(NAMES)


def test_file_is_named_after_its_device(device: Device) -> None:
    """The name inside a file is the file's name, so one small file is all that finding it reads."""
    assert device.name in NAMES


def test_every_number_has_source_and_date(device: Device) -> None:
    """A number without a source, or with an impossible date, does not enter the catalogue."""
    for fact in device.sources:
        assert len(fact.source) >= 10, fact
        assert re.fullmatch(r"20[0-2]\d(-(0[1-9]|1[0-2]))?", fact.date), fact


def test_stated_and_unknown_fields_make_the_whole(device: Device) -> None:
    """A field is stated or listed as unknown, never both and never neither."""
    stated = {fact.field for fact in device.sources}
    plain = {name for name in FIELDS if not name.startswith(("matrix_flops.", "achieved_"))}
    assert stated & set(device.unknown) == set()
    assert plain <= stated | set(device.unknown)


def test_matrix_rates_do_not_fall_with_the_width_of_the_type(device: Device) -> None:
    """A narrower type is at least as fast: fp32 <= tf32 <= 16 bits <= fp8 <= fp4, and int8 <= int4."""
    rates = device.matrix_flops
    for chain in (("fp32", "tf32", "bf16", "fp8", "fp4"), ("fp32", "fp16"), ("int8", "int4")):
        known = [rates[dtype] for dtype in chain if dtype in rates]
        assert known == sorted(known), (device.name, chain)


def ahead(device: Device) -> int:
    """How far above what exists a device may be: hypothetical ones four times."""
    return 4 if "hypothetical" in device.full_name else 1


def test_memory_and_bandwidth_are_plausible(device: Device) -> None:
    """Sizes mistaken by 1000, or bits taken for bytes, fall outside; what a driver leaves is no round number."""
    assert 8e9 < device.memory_bytes < 600e9
    assert 0.6 < device.usable_memory_bytes / device.memory_bytes <= 1
    rest = device.vendor == "NVIDIA" or device.name.startswith("cpu-")
    assert device.memory_bytes < 12e9 or device.memory_bytes % 2**20 == 0 or rest
    if device.knows("memory_bytes_per_second"):
        assert 20e9 < device.memory_bytes_per_second < 10e12 * ahead(device)


def test_last_caches_are_plausible(device: Device) -> None:
    """Whole megabytes as makers print them, of NVIDIA's devices alone: what caches save was fitted on these."""
    if device.knows("last_cache_bytes"):
        assert device.vendor == "NVIDIA"
        assert 3e6 <= device.last_cache_bytes <= 128e6 and device.last_cache_bytes % 1e6 == 0


def test_links_are_plausible_in_one_direction(device: Device) -> None:
    """A fast link is below 1.3 TB/s in one direction and not slower than the network it shortcuts."""
    assert device.fast_link in all_links()
    if device.knows("fast_bytes_per_second"):
        assert 15e9 < device.fast_bytes_per_second <= 1.28e12 * ahead(device)
    if device.knows("slow_bytes_per_second"):
        assert 1e9 < device.slow_bytes_per_second <= 100e9 * ahead(device)
    if device.knows("fast_bytes_per_second") and device.knows("slow_bytes_per_second") and device.fast_link != "pcie":
        assert device.slow_bytes_per_second < device.fast_bytes_per_second
    assert not device.fast_in_network or device.fast_link in ("nvlink-4", "nvlink-5")


def test_no_device_computes_faster_than_its_power_allows(device: Device) -> None:
    """Dense 16-bit rates of up to 2026 stay below 3 TFLOP/s a watt; a sparse rate by mistake would be near or above."""
    if device.knows("power_watts") and "bf16" in device.matrix_flops:
        assert device.peak_flops("bf16") / device.power_watts < 3e12


@pytest.mark.parametrize(("name", "memory_gib", "terabytes_per_second", "rates"), PUBLISHED)
def test_published_dense_figures(
    name: str, memory_gib: float, terabytes_per_second: float, rates: dict[str, float]
) -> None:
    """The catalogue repeats the makers' dense figures, never the sparse ones, which are twice as large."""
    device = find_device(name).device
    assert device.memory_bytes == pytest.approx(memory_gib * 2**30, rel=1e-4)
    assert device.memory_bytes_per_second == pytest.approx(terabytes_per_second * TB)
    for dtype, rate in rates.items():
        assert device.peak_flops(dtype) == pytest.approx(rate * TB)


@pytest.mark.parametrize(
    ("name", "one_direction"),
    [
        ("v100-sxm-32gb", 150e9),
        ("a100-sxm-80gb", 300e9),
        ("h100-sxm-80gb", 450e9),
        ("h800-sxm-80gb", 200e9),
        ("b200-sxm-180gb", 900e9),
        ("gb200", 900e9),
        ("mi300x", 448e9),
        ("tpu-v5p", 600e9),
    ],
)
def test_fast_links_count_one_direction(name: str, one_direction: float) -> None:
    """A link sold as "NVLink 900 GB/s" counts both directions: one direction is half of it."""
    assert find_device(name).device.fast_bytes_per_second == one_direction


def test_names_of_others_resolve() -> None:
    """Names in published measurements, of other tools, and short names find a device."""
    assert {find_device(name).device.name for name in FOREIGN.split()} <= {*NAMES}


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("H100_SXM_80GB", "h100-sxm-80gb"),
        ("  gb200-nvl72 ", "gb200"),
    ],
)
def test_names_that_drivers_print_resolve(printed: str, name: str) -> None:
    """Case, blanks and underscores do not matter, and the driver's own name needs no assumption."""
    assert find_device(printed).device.name == name
    assert find_device(printed).assumptions == ()


def test_other_names_point_at_devices() -> None:
    """Every other name leads to a catalogue device, hides none, and says what it assumes."""
    for name, (target, assumption) in other_names().items():
        assert target in NAMES, name
        assert name not in NAMES
        assert find_device(name).assumptions == ((assumption,) if assumption else ()), name


def test_short_name_lists_its_assumption() -> None:
    """The name "h100" could be four boards, so taking it for one is said."""
    assert find_device("h100").device is find_device("h100-sxm-80gb").device
    assert "h100-sxm-80gb" in find_device("h100").assumptions[0]


@pytest.mark.parametrize(
    ("name", "near"), [("h100-sxm-80", "h100-sxm-80gb"), ("mi300", "mi300x"), ("zzz9", "`shardwise devices`")]
)
def test_unknown_name_offers_near_matches(name: str, near: str) -> None:
    """A misspelt device is refused with the names that are close to it."""
    with pytest.raises(InputError) as error:
        find_device(name)
    (problem,) = error.value.problems
    assert (problem.field, problem.value) == ("device", name)
    assert near in problem.remedy


@pytest.mark.parametrize("name", ["", "   ", "../h100", "catalogue/h100", None, 7, True])
def test_strange_names_are_refused(name: object) -> None:
    """Text that cannot be a name, or reaches for other files, is a problem of the device."""
    with pytest.raises(InputError) as error:
        find_device(name)  # type: ignore[arg-type]
    assert error.value.problems[0].field == "device"


def test_every_link_has_a_latency_with_source_and_date() -> None:
    """A step costs microseconds, more over the network than inside a domain behind a switch."""
    links = all_links()
    for link in links.values():
        assert 0 <= link.latency_seconds <= 1e-5
        assert len(link.source) >= 10
        assert re.fullmatch(r"20\d\d(-\d\d)?", link.date)
    assert links["nvlink-4"].latency_seconds < links["pcie"].latency_seconds < links["network"].latency_seconds


def test_public_names() -> None:
    """The public surface of the package changes only on purpose."""
    assert sorted(name for name, value in vars(hardware).items() if name[0] != "_" and not ismodule(value)) == [
        "COMMITMENTS",
        "Cluster",
        "Device",
        "Fact",
        "Lookup",
        "OVERRIDES",
        "Offer",
        "Tier",
        "build_cluster",
        "context_bytes",
        "counted_text",
        "device_names",
        "device_to_toml",
        "find_device",
        "find_link",
        "find_rented",
        "instance_devices",
        "load_device",
        "offers",
        "other_names",
        "part_of",
        "peer_bytes",
        "says_how_many",
    ]


def test_device_round_trips_through_toml(device: Device, tmp_path: Path) -> None:
    """Written and read again, a device is equal, sources and dates included."""
    path = tmp_path / "device.toml"
    path.write_text(device_to_toml(device), encoding="utf-8")
    assert load_device(path) == device


def test_loading_a_device_imports_no_numpy() -> None:
    """Hardware is plain data: NumPy stays out, and so do the layers above."""
    code = (
        "import sys; from shardwise.hardware import Cluster; Cluster.parse('8xh100');"
        "print([m for m in sys.modules if m == 'numpy' or m.startswith(('shardwise.ops', 'shardwise.models'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
