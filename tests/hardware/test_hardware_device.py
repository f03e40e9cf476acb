"""A device: what it knows, what it refuses, and devices that users describe themselves."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.hardware import Cluster, Device, Fact, device_to_toml, find_device, load_device
from shardwise.hardware._catalogue import device_from_table, show_number
from shardwise.hardware._device import FIELDS

H100 = find_device("h100-sxm-80gb").device

GOOD = """
name = "mine"
full_name = "My accelerator"
vendor = "me"
fast_link = "pcie"
[sources]
sheet = ["my datasheet", "2026-01"]
[facts]
memory_bytes = ["80GiB", "sheet"]
usable_memory_bytes = ["79GiB", "sheet"]
memory_bytes_per_second = ["3.35TB/s", "sheet"]
fast_bytes_per_second = ["400Gb/s", "sheet"]
power_watts = 700
[facts.matrix_flops]
bf16 = ["989T", "sheet"]
"""


def _fields(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [problem.field for problem in error.value.problems]


def test_memory_is_in_real_bytes() -> None:
    """80 GiB on the nameplate is 85899345920 bytes, of which the driver offers a little less."""
    assert H100.memory_bytes == 80 * 2**30
    assert H100.usable_memory_bytes == round(79.18 * 2**30)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("v100-sxm-32gb", "bf16"),
        ("a100-sxm-80gb", "fp8"),
        ("h100-sxm-80gb", "fp4"),
        ("h100-sxm-80gb", "float32"),
        ("cpu-generic", "bf16"),
        ("tpu-v5e", "fp16"),
        ("p100-sxm-16gb", "int8"),
    ],
)
def test_unsupported_type_is_refused_and_the_supported_are_named(name: str, dtype: str) -> None:
    """No data type is emulated: asking for one that the device lacks names those that it has."""
    device = find_device(name).device
    with pytest.raises(InputError) as error:
        device.peak_flops(dtype)
    (problem,) = error.value.problems
    assert (problem.field, problem.value) == ("dtype", dtype)
    for known in device.matrix_flops:
        assert known in problem.remedy


def test_device_without_any_rate_names_the_option_that_states_one() -> None:
    """A device of which only the memory is known asks for the peak."""
    with pytest.raises(InputError, match=r"peak_flops\.bf16"):
        find_device("generic-24gb").device.peak_flops("bf16")


@pytest.mark.parametrize(
    ("name", "field", "option"),
    [
        ("generic-24gb", "memory_bytes_per_second", "memory_bandwidth"),
        ("generic-24gb", "slow_bytes_per_second", "slow_bandwidth"),
        ("tpu-v7", "host_bytes_per_second", "device file"),
        ("gaudi2", "vector_flops", "device file"),
        ("mi300x", "last_cache_bytes", "device file"),
    ],
)
def test_unknown_figure_raises_with_the_option_that_gives_it(name: str, field: str, option: str) -> None:
    """A figure that no source gives is never a silent default."""
    device = find_device(name).device
    assert field in device.unknown
    with pytest.raises(InputError) as error:
        getattr(device, field)
    assert _fields(error) == [field]
    assert option in error.value.problems[0].remedy


def test_price_is_none_where_no_list_price_is_known() -> None:
    """Without a price no cost is reported, so the price is None rather than an error."""
    assert find_device("h20").device.usd_per_device_hour is None
    assert H100.usd_per_device_hour == pytest.approx(55.04 / 8)


def test_fact_tells_source_and_date() -> None:
    """Any number can be traced to who said it and when."""
    fact = H100.fact("memory_bytes_per_second")
    assert (fact.value, fact.date) == (3.35e12, "2023-03")
    assert "datasheet" in fact.source
    assert not fact.assumed
    assert find_device("a30").device.fact("usable_memory_bytes").assumed


def test_changed_value_brings_its_own_source() -> None:
    """What-if values replace the number and its source together; the rest of the device stays."""
    limited = H100.with_values({"power_watts": 500}, "power limit of the rack", "2026-02")
    assert limited.power_watts == 500
    assert limited.fact("power_watts").source == "power limit of the rack"
    assert limited.memory_bytes == H100.memory_bytes
    assert H100.power_watts == 700


def test_device_is_a_value() -> None:
    """Devices are hashable, comparable, frozen, and survive copying and pickling."""
    again = pickle.loads(pickle.dumps(H100))
    assert again == H100 == copy.deepcopy(H100)
    assert len({H100, again}) == 1
    assert again.peak_flops("bf16") == 989e12
    with pytest.raises(FrozenInstanceError):
        H100.name = "other"  # type: ignore[misc]


def test_rates_cannot_be_changed_in_place() -> None:
    """The mapping of rates is read-only."""
    with pytest.raises(TypeError):
        H100.matrix_flops["bf16"] = 1.0  # type: ignore[index]


def test_own_file_may_state_units_and_bare_numbers(tmp_path: Path) -> None:
    """A user's file takes text with units; a bare number has the file as its source."""
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    device = load_device(path)
    assert device.memory_bytes == 80 * 2**30
    assert device.fast_bytes_per_second == 50e9
    assert device.peak_flops("bf16") == 989e12
    assert device.fact("power_watts").source == "stated in mine.toml"
    assert device.fact("memory_bytes").source == "my datasheet"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"80GiB"', '"eighty"', "memory_bytes"),
        ('"80GiB"', "true", "memory_bytes"),
        ('"80GiB"', "-1", "memory_bytes"),
        ('"80GiB"', "0", "memory_bytes"),
        ('"80GiB"', "nan", "memory_bytes"),
        ('"80GiB"', "inf", "memory_bytes"),
        ('"80GiB"', "0.5", "memory_bytes"),
        ('"80GiB"', '"70GiB"', "usable_memory_bytes"),
        ('["79GiB", "sheet"]', "[]", "usable_memory_bytes"),
        ('["79GiB", "sheet"]', '["79GiB", "shet"]', "usable_memory_bytes"),
        ('["79GiB", "sheet"]', '["79GiB", "sheet", "x"]', "usable_memory_bytes"),
        ('"3.35TB/s"', '"3.35TX/s"', "memory_bytes_per_second"),
        ('"400Gb/s"', '"400GF/s"', "fast_bytes_per_second"),
        ('"989T"', '"989Q"', "matrix_flops.bf16"),
        ("bf16 =", "bf61 =", "matrix_flops.bf61"),
        ("power_watts", "power_wats", "power_wats"),
        ('vendor = "me"', "", "vendor"),
        ('vendor = "me"', 'vendor = " "', "vendor"),
        ('vendor = "me"', "vendor = 3", "vendor"),
        ('"pcie"', '"nvlink4"', "fast_link"),
        ('vendor = "me"', 'vendor = "me"\ncolour = "red"', "colour"),
        ('["my datasheet", "2026-01"]', '"my datasheet"', "sources.sheet"),
        ('["my datasheet", "2026-01"]', '["my datasheet", ""]', "sources.sheet"),
    ],
)
def test_bad_file_names_file_and_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    """A mistake in a device file is reported with file, field, value, rule and remedy."""
    assert old in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as error:
        load_device(path)
    assert f"mine.toml: {field}" in _fields(error)
    assert all(problem.rule and problem.remedy for problem in error.value.problems)


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    """Three mistakes are three problems."""
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace('"80GiB"', '"eighty"').replace('"3.35TB/s"', "-3").replace("bf16 =", "bf61 ="))
    with pytest.raises(InputError) as error:
        load_device(path)
    assert {"mine.toml: memory_bytes", "mine.toml: memory_bytes_per_second", "mine.toml: matrix_flops.bf61"} <= set(
        _fields(error)
    )


@pytest.mark.parametrize("text", ["name = ", "facts = 3", "sources = []", "[facts]\nmatrix_flops = 3", ""])
def test_files_that_are_no_devices_are_refused(tmp_path: Path, text: str) -> None:
    """Whatever the file holds, the answer is a list of problems."""
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"odd\.toml"):
        load_device(path)


def test_missing_file_is_a_problem(tmp_path: Path) -> None:
    """A path that leads nowhere is reported with the path."""
    with pytest.raises(InputError, match=r"nowhere\.toml.*cannot be read"):
        load_device(tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_device(tmp_path)


def test_order_and_text_of_facts_do_not_matter() -> None:
    """Facts in another order, or with values as text, make an equal device."""
    texts = [Fact(field="memory_bytes", value="80GiB", source="a sheet", date="2024")]  # type: ignore[arg-type]
    others = [fact for fact in H100.sources if fact.field != "memory_bytes"]
    made = [
        Device(name="x", full_name="x", vendor="x", fast_link="pcie", sources=tuple(facts))
        for facts in ([*texts, *others], [*reversed(others), *texts])
    ]
    assert made[0] == made[1]
    assert made[0].fact("memory_bytes").value == 80 * 2**30


def test_field_stated_twice_is_refused() -> None:
    """Two values of one field contradict each other."""
    fact = Fact(field="year", value=2024, source="a source", date="2024")
    with pytest.raises(InputError) as error:
        Device(name="x", full_name="x", vendor="x", fast_link="pcie", sources=(*H100.sources, fact))
    assert _fields(error) == ["year"]


_TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.strip)
_SIZES = st.integers(2**20, 2**45)
_RATES = st.floats(1e9, 1e30, allow_nan=False, allow_infinity=False)


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """Devices with any text and any numbers that a device may have."""
    memory = draw(_SIZES)
    values: dict[str, float | bool] = {"memory_bytes": memory, "usable_memory_bytes": draw(st.integers(10**6, memory))}
    for name in draw(st.sets(st.sampled_from(sorted(FIELDS)))) - values.keys():
        quantity = FIELDS[name][0]
        whole = quantity is not None and quantity.whole
        values[name] = draw(st.booleans() if quantity is None else st.integers(10**6, 2**60) if whole else _RATES)
    facts = [Fact(field=name, value=value, source=draw(_TEXT), date=draw(_TEXT)) for name, value in values.items()]
    words = [draw(_TEXT) for _ in range(4)]
    return Device(name=words[0], full_name=words[1], vendor=words[2], fast_link=words[3], sources=tuple(facts))


@given(devices())
def test_any_device_round_trips_through_toml(device: Device) -> None:
    """Whatever the numbers and the texts, writing and reading gives an equal device."""
    import tomllib

    assert device_from_table(tomllib.loads(device_to_toml(device)), "text") == device


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**62), 2**62))
def test_numbers_are_written_exactly(value: float) -> None:
    """TOML text of a number reads back to the same number."""
    import tomllib

    assert tomllib.loads(f"x = {show_number(value)}")["x"] == value


@pytest.mark.parametrize(
    ("flag", "value"),
    [("memory", "96"), ("memory", 96), ("slow_bandwidth", "50"), ("peak_flops", 989), ("fast_latency", "5")],
)
def test_a_number_without_its_unit_is_not_a_device_of_bytes(flag: str, value: object) -> None:
    """A memory of 96 bytes, a network of 50 bytes a second and a latency of 5 seconds have lost their unit."""
    with pytest.raises(InputError, match="a unit may be missing"):
        Cluster.parse("16xh100-sxm-80gb", {flag: value})


def test_a_cluster_is_not_a_device() -> None:
    """The file of a cluster in the place of a device's is told by its tiers, in one sentence."""
    with pytest.raises(InputError, match="describes a cluster, not a device") as error:
        device_from_table({"device": "h100-sxm-80gb", "tiers": []}, "mine.toml")
    assert len(error.value.problems) == 1
