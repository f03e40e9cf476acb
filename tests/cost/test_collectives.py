"""Seconds of collectives: the forms by hand on ideal links, columns, and the tiers that bind."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest

from shardwise.cost import (
    Copies,
    Efficiencies,
    Network,
    collective_seconds,
    network_of,
    reduce_of,
    reduce_seconds,
    unlinked,
)
from shardwise.hardware import Cluster, find_device
from shardwise.ledger.op import Verb
from shardwise.ledger.traced import tracing

VERBS: tuple[Verb, ...] = get_args(Verb)
IDEAL = Efficiencies(ideal=True)


def net(devices: int = 64, device: str = "a100-sxm-80gb", imposed: Efficiencies = IDEAL, **options: Any) -> Any:
    """Return the links of a cluster: NVLink at 300 GB/s and a network at 25 GB/s, unless said."""
    return network_of(Cluster.parse(f"{devices}x{device}", options), imposed)


def test_a_switch_that_reduces_needs_no_measured_all_reduce() -> None:
    """A cluster whose first tier reduces in its switch has rates on devices without a measured all-reduce, too."""
    cluster = Cluster.parse("8xgaudi2")
    tiers = tuple(replace(tier, in_network=True) for tier in cluster.tiers)
    links = network_of(replace(cluster, tiers=tiers), Efficiencies()).links
    assert links[0].in_network and links[0].trees_bytes_per_second == 0.0


@pytest.mark.parametrize(
    ("verb", "group", "seconds"),
    [
        # 3e9 bytes over 8 ranks of one domain at 300 GB/s: rings move (n - 1) / n of it, all-reduce twice that.
        ("all_gather", (8, 8), 7 / 8 * 3e9 / 300e9),
        ("reduce_scatter", (8, 8), 7 / 8 * 3e9 / 300e9),
        ("all_reduce", (8, 8), 2 * 7 / 8 * 3e9 / 300e9),
        ("all_to_all", (8, 8), 7 / 8 * 3e9 / 300e9),
        ("broadcast", (8, 8), 3e9 / 300e9),
        ("reduce", (8, 8), 3e9 / 300e9),
        ("send", (8, 8), 3e9 / 300e9),
        # Across domains at 25 GB/s: eight rings share the bytes of a gather, one rank a domain carries all alone.
        ("all_gather", (8, 64), 63 / 64 * 3e9 / (8 * 25e9)),
        ("all_gather", (1, 8), 7 / 8 * 3e9 / 25e9),
        ("all_to_all", (8, 64), 56 / 64 * 3e9 / 25e9),
        ("send", (1, 2), 3e9 / 25e9),
    ],
)
def test_ideal_links_follow_the_ring_forms(verb: Verb, group: tuple[int, ...], seconds: float) -> None:
    """On links without latency every collective takes the bytes of its ring over its link (docs/formulas.md)."""
    assert collective_seconds(net(), verb, 3e9, group) == pytest.approx(seconds)


def test_switches_that_reduce_send_less() -> None:
    """NVLink SHARP sends 1 + 1/n of the tensor; two ranks and other verbs gain nothing."""
    switched = net(device="h100-sxm-80gb")
    assert collective_seconds(switched, "all_reduce", 9e9, (8, 8)) == pytest.approx((1 + 1 / 8) * 9e9 / 450e9)
    assert collective_seconds(switched, "all_reduce", 9e9, (2, 2)) == pytest.approx(9e9 / 450e9)
    assert collective_seconds(switched, "all_gather", 9e9, (8, 8)) == pytest.approx(7 / 8 * 9e9 / 450e9)


@pytest.mark.parametrize("verb", VERBS)
def test_columns_of_two_equal_two_numbers(verb: Verb) -> None:
    """Every collective accepts arrays of length two, groups of one among them."""
    links = net(imposed=Efficiencies())
    size, inner, outer = np.array([1e6, 1e9]), np.array([8.0, 1.0]), np.array([64.0, 1.0])
    found = collective_seconds(links, verb, size, (inner, outer))
    assert found.tolist() == pytest.approx(
        [collective_seconds(links, verb, 1e6, (8, 64)), collective_seconds(links, verb, 1e9, (1, 1))]
    )
    assert found[1] == 0


def test_a_network_that_is_the_only_tier_is_priced_as_one() -> None:
    """Nodes of one device have no fast link: the slow link's efficiency applies, not the fast one's."""
    cluster = Cluster.parse("2x1xa100-sxm-80gb")
    assert [t.name for t in cluster.tiers] == ["network"]
    slow = collective_seconds(network_of(cluster, Efficiencies(slow_link=0.5)), "send", 1e9, (2,))
    fast = collective_seconds(network_of(cluster, Efficiencies(fast_link=0.5)), "send", 1e9, (2,))
    assert slow > 1e9 / (0.5 * 25e9) > fast


@pytest.mark.parametrize(("option", "group"), [("fast_latency", (8, 8)), ("slow_latency", (1, 8))])
def test_a_latency_that_is_given_counts(option: str, group: tuple[int, ...]) -> None:
    """A longer latency of either tier lengthens a small message over it by a step for each hop."""
    short, long = (
        collective_seconds(net(imposed=Efficiencies(), **{option: text}), "all_gather", 8.0, group)
        for text in ("20us", "120us")
    )
    assert long - short == pytest.approx(7 * 100e-6)


def test_messages_of_middling_size_pay_for_the_protocol() -> None:
    """Below the size at half rate a link is slower than its bandwidth, and far above it is not."""
    links = net(imposed=Efficiencies())
    rate = links.links[0].bytes_per_second
    times = {s: collective_seconds(links, "send", s, (2, 2)) * rate / s for s in (1e6, 1e11)}
    assert times[1e6] > 2
    assert times[1e11] < 1.05


def test_generic_links_say_so() -> None:
    """Links of a device that was not measured are an assumption that is stated, of a family with products too."""
    for device in ("gaudi2", "tpu-v5p", "mi250"):
        assert net(device=device, imposed=Efficiencies()).assumptions
    assert not net(imposed=Efficiencies()).assumptions


@pytest.mark.parametrize(
    ("device", "ranks", "size", "seconds"),
    [
        ("mi300x", 4, 2**14, 7.26e-6),  # github.com/vllm-project/vllm pull 19744
        ("mi300x", 4, 2**22, 63.86e-6),
        ("mi355x", 8, 3 * 2**19, 12.9e-6),  # pull 39080
    ],
)
def test_the_all_reduce_of_an_engine_has_the_links_of_its_group(
    device: str, ranks: int, size: int, seconds: float
) -> None:
    """Four of eight devices of a mesh reduce over three of seven links: within a tenth of the published kernel."""
    cluster = Cluster.parse(f"8x{device}")
    own, link = reduce_of(cluster.device, "vllm"), network_of(cluster, Efficiencies()).links[0]
    rate = link.nominal_bytes_per_second / unlinked(link.wire("all_reduce"), ranks)
    assert own is not None
    assert reduce_seconds(own, rate, size, ranks) == pytest.approx(seconds, rel=0.1)


def test_a_mesh_gives_a_pair_its_own_links_only() -> None:
    """Four A100 of a node are joined pairwise: two of them gather at a third of the rate that four do."""
    board = network_of(Cluster.parse("4xa100-sxm-80gb", {"devices_per_node": 4}), Efficiencies())
    pair, four = (board.links[0].wire("all_gather"), collective_seconds(board, "all_gather", 8e9, (4.0,)))
    alone = collective_seconds(board, "all_gather", 8e9, (2.0,))
    assert pair.peers == 3
    assert alone / four == pytest.approx(3 * (1 / 2) / (3 / 4), rel=0.3)


@pytest.mark.parametrize(
    ("devices", "peers", "longer"),
    [("8xv100-sxm-32gb", 6, (6.0, 1.5, 1.0)), ("8xp100-sxm-16gb", 4, (4.0, 2.0, 1.0))],
)
def test_a_hybrid_cube_mesh_gives_a_group_the_links_between_its_members(
    devices: str, peers: int, longer: tuple[float, ...]
) -> None:
    """Neighbours on a board of eight V100 share one of six links, and four of them four."""
    wire = network_of(Cluster.parse(devices), Efficiencies()).links[0].wire("all_reduce")
    assert wire.peers == peers
    assert [unlinked(wire, at) for at in (2, 4, 8)] == pytest.approx(longer)


@pytest.mark.parametrize(
    ("devices", "changes", "peers"),
    [
        ("4xv100-sxm-32gb", {"devices_per_node": 4}, 3),
        ("16xv100-sxm-32gb-dgx2", {}, 0),
        ("1x4xgh200-96gb", {}, 3),
    ],
)
def test_other_nodes_are_joined_pairwise_or_by_a_switch(devices: str, changes: dict[str, object], peers: int) -> None:
    """Boards of four V100 have two links between each pair, of four GH200 six; a DGX-2 has NVSwitch."""
    assert network_of(Cluster.parse(devices, changes), Efficiencies()).links[0].wire("all_reduce").peers == peers


@pytest.mark.parametrize(("devices", "links"), [("8xv100-sxm-32gb", 6), ("8xmi300x", 7), ("8xh100", 1)])
def test_a_message_between_two_of_a_mesh_has_their_link_alone(devices: str, links: int) -> None:
    """A stage sends to one neighbour: of the links of a device it takes those to that one, however many stages are."""
    net = network_of(Cluster.parse(devices), Efficiencies())
    size = 1e9
    rate = float(net.links[0].wire("send").bytes_per_second) / links
    for stages in (2.0, 4.0, 8.0):
        assert size / collective_seconds(net, "send", size, (stages,)) == pytest.approx(rate, rel=0.25)


def test_two_dies_of_a_package_have_more_than_a_mesh_of_eight() -> None:
    """Dies of one MI250X reach each other at 200 GB/s, of two at 50 to 100 (Frontier's user guide); a mesh had 25."""
    net, size = network_of(Cluster.parse("8xmi250x-gcd"), Efficiencies()), 8e9
    pair, four, eight = (
        size * (n - 1) / n / collective_seconds(net, "all_gather", size, (n,)) for n in (2.0, 4.0, 8.0)
    )
    assert pair == pytest.approx(eight, rel=0.05)
    assert four / eight == pytest.approx(0.57, rel=0.05)
    assert 4e10 < size / collective_seconds(net, "send", size, (8.0,)) < 5e10


def test_a_gaudi_has_three_ports_to_each_other_of_its_node() -> None:
    """Of the 21 ports inside a node of eight Gaudi 2 a pair shares three."""
    wire = network_of(Cluster.parse("8xgaudi2"), Efficiencies()).links[0].wire("all_reduce")
    assert [unlinked(wire, at) for at in (2, 4, 8)] == pytest.approx([7, 7 / 3, 1])


@pytest.mark.parametrize(("devices", "microseconds"), [("4xtpu-v5p", 782), ("8xtpu-v6e", 776)])
def test_a_message_to_a_neighbour_in_a_torus_has_one_link(devices: str, microseconds: float) -> None:
    """64 MiB by ppermute on a v5p-8 and a v6e-8 (github.com/marin-community/marin issue 6736): within a quarter."""
    seconds = collective_seconds(network_of(Cluster.parse(devices), Efficiencies()), "send", 64 * 2.0**20, (2.0,))
    assert 1e6 * seconds == pytest.approx(microseconds, rel=0.25)


@pytest.mark.parametrize(
    ("devices", "ranks", "longer"),
    [
        ("512xtpu-v5p", 8, 3.0),
        ("512xtpu-v5p", 64, 1.5),
        ("512xtpu-v5p", 512, 1.0),
        ("256xtpu-v5e", 16, 2.0),
        ("256xtpu-v5e", 256, 1.0),
        ("8xtpu-v6e", 8, 2.0),
        ("8xtpu-v6e", 4, 4.0),
        ("64xtpu-v5p", 2, 6.0),
        ("64xtpu-v5p", 4, 3.0),
        ("32xtpu-v5p", 2, 6.0),
        ("32xtpu-v5p", 4, 6.0),
        ("256xtpu-v5e", 4, 4.0),
        ("8xh100", 4, 0.0),
    ],
)
def test_a_group_in_a_torus_has_the_links_of_its_axes(devices: str, ranks: int, longer: float) -> None:
    """Tensor parallelism lies along one axis of three or two; pairs and axes of less than a cube or pod are lines."""
    torus = network_of(Cluster.parse(devices), Efficiencies()).links[0].wire("all_gather").torus
    assert (torus.slower("all_gather", ranks) if torus else 0.0) == longer


def test_an_all_to_all_along_an_axis_takes_a_quarter_of_gathering() -> None:
    """The law of a ring of links both ways (jax-ml.github.io/scaling-book, sharding), for long messages."""
    net, size = network_of(Cluster.parse("256xtpu-v5e"), Efficiencies()), 1e12
    gathered, exchanged = (
        collective_seconds(net, v, s, (16.0,)) for v, s in (("all_gather", size), ("all_to_all", size / 16))
    )
    assert exchanged / gathered == pytest.approx(1 / 4, rel=0.05)


def test_a_rate_that_is_imposed_is_that_of_a_torus_too() -> None:
    """Who states what links reach is taken at the word."""
    net = network_of(Cluster.parse("256xtpu-v5e"), Efficiencies(fast_link=0.5))
    assert net.links[0].wire("all_gather").torus is None


def test_a_network_that_was_measured_has_its_own_rate() -> None:
    """Slingshot 11 takes the share of its rate that was measured on it, other networks that of InfiniBand."""
    cluster = Cluster.parse("4x4xa100-sxm-40gb", {"nic_bandwidth": "200Gb/s", "nics_per_node": 4})
    named = cluster.with_tiers((cluster.tiers[0], replace(cluster.tiers[1], name="slingshot-11")))
    plain, own = (network_of(c, Efficiencies()).links[1].bytes_per_second for c in (cluster, named))
    assert float(own) / 25e9 == pytest.approx(0.6637, abs=0.03)
    assert float(plain) / 25e9 == pytest.approx(0.85)
    lone, two = collective_seconds(network_of(named, Efficiencies()), "all_gather", 8e9, (np.array([1.0, 2.0]), 8.0))
    assert lone / two == pytest.approx(2 / 0.856, rel=0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_an_engine_reads_all_peers_for_small_messages_and_rings_for_large(engine: str) -> None:
    """From 4 KiB to 1 GiB an engine's all-reduce goes from its start to 0.6 to 1 of the link's rate, never falling."""
    device = find_device("h100-sxm-80gb").device
    own = reduce_of(device, engine)
    assert own is not None
    sizes = [4096.0 * 4**i for i in range(10)]
    found = [float(reduce_seconds(own, device.fast_bytes_per_second, size, 8)) for size in sizes]
    assert found == sorted(found)
    assert 2e-6 < found[0] < 7e-6
    assert 0.6 < (1 + 1 / 8) * sizes[-1] / found[-1] / device.fast_bytes_per_second < 1


def test_an_engine_was_measured_on_one_kind_of_link() -> None:
    """A100 on PCIe keeps NCCL's all-reduce: that of engines was measured over NVLink."""
    assert reduce_of(find_device("a100-pcie-80gb").device, "vllm") is None
    assert reduce_of(find_device("l40s").device, "vllm") is not None


def test_latency_of_an_all_reduce_grows_with_the_logarithm_of_nodes() -> None:
    """A small all-reduce between nodes takes a tree: each doubling of nodes adds the same seconds."""
    links = net(4096, imposed=Efficiencies())
    seconds = [collective_seconds(links, "all_reduce", 32768.0, (1, nodes)) for nodes in (32, 64, 128, 256, 512)]
    added = [after - before for before, after in pairwise(seconds)]
    assert added == pytest.approx([added[0]] * 4, rel=0.01)
    assert seconds[-1] < 2 * seconds[0]


@pytest.mark.parametrize(("nodes", "seconds"), [(16, 149e-6), (64, 220e-6), (128, 250e-6)])
def test_small_all_reduces_between_nodes_that_were_not_fitted(nodes: int, seconds: float) -> None:
    """32 KiB over nodes of four A100 on Slingshot, nccl-tests: numbers of nodes that no constant rests on."""
    cluster = Cluster.parse(f"{nodes}x4xa100-sxm-40gb", {"nic_bandwidth": "200Gb/s", "nics_per_node": 4})
    cluster = cluster.with_tiers((cluster.tiers[0], replace(cluster.tiers[1], name="slingshot-11")))
    links = network_of(cluster, Efficiencies())
    assert collective_seconds(links, "all_reduce", 32768.0, (4, 4 * nodes)) == pytest.approx(seconds, rel=0.1)


def slingshot(nodes: int) -> Network[float]:
    """Return the links of nodes of four A100 on Slingshot."""
    cluster = Cluster.parse(f"{nodes}x4xa100-sxm-40gb", {"nic_bandwidth": "200Gb/s", "nics_per_node": 4})
    return network_of(
        cluster.with_tiers((cluster.tiers[0], replace(cluster.tiers[1], name="slingshot-11"))), Efficiencies()
    )


@pytest.mark.parametrize(
    ("verb", "nodes", "size", "seconds"),
    [
        ("reduce_scatter", 16, 4 << 20, 728.9e-6),
        ("reduce_scatter", 64, 8 << 20, 1806.8e-6),
        ("reduce_scatter", 64, 16 << 20, 2959.1e-6),
        ("all_gather", 8, 4 << 20, 508.1e-6),
    ],
)
def test_rings_of_short_parts_hold_up_every_hop(verb: Verb, nodes: int, size: int, seconds: float) -> None:
    """Parts of 64 KiB and less take the protocol with short steps, whose bytes cost inside nodes too (nccl-tests)."""
    assert collective_seconds(slingshot(nodes), verb, float(size), (4, 4 * nodes)) == pytest.approx(seconds, rel=0.14)


def test_a_ring_between_nodes_hides_the_lesser_of_bytes_and_steps() -> None:
    """A ring at full rate takes the root of both squares, what passes along a chain once takes their sum."""
    far = slingshot(16).links[1]
    wire = replace(far.wire("all_gather"), low_bytes_per_second=1.0, inner_step_share=0.0, start_seconds=0.0)
    bare = replace(wire, step_seconds=0.0, lone_share=1.0)
    net = Network(links=(replace(far, collectives={"all_gather": bare}),))
    moved = 15 / 16 * 64e6 / bare.bytes_per_second
    stepped = 15 * bare.long_step_seconds
    assert collective_seconds(net, "all_gather", 64e6, (16,)) == pytest.approx(math.hypot(moved, stepped))
    assert collective_seconds(net, "broadcast", 64e6, (16,)) == pytest.approx(moved * 16 / 15 + stepped)


def test_a_tree_never_makes_an_all_reduce_slower() -> None:
    """Of ring and tree the faster counts, and large messages between few nodes stay on the ring."""
    links = net(4096, imposed=Efficiencies())
    far = links.links[-1]
    ring = replace(far, collectives={verb: replace(wire, tree=None) for verb, wire in far.collectives.items()})
    rings = replace(links, links=(*links.links[:-1], ring))
    for size in (1e3, 1e5, 1e7, 1e9):
        for nodes in (2, 8, 64, 512):
            group = (8, 8 * nodes)
            tree, plain = (collective_seconds(n, "all_reduce", size, group) for n in (links, rings))
            assert tree <= plain
            assert size < 1e9 or nodes > 2 or tree == plain


def test_a_tree_climbs_the_nodes_and_passes_each_as_a_chain() -> None:
    """64 nodes of eight take the levels of 64, and two passes over seven hops within a node beside them."""
    links = net(4096, "h100-sxm-80gb", Efficiencies())
    one, eight, more = (collective_seconds(links, "all_reduce", 8.0, group) for group in ((1, 64), (8, 512), (8, 1024)))
    near, far = (link.wire("all_reduce") for link in links.links)
    assert eight - one == pytest.approx(14 * near.step_seconds + near.start_seconds, rel=0.01)
    assert more - eight == pytest.approx(2 * far.tree.step_seconds, rel=0.01)


def test_a_tree_over_a_tree_pays_no_chain_of_nodes() -> None:
    """A faster or equal tier between node and network lengthens no all-reduce: its own tree is beside the one above."""
    links = net(4096, "h100-sxm-80gb", Efficiencies())
    split = replace(links, links=(*links.links, links.links[-1]))
    for size in (8.0, 2.0**20, 2.0**26):
        two = collective_seconds(links, "all_reduce", size, (8, 4096))
        assert collective_seconds(split, "all_reduce", size, (8, 64, 4096)) <= two


@pytest.mark.parametrize(
    ("ranks", "narrow", "wide", "back"),
    [
        (8, 713.98e9, 764.03e9, 737.13e9),
        (16, 650.48e9, 706.95e9, 666.26e9),
        (24, 577.96e9, 665.97e9, 639.80e9),
        (32, 538.86e9, 642.23e9, 605.15e9),
        (36, 489.27e9, 632.31e9, 596.99e9),
    ],
)
def test_kernels_that_send_a_token_once_take_what_was_measured(
    ranks: int, narrow: float, wide: float, back: float
) -> None:
    """DeepEP's table of HybridEP, GB200 with 32 SMs: 4096 tokens of 7168 values, 8 choices, 8 experts a rank."""
    link = network_of(Cluster.parse("72xgb200"), Efficiencies()).links[0]
    kernel = replace(link.wire("all_to_all"), start_seconds=0.0, step_seconds=0.0)
    links = Network(links=(replace(link, collectives={"all_to_all": kernel}),))
    sent = ranks * (1 - (1 - 1 / ranks) ** 8) * 4096
    # 8 bits have a scale for every 128 values; the weights of all experts go with a copy.
    for value_bytes, measured in ((1, narrow), (2, wide), (2, back)):
        scales = 4 / 128 * (value_bytes == 1)
        copy = 7168 * (value_bytes + scales)
        one = Copies(fanout=8, copy_bytes=copy, beside_bytes=4.0 * 8 * ranks)
        seconds = collective_seconds(links, "all_to_all", 4096 * 8 * copy, (ranks,), one)
        assert sent * copy / seconds == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("cluster", "group", "size", "measured", "within"),
    [
        # CoreWeave's GB200, 72 a domain, 2 and 20 of them, of which the rate is, and Oracle's GB300, 64 a domain.
        ("144xgb200", (72, 144), 2.0**34, 0.042067, 0.02),
        ("1440xgb200", (72, 1440), 2.0**34, 0.084625, 0.08),
        ("128xgb300", (64, 128), 2.0**34, 0.04617, 0.1),
        ("128xgb300", (64, 128), 2.0**33, 0.02405, 0.13),
    ],
)
def test_trees_over_several_domains_take_what_was_measured(
    cluster: str, group: tuple[int, ...], size: float, measured: float, within: float
) -> None:
    """An all-reduce over domains of several hosts passes each as a node of a tree, and not all at the switch's rate."""
    links = network_of(Cluster.parse(cluster), Efficiencies())
    assert collective_seconds(links, "all_reduce", size, group) == pytest.approx(measured, rel=within)


def test_only_domains_of_several_hosts_are_nodes_of_trees() -> None:
    """Nodes of eight B200 have a ring over their adapters; a bound of the whole rate has no trees."""
    assert net(64, "b200-sxm-180gb", Efficiencies()).links[0].trees_bytes_per_second == 0
    assert net(144, "gb200", IDEAL).links[0].trees_bytes_per_second == 0
    assert net(144, "gb200", Efficiencies()).links[0].trees_bytes_per_second == pytest.approx(0.46 * 900e9)
    with tracing():
        # No trees were measured on Hopper; while tracing, a zero would be a rate to divide by.
        hosts = network_of(Cluster.parse("16xh100", {"fast_domain": 16}), Efficiencies())
        assert hosts.links[0].trees_bytes_per_second == 0


@pytest.mark.parametrize(
    ("device", "ranks", "narrow", "wide", "back"),
    [
        ("b200-sxm-180gb", 8, 349e9, 494e9, 420e9),
        ("gb200", 8, 351e9, 512.7e9, 426e9),
        ("gb200", 16, 339e9, 442e9, 378e9),
    ],
)
def test_kernels_of_the_first_deepep_take_what_was_measured(
    device: str, ranks: int, narrow: float, wide: float, back: float
) -> None:
    """DeepEP's table of its first kernels with 24 SMs, of which that of 16 ranks was not fitted."""
    link = network_of(Cluster.parse(f"{ranks}x{device}"), Efficiencies()).links[0]
    kernel = replace(link.wire("all_to_all"), start_seconds=0.0, step_seconds=0.0)
    links = Network(links=(replace(link, collectives={"all_to_all": kernel}),))
    sent = ranks * (1 - (1 - 1 / ranks) ** 8) * 4096
    for value_bytes, measured in ((1, narrow), (2, wide), (2, back)):
        copy = 7168 * (value_bytes + 4 / 128 * (value_bytes == 1))
        one = Copies(fanout=8, copy_bytes=copy, beside_bytes=4.0 * 8, queued=True)
        seconds = collective_seconds(links, "all_to_all", 4096 * 8 * copy, (ranks,), one)
        assert sent * copy / seconds == pytest.approx(measured, rel=0.17)


@pytest.mark.parametrize(
    ("device", "ranks", "value_bytes", "choices", "microseconds"),
    [
        ("mi300x", 8, 2, 6, 838.69 - 129.57),
        ("mi300x", 8, 2, 16, 1328.92 - 192.79),
        ("mi300x", 8, 2, 8, 924.08 - 133.8),
        ("mi355x", 8, 2, 6, 725.51 - 117.38),
        ("mi355x", 8, 2, 16, 1150.08 - 174.6),
        ("mi355x", 8, 2, 8, 739.94 - 107.88),
        ("mi355x", 8, 1, 8, 463.88 - 88.61),
        # Four of a mesh have three links each, and not seven.
        ("mi300x", 4, 2, 8, 1353.17 * 7 / 8),
    ],
)
def test_kernels_of_a_mesh_send_a_token_once_too(
    device: str, ranks: int, value_bytes: int, choices: int, microseconds: float
) -> None:
    """MORI-EP's tables: 3,584 tokens of 7,168 more, dispatch but for the third, sixth and last, which are combine."""
    link = network_of(Cluster.parse(f"8x{device}"), Efficiencies()).links[0]
    kernel = replace(link.wire("all_to_all"), start_seconds=0.0, step_seconds=0.0)
    links = Network(links=(replace(link, collectives={"all_to_all": kernel}),))
    copy = 7168.0 * value_bytes
    one = Copies(fanout=choices, copy_bytes=copy, beside_bytes=0.0)
    seconds = collective_seconds(links, "all_to_all", 3584 * choices * copy, (ranks,), one)
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.12)


def test_only_devices_whose_kernels_were_measured_send_copies_by_them() -> None:
    """More experts in a domain lengthen an exchange of Blackwell, whose kernels carry their weights, not of Hopper."""
    few, many = (Copies(fanout=8, copy_bytes=2048.0, beside_bytes=4.0 * e) for e in (64, 512))
    for device, longer in (("gb200", True), ("h100-sxm-80gb", False)):
        links = network_of(Cluster.parse(f"8x{device}"), Efficiencies())
        one, other = (collective_seconds(links, "all_to_all", 1e8, (8,) * len(links.links), c) for c in (few, many))
        assert (other > one) is longer


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("imposed", [IDEAL, Efficiencies(fast_link=1.0)])
def test_an_imposed_rate_sends_a_token_as_often_as_the_kernel_does(ranks: int, imposed: Efficiencies) -> None:
    """A bound of the link's whole rate is below the fitted kernel: it does not send each of a token's eight copies."""
    one = Copies(fanout=8, copy_bytes=14336.0, beside_bytes=256.0)

    def seconds(rates: Efficiencies) -> float:
        network = net(8, "b200-sxm-180gb", rates)
        return float(collective_seconds(network, "all_to_all", 4096 * 8 * 14336.0, (ranks,), one))

    assert 0.8 * seconds(Efficiencies()) < seconds(imposed) < seconds(Efficiencies())
