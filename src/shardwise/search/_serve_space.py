"""The space of a search for a way to serve a model, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from shardwise.cost import Efficiencies
from shardwise.errors import Problem, Problems
from shardwise.plans import Serving
from shardwise.search._space import Order, Wholes, upto
from shardwise.serving import Engine, find_engine, find_format
from shardwise.serving._formats import cache_bytes

# Inference has no second tensor axis and no context parallelism: three axes can change places.
SERVING_ORDERS: tuple[Order, ...] = (
    ("tp", "tp2", "cp", "dp", "pp"),
    ("tp", "tp2", "cp", "pp", "dp"),
    ("pp", "tp", "tp2", "cp", "dp"),
    ("pp", "dp", "tp", "tp2", "cp"),
    ("dp", "tp", "tp2", "cp", "pp"),
    ("dp", "pp", "tp", "tp2", "cp"),
)
EVERY, BATCHES = Wholes(), upto(4096)
MOST_BATCHES = 10_000
WORDS = ("engine", "weights", "kv_cache", "compute")
# Smaller is better; arguments are the columns of a table of plans.
SERVING_OBJECTIVES: dict[str, Callable[[Any], Any]] = {
    "throughput": lambda t: 1 / t.tokens_per_second_per_gpu,
    "cost": lambda t: 1 / t.tokens_per_second_per_gpu,
    "ttft": lambda t: t.ttft_seconds,
    "tpot": lambda t: t.tpot_seconds,
    "latency": lambda t: t.request_seconds,
    "devices": lambda t: 1.0 * t.devices,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpace:
    """What each field of a deployment may be; `devices` are counts of devices, by default all of the cluster.

    Batches are those given one by one; of a range its ends, the powers of two inside, the multiples of `batch_step`
    where it is not 0, and for each deployment the largest batch that fits and keeps the limits on latency. Empty words
    for formats follow the job, and where that is silent the checkpoint.

    >>> ServingSpace(batch=Wholes.parse("3,8..20")).batches
    (3, 8, 16, 20)
    """

    devices: Wholes = EVERY
    tp: Wholes = EVERY
    pp: Wholes = EVERY
    dp: Wholes = EVERY
    ep: Wholes = EVERY
    etp: Wholes = EVERY
    batch: Wholes = BATCHES
    batch_step: int = 0
    engine: tuple[str | Engine, ...] = ("vllm",)
    weights: tuple[str, ...] = ("",)
    kv_cache: tuple[str, ...] = ("",)
    compute: tuple[str, ...] = ("",)
    orders: tuple[Order, ...] = SERVING_ORDERS

    @property
    def open_batches(self) -> tuple[tuple[int, int], ...]:
        """Ranges of more than one batch, in which the largest that will do is sought."""
        return tuple((low, high) for low, high in self.batch.ranges if low < high)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches that every deployment is tried with."""
        found: set[int] = set()
        for low, high in self.batch.ranges:
            found |= {low, high}
            found |= {2**k for k in range(high.bit_length()) if low <= 2**k}
            if self.batch_step:
                found |= set(range(-(-low // self.batch_step) * self.batch_step, high + 1, self.batch_step))
        return tuple(sorted(found))

    def setups(self, job: Serving) -> list[tuple[Any, ...]]:
        """Return every (engine, weights, kv_cache, compute), what the job says in place of empty words."""
        own = {name: getattr(job, name) for name in ("weights", "kv_cache", "compute")}
        return list(product(self.engine, *([word or own[name] for word in getattr(self, name)] for name in own)))

    def check(self) -> None:
        """Raise `InputError` for choices that are not known, named twice or left empty."""
        found = Problems()
        for name in (*WORDS, "orders"):
            values = getattr(self, name)
            if not values or len(set(map(str, values))) < len(values):
                found.add(name, str(values), "must name each of its choices once", "leave out what stands twice")
        if not self.batch.ranges:
            found.add("batch", "", "must have a largest value", "use for example 1..4096")
        if not isinstance(self.batch_step, int) or self.batch_step < 0:
            found.add("batch_step", self.batch_step, "must be a whole number of at least 0", "use 0 to leave it out")
        elif self.batch_step:
            self._check_steps(found)
        self._check_names(found)
        found.raise_if_any()

    def _check_steps(self, found: Problems) -> None:
        widest = max((high - low for low, high in self.batch.ranges), default=0)
        if widest // self.batch_step > MOST_BATCHES:
            rule = (
                f"tries {widest // self.batch_step:,} batches of every layout, and at most {MOST_BATCHES:,} are tried"
            )
            least = f"use at least {-(-widest // MOST_BATCHES)}, or 0: the largest batch that fits is found anyway"
            found.add("batch_step", self.batch_step, rule, least)

    def _check_names(self, found: Problems) -> None:
        finders: tuple[tuple[Sequence[Any], Callable[[Any], Any]], ...] = (
            (self.engine, lambda word: word if isinstance(word, Engine) else find_engine(word)),
            (self.weights, find_format),
            (self.kv_cache, cache_bytes),
        )
        for words, find in finders:
            for word in filter(None, words):
                with found.collect():
                    find(word)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingWish:
    """What is wanted of a deployment: the objective, how many plans, and limits; a limit of 0 is none.

    `max_usd` is of a million output tokens, `min_tokens_per_second` of output tokens of the whole deployment.
    """

    objective: str = "throughput"
    top: int = 10
    max_ttft_seconds: float = 0.0
    max_tpot_seconds: float = 0.0
    max_latency_seconds: float = 0.0
    max_usd: float = 0.0
    min_tokens_per_second: float = 0.0
    efficiencies: Efficiencies = field(default_factory=Efficiencies)

    def problems(self, price: float | None) -> tuple[Problem, ...]:
        """Return what is wrong with a wish where a device costs so much an hour, None where it is not known."""
        found = Problems()
        if self.objective not in SERVING_OBJECTIVES:
            remedy = "use one of " + ", ".join(SERVING_OBJECTIVES)
            found.add("objective", self.objective, "is not an objective", remedy)
        for name in (*(limit.field for limit in LIMITS), "top"):
            if not getattr(self, name) >= (name == "top"):
                found.add(name, getattr(self, name), "must be a number above 0", "leave it out for no limit")
        if self.max_usd and price is None:
            found.add("max_usd", self.max_usd, "needs a price of the device", "give for example --price 2.5")
        return tuple(found.items)


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of a wish: its field, the column it bounds, and whether a larger batch only makes it harder to keep."""

    field: str
    column: str
    title: str
    grows: bool
    least: bool = False

    def ratio(self, table: Any, wish: ServingWish) -> Any:
        """Return by how much plans exceed the limit, as a ratio; up to 1 they keep it."""
        value, bound = getattr(table, self.column), getattr(wish, self.field)
        return bound / value if self.least else value / bound


LIMITS = (
    Limit("max_ttft_seconds", "ttft_seconds", "first tokens later than asked", True),
    Limit("max_tpot_seconds", "tpot_seconds", "tokens farther apart than asked", True),
    Limit("max_latency_seconds", "request_seconds", "requests longer than asked", True),
    Limit("max_usd", "usd", "tokens dearer than asked", False),
    Limit("min_tokens_per_second", "tokens_per_second", "fewer tokens a second than asked", False, True),
)
