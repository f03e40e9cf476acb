"""CPU seconds of one answer of `train` in process, page or JSON: `python benchmarks/answers.py [TIMES]`.

The best of so many times of each question, in milliseconds, on the machine that runs it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time

from shardwise.cli import main

BASE = "train llama-3.1-8b --on 8xh100-sxm-80gb --seq-len 4096 --global-batch 128"
QUESTIONS = {
    "fits": "--tp 8 --micro-batch 1",
    "fits, JSON": "--tp 8 --micro-batch 1 --json",
    "fits, micro-batch left out": "--tp 8",
    "does not fit": "--micro-batch 1",
    "does not fit, JSON": "--micro-batch 1 --json",
}


def cpu_seconds(words: str, times: int) -> float:
    """Return the CPU seconds of the quickest of so many answers."""
    spent = []
    for _ in range(times + 1):
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            main([*BASE.split(), *words.split()])
        spent.append(time.process_time() - start)
    return min(spent[1:])


if __name__ == "__main__":
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for name, words in QUESTIONS.items():
        print(f"{name:<28}{1e3 * cpu_seconds(words, times):8.1f} ms")
