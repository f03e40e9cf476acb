"""Measure a machine with PyTorch, a GPU or a plain CPU, and write rows that `shardwise validate` reads.

`python -m accuracy.measuring FOLDER` measures matrix products, attention, kernels that move bytes, experts, whole
training steps (seconds and peaks of memory) and static inference; `--only products,steps` takes some of them, `--quick`
tiny sizes. The files FOLDER/*_own.csv have the columns of docs/own-runs.md and accuracy/notes/calibration.md; each
row carries the spread of its repeats. accuracy/notes/measuring.md tells what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

PARTS = ("products", "attention", "streams", "experts", "steps", "memory", "inference")


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the files")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether the script runs here")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to measure, of {', '.join(PARTS)}")
    parser.add_argument("--name", default="", help="what the processor is, where it does not tell its full name")
    parser.add_argument("--key", default="", help="name of the device in the rows, such as one of the catalogue")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved repeats of kernels")
    parser.add_argument("--fit", metavar="KEY", help="measure nothing: fit cost/cpu.toml for that device")
    parser.add_argument("--share", default="", metavar="I/N", help="every N-th case of each part, from I")
    return parser.parse_args()


def main() -> int:
    """Measure the parts and write their files."""
    given = arguments()
    if given.fit:
        from accuracy.measuring.fit import main as fit

        fit(given.folder, given.fit)
        return 0
    # Threads of OpenMP that sleep between kernels come back late on a machine where others run too.
    os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
    import torch

    from accuracy.measuring import parts
    from accuracy.measuring.tables import Tables
    from shardwise.measuring import Clock, describe

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine, tables = describe(device, given.name, given.key), Tables()
    print(f"# {machine.key}: {machine.full_name}, {machine.cores} cores, {machine.threads} threads, "
          f"{machine.memory_bytes / 2**30:.1f} GiB, torch {machine.torch_version}")  # fmt: skip
    clock = Clock(device=device, rounds=2 if given.quick else given.rounds)
    first, step = map(int, (given.share or "0/1").split("/"))
    bench = parts.Bench(machine, tables, clock, parts.peaks_of(machine.key), given.quick, slice(first, None, step))
    every: dict[str, Callable[[], str]] = {
        "products": bench.products, "attention": bench.attention, "streams": bench.streams, "experts": bench.experts,
        "steps": bench.steps, "memory": bench.memory, "inference": bench.inference,
    }  # fmt: skip
    for word in given.only.split(","):
        began = time.perf_counter()
        print(f"{word}: {every[word]()} ({time.perf_counter() - began:.0f} s)", flush=True)
        tables.write(given.folder)
    print(*tables.write(given.folder), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
