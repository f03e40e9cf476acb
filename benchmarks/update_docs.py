"""Put the output of programs into the documents that show it: `python benchmarks/update_docs.py` rewrites them.

A document shows the output of a program between the lines `<!-- output of benchmarks/NAME.py -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- output of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def output_of(program: str) -> str:
    """Return what a program of this repository prints."""
    words = [str(ROOT / program)]
    if program.startswith("accuracy/"):  # a package, not a folder of scripts
        words = ["-m", program.removesuffix(".py").replace("/", ".")]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def updated(text: str) -> str:
    """Return a document with every shown output made again."""
    return _BLOCK.sub(lambda found: f"{found[1]}{output_of(found[2])}{found[3]}", text)


def main() -> int:
    """Rewrite every document whose outputs changed, and name it."""
    for path in sorted(
        p for folder in ("docs", "benchmarks", "accuracy", "examples") for p in (ROOT / folder).rglob("*.md")
    ):
        text = path.read_text(encoding="utf-8")
        new = updated(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
