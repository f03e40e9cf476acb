"""What clouds rent: instances and TPU slices by the provider's names, and dated prices of devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cache
from typing import Any, Literal

from shardwise.errors import nearest
from shardwise.files import own_table
from shardwise.hardware._quantity import fail
from shardwise.records import dataclass
from shardwise.units import show_count

Commitment = Literal["on-demand", "reserved", "spot"]
COMMITMENTS: tuple[Commitment, ...] = ("on-demand", "reserved", "spot")
_SLICE = re.compile(r"(?:tpu-)?([a-z0-9]+)-(\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One row of clouds.toml: an instance of a provider or a device by itself, and what an hour of it costs."""

    provider: str
    instance: str
    device: str
    devices: int
    fast_domain: int = 0
    """Devices in one fast domain (0: as many as is usual for the device)."""
    nic_bytes_per_second: float = 0.0
    """Rate of one device into the network in one direction (0: not stated)."""
    network: str = ""
    usd: Mapping[Commitment, float] = field(default_factory=dict)
    """Dollars an hour for the whole instance."""
    term: str = ""
    where: str = ""
    """Region, date and source of the price."""

    def device_usd(self, commitment: Commitment) -> float:
        """Return dollars for one device and hour."""
        return self.usd[commitment] / self.devices

    def price_note(self, commitment: Commitment) -> str:
        """Return the sentence that an answer lists for a price taken from here."""
        term = f" ({self.term})" if commitment == "reserved" else ""
        return (
            f"price = {self.device_usd(commitment):g} USD per device and hour: {self.provider} "
            f"{self.instance or self.device}, {commitment}{term}, {self.where}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """What a name of a cloud stands for: a device, how many of them, and the options of a cluster that follow."""

    device: str
    devices: int
    options: Mapping[str, float]
    assumptions: tuple[str, ...]


def _squeezed(name: str) -> str:
    """Return a name in lower case with one sign between its words, without what stands in parentheses behind it."""
    return re.sub(r"[\s_]+", "-", re.sub(r"\s*\([^()]*\)$", "", name.strip()).lower())


@cache
def _table() -> dict[str, Any]:
    return own_table(__file__, "clouds.toml")


def _offer(row: Mapping[str, Any]) -> Offer:
    usd = {one: row[f"{one.replace('-', '_')}_usd"] for one in COMMITMENTS if f"{one.replace('-', '_')}_usd" in row}
    return Offer(
        provider=row["provider"],
        instance=row.get("instance", ""),
        device=row["device"],
        devices=row["devices"],
        fast_domain=row.get("fast_domain", 0),
        nic_bytes_per_second=row.get("nic_bytes_per_second", 0.0),
        network=", ".join(row[key] for key in ("fabric", "network_source") if key in row),
        usd=usd,
        term=row.get("term", ""),
        where=", ".join(row[key] for key in ("region", "date", "source") if row.get(key)),
    )


@cache
def offers() -> tuple[Offer, ...]:
    """Return every instance and price that is known, in the order of clouds.toml.

    >>> {offer.provider for offer in offers()} >= {"aws", "azure", "gcp", "oci", "nebius"}
    True
    """
    return (*(_offer(row) for row in _table()["offer"]), *_unpriced())


def _unpriced() -> Iterator[Offer]:
    """Yield instances whose price no source here states, by the families of clouds.toml."""
    for row in _table()["family"]:
        for instance, devices in row["instances"].items():
            yield _offer({**row, "instance": instance, "devices": devices})


@cache
def instance_names() -> tuple[str, ...]:
    """Return the names of instances that can be asked for, in lower case, sorted: those that begin with a letter.

    >>> "p5.48xlarge" in instance_names()
    True
    """
    return tuple(sorted({*(_squeezed(o.instance) for o in offers() if o.instance[:1].isalpha()), *_table()["same"]}))


@cache
def _by_instance() -> dict[str, list[Offer]]:
    """Return the offers of each instance that has a name."""
    by_instance: dict[str, list[Offer]] = {}
    for offer in offers():
        if offer.instance:
            by_instance.setdefault(_squeezed(offer.instance), []).append(offer)
    return by_instance


def find_rented(name: str) -> Rented | None:
    """Return what an instance or a TPU slice consists of, None where no cloud has such a name.

    >>> find_rented("p5.48xlarge").device, find_rented("ND_H100_v5").devices, find_rented("tpu-v5p-256").devices
    ('h100-sxm-80gb', 8, 128)
    """
    wanted = _squeezed(name)
    wanted = _table()["same"].get(wanted, wanted)
    rented = _by_instance().get(wanted)
    return _instance(rented) if rented else _slice(wanted)


def of_family(name: str) -> Rented | None:
    """Return the one instance that a family of a provider has, by the family's name; None where there are more.

    >>> of_family("p5en").options["devices_per_node"], of_family("p5"), of_family("ND96isr_H100_v5").devices
    (8.0, None, 8)
    """
    wanted = _squeezed(name)
    begun = {
        one for one in instance_names() if one == f"standard-{wanted}" or one.startswith((f"{wanted}.", f"{wanted}-"))
    }
    begun -= _table()["same"].keys()
    return find_rented(begun.pop()) if len(begun) == 1 else None


def _slice(name: str) -> Rented | None:
    match = _SLICE.fullmatch(name)
    row = _table()["slice"].get(match[1]) if match else None
    if match is None or row is None:
        return None
    cores, number = int(row["cores"]), int(match[2])
    if number % cores or not number:
        fail("cluster", name, f"counts TensorCores, {cores} to a chip", f"use a multiple of {cores}")
    note = f"{name}: {number // cores} chips of {row['device']}, named by {'chips' if cores == 1 else 'TensorCores'}"
    return Rented(device=row["device"], devices=number // cores, options={}, assumptions=(note,))


def _instance(offers: list[Offer]) -> Rented:
    """Return an instance by all its rows: the first says what it is, any may have the price."""
    first, options, notes = offers[0], {"devices_per_node": float(offers[0].devices)}, []
    notes.append(f"{first.instance} ({first.provider}): {first.devices} x {first.device}")
    if first.fast_domain and first.fast_domain <= first.devices:
        options["fast_domain"] = float(first.fast_domain)
    if first.nic_bytes_per_second:
        options["slow_bandwidth"] = first.nic_bytes_per_second
        notes.append(f"slow_bandwidth = {show_count(first.nic_bytes_per_second, 'B/s')}: {first.network}")
    if first.instance in _table()["host_memory"]:
        options["host_memory"] = _table()["host_memory"][first.instance] * 2.0**30
    priced = next(((o, c) for c in COMMITMENTS for o in offers if c in o.usd), None)
    if priced:
        options["price"] = priced[0].device_usd(priced[1])
        notes.append(priced[0].price_note(priced[1]))
    else:
        notes.append(f"{first.provider} states no price for {first.instance} that is known here: give --price")
    return Rented(device=first.device, devices=first.devices, options=options, assumptions=tuple(notes))


def cheapest(device: str, commitment: Commitment, provider: str = "") -> Offer | None:
    """Return the offer of a device that costs least an hour, of one provider or of all; None where none is known.

    >>> cheapest("mi300x", "on-demand").provider
    'crusoe'
    """
    fitting = [o for o in offers() if o.device == device and commitment in o.usd and provider in ("", o.provider)]
    return min(fitting, key=lambda o: (o.device_usd(commitment), o.provider, o.instance), default=None)


def find_price(words: str, device: str) -> tuple[float, str]:
    """Return dollars per device and hour by the words of `--price`, and the sentence that says whose they are.

    The words are a provider ("nebius"), a commitment ("spot": the cheapest of all), or both ("nebius:spot"). Of several
    instances the cheapest per device counts. Raises `InputError` naming who rents the device.

    >>> find_price("nebius:spot", "h100-sxm-80gb")[0]
    1.25
    """
    provider, _, kind = words.strip().lower().partition(":")
    if provider in COMMITMENTS and not kind:
        provider, kind = "", provider
    commitment: Commitment = next((one for one in COMMITMENTS if one == (kind or "on-demand")), "on-demand")
    if kind and kind not in COMMITMENTS:
        fail(
            "price",
            words,
            "is not a price, a provider or provider:commitment",
            f"use {nearest(kind, COMMITMENTS)}",
        )
    best = cheapest(device, commitment, provider)
    if best is None:
        rented = [offer for offer in offers() if offer.device == device and offer.usd]
        known = sorted({f"{o.provider}:{c}" for o in rented for c in o.usd})
        rule = f"has no known price of {device}"
        fail(
            "price", words, rule, f"use one of {', '.join(known)}, or dollars such as 2.5" if known else "give dollars"
        )
    return best.device_usd(commitment), best.price_note(commitment)
