"""What is wanted of a search: the objective, how many plans, the wanted chance to fit, and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from shardwise.cost import WANTED_CHANCE, Efficiencies
from shardwise.errors import Problem, Problems
from shardwise.hardware import Cluster
from shardwise.plans import Stack, Training
from shardwise.records import dataclass, replace
from shardwise.units import show_bytes

# Rows of a part of the space: more spread the cost of a call, fewer stay in the cache and show progress.
ROWS = 1_600_000

# Smaller is better; arguments are seconds of a step, bytes on a device and devices.
OBJECTIVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "step": lambda seconds, size_bytes, devices: seconds,
    "throughput": lambda seconds, size_bytes, devices: seconds * devices,
    "cost": lambda seconds, size_bytes, devices: seconds * devices,
    # With failures, the seconds include the time they lose.
    "days": lambda seconds, size_bytes, devices: seconds,
    "memory": lambda seconds, size_bytes, devices: size_bytes + 0 * seconds,
    "headroom": lambda seconds, size_bytes, devices: size_bytes + 0 * seconds,
    "devices": lambda seconds, size_bytes, devices: devices + 0 * seconds,
}
# The headline that an objective is, where it is not that of a step or a request.
_HEADLINES = {"memory": "memory.peak_bytes", "headroom": "memory.peak_bytes", "devices": ""}
_SERVING_HEADLINES = {"ttft": "ttft_seconds", "tpot": "tpot_seconds", "devices": ""}
# Smaller is better; arguments are the columns of a table of deployments.
SERVING_OBJECTIVES: dict[str, Callable[[Any], Any]] = {
    "throughput": lambda t: 1 / t.tokens_per_second_per_gpu,
    "cost": lambda t: 1 / t.tokens_per_second_per_gpu,
    "ttft": lambda t: t.ttft_seconds,
    "tpot": lambda t: t.tpot_seconds,
    "latency": lambda t: t.request_seconds,
    "devices": lambda t: 1.0 * t.devices,
}
TRAIN_LIMITS = {
    "max_step_seconds": "steps longer than asked",
    "max_run_seconds": "runs longer than asked",
    "max_usd": "cost of the run above the limit",
    "min_free_bytes": "less free memory than asked",
}


@dataclass(frozen=True, slots=True)
class ServingLimit:
    """A limit on deployments: its field, the column it bounds, and whether a larger batch only makes it harder."""

    field: str
    column: str
    title: str
    grows: bool
    least: bool = False

    def ratio(self, table: Any, options: SearchOptions) -> Any:
        """Return by how much plans exceed the limit, as a ratio; up to 1 they keep it."""
        value, bound = getattr(table, self.column), getattr(options, self.field)
        return bound / value if self.least else value / bound


SERVING_LIMITS = (
    ServingLimit("max_ttft_seconds", "request_ttft_seconds", "TTFT of a request above the limit", True),
    ServingLimit("max_tpot_seconds", "request_tpot_seconds", "TPOT of a request above the limit", True),
    ServingLimit("max_latency_seconds", "request_seconds", "requests longer than asked", True),
    ServingLimit("max_usd", "usd", "cost of tokens above the limit", False),
    ServingLimit("min_tokens_per_second", "tokens_per_second", "fewer tokens a second than asked", False, True),
)
_SERVING = tuple(limit.field for limit in SERVING_LIMITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What is wanted of a search, of training plans or of deployments; a limit of 0 is none.

    Without an `objective` the shortest step is sought, of deployments the most tokens a second and device. Plans are
    proposed that fit with a chance of at least `risk`. `max_run_seconds` and `max_usd` are of the job's token budget,
    of deployments `max_usd` is of a million output tokens and `min_tokens_per_second` of all devices; `min_free_bytes`
    stay free on the fullest device. With `explore` layouts are tried too that the framework cannot launch.

    >>> SearchOptions(objective="days", max_usd=2e6).top
    10
    """

    objective: str = ""
    top: int = 10
    risk: float = WANTED_CHANCE
    prune: bool = True
    stack: Stack | str = "megatron"
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    overlap: bool = True
    explore: bool = False
    rows: int = ROWS
    max_step_seconds: float = 0.0
    max_run_seconds: float = 0.0
    max_usd: float = 0.0
    min_free_bytes: float = 0.0
    max_ttft_seconds: float = 0.0
    max_tpot_seconds: float = 0.0
    max_latency_seconds: float = 0.0
    min_tokens_per_second: float = 0.0

    def sought(self, usual: str) -> SearchOptions:
        """Return the options with the usual objective where none is named."""
        return replace(self, objective=self.objective or usual)

    @property
    def headline(self) -> str:
        """The headline of a training plan that the objective is; empty where it is exact."""
        return _HEADLINES.get(self.objective, "step_seconds")

    @property
    def serving_headline(self) -> str:
        """The headline of a deployment that the objective is; empty where it is exact."""
        return _SERVING_HEADLINES.get(self.objective, "request_seconds")

    def harmless(self, deployments: Any) -> Any:
        """Return which deployments fit with the chance asked, within the limits that a larger batch makes harder."""
        fits = deployments.fits_at_risk
        for limit in SERVING_LIMITS:
            if limit.grows and getattr(self, limit.field):
                fits = fits & (limit.ratio(deployments, self) <= 1)
        return fits

    def _common(self, objectives: dict[str, Any], limits: tuple[str, ...]) -> Problems:
        """Return what is wrong with the objective, the risk and limits that are asked of the wrong kind of search."""
        problems = Problems()
        if self.objective not in ("", *objectives):
            problems.add("objective", self.objective, "is not an objective", "use one of " + ", ".join(objectives))
        if not 0 < self.risk < 1:
            problems.add("risk", self.risk, "must be a chance between 0 and 1", "use for example 90%")
        if not self.top >= 1:
            problems.add("top", self.top, "must be a number above 0", "use for example 10")
        for name in dict.fromkeys((*TRAIN_LIMITS, *_SERVING)):
            value = getattr(self, name)
            if not value >= 0:
                problems.add(name, value, "must not be negative", "leave it out for no limit")
            elif value and name not in limits:
                kind = "deployments" if name in _SERVING else "training plans"
                problems.add(name, value, f"is a limit on {kind}", "leave it out")
        return problems

    def training_problems(self, cluster: Cluster, job: Training) -> tuple[Problem, ...]:
        """Return what is wrong with the options for a training job on a cluster."""
        problems = self._common(OBJECTIVES, tuple(TRAIN_LIMITS))
        for name in ("max_run_seconds", "max_usd"):
            if getattr(self, name) and not job.token_budget:
                problems.add(name, getattr(self, name), "needs the tokens of the run", "give for example --tokens 2T")
        if self.max_usd and cluster.usd_per_device_hour is None:
            problems.add("max_usd", self.max_usd, "needs a price of the device", "give for example --price 2.5")
        limit = cluster.device.usable_memory_bytes
        if self.min_free_bytes >= limit:
            rule = f"is all that a device has, {show_bytes(limit)} to use"
            remedy = f"use less than {show_bytes(limit)}"
            problems.add("min_free_bytes", show_bytes(self.min_free_bytes), rule, remedy)
        return tuple(problems.items)

    def serving_problems(self, price: float | None, generates: bool) -> tuple[Problem, ...]:
        """Return what is wrong with the options where a device costs so much an hour, None where it is not known.

        Where no tokens are generated there is no time between them.
        """
        problems = self._common(SERVING_OBJECTIVES, _SERVING)
        if self.objective == "tpot" and not generates:
            rule = "is the time between output tokens, and none are generated"
            problems.add("objective", "tpot", rule, "use latency or throughput")
        if self.max_usd and price is None:
            problems.add("max_usd", self.max_usd, "needs a price of the device", "give for example --price 2.5")
        return tuple(problems.items)
