"""Clusters: what a text means, what may be changed, how tiers nest, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.hardware import Cluster, Tier, device_names, device_to_toml, find_device, part_of


def _tiers(cluster: Cluster) -> list[tuple[str, int, float]]:
    return [(tier.name, tier.size, tier.bytes_per_second) for tier in cluster.tiers]


def _fields(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [problem.field for problem in error.value.problems]


def _tier(size: object, rate: object = 1e9, latency: object = 1e-6, in_network: object = False) -> Tier:
    return Tier(
        name=f"t{size}",
        size=size,  # type: ignore[arg-type]
        bytes_per_second=rate,  # type: ignore[arg-type]
        latency_seconds=latency,  # type: ignore[arg-type]
        in_network=in_network,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("text", "devices", "node", "tiers"),
    [
        ("h100-sxm-80gb", 1, 1, [("local", 1, 3.35e12)]),
        ("1xh100-sxm-80gb", 1, 1, [("local", 1, 3.35e12)]),
        ("2xh100-sxm-80gb", 2, 2, [("nvlink-4", 2, 450e9)]),
        ("8xh100-sxm-80gb", 8, 8, [("nvlink-4", 8, 450e9)]),
        ("12xh100-sxm-80gb", 12, 8, [("nvlink-4", 8, 450e9), ("network", 12, 50e9)]),
        ("256xh100-sxm-80gb", 256, 8, [("nvlink-4", 8, 450e9), ("network", 256, 50e9)]),
        ("256 X h100", 256, 8, [("nvlink-4", 8, 450e9), ("network", 256, 50e9)]),
        ("32x8xh100-sxm-80gb", 256, 8, [("nvlink-4", 8, 450e9), ("network", 256, 50e9)]),
        ("2x4xa100-sxm-80gb", 8, 4, [("nvlink-3", 4, 300e9), ("network", 8, 25e9)]),
        ("1x4xa100-sxm-80gb", 4, 4, [("nvlink-3", 4, 300e9)]),
        ("72xgb200-nvl72", 72, 4, [("nvlink-5", 72, 900e9)]),
        ("18x4xgb200-nvl72", 72, 4, [("nvlink-5", 72, 900e9)]),
        ("144xgb200", 144, 4, [("nvlink-5", 72, 900e9), ("network", 144, 50e9)]),
        ("256xgb200", 256, 4, [("nvlink-5", 64, 900e9), ("network", 256, 50e9)]),
        ("96xgb200", 96, 4, [("nvlink-5", 48, 900e9), ("network", 96, 50e9)]),
        ("100xgb200", 100, 4, [("nvlink-5", 72, 900e9), ("network", 100, 50e9)]),
        ("2x72xgb300", 144, 72, [("nvlink-5", 72, 900e9), ("network", 144, 100e9)]),
        ("8xh100-nvl-94gb", 8, 8, [("nvlink-4", 2, 300e9), ("pcie", 8, 64e9)]),
        ("16xh100-nvl-94gb", 16, 8, [("nvlink-4", 2, 300e9), ("pcie", 8, 64e9), ("network", 16, 50e9)]),
        ("2x16xv100-sxm-32gb", 32, 16, [("nvlink-2", 16, 150e9), ("network", 32, 6.25e9)]),
        ("32xv100-sxm-32gb-dgx2", 32, 16, [("nvlink-2", 16, 150e9), ("network", 32, 6.25e9)]),
        ("4xrtx-4090", 4, 4, [("pcie", 4, 32e9)]),
        ("256xtpu-v5e", 256, 8, [("ici", 256, 200e9)]),
        ("512xtpu-v5e", 512, 8, [("ici", 256, 200e9), ("network", 512, 3.125e9)]),
        ("8xgh200-96gb", 8, 1, [("network", 8, 50e9)]),
        ("2x4xgh200-96gb", 8, 4, [("nvlink-4", 4, 450e9), ("network", 8, 50e9)]),
        ("1x4xgh200-144gb", 4, 4, [("nvlink-4", 4, 450e9)]),
        ("generic-8gb", 1, 1, [("local", 1, 32e9)]),
    ],
)
def test_text_means_devices_and_tiers(text: str, devices: int, node: int, tiers: list[tuple[str, int, float]]) -> None:
    """The text alone gives the devices, the node and the usual tiers."""
    cluster = Cluster.parse(text)
    assert (cluster.num_devices, cluster.devices_per_node) == (devices, node)
    assert _tiers(cluster) == tiers


def test_segments_of_racks_are_an_assumption() -> None:
    """Equal segments of racks are listed as assumed; whole racks and a stated domain assume nothing of them."""
    said = "fast_domain = 64: the job takes equal segments of 64 from domains of 72"
    assert said in Cluster.parse("256xgb200").assumptions
    stated = Cluster.parse("256xgb200", {"fast_domain": 72})
    assert stated.tiers[0].size == 72
    for cluster in (stated, Cluster.parse("144xgb200")):
        assert not [one for one in cluster.assumptions if one.startswith("fast_domain")]


@pytest.mark.parametrize("count", range(1, 17))
def test_a_part_of_a_cluster_is_joined_as_its_first_devices_are(count: int) -> None:
    """Tiers within the part stay as they are, and the one that spans it ends with it."""
    whole = Cluster.parse("16xh100", {"fast_domain": 4})
    sizes = [("nvlink-4", 4, 450e9), ("pcie", 8, 64e9), ("network", 16, 50e9)]
    inner = [one for one in sizes if one[1] < count]
    name, _, rate = sizes[len(inner)]
    part = part_of(whole, count)
    assert (part.num_devices, _tiers(part)) == (count, [*inner, (name, count, rate)])


@pytest.mark.parametrize(
    ("text", "options", "tiers"),
    [
        ("h100", {"num_devices": 16}, [("nvlink-4", 8, 450e9), ("network", 16, 50e9)]),
        ("8xh100", {"num_devices": "16"}, [("nvlink-4", 8, 450e9), ("network", 16, 50e9)]),
        ("16xh100", {"devices_per_node": 4}, [("nvlink-4", 4, 450e9), ("network", 16, 50e9)]),
        ("16xh100", {"fast_domain": 16}, [("nvlink-4", 16, 450e9)]),
        ("16xh100", {"fast_domain": 4}, [("nvlink-4", 4, 450e9), ("pcie", 8, 64e9), ("network", 16, 50e9)]),
        ("16xh100", {"fast_domain": 1}, [("pcie", 8, 64e9), ("network", 16, 50e9)]),
        ("16xh100", {"fast_bandwidth": "200GB/s"}, [("nvlink-4", 8, 200e9), ("network", 16, 50e9)]),
        ("16xh100", {"slow_bandwidth": "25GB/s"}, [("nvlink-4", 8, 450e9), ("network", 16, 25e9)]),
        ("16xh100", {"nic_bandwidth": "200Gb/s"}, [("nvlink-4", 8, 450e9), ("network", 16, 25e9)]),
        ("16xh100", {"nics_per_node": 4}, [("nvlink-4", 8, 450e9), ("network", 16, 25e9)]),
        ("16xh100", {"rails": 4}, [("nvlink-4", 8, 450e9), ("network", 16, 25e9)]),
        (
            "16xh100",
            {"nics_per_node": 4, "rails": 2, "nic_bandwidth": "800Gb/s"},
            [("nvlink-4", 8, 450e9), ("network", 16, 50e9)],
        ),
        ("16xh100", {"oversubscription": 2}, [("nvlink-4", 8, 450e9), ("network", 16, 25e9)]),
        ("16xrtx-4090", {"slow_bandwidth": "1.25GB/s"}, [("pcie", 8, 32e9), ("network", 16, 1.25e9)]),
        ("8xh100", {"fast_bandwidth": None, "price": None}, [("nvlink-4", 8, 450e9)]),
    ],
)
def test_options_change_tiers(text: str, options: dict[str, object], tiers: list[tuple[str, int, float]]) -> None:
    """Each option changes what its name says; None is an option not given."""
    assert _tiers(Cluster.parse(text, options)) == tiers


def test_options_change_the_device() -> None:
    """Memory, bandwidth, peaks, price and latencies are what the user says, and say that they are the user's."""
    options = {
        "memory": "96GiB",
        "memory_bandwidth": "2.4TB/s",
        "peak_flops": "800T",
        "peak_flops.fp8": 1.5e15,
        "price": "2.5",
        "fast_latency": "2us",
        "slow_latency": 1e-5,
    }
    cluster = Cluster.parse("16xh100", options)
    device = cluster.device
    assert device.memory_bytes == device.usable_memory_bytes == 96 * 2**30
    assert device.memory_bytes_per_second == 2.4e12
    assert (device.peak_flops("bf16"), device.peak_flops("fp8")) == (800e12, 1.5e15)
    assert device.peak_flops("fp16") == 989e12
    assert cluster.usd_per_device_hour == 2.5
    assert [tier.latency_seconds for tier in cluster.tiers] == [2e-6, 1e-5]
    assert device.fact("memory_bytes").source == "given by the user"
    assert "price" not in " ".join(cluster.assumptions)


def test_units_of_links_do_not_mix() -> None:
    """400 Gb/s is 50 GB/s: the small b counts bits, and a bare number is bytes per second."""
    rates = {"400Gb/s": 50e9, "400Gbps": 50e9, "400Gbit/s": 50e9, "400GB/s": 400e9, "50GB/s": 50e9, "50e9": 50e9}
    for text, rate in rates.items():
        assert Cluster.parse("16xh100", {"slow_bandwidth": text}).tiers[-1].bytes_per_second == rate
    assert Cluster.parse("16xh100", {"slow_bandwidth": 50e9}).tiers[-1].bytes_per_second == 50e9


@pytest.mark.parametrize(
    ("text", "options", "field"),
    [
        ("", {}, "cluster"),
        ("8", {}, "cluster"),
        ("8x", {}, "cluster"),
        ("-8xh100", {}, "cluster"),
        ("8.5xh100", {}, "cluster"),
        ("8h100", {}, "cluster"),
        ("2x2x2xh100", {}, "cluster"),
        ("9" * 5000 + "xh100", {}, "cluster"),
        (None, {}, "text"),
        (8, {}, "text"),
        ("0xh100", {}, "num_devices"),
        ("4x0xh100", {}, "devices_per_node"),
        ("8xh1000", {}, "device"),
        ("8xnowhere.toml", {}, "device"),
        ("8xh100", {"num_devices": 0}, "num_devices"),
        ("8xh100", {"num_devices": -8}, "num_devices"),
        ("8xh100", {"num_devices": 8.5}, "num_devices"),
        ("8xh100", {"num_devices": True}, "num_devices"),
        ("8xh100", {"num_devices": "eight"}, "num_devices"),
        ("8xh100", {"num_devices": [8]}, "num_devices"),
        ("8xh100", {"num_devices": math.inf}, "num_devices"),
        ("8xh100", {"fast_bandwidth": math.nan}, "fast_bandwidth"),
        ("8xh100", {"fast_bandwidth": "450GX/s"}, "fast_bandwidth"),
        ("8xh100", {"fast_bandwidth": 0}, "fast_bandwidth"),
        ("8xh100", {"fast_bandwidth": 10**400}, "fast_bandwidth"),
        ("16xh100", {"fast_domain": 3}, "fast_domain"),
        ("16xh100", {"fast_domain": 12}, "fast_domain"),
        ("16xgb200", {"devices_per_node": 5}, "devices_per_node"),
        ("16xh100", {"oversubscription": 0.5}, "oversubscription"),
        ("16xh100", {"slow_bandwidth": "50GB/s", "nic_bandwidth": "400Gb/s"}, "slow_bandwidth"),
        ("16xh100", {"nics_per_node": 4, "rails": 3}, "rails"),
        ("16xh100", {"slow_latency": "-1us"}, "slow_latency"),
        ("16xh100", {"price": 0}, "price"),
        ("16xh100", {"memory": "80 Gigs"}, "memory"),
        ("16xh100", {"memory": 0.5}, "memory"),
        ("16xh100", {"peak_flops": "1P", "peak_flops.bf16": "1P"}, "peak_flops"),
        ("16xh100", {"peak_flops.fp7": "1P"}, "peak_flops.fp7"),
        ("16xh100", {"nic_bandwith": "400Gb/s"}, "nic_bandwith"),
        ("16xrtx-4090", {}, "slow_bandwidth"),
        ("16xrtx-4090", {"nics_per_node": 1}, "nic_bandwidth"),
        ("8xmi300a", {"fast_domain": 2}, "fast_domain"),
    ],
)
def test_bad_input_names_its_field(text: object, options: dict[str, object], field: str) -> None:
    """Each mistake is one problem of the field in which it was made, with a rule and a remedy."""
    with pytest.raises(InputError) as error:
        Cluster.parse(text, options)  # type: ignore[arg-type]
    assert _fields(error) == [field]
    assert error.value.problems[0].rule
    assert error.value.problems[0].remedy


def test_all_mistakes_are_reported_at_once() -> None:
    """A wrong device, a wrong count and two wrong options are four problems."""
    with pytest.raises(InputError) as error:
        Cluster.parse("0xh1000", {"price": "much", "speed": 3})
    assert sorted(_fields(error)) == ["device", "num_devices", "price", "speed"]


def test_misspelt_option_offers_the_right_one() -> None:
    """An unknown option is answered with those that are spelt like it."""
    with pytest.raises(InputError, match="use nic_bandwidth"):
        Cluster.parse("16xh100", {"nic_bandwith": "400Gb/s"})


def test_assumptions_are_listed() -> None:
    """What was not said but taken is listed: the board, the price, a network, a latency."""
    said = " ".join(Cluster.parse("16xh20", {"nic_bandwidth": "400Gb/s"}).assumptions)
    assert "nics_per_node = 8" in said
    assert "price = 6.88" in " ".join(Cluster.parse("8xh100-sxm-80gb").assumptions)
    assert "h100-sxm-80gb" in " ".join(Cluster.parse("8xh100").assumptions)
    assert "slow_bytes_per_second" in " ".join(Cluster.parse("16xh20").assumptions)
    assert "slow_bytes_per_second" not in " ".join(Cluster.parse("8xh20").assumptions)
    assert "fast_latency" in " ".join(Cluster.parse("8xmi300x").assumptions)
    assert "16 devices of a node" in " ".join(Cluster.parse("2x16xv100-sxm-32gb").assumptions)


def test_three_tiers_of_ones_own() -> None:
    """A domain of 72, a pod of 576 and a spine of 1152 nest, and a partial last domain is legal."""
    tiers = [_tier(72, 900e9), _tier(576, 100e9), _tier(1152, 50e9)]
    assert Cluster.parse("1152xgb200").with_tiers(tiers).tiers == tuple(tiers)
    assert Cluster.parse("1000xgb200").with_tiers([*tiers[:2], _tier(1000)]).num_nodes == 250


@pytest.mark.parametrize("sizes", [[], [8], [8, 12, 16], [16, 8, 16], [8, 8, 16], [3, 16], [32], [8, 32]])
def test_tiers_that_do_not_nest_are_refused(sizes: list[int]) -> None:
    """Tiers grow, divide the next, fit the node, and the last spans the cluster."""
    with pytest.raises(InputError) as error:
        Cluster.parse("16xh100").with_tiers(map(_tier, sizes))
    assert all(field.startswith("tiers") for field in _fields(error))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((0,), "size"),
        ((True,), "size"),
        ((2.5,), "size"),
        (("8",), "size"),
        ((8, 0.0), "bytes_per_second"),
        ((8, math.inf), "bytes_per_second"),
        ((8, "450GB/s"), "bytes_per_second"),
        ((8, 1e9, -1e-6), "latency_seconds"),
        ((8, 1e9, math.nan), "latency_seconds"),
        ((8, 1e9, 0.0, 1), "in_network"),
    ],
)
def test_bad_tier_names_tier_and_field(values: tuple[object, ...], field: str) -> None:
    """A tier refuses what is not positive, finite and a number; a latency of zero is an ideal network."""
    with pytest.raises(InputError) as error:
        _tier(*values)
    assert _fields(error) == [f"tiers.t{values[0]}.{field}"]
    assert _tier(8, 1e9, 0.0).latency_seconds == 0


def test_last_node_may_be_partial() -> None:
    """Twelve devices in nodes of eight are two nodes, the second half used."""
    cluster = Cluster.parse("12xh100-sxm-80gb")
    assert cluster.num_nodes == 2
    assert cluster.tiers[-1].size == 12


CLUSTER = """
name = "lab"
device = "h100-sxm-80gb"
num_devices = 64
fast_bandwidth = "450GB/s"
nics_per_node = 4
nic_bandwidth = "400Gb/s"
price = 2.1
[peak_flops]
bf16 = "900T"
"""


def test_cluster_of_a_file(tmp_path: Path) -> None:
    """A file gives the device and the same options as the command line."""
    path = tmp_path / "lab.toml"
    path.write_text(CLUSTER)
    cluster = Cluster.load(path)
    assert (cluster.name, cluster.num_devices, cluster.usd_per_device_hour) == ("lab", 64, 2.1)
    assert _tiers(cluster) == [("nvlink-4", 8, 450e9), ("network", 64, 25e9)]
    assert cluster.device.peak_flops("bf16") == 900e12


def test_file_may_hold_tiers_and_its_own_device(tmp_path: Path) -> None:
    """A device of one's own lies beside the cluster's file or inside it, and tiers may be stated."""
    device = find_device("gb200").device.with_values({"year": 2026}, "my datasheet", "2026")
    (tmp_path / "mine.toml").write_text(device_to_toml(device))
    tiers = "".join(
        f'[[tiers]]\nname = "t{size}"\nsize = {size}\nbandwidth = "{rate}GB/s"\nlatency = "3us"\n'
        for size, rate in ((72, 900), (576, 100), (1152, 50))
    )
    path = tmp_path / "pod.toml"
    path.write_text('device = "mine.toml"\n' + tiers)
    cluster = Cluster.load(path)
    assert cluster.device == device
    assert _tiers(cluster) == [("t72", 72, 900e9), ("t576", 576, 100e9), ("t1152", 1152, 50e9)]
    inside = device_to_toml(device).replace("[sources]", "[device.sources]").replace("[facts]", "[device.facts]")
    path.write_text("[device]\n" + inside)
    assert Cluster.load(path).device == device
    assert Cluster.parse(f"4x{tmp_path}/mine.toml").num_devices == 4


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"h100-sxm-80gb"', '"h100-sxm-80"', "device"),
        ('device = "h100-sxm-80gb"', "", "device"),
        ("num_devices = 64", "num_devices = true", "num_devices"),
        ("num_devices = 64", "num_device = 64", "num_device"),
        ('"450GB/s"', '"450 fast"', "fast_bandwidth"),
        ('bf16 = "900T"', 'bf61 = "900T"', "peak_flops.bf61"),
        ("price = 2.1", "price = nan", "price"),
        ("price = 2.1", "tiers = 3", "tiers"),
        ("price = 2.1", "tiers = [3]", "tiers[0]"),
        ("price = 2.1", 'tiers = [{size = 64, bandwidth = "1GB/s"}]', "tiers[0].latency"),
        ("price = 2.1", 'tiers = [{size = 64, bandwidth = "1GB/s", latency = 0, speed = 1}]', "tiers[0].speed"),
        ("price = 2.1", 'tiers = [{size = 8, bandwidth = "1GB/s", latency = 0}]', "tiers"),
        ("nics_per_node = 4", 'slow_bandwidth = "1GB/s"', "slow_bandwidth"),
        ('name = "lab"', 'name = "lab', ""),
    ],
)
def test_bad_cluster_file_names_file_and_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    """A mistake in a cluster's file is reported with the file and the field."""
    assert old in CLUSTER
    path = tmp_path / "lab.toml"
    path.write_text(CLUSTER.replace(old, new))
    with pytest.raises(InputError) as error:
        Cluster.load(path)
    (found,) = _fields(error)
    assert found == (f"lab.toml: {field}" if field else "cluster")


_NAMES = st.sampled_from([name for name in device_names() if find_device(name).device.knows("slow_bytes_per_second")])


@given(_NAMES, st.integers(1, 20000))
def test_tiers_nest_and_the_last_spans(name: str, num_devices: int) -> None:
    """For every device and size the tiers grow, the last spans the cluster, and the nodes hold all devices."""
    cluster = Cluster.parse(f"{num_devices}x{name}")
    sizes = [tier.size for tier in cluster.tiers]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == num_devices
    assert cluster.num_nodes * cluster.devices_per_node >= num_devices
    assert (cluster.num_nodes - 1) * cluster.devices_per_node < num_devices


@given(_NAMES, st.integers(1, 500), st.integers(1, 16))
def test_nodes_times_devices_is_the_count(name: str, nodes: int, node: int) -> None:
    """NxMxdevice is N times M devices, where the node fits the fast domain."""
    try:
        cluster = Cluster.parse(f"{nodes}x{node}x{name}")
    except InputError as error:
        assert {problem.field for problem in error.problems} <= {"devices_per_node", "fast_domain", "fast_bandwidth"}
        return
    assert cluster.num_devices == nodes * node
    assert cluster.devices_per_node == node


@given(st.integers(1, 16), st.floats(1e6, 1e12), st.floats(1, 16))
def test_network_rate_is_the_nics_shared_by_the_node(nics: int, rate: float, over: float) -> None:
    """A device gets the rate of the node's NICs over the devices of the node and the oversubscription."""
    options = {"nics_per_node": nics, "nic_bandwidth": rate, "oversubscription": over}
    cluster = Cluster.parse("64xh100-sxm-80gb", options)
    assert cluster.tiers[-1].bytes_per_second == pytest.approx(nics * rate / 8 / over)


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.lists(st.integers(), max_size=2)))
def test_no_value_crashes_an_option(value: object) -> None:
    """Whatever is given, the answer is a cluster or a list of problems."""
    for option in ("num_devices", "fast_domain", "nic_bandwidth", "price", "memory", "slow_latency", "peak_flops"):
        try:
            cluster = Cluster.parse("16xh100-sxm-80gb", {option: value})
        except InputError as error:
            assert error.problems
        else:
            assert math.isfinite(cluster.tiers[-1].bytes_per_second)


def test_the_file_of_a_device_alone_is_one_device(tmp_path: Path) -> None:
    """As the name of a device alone is one, its file is; what is wrong with it is said of the device."""
    (tmp_path / "t4.toml").write_text(device_to_toml(find_device("t4").device))
    lone, named = Cluster.load(tmp_path / "t4.toml"), Cluster.parse("t4")
    assert (lone.device, lone.num_devices, lone.tiers) == (named.device, 1, named.tiers)
    (tmp_path / "t5.toml").write_text((tmp_path / "t4.toml").read_text().replace("vendor", "maker"))
    with pytest.raises(InputError) as error:
        Cluster.load(tmp_path / "t5.toml")
    assert _fields(error) == ["t5.toml: maker", "t5.toml: vendor"]
