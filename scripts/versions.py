"""Run tests on each Python that pyproject.toml names, and on the least versions of the dependencies that it allows.

Interpreters are those of the path and of pyenv; one that is missing is fetched by uv, in an environment of its own.
`python scripts/versions.py` takes some minutes; `--tests` says which tests, `--python 3.13` which versions. `--parse`
takes seconds: interpreters that are here compile every file without a warning, and nothing is installed.
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
TESTS = (
    "tests/test_whole_answers.py tests/test_public.py tests/test_files.py tests/formats tests/shell tests/fuzz"
    " src/shardwise tests/answers/test_command_line.py tests/answers/test_bad_input.py tests/answers/test_streams.py"
)
NEEDED = ("pytest", "pytest-xdist", "hypothesis", "matplotlib")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pythons() -> list[str]:
    """Return the versions of Python that the project says it runs on."""
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in PROJECT["classifiers"])
    return [one[1] for one in found if one]


def least() -> list[str]:
    """Return the least version of each dependency of the base install and of plots, as pins."""
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["plots"]]
    return [re.sub(r">=", "==", one) for one in wanted]


def here(version: str) -> str:
    """Return an interpreter of a version that runs, the path's or pyenv's; empty for none."""
    own = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    said = (_said(name, "-c", "import sys; print(sys.executable)") for name in (f"python{version}", *map(str, own)))
    return next(filter(None, said), "")


def found(version: str) -> str:
    """Return an interpreter of a version: one that is here, or that uv fetches; empty for none."""
    if python := here(version):
        return python
    with tempfile.TemporaryDirectory() as folder:
        uv = str(_environment(sys.executable, folder, "uv").with_name("uv"))
        return _said(uv, "python", "find", version) if _said(uv, "python", "install", version) is not None else ""


def _said(*command: str) -> str | None:
    """Return what a command prints, None where it does not run or fails."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def _environment(python: str, folder: str, *packages: str) -> Path:
    """Return the interpreter of a new environment with some packages."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    inner = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([inner, "-m", "pip", "install", "-q", *packages], check=True)
    return inner


def tried(python: str, pins: list[str], tests: list[str]) -> bool:
    """Return whether the tests pass in a new environment of an interpreter with these pins."""
    with tempfile.TemporaryDirectory() as folder:
        inner = _environment(python, folder, "-e", str(ROOT), *NEEDED, *pins)
        return (
            subprocess.run([inner, "-m", "pytest", "-q", "-n", "auto", *tests], cwd=ROOT, check=False).returncode == 0
        )


def parses(version: str) -> bool:
    """Return whether an interpreter that is here compiles every file without a warning; print what it is."""
    files = "[*pathlib.Path('src').rglob('*.py'), *pathlib.Path('accuracy').rglob('*.py')]"
    code = f"import pathlib; [compile(p.read_bytes(), str(p), 'exec') for p in {files}]"
    python = here(version)
    passes = not python or subprocess.run([python, "-W", "error", "-c", code], cwd=ROOT, check=False).returncode == 0
    print(f"{'not here' if not python else 'compiles' if passes else 'DOES NOT COMPILE'}: Python {version}", flush=True)
    return passes


def main() -> int:
    """Print a line for each interpreter and for the least versions; return 1 where one fails or is not to be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--python", nargs="*", default=pythons())
    parser.add_argument("--parse", action="store_true")
    asked = parser.parse_args()
    if asked.parse:
        return 0 if all([parses(version) for version in asked.python]) else 1
    rounds: list[tuple[str, list[str]]] = [(version, []) for version in asked.python]
    failed = 0
    for version, pins in [*rounds, (pythons()[0], least())]:
        python, what = found(version), f"Python {version} {' '.join(pins) or 'with the newest versions'}"
        passes = bool(python) and tried(python, pins, asked.tests.split())
        failed += not passes
        print(f"{'passes' if passes else 'FAILS' if python else 'NOT HERE'}: {what}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
