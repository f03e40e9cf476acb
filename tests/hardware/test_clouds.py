"""Cloud instances, TPU slices and dated prices by the names that people use."""

from __future__ import annotations

import pytest

from shardwise.errors import InputError
from shardwise.hardware import Cluster, find_device, offers


@pytest.mark.parametrize(
    ("text", "devices", "node", "device"),
    [
        ("p5.48xlarge", 8, 8, "h100-sxm-80gb"),
        ("4xp5.48xlarge", 32, 8, "h100-sxm-80gb"),
        ("2 x ND_H100_v5", 16, 8, "h100-sxm-80gb"),
        ("Standard_ND96isr_MI300X_v5", 8, 8, "mi300x"),
        ("32xa3-megagpu-8g", 256, 8, "h100-sxm-80gb"),
        ("18xp6e-gb200.36xlarge", 72, 4, "gb200"),
        ("BM.GPU.H200.8", 8, 8, "h200-sxm-141gb"),
        ("gpu_2x_h100_sxm5", 2, 2, "h100-sxm-80gb"),
        ("2x1H100.80S.32V", 2, 1, "h100-sxm-80gb"),
        ("1x_A100-80GB_SECURE", 1, 1, "a100-pcie-80gb"),
        ("g5.xlarge", 1, 1, "a10g-24gb"),
        ("v5e-256", 256, 4, "tpu-v5e"),
        ("v5litepod-16", 16, 4, "tpu-v5e"),
        ("v5p-256", 128, 4, "tpu-v5p"),
        ("tpu7x-128", 64, 4, "tpu-v7"),
        ("2xtpu7x-standard-4t", 8, 4, "tpu-v7"),
    ],
)
def test_an_instance_is_a_cluster(text: str, devices: int, node: int, device: str) -> None:
    """An instance, a number of them, or a TPU slice stands for so many devices in nodes of its own size."""
    cluster = Cluster.parse(text)
    assert (cluster.num_devices, cluster.device.name) == (devices, device)
    assert device.startswith("tpu") or cluster.devices_per_node == min(node, devices)


def test_every_offer_is_of_a_known_device_and_can_be_asked_for() -> None:
    """Each row names a device of the catalogue, and each instance is a cluster by its name."""
    for offer in offers():
        assert find_device(offer.device).device.name == offer.device
        if offer.instance:
            assert Cluster.parse(offer.instance).num_devices == offer.devices
        for commitment, usd in offer.usd.items():
            assert 0.1 < usd / offer.devices < 30, (offer, commitment)
            assert offer.where


def test_what_is_rented_has_a_price() -> None:
    """Two devices of clouds have no price that a source states: answers about them give no dollars."""
    unpriced = {offer.device for offer in offers()} - {offer.device for offer in offers() if offer.usd}
    unpriced = {name for name in unpriced if find_device(name).device.usd_per_device_hour is None}
    assert unpriced == {"tpu-v7", "trainium2"}
    assert {"rtx-3090", "l40", "t4", "a40"} <= {offer.device for offer in offers() if offer.usd}


def test_an_instance_brings_its_price_and_network_unless_they_are_given() -> None:
    """The instance's price is listed with place and date; a price or network that is given wins, without a note."""
    found = Cluster.parse("2xp5.48xlarge")
    assert found.usd_per_device_hour == pytest.approx(6.88)
    assert found.tiers[-1].bytes_per_second == pytest.approx(50e9)
    assert any("us-east-1" in note for note in found.assumptions)
    own = Cluster.parse("2xp5.48xlarge", {"price": 2.5, "slow_bandwidth": "25GB/s"})
    assert (own.usd_per_device_hour, own.tiers[-1].bytes_per_second) == (2.5, 25e9)
    assert not any("price" in note or "slow_bandwidth" in note for note in own.assumptions)


def test_a_price_is_named_by_who_asks_it() -> None:
    """--price takes a provider, a commitment or both, and says whose price it is."""
    nebius = Cluster.parse("8xh100-sxm-80gb", {"price": "nebius"})
    spot = Cluster.parse("8xh100-sxm-80gb", {"price": "spot"})
    assert nebius.usd_per_device_hour == pytest.approx(2.95)
    assert spot.usd_per_device_hour is not None
    assert spot.usd_per_device_hour < 2.95
    assert any(note.startswith("price = 2.95 USD per device and hour: nebius") for note in nebius.assumptions)


@pytest.mark.parametrize(
    ("text", "price", "said"),
    [
        ("2x4xp5.48xlarge", None, "write 2xp5.48xlarge"),
        ("v5p-3", None, "multiple of 2"),
        ("8xh100-sxm-80gb", "nobody", "nebius:spot"),
        ("8xh100-sxm-80gb", "nebius:weekly", "on-demand"),
        ("8xh100-sxm-80gb", "aws:1yr", "use on-demand, reserved or spot"),
        ("8xtpu-v4", "nebius", "give dollars"),
        ("p5", None, "use p5.4xlarge, p5.48xlarge or"),
        ("m2-pro", None, "use apple-m1-7core, apple-m1-max-32core, apple-m1-ultra-64core, apple-m2-max-38core"),
        ("8xp5.48xlarg", None, "p5.48xlarge"),
    ],
)
def test_what_cannot_be_rented_is_said(text: str, price: str | None, said: str) -> None:
    """A wrong instance, slice or price names what would do."""
    with pytest.raises(InputError) as error:
        Cluster.parse(text, {"price": price} if price else {})
    assert said in str(error.value)


# What people type -> the device, how many, and how many of them a node has.
TYPED = {
    "p5en": ("h200-sxm-141gb", 8, 8), "p4de": ("a100-sxm-80gb", 8, 8), "2xp4d": ("a100-sxm-40gb", 16, 8),
    "a4": ("b200-sxm-180gb", 8, 8), "a3 mega": ("h100-sxm-80gb", 8, 8), "g2-standard-96": ("l4", 8, 8),
    "a2-highgpu-1g": ("a100-sxm-40gb", 1, 1), "g6e.12xlarge": ("l40s", 4, 4),
    "ND96isr_H100_v5": ("h100-sxm-80gb", 8, 8), "NC80adis_H100_v5": ("h100-nvl-94gb", 2, 2),
    "p5.48xlarge (Capacity Block)": ("h100-sxm-80gb", 8, 8), "dgx h100": ("h100-sxm-80gb", 8, 8),
    "4x DGX B200": ("b200-sxm-180gb", 32, 8), "v6e": ("tpu-v6e", 1, 1), "TPU v5e-256": ("tpu-v5e", 256, 8),
    "4090": ("rtx-4090", 1, 1), "2x7900xtx": ("rx-7900-xtx", 2, 2), "GeForce RTX 4090": ("rtx-4090", 1, 1),
    "m3max": ("apple-m3-max-40core", 1, 1), "h100nvl": ("h100-nvl-94gb", 1, 1), "H100:8": ("h100-sxm-80gb", 8, 8),
    "8*h100": ("h100-sxm-80gb", 8, 8), "h100x8": ("h100-sxm-80gb", 8, 8), "A100-80G": ("a100-sxm-80gb", 1, 1),
    "AMD Instinct MI300X": ("mi300x", 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("text", TYPED)
def test_names_that_people_type_are_understood(text: str) -> None:
    """Families with one instance, makers' machines, cards by their numbers, and counts before or behind a name."""
    found = Cluster.parse(text)
    assert (found.device.name, found.num_devices, found.devices_per_node) == TYPED[text]


def test_a_price_says_for_how_long_it_is_reserved_and_only_then() -> None:
    """The note of a reserved price has its term, and no other note has."""
    for offer in offers():
        for commitment in offer.usd:
            before, _, _ = offer.price_note(commitment).partition(f", {offer.where}")
            assert before.endswith(f", reserved ({offer.term})" if commitment == "reserved" else f", {commitment}")
