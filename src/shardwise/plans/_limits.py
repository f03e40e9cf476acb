"""Latency limits on the requests of a workload."""

from __future__ import annotations

import math

from shardwise.errors import Problems
from shardwise.plans._workload import QUANTILES, Metric, Workload
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One latency limit: a metric, the quantile that must keep it ("mean" too), and seconds."""

    metric: Metric
    quantile: str
    seconds: float
    of: str = ""
    """The class of requests that it is about; empty: all."""

    @property
    def needed_requests(self) -> int:
        """Requests that must be simulated for the quantile to mean something: ten beyond it."""
        share = QUANTILES[self.quantile]
        # In hundredths, of which 1 - 0.9 is not quite ten.
        return 1 if math.isnan(share) else math.ceil(1000 / round(100 - 100 * share, 6))

    def needed_of(self, workload: Workload) -> int:
        """Return the requests of a workload that must be simulated, so that there are enough of the limit's class."""
        return math.ceil(self.needed_requests / workload.share(self.of))

    def problems(self, workload: Workload) -> Problems:
        """Return what is wrong with the limit on the requests of a workload."""
        problems = Problems()
        if self.quantile not in QUANTILES:
            problems.add("quantile", self.quantile, "is not a known choice", "use one of " + ", ".join(QUANTILES))
        if self.of and self.of not in (names := [one.name for one in workload.classes]):
            problems.add("of", self.of, "is no class of the workload", f"use one of {', '.join(names) or 'none'}")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            name = f"{self.quantile}_{self.metric}"
            problems.add(name, self.seconds, "must be more than 0 seconds", "use for example 1s")
        elif self.metric in ("tpot", "itl") and not problems.items and self._most_output(workload) < 2:
            rule = "is of tokens after the first, and answers have one token"
            fix = "use more --output-tokens, or a limit on the first token such as --p99-ttft"
            problems.add(f"{self.quantile}_{self.metric}", self.seconds, rule, fix)
        return problems

    def _most_output(self, workload: Workload) -> int:
        """Return the most output tokens of a request of the limit's class, of all where none is named."""
        of_class = (one.output_tokens.largest for one in workload.classes if one.name == self.of)
        return max(of_class, default=workload.longest[1])
