"""Build sdist and wheel of the last commit twice, in folders and environments of their own, and compare every byte."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def built(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that a checkout of the last commit builds."""
    source = folder / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "hatchling"], check=True)
    subprocess.run([python, "-m", "hatchling", "build", "-d", str(folder / "out")], cwd=source, check=True)
    files = sorted((folder / "out").iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> int:
    """Print what was built; return 1 where the two builds differ."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (built(Path(folder) / name) for name in ("first", "second"))
    for name in sorted({*first, *second}):
        print("same" if first.get(name) == second.get(name) else "DIFFERENT", name, first.get(name))
    return 0 if first == second else 1


if __name__ == "__main__":
    sys.exit(main())
