"""Requests: what a simulation books of each, and the moments of all of them that the closed form reads."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import accumulate, takewhile
from typing import TypeAlias

from shardwise.ledger.number import quantile
from shardwise.plans import QUANTILES
from shardwise.records import dataclass

CAUSES = ("slots", "cache", "step_tokens", "running_step")
"""Why a request waits before its first piece: sequences, cache or step tokens are full, or a step is under way."""
SLOTS, CACHE, TOKENS, STEP = range(4)
_NO_WAITS = (0.0,) * len(CAUSES)


PERCENTILES = {name: share for name, share in QUANTILES.items() if name != "mean"}
CacheBlocks: TypeAlias = Sequence[tuple[int, int]]
"""Name and tokens of each block of a request, of its prompt and then of its answer."""


class Request:
    """One request: what it asks, and when what happened to it, in seconds of the simulated clock."""

    __slots__ = (
        "arrival", "away", "blocks", "cache_tokens", "cached_tokens", "end", "first", "input_tokens", "joined", "kept",
        "kind", "last_step", "lost", "made", "others", "output_tokens", "past", "pinned", "preemptions", "prefilled",
        "prompts", "ready", "remote", "running", "scheduled", "seen", "server_seconds", "stamp", "target", "user",
        "waits",
    )  # fmt: skip

    def __init__(
        self, arrival: float, input_tokens: int, output_tokens: int, cached_tokens: int = 0, blocks: CacheBlocks = ()
    ) -> None:
        self.arrival, self.input_tokens = arrival, input_tokens
        self.output_tokens = output_tokens if output_tokens > 1 else 1
        self.cached_tokens, self.user = min(cached_tokens, input_tokens - 1) if cached_tokens else 0, -1
        self.blocks, self.pinned = blocks, 0
        self.kind = 0
        """Which class of the workload it is of."""
        self.ready = arrival
        """When the engine that runs it next may have it: as it arrives, then as its cache has reached another pool."""
        self.server_seconds = 0.0
        """What it waits in an API server, before any engine has it."""
        self.remote = False
        self.scheduled = self.prefilled = self.joined = self.first = self.end = -1.0
        self.cache_tokens: int | float = 0
        self.stamp: int | float = 0
        self.target, self.past, self.made, self.last_step = input_tokens, 0, 0, 0
        self.running, self.preemptions, self.kept = False, 0, 0
        self.waits: tuple[float, ...] = _NO_WAITS
        self.seen: tuple[float, ...] = ()
        self.prompts = self.others = self.lost = 0.0
        """Seconds after the first token: of prompts in its steps, of slower groups or batches in flight, sent away."""
        self.away = -1.0

    def start(self, spent: tuple[float, float], now: float) -> None:
        """Let it decode from here on; what it was sent away for ends."""
        self.seen = spent
        if self.away >= 0:
            self.lost, self.away = self.lost + now - self.away, -1.0

    def settle(self, spent: tuple[float, float], away: float = -1.0) -> None:
        """Book what its decode steps took beyond their own since it started, and when it is sent away."""
        self.prompts += spent[0] - self.seen[0]
        self.others += spent[1] - self.seen[1]
        self.away = away

    @property
    def prompt_blocks(self) -> int:
        """How many of its blocks are of its prompt."""
        return len(self.blocks) - (sum(size for _, size in self.blocks) > self.input_tokens)

    @property
    def ttft_seconds(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first - self.arrival

    @property
    def e2e_seconds(self) -> float:
        """Seconds from arrival to the last token."""
        return self.end - self.arrival

    @property
    def queue_seconds(self) -> float:
        """Seconds in the engine before the first piece of the prompt runs."""
        return self.scheduled - self.arrival - self.server_seconds

    @property
    def prompt_seconds(self) -> float:
        """Seconds from the first piece of the prompt to its end."""
        return (self.prefilled if self.remote else self.first) - self.scheduled

    @property
    def transfer_seconds(self) -> float:
        """Seconds from the end of the prompt until its cache is where it decodes, 0 where it was computed there."""
        return self.ready - self.prefilled if self.remote else 0.0

    @property
    def tpot_seconds(self) -> float | None:
        """Mean seconds of each token after the first; None where there is one token alone."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def request_of(
    arrival: float, drawn: tuple[int, int, int, CacheBlocks, int], user: int = -1, server_seconds: float = 0.0
) -> Request:
    """Return a request as a workload draws it, which waits so long in an API server."""
    tokens, made, cached, blocks, kind = drawn
    request = Request(arrival, tokens, made, cached, blocks)
    request.kind, request.user = kind, user
    request.server_seconds, request.ready = server_seconds, arrival + server_seconds
    return request


@dataclass(slots=True)
class Step:
    """The next iteration of a scheduler, or so many decode steps alike: seconds of each, and tokens that run in it."""

    pieces: Sequence[tuple[Request, int]]
    steps: int
    seconds: float
    tokens: int


class PrefixCache:
    """Blocks that are in the cache of a group: those of requests that run, and of others until room is needed.

    What nobody uses goes in the order of its last use, of one request from its end, as in vLLM
    vllm/v1/core/kv_cache_manager.py free; a prompt is there for others once it has been computed.

    >>> cache, first = PrefixCache(), Request(0.0, 1300, 10, blocks=((1, 512), (2, 512), (3, 276)))
    >>> cache.take(first, 3), cache.give(first)
    (0, 0)
    >>> cache.keep(1000)
    >>> cache.hits(first.blocks), cache.hits(((2, 512), (1, 512)))
    ((1, 1000), (0, 488))
    """

    __slots__ = ("idle", "tokens", "users")

    def __init__(self) -> None:
        self.idle: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0
        """Tokens of idle blocks."""
        self.users: dict[int, int] = {}

    def hits(self, blocks: CacheBlocks) -> tuple[int, int]:
        """Return how many whole blocks from the start of a request are cached, and how many tokens."""
        tokens = 0
        for index, (name, size) in enumerate(blocks):
            left = size if name in self.users else self.idle.get(name, 0)
            tokens += min(left, size)
            if left < size:
                return index, tokens
        return len(blocks), tokens

    def warm(self, blocks: CacheBlocks) -> None:
        """Hold blocks that were computed before the first request."""
        self.idle.update(blocks)
        self.tokens = sum(self.idle.values())

    def shared(self, blocks: CacheBlocks) -> int:
        """Return the tokens of a request's first blocks that others hold as it comes."""
        return sum(size for _, size in takewhile(lambda one: one[0] in self.users, blocks))

    def take(self, request: Request, count: int) -> int:
        """Hold the first blocks of a request as long as it runs; return the tokens that others hold already."""
        shared = 0
        for name, size in request.blocks[request.pinned : count]:
            users = self.users.get(name, 0)
            shared += size if users else 0
            self.tokens -= self.idle.pop(name, 0)
            self.users[name] = users + 1
        request.pinned = max(count, request.pinned)
        return shared

    def give(self, request: Request) -> int:
        """Let the blocks of a request go that has ended or was sent away; return the tokens that others still hold."""
        shared = 0
        for name, size in reversed(request.blocks[: request.pinned]):
            self.users[name] -= 1
            if self.users[name]:
                shared += size
            else:
                del self.users[name]
                self.idle[name] = size
                self.tokens += size
        request.pinned = 0
        return shared

    def keep(self, room: float) -> None:
        """Forget what is more than so many tokens."""
        while self.tokens > room and self.idle:
            name, size = next(iter(self.idle.items()))
            more = min(math.ceil(self.tokens - room), size)
            self.tokens -= more
            if more < size:
                self.idle[name] = size - more
            else:
                del self.idle[name]


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles of seconds; empty for no value."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered)} | {name: quantile(ordered, q) for name, q in PERCENTILES.items()}


def latencies_of(requests: Sequence[Request]) -> dict[str, dict[str, float]]:
    """Return mean and percentiles of seconds of requests: ttft, tpot, e2e and queue."""
    return {
        "ttft": spread_of([r.ttft_seconds for r in requests]),
        "tpot": spread_of([seconds for r in requests if (seconds := r.tpot_seconds) is not None]),
        "e2e": spread_of([r.e2e_seconds for r in requests]),
        "queue": spread_of([r.queue_seconds for r in requests]),
    }


def with_unit(latencies: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return latencies with the unit in the name of each value."""
    return {m: {f"{name}_seconds": value for name, value in spread.items()} for m, spread in latencies.items()}


@dataclass(slots=True)
class Trace:
    """What a replica did over a simulation."""

    finished: list[Request] = field(default_factory=list)
    seconds: float = 0.0
    busy_seconds: float = 0.0
    iterations: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    running_seconds: float = 0.0
    """Sequences times seconds, of all that run."""
    most_running: int = 0
    most_waiting: int = 0
    cache_token_seconds: float = 0.0
    most_cache_tokens: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two tokens of a sequence, and of how many tokens."""
    stalls: list[tuple[float, int]] = field(default_factory=list)
    """Seconds of each step of prompts since the last token, and the sequences that waited for it."""

    def decoded(self, seconds: float, tokens: int, steps: int, made: float) -> None:
        """Book the gaps of so many steps of as many seconds, each a token of each sequence or `made` of them.

        Before the first, sequences wait for the steps of prompts that ran since their last token.
        """
        waited = 0
        if self.stalls:
            left = sum(own for own, _ in self.stalls)
            for own, count in self.stalls:
                here = max(min(count, tokens) - waited, 0)
                self.gaps.append(((seconds + left) / made, round(here * made)))
                left, waited = left - own, waited + here
            self.stalls.clear()
        self.gaps.append((seconds / made, round((tokens * steps - waited) * made)))

    def prompted(self, seconds: float, tokens: int, made: float) -> None:
        """Book a step of prompts, beside which sequences make so many tokens each, or wait where they make none."""
        if made:
            self.decoded(seconds, tokens, 1, made)
        elif tokens:
            self.stalls.append((seconds, tokens))


def gaps_of(traces: Sequence[Trace]) -> dict[str, float]:
    """Return mean and percentiles of the seconds between two tokens, each token counted once; empty for none."""
    gaps = sorted((gap, count) for trace in traces for gap, count in trace.gaps if count)
    tokens = sum(count for _, count in gaps)
    if not tokens:
        return {}
    ends = list(accumulate(count for _, count in gaps))
    ranks = {name: gaps[bisect_left(ends, share * tokens)][0] for name, share in PERCENTILES.items()}
    return {"mean": sum(gap * count for gap, count in gaps) / tokens} | ranks


def ended_rate(ends: Sequence[float]) -> float:
    """Return requests a second by the moments, in order, at which they ended: the slope of the line through them.

    Equal requests end at once, so that the first and the last moment alone would count a bunch too many.

    >>> round(ended_rate([1.0, 1.0, 2.0, 2.0, 3.0, 3.0]), 6)
    2.0
    """
    count, mean = len(ends), sum(ends) / len(ends)
    spread = sum((end - mean) ** 2 for end in ends)
    slope = sum((end - mean) * (index - (count - 1) / 2) for index, end in enumerate(ends))
    return slope / spread if spread else math.inf


# Of those who come, who are not done where a queue grows, at least, and the more the farther the load is below what is
# said to be carried: at half of that 2 % were not done in a half of 1,500 requests, and none in one of 6,000.
_GROWS, _DOUBT = 0.01, 8


def queue_growth(requests: Sequence[Request], rate: float, utilisation: float = 1.0) -> float:
    """Return the requests a second by which a queue grows, as a simulation showed; 0 where it does not.

    If those who arrive in the last quarter wait half as long again as those of the second, and a tenth of a request
    more, it grows by what is not done of the second half of the arrivals, if that is such a share of them that no busy
    hour leaves it, at a load that is said to be so much of what is carried.
    """
    every = sorted(requests, key=lambda r: r.arrival)
    quarter = len(every) // 4
    if quarter < 25:
        return 0.0
    early, late = every[quarter : 2 * quarter], every[3 * quarter :]
    before, after = (sum(r.queue_seconds for r in part) / len(part) for part in (early, late))
    usual = sum(r.e2e_seconds - r.queue_seconds for r in late) / len(late)
    if after - before <= 0.5 * before + 0.1 * usual:
        return 0.0
    start, end = every[2 * quarter].arrival, every[-1].arrival
    span = max(end - start, 1e-9)
    times = [r.arrival for r in every], [r.end for r in every]
    come, done = (sum(start < one <= end for one in each) / span for each in times)
    return max(rate - done, 1e-9) if come - done > max(_GROWS, (1 - utilisation) / _DOUBT) * come else 0.0
