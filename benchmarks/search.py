"""How fast the search is: GPT-3 175B on 4,096 A100-80GB at a global batch of 3,072, or another case.

    python benchmarks/search.py                     the whole space, pruned, ranked
    python benchmarks/search.py --no-prune --seconds 60     sustained rate: memory and time of every legal plan
    python benchmarks/search.py --space classic     tp, sp, pp, vpp, dp, micro-batch, recompute, sharding; one placement

Prints plans by what became of them, seconds from parsed input to ranked answer, the rate, peak memory, and the
physical limit: bytes that a plan must move over the measured bandwidth of this machine's memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Training
from shardwise.search import Here, Processes, Space, Wholes, Wish, searched, work_of
from shardwise.search._rows import case_for
from shardwise.search._tables import mapped, spans_of, tabulate

CLASSIC = Space(layout=("1d",), cp=Wholes(((1, 1),)), orders=(("tp", "tp2", "cp", "dp", "pp"),))


def memory_bandwidth() -> float:
    """Return bytes a second that one core reads and writes, the best of five copies of 256 MiB."""
    source, target = np.ones(2**25), np.empty(2**25)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def bytes_a_plan(work: Any) -> float:
    """Return bytes that a plan must move: its blocks read once for all compositions that share them, two results."""
    rows = work.rows
    start, end = rows.chunks(20_000)[-1]
    base = {c: v[start:end] for c, v in rows.base.items()}
    columns = rows.expand(base, rows.court())
    case = case_for(rows.case, pp=int(base["pp"][0]), vpp=1)
    tables = tabulate(case, rows.space, columns, spans_of(columns, rows.space, case.domains))
    sizes: list[int] = []
    mapped(tables.rows(np.arange(len(columns["tp"]))).parts, lambda v: sizes.append(getattr(v, "nbytes", 0)))
    cells = len(columns["tp"]) * len(rows.space.recompute)
    sharing = len(rows.compositions(int(base["pp"][0]))) * len(rows.space.sharding)
    return sum(sizes) / cells / sharing + 16


def main() -> None:
    """Run one search and print its figures."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--model", default="gpt3-175b")
    ask.add_argument("--on", default="4096xa100-sxm-80gb")
    ask.add_argument("--seq-len", type=int, default=2048)
    ask.add_argument("--global-batch", type=int, default=3072)
    ask.add_argument("--space", choices=("whole", "classic"), default="whole")
    ask.add_argument("--no-prune", action="store_true")
    ask.add_argument("--seconds", type=float, default=0.0, help="stop after so long, in a shuffled order of parts")
    ask.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = ask.parse_args()
    model, cluster = load_model(given.model), Cluster.parse(given.on)
    job = Training(seq_len=given.seq_len, global_batch=given.global_batch)
    space = CLASSIC if given.space == "classic" else Space()
    start = time.perf_counter()
    work = work_of(model, cluster, job, space, replace(Wish(), prune=not given.no_prune))

    def stop(tally: Any, share: float) -> None:
        if given.seconds and time.perf_counter() - start > given.seconds:
            raise KeyboardInterrupt

    if given.seconds:
        parts = work.rows.chunks(work.wish.rows)
        Random(0).shuffle(parts)
        object.__setattr__(work.rows, "chunks", lambda most: parts)
    engine = Here() if given.workers == 1 else Processes(given.workers)
    found = searched(work, engine, stop)
    seconds, counts = time.perf_counter() - start, found.counts
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(u.ru_utime + u.ru_stime for u in usage)
    peak = [resource.getrusage(w).ru_maxrss / 2**20 for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    rate = memory_bandwidth()
    moved = bytes_a_plan(work_of(model, cluster, job, space, None))
    print(f"{given.model} on {given.on}, {given.workers} workers, pruning {'off' if given.no_prune else 'on'}")
    print(f"plans of the space   {found.num_plans:>15,}   covered {found.covered:.1%}")
    print(f"legal                {counts.legal:>15,}")
    print(f"fitting              {counts.fitting:>15,}")
    print(f"memory and time      {counts.evaluated:>15,}")
    print(f"seconds              {seconds:>15.2f}   load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"legal plans a second {counts.legal / seconds:>15,.0f}   timed {counts.evaluated / seconds:,.0f}")
    print(f"of one core's time   {counts.legal / busy:>15,.0f}   timed {counts.evaluated / busy:,.0f}, {busy:.1f} s")
    print(f"peak memory          {peak[0]:>11.2f} GiB   largest worker {peak[1]:.2f} GiB")
    print(
        f"physical limit       {rate / moved:>15,.0f}   a second and core: {moved:.0f} bytes at {rate / 1e9:.1f} GB/s"
    )
    if found.best:
        print(f"best                 {found.best[0].step_seconds:>13.3f} s   {found.best[0].plan}")


if __name__ == "__main__":
    main()
