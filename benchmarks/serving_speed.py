"""Print how fast serving under load is, each figure beside its limit; exit 1 where one is broken.

    python benchmarks/serving_speed.py [--runs 3]

Seconds are user CPU of one core, the least of some runs, which other work on the machine hardly changes. Ratios are
over the seconds of a fixed loop of Python on the same core in the same run, so that machines can be compared.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from startup import Line

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Limit, Plan, Workload
from shardwise.search import IntRanges, LoadSpace
from shardwise.search._load_front import front_of
from shardwise.search._load_groups import LoadSearch
from shardwise.search._load_pools import candidates
from shardwise.search._load_rejected import rejected_of
from shardwise.search._options import SearchOptions
from shardwise.search._serving_grid import ServingGrid
from shardwise.serving import ServingOptions
from shardwise.serving.load import LoadOptions, ServeReport, StepTable, serve
from shardwise.serving.load._fleet import requests_of
from shardwise.serving.load._replica import Replica

COUNT = 20_000
COMMAND = (
    *("serve", "llama-3.1-70b", "--on", "8xh100-sxm-80gb", "--tp", "4", "--rate", "5/s", "--input-tokens", "2000"),
    *("--output-tokens", "300", "--p99-ttft", "1s", "--p99-tpot", "50ms"),
)
ASKED = Workload(
    input_tokens=Length(mean=2000), output_tokens=Length(mean=300), arrivals=Arrivals(rate=3.5), count=COUNT
)
LIMITS = (Limit(metric="ttft", quantile="p99", seconds=1.0), Limit(metric="tpot", quantile="p99", seconds=0.05))


def least(runs: int, work: Callable[[], object]) -> float:
    """Return the fewest seconds of CPU that some work took."""
    found = []
    for _ in range(runs):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def loop() -> int:
    """Do a fixed piece of Python: what one second of a core is worth."""
    total = 0
    for number in range(3_000_000):
        total += number & 7
    return total


def one_replica() -> ServeReport:
    """Return Llama-3.1-70B on four H100 with the defaults of vLLM."""
    asked = replace(ASKED, count=1)
    return serve(load_model("llama-3.1-70b"), Cluster.parse("4xh100-sxm-80gb"), Plan(tp=4), asked)


def simulated(report: ServeReport) -> None:
    """Simulate the requests on one replica, at 70 % of what it carries."""
    Replica(report.fleet.decode.table, report.policy, float(report.base.kv_cache_tokens)).run(requests_of(ASKED, COUNT))


def tabled(report: ServeReport) -> None:
    """Make the table of steps of one replica."""
    StepTable(report.base.case, report.policy.max_sequences, report.policy.step_tokens, 2300)


def searched() -> int:
    """Answer the layouts of DeepSeek-V3 under a load by the closed form, with limits and front; return how many."""
    space, cluster = LoadSpace(), Cluster.parse("1024xh100-sxm-80gb")
    options, asked = LoadOptions(limits=LIMITS, serving=ServingOptions()), replace(ASKED, arrivals=Arrivals(rate=50.0))
    report = one_replica()
    grid = ServingGrid(
        model=load_model("deepseek-v3"), cluster=Cluster.parse("64xh100-sxm-80gb"), job=report.base.job,
        space=replace(space.layouts, dp=IntRanges(ranges=((1, 1),))),
        options=SearchOptions(efficiencies=options.serving.efficiencies),
    )  # fmt: skip
    found = LoadSearch(
        grid=grid, space=space, workload=asked, options=options, objective="devices", cluster=cluster
    )  # fmt: skip
    list(candidates(found))
    front_of(found)
    rejected_of(found, 0, answered=True, wider=(0, 0))
    return sum(len(group.plans) + group.short for group in found.groups)


SEARCH = (
    *("plan", "serve", "llama-3.1-70b", "--on", "h100", "--rate", "50/s", "--input-tokens", "2000"),
    *("--output-tokens", "300", "--p99-ttft", "1s", "--p99-tpot", "50ms"),
)


def commanded(words: tuple[str, ...]) -> None:
    """Ask the command line, bytecode compiled."""
    told = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-m", "shardwise", *words], check=True, env=told, stdout=subprocess.DEVNULL)


def command_seconds(runs: int, words: tuple[str, ...]) -> float:
    """Return the fewest seconds of user CPU of a whole command."""
    found = []
    for _ in range(runs + 1):  # the first may compile
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        commanded(words)
        found.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start)
    return min(found)


def main() -> int:
    """Print every figure; return 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    fixed, report = least(runs, loop), one_replica()
    requests, table = least(runs, lambda: simulated(report)), least(runs, lambda: tabled(report))
    layouts = searched()
    search = least(runs, searched)
    lines = [
        Line(name="50,000 simulated requests", value=requests / COUNT * 50_000, unit="s", limit=1.0),
        Line(name="step table", value=1e3 * table, unit="ms", limit=20.0),
        Line(name="1,000 layouts by the closed form", value=search / layouts * 1000, unit="s", limit=2.0),
        Line(name="serve, the whole command", value=command_seconds(runs, COMMAND), unit="s", limit=0.6),
        Line(name="plan serve, the whole command", value=command_seconds(runs, SEARCH), unit="s", limit=3.0),
        Line(name="a fixed loop of Python", value=fixed, unit="s"),
        Line(name="requests simulated in the loop's time", value=COUNT / requests * fixed, unit=""),
        Line(name="layouts answered in the loop's time", value=layouts / search * fixed, unit=""),
    ]
    print(*lines, sep="\n")
    return int(any(line.broken for line in lines))


if __name__ == "__main__":
    sys.exit(main())
