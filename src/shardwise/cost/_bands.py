"""How far to trust a number: the spread of published measurements over predictions, scaled by what is known of a run.

Residuals of published runs (`python -m accuracy update`), one a configuration, each predicted as a source that nobody
has seen. A run is further off where its experts lie on many ranks, its device has no measured kernels, or nobody ran
its stack: every condition widens the band by a factor. bands.toml has them, with the runs and laboratories behind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import field
from functools import cache

from shardwise.cost._tables import constants, record
from shardwise.files import own_table
from shardwise.records import dataclass, replace

# Standard deviations of a normal distribution from its median to its 90 %.
_EDGE = 1.2815515655446004
_RELEASE = re.compile(r"-(scores|20\d\d)$")
UNSEEN_STACK, UNSEEN_PAIR, UNMEASURED = "unseen stack", "stack unseen on the family", "device without kernels"
UNSEEN_DEVICE = "unseen device"
"""Conditions that a stack and a device bring: no runs of the stack, none on the family, no kernel tables, no runs of
the device."""


WANTED_CHANCE = 0.9
"""Chance with which what is chosen fits, where nobody asks for another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Factors from predicted to measured: 10 %, median and 90 % of published runs, and how many rows they rest on."""

    low: float
    typical: float
    high: float
    rows: int
    source: str

    def around(self, value: float) -> tuple[float, float]:
        """Return the interval around a prediction.

        >>> Band(low=0.5, typical=1.0, high=2.0, rows=3, source="").around(4.0)
        (2.0, 8.0)
        """
        return value * self.low, value * self.high

    @property
    def of_rate(self) -> Band:
        """The factors of a rate whose seconds these are of: twice the seconds are half as many a second.

        >>> Band(low=0.5, typical=1.0, high=4.0, rows=3, source="").of_rate
        Band(low=0.25, typical=1.0, high=2.0, rows=3, source='')
        """
        return replace(self, low=1 / self.high, typical=1 / self.typical, high=1 / self.low)

    def at(self, chance: float) -> float:
        """Return the factor below which measured over predicted lies with a chance.

        Logarithms are normal on either side of the median, as wide as the 10 % and the 90 % say.

        >>> round(Band(low=0.5, typical=1.0, high=1.1, rows=3, source="").at(0.9), 12)
        1.1
        """
        side = self.high if chance > 0.5 else self.low
        return self.typical * math.exp(math.log(side / self.typical) * _deviations(chance) / _EDGE)

    def chance(self, factor: float) -> float:
        """Return the chance that measured over predicted lies below a factor.

        >>> round(Band(low=0.5, typical=1.0, high=1.1, rows=3, source="").chance(1.1), 12)
        0.9
        """
        side = self.high if factor > self.typical else self.low
        if side == self.typical:
            return float(factor >= self.typical)
        deviations = _EDGE * math.log(factor / self.typical) / abs(math.log(side / self.typical))
        return (1 + math.erf(deviations / math.sqrt(2))) / 2


def _deviations(chance: float) -> float:
    """Return how many deviations from the middle of a normal distribution a chance lies.

    >>> _deviations(0.9) == _EDGE, round(_deviations(0.75), 3)
    (True, 0.674)
    """
    if chance in (0.1, 0.9):
        return _EDGE
    # To load it takes longer than a plan to be answered, and most ask for the ends of a band.
    from statistics import NormalDist

    return abs(NormalDist().inv_cdf(chance))


def joined(parts: Collection[tuple[float, Band]]) -> Band:
    """Return the band of a sum of quantities, each with its share of it: all may be off the same way.

    >>> half = Band(low=0.5, typical=1.0, high=1.5, rows=3, source="a")
    >>> joined(((0.5, half), (0.5, Band(low=1.0, typical=1.0, high=2.5, rows=5, source="b, a"))))
    Band(low=0.75, typical=1.0, high=2.0, rows=3, source='a, b')
    """
    low, typical, high = (
        sum(share * getattr(band, name) for share, band in parts) for name in ("low", "typical", "high")
    )
    sources = sorted({source for _, band in parts for source in band.source.split(", ")})
    rows = min(band.rows for _, band in parts)
    return Band(low=low, typical=typical, high=high, rows=rows, source=", ".join(sources))


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What is known of a run that decides how far predictions were off: its stack or engine, device, and words.

    No family means that the device plays no part. `hosts` is what it takes where the host launches its kernels fastest
    and slowest, over what is predicted.
    """

    stack: str
    family: str
    words: tuple[str, ...]
    device: str = ""
    hosts: tuple[float, float] = (1.0, 1.0)

    def also(self, word: str) -> Conditions:
        """Return the conditions with one word more.

        >>> Conditions(stack="megatron", family="hopper", words=("nodes",)).also("assumed fields").words
        ('nodes', 'assumed fields')
        """
        return replace(self, words=(*self.words, word))

    def known(self, seen: Mapping[str, tuple[str, ...]], devices: Collection[str]) -> tuple[str, ...]:
        """Return the words, with those that its stack and device bring; `seen` are families of runs by stack.

        >>> run = Conditions(stack="megatron", family="volta", words=("nodes",), device="v100-sxm-16gb")
        >>> run.known({"megatron": ("hopper",)}, ("h100-sxm-80gb",))
        ('nodes', 'device without kernels', 'unseen device', 'stack unseen on the family')
        """
        if not self.family:
            return (*self.words, *(UNSEEN_STACK,) * (self.stack not in seen))
        unmeasured = (UNMEASURED,) * bool(constants().families[self.family].note)
        words = (*self.words, *unmeasured, *(UNSEEN_DEVICE,) * bool(self.device and self.device not in devices))
        if self.stack not in seen:
            return (*words, UNSEEN_STACK)
        return (*words, *(UNSEEN_PAIR,) * (self.family not in seen[self.stack]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """How far two plans of one job were off against each other: what both are off by falls out of their ratio.

    `log` is what 80 % of the logarithms of measured over predicted ratios of `pairs` of published runs lie within.
    """

    log: float
    pairs: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How far published runs were off in one headline.

    `low`, `typical` and `high` are 10 %, median and 90 % of the logarithm of measured over predicted, in units of a
    scale: `scale` times the factor of every condition of a run (`wider`), `widest` at most, which the runs have among
    themselves: conditions that no run met together are not known to multiply.
    `seen` are families of devices with runs, by stack or engine, `devices` all devices with runs. `slower` are the
    logarithms of how much longer typical runs take than predicted, by family, of all where none is named, `waiting` the
    share of their exposed messages that they take longer beside: residuals are those that this leaves. `paired` is
    known where sources ran several plans of one job.
    """

    low: float
    typical: float
    high: float
    scale: float
    wider: Mapping[str, float]
    seen: Mapping[str, tuple[str, ...]]
    rows: int
    sources: int
    source: str
    devices: tuple[str, ...] = ()
    widest: float = math.inf
    slower: Mapping[str, float] = field(default_factory=dict)
    waiting: float = 0.0
    paired: Paired | None = None

    def scale_of(self, known: Conditions) -> float:
        """Return how far a run is off: the logarithm by which one of its kind usually is."""
        words = known.known(self.seen, self.devices)
        wider = {word: self.wider.get(word, 1.0) for word in words}
        if UNSEEN_STACK in wider and known.family:
            # A stack without runs is no better known on a family than one with runs on others.
            wider[UNSEEN_STACK] = max(wider[UNSEEN_STACK], self.wider.get(UNSEEN_PAIR, 1.0))
        return self.scale * min(math.prod(wider.values()), self.widest)

    def band(self, known: Conditions) -> Band:
        """Return the band of a run: what its kind is off by and what its host may be are independent.

        >>> run = Conditions(stack="megatron", family="hopper", words=(), hosts=(0.8, 1.5))
        >>> other = Conditions(stack="megatron", family="hopper", words=())
        >>> any_host, usual = (spreads()["step_seconds"].band(one) for one in (run, other))
        >>> any_host.low < min(0.8, usual.low), any_host.high > max(1.5, usual.high), any_host.typical == usual.typical
        (True, True, True)
        """
        scale = self.scale_of(known)
        typical = self.typical * scale
        ends = zip((self.low * scale, self.high * scale), known.hosts, (-1, 1), strict=True)
        low, high = (typical + sign * math.hypot(end - typical, math.log(host)) for end, host, sign in ends)
        low, typical, high = (math.exp(log) for log in (low, typical, high))
        return Band(low=low, typical=typical, high=high, rows=self.rows, source=self.source)


@cache
def spreads() -> dict[str, Spread]:
    """Return the spread of every headline."""
    return {name: record(Spread, row, f"bands.{name}") for name, row in own_table(__file__, "bands.toml").items()}


def band_of(quantity: str, known: Conditions) -> Band:
    """Return the band of a headline for a run.

    >>> plain = Conditions(stack="megatron", family="hopper", words=())
    >>> odd = Conditions(stack="of my own", family="generic", words=("experts",))
    >>> widths = [band.high / band.low for band in (band_of("step_seconds", one) for one in (plain, odd))]
    >>> widths[0] < widths[1]
    True
    """
    return spreads()[quantity].band(known)


def tie_factor(quantity: str) -> float:
    """Return the ratio of a headline of two plans of one job up to which neither is known to be the better one.

    Within it the plan that is predicted to be worse is the better one with a chance of 10 % and more. It is 1 where
    there is no headline, or no source ran several plans of one job.

    >>> 1 < tie_factor("step_seconds") < 1.3, tie_factor("")
    (True, 1.0)
    """
    paired = spreads()[quantity].paired if quantity else None
    return math.exp(paired.log) if paired else 1.0


def typical_slack(family: str) -> float:
    """Return the share of a step that published runs take longer than predicted, on a family of devices.

    >>> typical_slack("ampere") > typical_slack("hopper") > 0
    True
    """
    slower = spreads()["step_seconds"].slower
    return math.expm1(slower.get(family, slower.get("", 0.0)))


def typical_waiting() -> float:
    """Return the share of its exposed messages that a step of published runs takes longer beside its slack.

    >>> 0 < typical_waiting() < 1
    True
    """
    return spreads()["step_seconds"].waiting


def memory_band(stack: str, tuned: bool = False) -> Band:
    """Return the band of the bytes of a device under a stack, whatever the device; `tuned`: not all weights train.

    >>> memory_band("megatron").high > 1
    True
    """
    return band_of("memory.peak_bytes", memory_conditions(stack, tuned))


def lineage(stack: str) -> str:
    """Return the name that releases of one stack share, with attention scores or without.

    >>> lineage("nemo-2024"), lineage("megatron-scores"), lineage("fsdp2-compiled-loss")
    ('nemo', 'megatron', 'fsdp2-compiled-loss')
    """
    return _RELEASE.sub("", stack)


def memory_conditions(stack: str, tuned: bool) -> Conditions:
    """Return what decides how far bytes were off: the stack, which keeps attention scores as exactly as the rest."""
    return Conditions(stack=stack.removesuffix("-scores"), family="", words=("fine-tuning",) if tuned else ())
