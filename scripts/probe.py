"""What users see of the package, as numbers: questions of every command, their answers, and the statements they run.

Questions are those whose answers are stored, and random ones of another seed than theirs: a change that moves a number
of a random one is one that nobody has seen. Statements are written down as they begin, by a line put before each as its
module is compiled.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import pkgutil
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from questions import ROOT, Question, questions

SOURCE = ROOT / "src" / "shardwise"
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "benchmarks", "")]

# No answer rests on what an earlier run kept.
os.environ["SHARDWISE_CACHE"] = "off"
FROZEN = "tests/validation/test_frozen.py"
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain")
MOST_SECONDS = 1.2
"""What a question may take: others would be asked too seldom."""


def stored() -> Iterator[Question]:
    """Yield the questions whose answers are stored."""
    from test_whole_answers import CASES, sample

    for words in CASES.values():
        yield Question((*words.split(), "--json"), stored="whole")
    for one in sample():
        files = {name: text.encode() for name, text in one.get("files", {}).items()}
        yield Question(tuple(one["words"].split(" ")), files, stored="random")


def answered(asked: Question) -> dict[str, float] | None:
    """Return the numbers of an answer, None where a question is refused; what varies from run to run is left out.

    Of a stored one they are those that are stored.
    """
    from command_line import run
    from test_whole_answers import APART, numbers, sums, untimed

    for name, data in asked.files.items():
        Path(name).write_bytes(data)
    shutil.rmtree("found", ignore_errors=True)  # what a sweep finds of an earlier one it says
    done = run(*asked.words)
    if asked.stored == "random":
        return sums(done, asked.words[0])
    if done.status not in (0, 1):
        return None
    found = {"status": float(done.status)}
    if asked.words[0] in ("import", "export"):
        found["text"] = float(zlib.crc32(done.out.encode()))
    if "--json" not in asked.words:
        places = enumerate(re.findall(r"\d+\.?\d*", untimed(done.out)))
        return found | {str(place): float(one) for place, one in places}
    tree = done.tree
    tree.get("search", {}).pop("seconds", None)
    if asked.stored:
        tree = {name: part for name, part in tree.items() if name not in APART}
    return found | {name: value for name, value in numbers(tree) if not name.endswith("/elapsed_seconds")}


def moved(before: dict[str, float], after: dict[str, float] | None) -> bool:
    """Return whether any number of an answer is another, or is gone or new."""
    if after is None or before.keys() != after.keys():
        return True
    from test_whole_answers import near

    return any(not near(name, value, after[name]) for name, value in before.items())


@dataclass(frozen=True)
class Answer:
    """What the unchanged package answers to a question, in how many seconds, and which statements that ran."""

    asked: Question
    numbers: dict[str, float]
    seconds: float
    ran: bytes


@dataclass(frozen=True)
class Base:
    """Every answer of the unchanged package; statements by file and line, and those of imports and frozen rows."""

    answers: list[Answer]
    numbered: dict[tuple[str, int], int]
    imports: bytes
    frozen: bytes

    def runs(self, ran: bytes, path: Path, line: int) -> bool:
        """Return whether a statement was among those that ran."""
        number = self.numbered.get((str(path.relative_to(ROOT)), line), len(ran))
        return number < len(ran) and bool(ran[number])


class Marks(ast.NodeTransformer):
    """Writes a line before every statement of every function that says that it was begun."""

    def __init__(self, file: str, numbered: dict[tuple[str, int], int], ran: bytearray) -> None:
        self.file, self.numbered, self.ran, self.depth = file, numbered, ran, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Return the marked node."""
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self.depth += inside
        super().generic_visit(node)
        if self.depth:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    setattr(node, name, list(self._marked(block)))
        self.depth -= inside
        return node

    def _marked(self, block: list[ast.stmt]) -> Iterator[ast.stmt]:
        for one in block:
            number = self.numbered.setdefault((self.file, one.lineno), len(self.ran))
            self.ran.extend(bytes(number >= len(self.ran)))
            mark = ast.copy_location(ast.parse(f"__ran__[{number}] = 1").body[0], one)
            is_doc = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            yield from (one, mark) if is_doc else (mark, one)


def compiled_as(tree_of: Callable[[str], ast.AST | None]) -> None:
    """Make imports compile another tree of a file where there is one."""
    before = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        tree = tree_of(self.path)
        return compile(tree, self.path, "exec") if tree else before(self, name)  # type: ignore[arg-type]

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def load_everything() -> None:
    """Import every module of the package and what tests need beside it."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    import shardwise

    for module in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    import command_line  # noqa: F401


def base() -> Base:
    """Return the answers of the package, which is loaded with its statements marked."""
    numbered: dict[tuple[str, int], int] = {}
    ran = bytearray()
    setattr(builtins, "__ran__", ran)  # noqa: B010
    files: set[str | None] = set()

    def marked(path: str) -> ast.AST | None:
        if not (path.startswith(f"{SOURCE}{os.sep}") and path.endswith(".py")):
            return None
        files.add(path)
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        return ast.fix_missing_locations(Marks(str(Path(path).relative_to(ROOT)), numbered, ran).visit(tree))

    compiled_as(marked)
    load_everything()
    loaded = {name: getattr(one, "__file__", None) for name, one in sys.modules.items() if name.startswith("shardwise")}
    if unmarked := sorted(name for name, file in loaded.items() if file not in files):
        raise RuntimeError(f"loaded before their statements were marked: {', '.join(unmarked)}")
    from command_line import inside_a_folder  # loads the package, as whatever reads an answer does

    imports, answers = bytes(ran), []
    with inside_a_folder():
        for asked in [*stored(), *questions("judged")]:
            ran[:] = bytes(len(ran))
            begin = time.process_time()
            numbers = answered(asked)
            seconds = time.process_time() - begin
            if numbers is None or (not asked.stored and seconds > MOST_SECONDS):
                continue
            if asked.stored or not moved(numbers, answered(asked)):
                answers.append(Answer(asked, numbers, seconds, bytes(ran)))
    import pytest

    ran[:] = bytes(len(ran))
    pytest.main([*PYTEST, FROZEN])
    return Base(sorted(answers, key=lambda one: (not one.asked.stored, one.seconds)), numbered, imports, bytes(ran))
