"""Print what it costs to have shardwise and to ask it questions, each beside its limit; exit 1 where one is broken.

    python benchmarks/startup.py [--here]

The base install goes to a fresh virtual environment in a temporary folder, from the index that pip is configured for,
and every process is timed there. `--here` times the interpreter that runs this program and measures no install.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
QUESTION = (
    *("train", "llama-3.1-70b", "--on", "64xh100-sxm-80gb", "--tp", "8", "--pp", "2", "--seq-len", "8192"),
    *("--global-batch", "256", "--sharding", "distributed-optimizer", "--recompute", "selective"),
)
NOT_OURS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")
RUNS = 9


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measured number, its unit and its limit (0: none)."""

    name: str
    value: float
    unit: str
    limit: float = 0.0

    @property
    def broken(self) -> bool:
        """Whether the number is over its limit."""
        return bool(self.limit) and self.value > self.limit

    def __str__(self) -> str:
        limit = f"limit {self.limit:g} {self.unit}" if self.limit else "no limit"
        return f"{self.name:<34}{self.value:>12,.3f} {self.unit:<10} {limit}{'  BROKEN' if self.broken else ''}"


def fresh_interpreter(folder: Path) -> tuple[Path, Path]:
    """Make a virtual environment with shardwise and what it declares; return its interpreter and its packages."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", str(ROOT)], check=True)
    packages = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", packages], capture_output=True, text=True, check=True).stdout.strip()
    return python, Path(found)


def megabytes(packages: Path) -> float:
    """Return the size of installed packages in MB, without pip's own and without compiled copies."""
    ours = (p for p in packages.iterdir() if not p.name.startswith(NOT_OURS))
    files = itertools.chain.from_iterable([p] if p.is_file() else p.rglob("*") for p in ours)
    return sum(f.stat().st_size for f in files if f.is_file() and f.suffix != ".pyc") / 1e6


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Return the median seconds of a process and of its processor time, after one run that fills caches.

    Where the two differ by much, the machine was busy with something else.
    """
    taken, worked = [], []
    for _ in range(RUNS + 1):
        start, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
        after = os.times()
        worked.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return median(taken[1:]), median(worked[1:])


def import_seconds(python: Path) -> float:
    """Return the median seconds of the statement `import shardwise` in new processes."""
    program = "import time; t = time.perf_counter(); import shardwise; print(time.perf_counter() - t)"
    taken = [
        float(subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(RUNS + 1)
    ]
    return median(taken[1:])


def repeated_seconds(call: Callable[[], object], times: int = 30) -> float:
    """Return the median processor seconds of a call in this process, after one that loads what it needs."""
    taken = []
    for _ in range(times + 1):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return median(taken[1:])


def in_process() -> Iterator[Line]:
    """Yield the processor time of one plan, of one deployment and of a frame of plans, in this process."""
    from shardwise import Cluster, Model, Plan, Serving, Training, frame, infer, train

    model, cluster = Model.load("llama-3.1-70b"), Cluster.parse("64xh100-sxm-80gb")
    job = Training(seq_len=4096, global_batch=256)
    plan = Plan(tp=8, pp=2, dp=4)
    one = repeated_seconds(lambda: train(model, cluster, plan, job).step_seconds)
    yield Line(name="one plan, in process", value=one * 1e3, unit="ms")
    small, node = Model.load("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    request = Serving(batch=16, input_tokens=1024, output_tokens=256)
    served = repeated_seconds(lambda: infer(small, node, Plan(tp=8), request).request_seconds, 100)
    yield Line(name="one deployment, in process", value=served * 1e3, unit="ms", limit=2)
    # 14,928 plans: every legal one of Llama 3.1 8B on two nodes.
    two, job = Cluster.parse("16xh100-sxm-80gb"), Training(seq_len=8192, global_batch=64)
    plans, framed = len(frame(small, two, job)), repeated_seconds(lambda: frame(small, two, job), 9)
    yield Line(name="10,000 plans as a frame", value=framed / plans * 1e4, unit="s", limit=0.2)
    yield Line(name="the same by `train`, one by one", value=one / (framed / plans), unit="times")


def measured(here: bool) -> Iterator[Line]:
    """Yield every measurement."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(sys.executable)
        if not here:
            python, packages = fresh_interpreter(Path(folder) / "base")
            declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
            print("base install: shardwise,", ", ".join(declared))
            yield Line(name="base install", value=megabytes(packages), unit="MB", limit=110)
        yield Line(name="import shardwise", value=import_seconds(python), unit="s", limit=0.15)
        command = [str(python), "-m", "shardwise", *QUESTION]
        whole, worked = seconds_of(command)
        yield Line(name="shardwise train, whole process", value=whole, unit="s", limit=0.4)
        yield Line(name="shardwise train, processor time", value=worked, unit="s")
    yield from in_process()


def main() -> int:
    """Print every line and return 1 where a limit is broken."""
    broken = False
    for line in measured("--here" in sys.argv[1:]):
        print(line, flush=True)
        broken |= line.broken
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
