"""A replica in steady state, in closed form: what it can carry, and mean latencies below that.

The decode batch is a processor-sharing queue whose speed depends on its length. With lam requests a second, n sequences
decode in d(n) seconds a step, and each prompt adds D(n) to the steps that it shares, so that one of n sequences is done
at n / ((O - 1) d(n) + n D(n)) a second; Little's law gives the rest. Kleinrock, Queueing Systems vol. 2, 4.4
(processor sharing); held against the simulation in tests/serving/test_load.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.serving.load._policy import Policy
from shardwise.serving.load._steps import StepTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """Means of one replica under Poisson arrivals of so many requests a second."""

    capacity: float
    """Requests a second that one replica carries at most."""
    rate: float
    running: float
    ttft_seconds: float
    tpot_seconds: float
    e2e_seconds: float

    @property
    def stable(self) -> bool:
        """Whether the replica carries its load."""
        return self.rate < self.capacity

    @property
    def utilisation(self) -> float:
        """Load over capacity."""
        return self.rate / self.capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanRequest:
    """The mean lengths of a workload, and the tokens of a prompt that are cached already."""

    input_tokens: float
    output_tokens: float
    cached_tokens: float


class Replicas:
    """The closed form of one replica of a deployment: `at` gives its means at a rate."""

    def __init__(self, table: StepTable, policy: Policy, cache_tokens: float, mean: MeanRequest) -> None:
        self.table, self.policy, self.mean = table, policy, mean
        self.context = mean.input_tokens + (mean.output_tokens - 1) / 2
        share = 1.0 if policy.reserved_share else 0.5
        held = mean.input_tokens + share * mean.output_tokens + policy.block_tokens / 2
        most = min(policy.max_sequences, table.max_sequences, int(cache_tokens // held))
        self.most = max(most, 1)
        self.capacity = max(self.completed(n) for n in range(1, self.most + 1))

    def added(self, running: int) -> float:
        """Return the seconds that one prompt adds to the steps of so many decoding sequences."""
        new = max(round(self.mean.input_tokens - self.mean.cached_tokens), 1)
        room = max(self.policy.step_tokens - (running if self.policy.mixed else 0), 1)
        pieces = max(math.ceil(new / room), 1)
        size, past, seconds = math.ceil(new / pieces), round(self.mean.cached_tokens), 0.0
        beside = min(running, self.table.max_sequences) if self.policy.mixed else 0
        for piece in range(pieces):
            seconds += self.table.mixed(beside, self.context, [(size, past + piece * size)])
        return seconds - (pieces * self.table.decode(beside, self.context) if beside else 0.0)

    def completed(self, running: int) -> float:
        """Return requests a second that end while so many sequences run."""
        decode = self.table.decode(min(running, self.table.max_sequences), self.context)
        return running / ((self.mean.output_tokens - 1) * decode + running * self.added(running))

    def at(self, rate: float) -> Steady:
        """Return the means at so many requests a second, of an empty replica at 0; infinite from the capacity on."""
        if rate >= self.capacity:
            return Steady(
                capacity=self.capacity, rate=rate, running=math.inf, ttft_seconds=math.inf, tpot_seconds=math.inf,
                e2e_seconds=math.inf,
            )  # fmt: skip
        # By logarithms: products over a thousand sequences pass what a number holds.
        logs = [0.0]
        for n in range(1, self.most + 1):
            logs.append(logs[-1] + math.log(rate / self.completed(n)) if rate else -math.inf)
        highest = max(logs)
        weights = [math.exp(one - highest) for one in logs]
        whole = sum(weights)
        running = sum(n * weight for n, weight in enumerate(weights)) / whole
        tpot = self._tpot(rate, running)
        usual = min(max(round(running), 1), self.most)
        added = self.added(usual)
        prompt = added + (self.table.decode(usual, self.context) if self.policy.mixed else 0.0)
        busy, load = 1 - weights[0] / whole, min(rate * added, 0.999)
        # A prompt waits for the rest of the step under way, then behind prompts that came before (M/D/1).
        ttft = busy * max(tpot, added * load) / 2 + prompt + load * added / (2 * (1 - load))
        e2e = ttft + (self.mean.output_tokens - 1) * tpot
        return Steady(
            capacity=self.capacity, rate=rate, running=running, ttft_seconds=ttft, tpot_seconds=tpot, e2e_seconds=e2e
        )

    def _tpot(self, rate: float, running: float) -> float:
        """Return the mean seconds of a token by Little's law, never below an empty replica's."""
        if self.mean.output_tokens <= 1:
            return 0.0
        alone = self.table.decode(1, self.context)
        return max(running / rate / (self.mean.output_tokens - 1), alone) if rate else alone
