"""Ask the command line random inputs: `python scripts/ask_random.py --count 100000 --seed 7`; 0 faults is status 0.

Memory is limited to 4 GiB, so that an input that wants more is told apart. What is wrong is printed with the number of
its input, and `--only NUMBER` asks that one again with its words and files shown.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fuzz.judge import judged


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


def main() -> int:
    """Print what is wrong and how many inputs of each kind were asked; return 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    _limit_memory()
    gc.set_threshold(50_000, 20, 50)  # an input makes little garbage beside what a process keeps
    numbers = (
        range(asked.only, asked.only + 1) if asked.only is not None else range(asked.first, asked.first + asked.count)
    )
    kinds: Counter[str] = Counter()
    faults = 0
    for number, kind, given, said in judged(asked.seed, numbers):
        kinds[kind] += 1
        if not kinds.total() % 1000:
            print(f"{kinds.total()} inputs, {faults} wrong", flush=True)
        if said or asked.only is not None:
            faults += bool(said)
            print(f"{number} {kind} {given.words!r:.300}: {said or 'nothing wrong'}", flush=True)
        if asked.only is not None:
            print(*(f"--- {name}\n{data.decode(errors='replace')}" for name, data in given.files.items()), sep="\n")
    said = ", ".join(f"{name} {count}" for name, count in sorted(kinds.items()))
    print(f"{datetime.date.today()}: seed {asked.seed}, {kinds.total()} inputs ({said}), {faults} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
