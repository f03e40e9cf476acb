"""A workload of a server: how long requests are, when they arrive, what they share, and the limits they should meet."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain, islice, pairwise, repeat, takewhile
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from shardwise.errors import Problems
from shardwise.records import dataclass, replace

if TYPE_CHECKING:
    from random import Random
    from statistics import NormalDist

LengthKind: TypeAlias = Literal["fixed", "uniform", "lognormal", "exponential", "empirical"]
ArrivalKind: TypeAlias = Literal["poisson", "constant", "gamma", "burst", "closed", "trace"]
Metric: TypeAlias = Literal["ttft", "tpot", "itl", "e2e"]
METRICS: tuple[Metric, ...] = get_args(Metric)
QUANTILES: dict[str, float] = {"mean": math.nan, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

MOST_REQUESTS = 1_000_000
# Requests whose lengths together have the very distribution that is asked for.
_TOGETHER = 4096
_EACH = repeat(1)
DrawnRequest: TypeAlias = tuple[int, int, int, tuple[tuple[int, int], ...], int]


@cache
def _normal() -> NormalDist:
    # Loaded when lengths are drawn: it takes longer than a plan to be answered.
    from statistics import NormalDist

    return NormalDist()


def _evenly(random: Random, count: int) -> Iterator[float]:
    """Yield numbers between 0 and 1 without end: of so many, one in each of as many equal parts, in random order.

    >>> from random import Random
    >>> sorted(int(4 * share) for share in islice(_evenly(Random(0), 4), 4))
    [0, 1, 2, 3]
    """
    order, draw = list(range(count)), random.random
    while True:
        random.shuffle(order)
        for part in order:
            drawn = draw()
            yield (part + (drawn if drawn > 1e-12 else 1e-12)) / count


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """A distribution of token counts.

    >>> Length(mean=2000).at(0.5), Length(kind="uniform", mean=1500, low=1000, high=2000).at(0.25)
    (2000, 1250)
    """

    kind: LengthKind = "fixed"
    mean: float = 0.0
    cv: float = 0.0
    """Standard deviation over the mean, of "lognormal"."""
    low: int = 1
    high: int = 0
    """Least and most tokens that are drawn (0: up to the 99.9th percentile)."""
    values: tuple[int, ...] = ()
    """What is drawn from, of "empirical"."""

    def at(self, share: float) -> int:
        """Return the tokens that so much of all requests has at most, for a share between 0 and 1."""
        return self._quantiles()(share)

    def _quantiles(self) -> Callable[[float], int]:
        """Return what gives the tokens at a share; what all shares have in common is computed once."""
        low, mean = self.low, self.mean
        if self.kind == "fixed":
            return lambda share: round(mean)
        if self.kind == "empirical":
            values, many = self.values, len(self.values)
            return lambda share: values[int(share * many)]
        if self.kind == "uniform":
            wide = self.high - low + 1
            return lambda share: low + int(share * wide)
        most = self.largest
        if self.kind == "exponential":
            return lambda share: min(max(round(-mean * math.log1p(-share)), low), most)
        width = math.log(1 + self.cv**2)
        spread, half, normal, exp = math.sqrt(width), width / 2, _normal().inv_cdf, math.exp
        return lambda share: min(max(round(mean * exp(spread * normal(share) - half)), low), most)

    def each(self, random: Random, count: int) -> Iterator[int]:
        """Yield the tokens of one request after another, without end; so many together are of the very distribution."""
        fixed = self.kind == "fixed"
        return repeat(round(self.mean)) if fixed else map(self._quantiles(), _evenly(random, count))

    @property
    def largest(self) -> int:
        """The most tokens that can be drawn, or for distributions without a bound those of the 99.9th percentile."""
        if self.kind == "empirical":
            return max(self.values)
        if self.high:
            return self.high
        if self.kind == "exponential":
            return round(self.mean * math.log(1000))
        width = math.sqrt(math.log(1 + self.cv**2))
        return round(self.mean * math.exp(3.09 * width - width**2 / 2))

    def problems(self, name: str, least: int) -> Problems:
        """Return what is wrong with the distribution of the field `name`."""
        problems = Problems()
        if not math.isfinite(self.mean) or self.mean < least:
            problems.add(name, self.mean, f"must be at least {least} on average", f"use {least} or more")
        if not 0 <= self.cv <= 10:
            problems.add(f"{name}_cv", self.cv, "must lie between 0 and 10", "use for example 0.8")
        if self.kind == "empirical" and (not self.values or min(self.values) < least):
            problems.add(name, str(self.values[:3]), f"must have values of at least {least}", "give values=(512, 1024)")
        if self.kind == "uniform" and self.low < least:
            shown, most = f"{self.low}..{self.high}", max(self.high, least)
            problems.add(name, shown, f"must begin with at least {least}", f"write {least}..{most}")
        if self.high and self.low > self.high:
            problems.add(name, f"{self.low}..{self.high}", "must rise", f"write {self.high}..{self.low}")
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """When requests arrive: in an open loop at a rate, or in a closed loop of users who wait for their answers."""

    kind: ArrivalKind = "poisson"
    rate: float = 0.0
    """Requests a second, of open loops."""
    cv: float = 1.0
    """Standard deviation of the gaps over their mean, of "gamma"."""
    users: int = 0
    """Users of a closed loop, who start one after another, or all at once where just these requests are asked."""
    think_seconds: float | None = None
    """Mean seconds from an answer to the user's next request; None: what a client and its tokenizer take."""
    times: tuple[float, ...] = ()
    """Seconds of each arrival of a trace, rising from 0."""

    def seconds(self, count: int, random: Random, steps: Iterator[int] = _EACH) -> Iterator[float]:
        """Yield the seconds at which `count` requests of an open loop arrive; all at 0 of a burst.

        Of a part of them each is the one so many `steps` after the last: the gap is the sum of as many.

        They come at the rate: clients scale random gaps to the time of all (github.com/vllm-project/vllm
        vllm/benchmarks/serve.py get_request).

        >>> from random import Random
        >>> round(max(Arrivals(kind="poisson", rate=2.0).seconds(500, Random(0))), 9)
        250.0
        """
        if self.kind == "trace":
            yield from self.times[:count]
        elif self.kind in ("poisson", "gamma"):
            ahead = list(islice(steps, count))
            gaps = list(self._gaps(random, iter(ahead)))
            scale = sum(ahead) / self.rate / sum(gaps)
            yield from accumulate(gap * scale for gap in gaps)
        else:
            for index in islice(accumulate(steps, initial=0), count):
                yield index / self.rate if self.kind == "constant" else 0.0

    def _gaps(self, random: Random, steps: Iterator[int] = _EACH) -> Iterator[float]:
        """Yield sums of so many random gaps of a mean of 1."""
        shape = 1 / self.cv**2 if self.kind == "gamma" else 1.0
        drawn, draw, log = random.gammavariate, random.random, math.log
        for step in steps:
            # A gamma distribution of shape 1 is the exponential one, drawn as `Random` does.
            yield -log(1.0 - draw()) if shape * step == shape == 1.0 else drawn(shape * step, 1 / shape)

    def through(self, stages: Sequence[tuple[float, float]], random: Random) -> Arrivals:
        """Return arrivals whose rate changes: so many requests a second for so many seconds, one stage after another.

        Gaps are of the kind of these arrivals, stretched as the rate is.

        >>> from random import Random
        >>> Arrivals(kind="constant").through([(2, 1.0), (1, 2.0)], Random(0)).times
        (0.0, 0.5, 1.0, 2.0)
        """
        times, start, passed = list[float](), 0.0, 0.0
        problems = replace(self, rate=1.0).problems()
        if self.kind not in ("constant", "poisson", "gamma"):
            problems.add("arrivals", self.kind, "has no rate that stages change", "use poisson, constant or gamma:CV")
        problems.raise_if_any()
        steady = self.kind == "constant"
        gaps = accumulate(repeat(1.0), initial=0.0) if steady else accumulate(self._gaps(random))
        at = next(gaps)
        for rate, seconds in stages:
            while at < passed + rate * seconds - 1e-9:
                times.append(start + (at - passed) / rate)
                at = next(gaps)
            passed, start = passed + rate * seconds, start + seconds
        if not times:
            problems.add("stages", passed, "have no request", "write longer stages, or higher rates")
        problems.raise_if_any()
        return Arrivals(kind="trace", times=tuple(time - times[0] for time in times))

    def problems(self) -> Problems:
        """Return what is wrong with the arrivals."""
        problems = Problems()
        if self.kind == "closed":
            if self.users < 1:
                problems.add("users", self.users, "must be at least 1", "use for example 64")
            if self.think_seconds is not None and not 0 <= self.think_seconds < math.inf:
                problems.add("think_seconds", self.think_seconds, "must be 0 or more", "use for example 2s")
        elif self.kind == "trace":
            if not self.times:
                problems.add("trace", 0, "has no request", "give a file with at least one")
            elif any(b < a for a, b in pairwise(self.times)):
                problems.add("trace", len(self.times), "must be sorted by time", "sort its rows by arrival")
        elif self.kind != "burst" and not (math.isfinite(self.rate) and 0 < self.rate <= 1e6):
            problems.add("rate", self.rate, "must be above 0 and at most 1,000,000 a second", "use for example 50/s")
        if self.kind == "gamma" and not 0.05 <= self.cv <= 20:
            problems.add("cv", self.cv, "must lie between 0.05 and 20", "use 1 for Poisson arrivals")
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestClass:
    """Requests of one kind, such as chats or summaries: their share of all, how long they are, what they share."""

    name: str
    share: float
    input_tokens: Length
    output_tokens: Length
    prefix_tokens: int = 0
    """Tokens at the start of every prompt of the class."""

    def problems(self) -> Problems:
        """Return what is wrong with the class, each field under its name."""
        problems = self.input_tokens.problems("input_tokens", 1)
        problems.items.extend(self.output_tokens.problems("output_tokens", 1).items)
        if not 0 < self.share <= 1:
            problems.add("share", self.share, "must be more than 0 and at most 1", "use for example 0.5")
        if not 0 <= self.prefix_tokens < max(self.input_tokens.mean, 1):
            rule = f"must be 0 or more, and less than the {self.input_tokens.mean:g} tokens of a prompt"
            problems.add("prefix_tokens", self.prefix_tokens, rule, "count the prefix within the input")
        named = Problems()
        named.items += [replace(one, field=f"{self.name}.{one.field}") for one in problems.items]
        return named


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a server is asked: lengths, arrivals, a shared prefix, and how many requests are looked at.

    >>> Workload(input_tokens=Length(mean=2000), output_tokens=Length(mean=300), arrivals=Arrivals(rate=50)).count
    2000
    """

    input_tokens: Length
    output_tokens: Length
    arrivals: Arrivals
    pairs: tuple[tuple[int, int], ...] = ()
    """Input and output tokens of each request of a trace; empty: drawn apart from the two distributions."""
    classes: tuple[RequestClass, ...] = ()
    """Kinds of requests, by whose shares each is drawn; empty: all are of the two distributions above."""
    blocks: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Name and tokens of each block of the requests of a trace: where two have one name, all before it is the same.

    The blocks of a prompt, and after them its answer where a later prompt has it.
    """
    prefix_tokens: int = 0
    """Tokens at the start of every prompt that all share, such as a system prompt."""
    cached_share: float = 0.0
    """Share of requests whose whole prompt is in the prefix cache, as where a benchmark repeats its prompts."""
    count: int = 2000
    """Requests that are simulated."""
    seed: int = 0
    finite: bool = False
    """Just these requests are asked, as in a benchmark: latencies are theirs though a queue grows."""

    def draws(self, steps: Iterator[int] = _EACH) -> Iterator[DrawnRequest]:
        """Yield input, output, cached tokens, blocks and class of one request after another, or steps, without end.

        Of requests with blocks the cached tokens are those of a cache that never forgets. A trace that starts
        again has other blocks: nobody asks twice. A prefix that all share is a block with a negative name.

        >>> asked = Workload(input_tokens=Length(mean=700), output_tokens=Length(mean=9), arrivals=Arrivals(rate=1),
        ...     pairs=((700, 9), (1100, 9)), blocks=(((5, 512), (6, 188)), ((5, 512), (7, 588))))
        >>> [cached for (_, _, cached, *_), _ in zip(asked.draws(), range(4))]
        [0, 512, 0, 512]
        """
        from random import Random

        random = Random(f"lengths {self.seed}")
        index, seen = 0, set[int]()
        together = max(min(self.count, _TOGETHER), 1)
        kinds = self.classes or (self,)
        lengths = [(k.input_tokens.each(random, together), k.output_tokens.each(random, together)) for k in kinds]
        of, which, prefix = 0, _evenly(random, together), self.prefix_tokens
        bounds = list(accumulate(one.share for one in self.classes))
        apart = 1 + max((block for blocks in self.blocks for block, _ in blocks), default=0)
        while True:
            if self.pairs:
                tokens, made = self.pairs[index % len(self.pairs)]
            else:
                if self.classes:
                    of = min(bisect_right(bounds, next(which) * bounds[-1]), len(bounds) - 1)
                    prefix = self.classes[of].prefix_tokens
                prompts, answers = lengths[of]
                tokens, made = next(prompts), next(answers)
            if self.blocks:
                turn, at = divmod(index, len(self.blocks))
                blocks = self.blocks[at]
                if turn:
                    blocks = tuple((block + turn * apart, size) for block, size in blocks)
                known = takewhile(lambda one: one[0] in seen, blocks)
                yield tokens, made, min(sum(size for _, size in known), tokens), blocks, 0
                seen.update(block for block, _ in blocks)
            else:
                whole = random.random() < self.cached_share
                shared = () if whole or not prefix or self.pairs else ((-1 - of, min(prefix, tokens)),)
                yield tokens, made, tokens if whole else min(prefix, tokens), shared, of
            index += next(steps)

    @property
    def prefixes(self) -> tuple[tuple[int, int], ...]:
        """Name and tokens of what all requests, or all of a class, begin with."""
        each = (self.prefix_tokens,) if not self.classes else (one.prefix_tokens for one in self.classes)
        return () if self.pairs else tuple((-1 - of, tokens) for of, tokens in enumerate(each) if tokens)

    @property
    def repeats(self) -> bool:
        """Whether prompts begin with what others had, which a prefix cache spares."""
        names = [name for blocks in self.blocks for name, _ in blocks]
        return bool(self.prefixes or self.cached_share) or len(set(names)) < len(names)

    @property
    def longest(self) -> tuple[int, int]:
        """The most input and output tokens of a request that the workload holds."""
        if self.pairs:
            return max(a for a, _ in self.pairs), max(b for _, b in self.pairs)
        every = self.classes or (self,)
        return max(one.input_tokens.largest for one in every), max(one.output_tokens.largest for one in every)

    def share(self, name: str) -> float:
        """Return the share of the requests of a class in all, 1 of no name."""
        return next((one.share for one in self.classes if one.name == name), 1.0)

    def problems(self) -> Problems:
        """Return everything that is wrong with the workload."""
        problems = self.arrivals.problems()
        for name in ("input_tokens", "output_tokens"):
            problems.items.extend(getattr(self, name).problems(name, 1).items)
        if not self.pairs and self.prefix_tokens >= max(self.input_tokens.mean, 1):
            rule = f"must be shorter than the {self.input_tokens.mean:g} tokens of a prompt"
            problems.add("prefix_tokens", self.prefix_tokens, rule, "count the prefix within the input")
        if self.prefix_tokens < 0:
            problems.add("prefix_tokens", self.prefix_tokens, "must be 0 or more", "use 0 for none")
        problems.items.extend(self._of_classes().items)
        if not 0 <= self.cached_share <= 1:
            problems.add("cached_share", self.cached_share, "must lie between 0 and 1", "use 0 for none")
        # Blocks of long traces are as they were read.
        blocks = (size for several in self.blocks[:1000] for _, size in several)
        tokens = chain(chain.from_iterable(self.pairs), blocks)
        if (least := min(tokens, default=1)) < 1:
            problems.add("pairs" if self.pairs else "blocks", least, "must have at least 1 token each", "use 1 or more")
        if any(self.blocks):
            for name in ("prefix_tokens", "cached_share"):
                if value := getattr(self, name):
                    rule = "is given beside a trace that says what prompts share"
                    problems.add(name, value, rule, "leave it out, or take hash_ids or conversations out of the trace")
        if not 1 <= self.count <= MOST_REQUESTS:
            problems.add("requests", self.count, f"must lie between 1 and {MOST_REQUESTS:,}", "use for example 2000")
        if self.arrivals.kind == "closed" and self.count < self.arrivals.users:
            rule = f"must be at least the {self.arrivals.users} users"
            problems.add("requests", self.count, rule, f"use {10 * self.arrivals.users}")
        return problems

    def _of_classes(self) -> Problems:
        """Return what is wrong with the classes of requests."""
        problems, names = Problems(), [one.name for one in self.classes]
        for one in self.classes:
            problems.items.extend(one.problems().items)
        if len(set(names)) < len(names):
            problems.add("classes", ", ".join(names), "must each have a name of its own", "name them apart")
        total = sum(one.share for one in self.classes)
        if self.classes and abs(total - 1) > 1e-6:
            problems.add("classes", total, "must have shares that add up to 1", "divide each share by their sum")
        return problems
