"""What `sweep` takes on processes and on Ray, in turn, and beside the same searches one by one in this process.

    python benchmarks/studies.py
    python benchmarks/studies.py --batches 1 --bandwidths 3 --rounds 3

A study of two models, five clusters, memory bandwidths and batches. Seconds on the clock mean something on an otherwise
idle machine; CPU seconds, of all processes that a command starts, change less with other work. The tables of all runs
must be the same to the byte. Reads /proc: for Linux.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from shardwise.answers._sweep import read_study, rows_of

STUDY = """
task = "train"
[fixed]
seq_len = 4096
[grid]
model = ["llama-3.1-70b", "mixtral-8x7b"]
on = ["64xh100-sxm-80gb", "128xh100-sxm-80gb", "256xh100-sxm-80gb", "64xb200-sxm-180gb", "128xb200-sxm-180gb"]
"""
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run each engine in turn and print the table."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--bandwidths", type=int, default=12, help="memory bandwidths to ask for")
    ask.add_argument("--batches", type=int, default=4, help="global batches to ask for")
    ask.add_argument("--rounds", type=int, default=2)
    ask.add_argument("--workers", type=int, default=2)
    given = ask.parse_args()
    engines = ["processes", *(["ray"] if find_spec("ray") else [])]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDWISE_CACHE"] = os.path.join(folder, "kept")
        study = Path(folder, "study.toml")
        rates = [f"{3 + i / 4:g}TB/s" for i in range(given.bandwidths)]
        batches = [256 << i for i in range(given.batches)]
        study.write_text(f"{STUDY}memory_bandwidth = {rates}\nglobal_batch = {batches}\n".replace("'", '"'))
        _one_by_one(study)  # keeps the formulas, which the first to be measured would record otherwise
        measured: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
        tables = set()
        for one in range(given.rounds):
            for engine in engines:
                out = Path(folder, f"{engine}-{one}")
                measured[engine].append(_timed(study, out, engine, given.workers))
                tables.add(b"".join(path.read_bytes() for path in sorted(out.glob("*.parquet"))))
        alone = _one_by_one(study)
    if len(tables) > 1:
        raise SystemExit("the tables differ")
    _print(alone, measured)


def _print(alone: float, measured: dict[str, list[tuple[float, float]]]) -> None:
    print("| | seconds on the clock | CPU seconds |\n|---|---|---|")
    print(f"| searches one by one | | {alone:.1f} |")
    for engine, runs in measured.items():
        clock, cpu = zip(*runs, strict=True)
        print(f"| {engine} | {', '.join(f'{s:.1f}' for s in clock)} | {', '.join(f'{s:.1f}' for s in cpu)} |")
    if "ray" in measured:
        first, other = ([median(of) for of in zip(*measured[one], strict=True)] for one in ("processes", "ray"))
        clock, cpu = (first[i] / other[i] for i in (0, 1))
        print(f"\nRay has {clock:.2f} of the rate of processes on the clock, {cpu:.2f} by CPU.")


def _one_by_one(study: Path) -> float:
    """Return the CPU seconds of the searches of a study in this process."""
    task, top, questions = read_study(str(study))
    start = time.process_time()
    for values in questions:
        rows_of((task, top), values)
    return time.process_time() - start


def _timed(study: Path, out: Path, engine: str, workers: int) -> tuple[float, float]:
    """Return the seconds on the clock and the CPU seconds of a command and all that it starts."""
    words = [sys.executable, "-m", "shardwise", "sweep", str(study), "--out", str(out)]
    cpu: dict[tuple[int, str], float] = {}
    start = time.perf_counter()
    words += ["--engine", engine, "--workers", str(workers)]
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while command.poll() is None:
        cpu.update(_cpu_of(command.pid))
        time.sleep(0.1)
    if command.returncode:
        raise SystemExit(f"{engine}: exit status {command.returncode}")
    return time.perf_counter() - start, sum(cpu.values())


def _cpu_of(root: int) -> Iterator[tuple[tuple[int, str], float]]:
    """Yield each process that comes from another one, known by its number and start, with its CPU seconds so far."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
    for pid, fields in stats.items():
        parent = pid
        while parent in stats and parent != root:
            parent = int(stats[parent][1])
        if parent == root:
            yield (pid, fields[19]), (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
