"""Run the tests on each Python that pyproject.toml supports and this machine has, and on the least versions it allows.

`python scripts/versions.py` asks every interpreter python3.11 to python3.13 that is found; `--tests` says which tests.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
TESTS = "tests/answers tests/formats tests/shell tests/test_files.py tests/test_public.py src/shardwise/units.py"


def least() -> list[str]:
    """Return the least version of each dependency of the base install and of plots, as pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["plots"]]
    return [re.sub(r">=", "==", one) for one in wanted]


def found(version: str) -> str:
    """Return the interpreter of a version, empty where there is none that runs."""
    name = f"python{version}"
    try:
        asked = subprocess.run(
            [name, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def tried(python: str, pins: list[str], tests: list[str]) -> bool:
    """Return whether the tests pass in a new environment of an interpreter with these pins."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inner = str(Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python")
        subprocess.run([inner, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]", *pins], check=True)
        return subprocess.run([inner, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode == 0


def main() -> int:
    """Print a line for each interpreter and for the least versions; return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", default=TESTS)
    tests = parser.parse_args().tests.split()
    rounds = [(version, []) for version in PYTHONS] + [(PYTHONS[0], least())]
    failed = 0
    for version, pins in rounds:
        python, what = found(version), f"Python {version} {' '.join(pins) or 'with the newest versions'}"
        if not python:
            print(f"not here: {what}", flush=True)
            continue
        passes = tried(python, pins, tests)
        failed += not passes
        print(f"{'passes' if passes else 'FAILS'}: {what}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
