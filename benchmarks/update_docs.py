"""Put the output of programs into the documents that show it: `python benchmarks/update_docs.py` rewrites them.

A document shows the output of a program between the lines `<!-- output of benchmarks/NAME.py -->` and `<!-- end -->`.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- output of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def output_of(program: str) -> str:
    """Return what a program of this repository prints, run here: what several of them load is loaded once."""
    path, out, loaded = ROOT / program, io.StringIO(), {*sys.modules}
    folder = ROOT if program.startswith("accuracy/") else path.parent  # accuracy is a package, others stand alone
    with (
        mock.patch.object(sys, "argv", [str(path)]),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    # Modules that stand beside a script have names that scripts of other folders use too.
    for name in {*sys.modules} - loaded:
        if folder != ROOT and Path(getattr(sys.modules[name], "__file__", None) or "").parent == folder:
            del sys.modules[name]
    return out.getvalue()


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
