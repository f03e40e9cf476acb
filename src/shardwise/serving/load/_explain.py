"""Numbers of the closed form of a deployment under load, opened down to the operators of each step's price.

They are means in steady state. Percentiles are simulated request by request: no formula opens them, their seconds by
cause are `ServeReport.why`.
"""

from __future__ import annotations

from typing import cast

from shardwise.errors import Problems
from shardwise.ledger.opened import opening
from shardwise.ledger.traced import Traced, named
from shardwise.records import replace
from shardwise.serving.load._fleet import Pool
from shardwise.serving.load._forms import replicas_of
from shardwise.serving.load._report import ServeReport

_LATENCIES = {f"{name}": f"{name}_seconds" for name in ("ttft", "tpot", "e2e")}
OPENED = {"utilization": "utilisation", "capacity": "capacity", **_LATENCIES}
"""What opens, and its name in the closed form."""


def explain(report: ServeReport, what: str = "tpot") -> Traced:
    """Return a number of the closed form that opens: means of a request, or what all replicas carry; see `OPENED`.

    >>> from shardwise.hardware import Cluster
    >>> from shardwise.models import load_model
    >>> from shardwise.plans import Arrivals, Length, Plan, Workload
    >>> from shardwise.serving.load import serve
    >>> asked = Workload(
    ...     input_tokens=Length(mean=500), output_tokens=Length(mean=100), arrivals=Arrivals(rate=4), count=100
    ... )
    >>> report = serve(load_model("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), asked)
    >>> [part.label for part in explain(report, "tpot").contributions][:2]
    ['own decode steps', 'prompts of others']
    """
    problems, arrivals = Problems(), report.workload.arrivals
    if what not in OPENED:
        problems.add("explain", what, "is not a number that can be explained", "use one of " + ", ".join(OPENED))
    elif what != "capacity" and arrivals.kind in ("closed", "burst"):
        rule = "is of requests that arrive at a rate, and these have none"
        problems.add("explain", what, rule, "give --rate, or explain capacity")
    elif not report.fits:
        rule = "is of a deployment that does not fit"
        problems.add("explain", what, rule, "ask without --explain for what would fit")
    elif what in _LATENCIES and not report.steady.stable:
        rule = f"grows without end: {report.steady.capacity * report.base.plan.dp:.4g} requests/s are carried"
        problems.add("explain", what, rule, "explain utilization, or lower the rate")
    problems.raise_if_any()
    fleet = report.fleet
    with opening():
        fleet = replace(fleet, decode=_open(fleet.decode), prefill=fleet.prefill and _open(fleet.prefill))
        number = getattr(fleet.at(report.steady.rate * report.base.plan.dp), OPENED[what])
        number = fleet.decode.many * number if what == "capacity" and fleet.decode.many > 1 else number
    return cast(Traced, named(number, what))


def _open(pool: Pool) -> Pool:
    """Return a pool whose prices open."""
    form = pool.form
    return replace(pool, form=replicas_of(pool.base.case, pool.policy, form.moments, pool.cache_tokens, form.at_once))
