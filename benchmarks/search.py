"""How fast the search is: GPT-3 175B on 4,096 A100-80GB at a global batch of 3,072, beside two published searches.

    python benchmarks/search.py
    python benchmarks/search.py --calculon CHECKOUT --estimates CHECKOUT --python INTERPRETER
    python benchmarks/search.py --commands

With `--commands`, user CPU of whole commands from words to page. Without:

First the whole space, pruned by proven bounds and ranked; then, with pruning off, memory and time of every plan of
random parts of it, `--share` of them but one at least; then the peers, given checkouts of their repositories and an
interpreter that has what they need (`search_peers`). Rates are of all cores, and of one core's time, which other work
on the machine does not change. The physical limit is the bytes that a plan must move over the measured bandwidth of
memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import search_peers as peers

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Training
from shardwise.search import (
    IntRanges,
    ProcessExecutor,
    SearchOptions,
    SearchSpace,
    SerialExecutor,
    TrainingResult,
    searched,
    work_of,
)

# What users ask, by name: the words of the command.
COMMANDS = {
    "Llama-8B, 8 H100": "plan train llama-3.1-8b --on 8xh100-sxm-80gb --seq-len 4096 --global-batch 128",
    "Mixtral, 64 H100": "plan train mixtral-8x7b --on 64xh100-sxm-80gb --seq-len 4096 --global-batch 1024",
    "Qwen3-235B, 512 B200": "plan train qwen3-235b-a22b --on 512xb200-sxm-180gb --seq-len 4096 --global-batch 4096",
    "GPT-3, 4,096 A100": "plan train gpt3-175b --on 4096xa100-sxm-80gb --seq-len 2048 --global-batch 3072",
    "Llama-405B, 16,384 H100": "plan train llama-3.1-405b --on 16384xh100-sxm-80gb --seq-len 8192 --global-batch 2048",
    "Llama-405B, 1,048,576 H100": (
        "plan train llama-3.1-405b --on 1048576xh100-sxm-80gb --seq-len 8192 --global-batch 1048576"
    ),
    "DeepSeek-V3, 2,048 H800": "plan train deepseek-v3 --on 2048xh800-sxm-80gb --seq-len 4096 --global-batch 15360",
    "Kimi-K2, 64 x GB200 NVL72": "plan train kimi-k2 --on 64x72xgb200 --seq-len 4096 --global-batch 9216",
    "infer Llama-70B, 8 H100": (
        "plan infer llama-3.1-70b --on 8xh100-sxm-80gb --input-tokens 1024 --output-tokens 256 --weights bf16,fp8"
    ),
    "infer DeepSeek-V3, up to 64 H200": (
        "plan infer deepseek-v3 --on 64xh200-sxm-141gb --at-most --input-tokens 4000 --output-tokens 1000"
        " --max-ttft 5s --max-tpot 50ms"
    ),
}
# What Calculon searches too: no placements, no layout but 1d, optimizer sharded or not.
COMMON = SearchSpace(
    layout=("1d",),
    cp=IntRanges(((1, 1),)),
    schedule=("1f1b", "interleaved"),
    sharding=("none", "zero1"),
    recompute=("none", "attention", "full"),
    orders=(("tp", "tp2", "cp", "dp", "pp"),),
)
CLASSIC = SearchSpace(layout=("1d",), cp=IntRanges(((1, 1),)), orders=(("tp", "tp2", "cp", "dp", "pp"),))


def memory_bandwidth() -> float:
    """Return bytes a second that one core reads and writes, the best of five copies of 256 MiB."""
    source, target = np.ones(2**25), np.empty(2**25)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


@dataclass(frozen=True, slots=True)
class Run:
    """One search: its answer, seconds on the clock and of cores, how many parts were drawn, and of how many."""

    result: TrainingResult
    seconds: float
    busy: float
    drawn: int
    parts: int

    @property
    def tried_per_core_second(self) -> float:
        """Plans a second of one core, those that laws refuse included."""
        return self.num_plans / self.busy

    @property
    def num_plans(self) -> int:
        """Plans of the parts that were searched: those that fell to laws, and the legal ones."""
        return self.result.counts.legal + sum(self.result.partial.rejected.values())


def _busy() -> float:
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def run(case: tuple[Any, ...], space: SearchSpace, options: SearchOptions, workers: int, share: float = 1.0) -> Run:
    """Return one search from parsed input to ranked answer, of a share of the parts drawn at random."""
    start, before = time.perf_counter(), _busy()
    work = work_of(*case, space, options)
    some = parts = work.grid.chunks(options.rows)
    if share < 1:
        some = Random(0).sample(parts, max(1, round(share * len(parts))))
        object.__setattr__(work.grid, "chunks", lambda most: some)
    found = searched(work, SerialExecutor() if workers == 1 else ProcessExecutor(workers))
    _ = found.best
    return Run(found, time.perf_counter() - start, _busy() - before, len(some), len(parts))


def show(title: str, done: Run, workers: int) -> None:
    """Print the figures of one search."""
    found, counts = done.result, done.result.counts
    kib = [resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"\n{title}, {workers} workers")
    searched_parts = f"{done.num_plans:,} of them searched, in {done.drawn:,} of {done.parts:,} parts"
    print(f"plans of the space   {found.num_plans:>15,}   {searched_parts}")
    if not counts.legal:
        print("legal                           none   of the parts that were drawn: no rates; raise --share")
        return
    print(f"legal                {counts.legal:>15,}   {counts.legal / done.seconds:>13,.0f} a second")
    print(f"fitting              {counts.fitting:>15,}")
    print(f"left out by bounds   {max(counts.fitting - counts.evaluated, 0):>15,}")
    print(f"memory and time      {counts.evaluated:>15,}   {counts.evaluated / done.seconds:>13,.0f} a second")
    print(f"seconds              {done.seconds:>15.2f}   {done.busy:.2f} s of cores, load {os.getloadavg()[0]:.1f}")
    print(f"of one core's time   {counts.legal / done.busy:>15,.0f}   legal plans a second")
    print(f"peak memory          {kib[0] / 2**20:>11.2f} GiB   largest worker {kib[1] / 2**20:.2f} GiB")
    if found.best:
        print(f"best                 {found.best[0].step_seconds:>13.3f} s   {found.best[0].plan}")


def compare(whole: Run, each: Run, rates: list[peers.Rate]) -> None:
    """Print the rates of the peers, and how many times as fast the search is; all of one core."""
    ran = each.result.counts.evaluated / each.busy
    print("\nplans a second of one core: tried (what laws refuse included), and ran (memory and time computed)")
    print(f"{'':38}{'tried':>14}{'ran':>14}{'tried here':>14}{'ran here':>12}{'with bounds':>14}")
    print(f"{'shardwise, every plan':38}{each.tried_per_core_second:>14,.0f}{ran:>14,.0f}")
    print(f"{'shardwise, bounds':38}{whole.tried_per_core_second:>14,.0f}")
    for rate in rates:
        good = rate.good / rate.seconds
        times = (each.tried_per_core_second, ran, whole.tried_per_core_second)
        ratios = [a / b for a, b in zip(times, (rate.tried_per_second, good, rate.tried_per_second), strict=True)]
        print(
            f"{rate.name:38}{rate.tried_per_second:>14,.0f}{good:>14,.0f}"
            f"{ratios[0]:>13,.0f}x{ratios[1]:>11,.0f}x{ratios[2]:>13,.0f}x"
        )


def commands() -> None:
    """Print user CPU of whole commands, the least of five: formulas recorded anew, and kept by an earlier question.

    Modules are compiled as an install leaves them.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = env.get("PYTHONPYCACHEPREFIX", tempfile.mkdtemp())
    print(f"{'question':36}{'recorded':>10}{'kept':>8}   user s")
    with tempfile.TemporaryDirectory() as kept:
        for name, words in COMMANDS.items():
            times = [_user_seconds(words, {**env, "SHARDWISE_CACHE": folder}, 5) for folder in ("off", kept)]
            print(f"{name:36}{times[0]:>10.2f}{times[1]:>8.2f}   load {os.getloadavg()[0]:.1f}", flush=True)


def _user_seconds(words: str, env: dict[str, str], runs: int) -> float:
    """Return the least user CPU of a command, run so many times; the first one fills what is kept."""
    least = float("inf")
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([sys.executable, "-m", "shardwise", *words.split()], env=env, capture_output=True, check=True)
        least = min(least, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    return least


def common(case: tuple[Any, ...], rates: list[peers.Rate]) -> None:
    """Print the time to answer on the space that Calculon searches too, and its own."""
    done = run(case, COMMON, SearchOptions(explore=True), 1)
    print(f"\ntime to answer, one core: {done.result.num_plans:,} plans of a space that both search")
    print(f"{'shardwise':38}{done.busy:>14,.2f} s")
    for rate in rates:
        if rate.name.startswith("Calculon"):
            whole = rate.seconds / rate.share
            print(f"{rate.name:38}{whole:>14,.0f} s{whole / done.busy:>12,.0f}x")


def main() -> None:
    """Run the searches and print their figures."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--model", default="gpt3-175b")
    ask.add_argument("--on", default="4096xa100-sxm-80gb")
    ask.add_argument("--seq-len", type=int, default=2048)
    ask.add_argument("--global-batch", type=int, default=3072)
    ask.add_argument("--space", choices=("whole", "classic"), default="whole")
    ask.add_argument("--share", type=float, default=0.25, help="of the parts of the space to evaluate with pruning off")
    ask.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    ask.add_argument("--calculon", help="checkout of calculon-ai/calculon")
    ask.add_argument("--estimates", help="checkout of ShashankSubramanian/transformer-perf-estimates")
    ask.add_argument("--python", default="python3", help="interpreter with psutil, pandas before 3 and matplotlib")
    ask.add_argument("--commands", action="store_true", help="user CPU of whole commands instead")
    given = ask.parse_args()
    if given.commands:
        commands()
        return
    case = (
        load_model(given.model),
        Cluster.parse(given.on),
        Training(seq_len=given.seq_len, global_batch=given.global_batch),
    )
    space = CLASSIC if given.space == "classic" else SearchSpace()
    print(f"{given.model} on {given.on}, {given.global_batch} sequences of {given.seq_len}, {given.space} space")
    whole = run(case, space, SearchOptions(explore=True), given.workers)
    show("pruning on", whole, given.workers)
    each = run(case, space, replace(SearchOptions(explore=True), prune=False, rows=6000), given.workers, given.share)
    show("pruning off", each, given.workers)
    rate = memory_bandwidth()
    # Two results of 8 bytes are written and read once to be ranked; blocks that plans share stay in the cache.
    print(f"\nphysical limit       {rate / 32:>15,.0f}   plans a second and core: 32 bytes at {rate / 1e9:.1f} GB/s")
    rates = peers.calculon(given.calculon, given.python, 10) if given.calculon else []
    common(case, rates)
    rates += peers.estimates(given.estimates, given.python, 10) if given.estimates else []
    if rates and each.result.counts.legal:
        compare(whole, each, rates)


if __name__ == "__main__":
    main()
