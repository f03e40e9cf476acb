"""Check the measurable rules of the code: lengths, arguments, no assert on input, ASCII, a class name once."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "src" / "shardwise", ROOT / "accuracy")
LONGEST_FUNCTION, LONGEST_FILE, MEDIAN_FUNCTION, MOST_ARGUMENTS = 60, 400, 8, 6


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return every function of a module."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    doc = node.body[0]
    has_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    skipped = (doc.end_lineno or 0) - doc.lineno + 1 if has_doc else 0
    return (node.end_lineno or 0) - node.lineno + 1 - skipped


def problems_of(path: Path, lengths: list[int]) -> list[str]:
    """Return the rules that one file breaks; its functions' lengths are added to `lengths`."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    where = path.relative_to(ROOT)
    found = [f"{where}: {n} lines, at most {LONGEST_FILE}" for n in [text.count("\n")] if n > LONGEST_FILE]
    if not text.isascii():
        found.append(f"{where}: not ASCII")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"{where}:{node.lineno}: assert in product code")
    for function in functions(tree):
        lines, a = code_lines(function), function.args
        lengths.append(lines)
        count = len([x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")])
        if lines > LONGEST_FUNCTION:
            found.append(f"{where}:{function.lineno}: {function.name} has {lines} lines, at most {LONGEST_FUNCTION}")
        if count > MOST_ARGUMENTS:
            found.append(f"{where}:{function.lineno}: {function.name} takes {count} arguments (max {MOST_ARGUMENTS})")
    return found


def twice_named(package: Path) -> list[str]:
    """Return the public classes of a package whose name stands for two things."""
    places: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return [f"class {name} stands twice: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def main() -> int:
    """Print every broken rule and return 1 when there is one."""
    lengths: list[int] = []
    found = [p for source in SOURCES for path in sorted(source.rglob("*.py")) for p in problems_of(path, lengths)]
    found += twice_named(SOURCES[0])
    median = statistics.median(lengths)
    if median > MEDIAN_FUNCTION:
        found.append(f"the median function has {median} lines, at most {MEDIAN_FUNCTION}")
    print(*found, sep="\n")
    p95 = statistics.quantiles(lengths, n=20)[-1]
    print(f"{len(lengths)} functions, median {median:g} lines, 95th percentile {p95:g}, longest {max(lengths)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
