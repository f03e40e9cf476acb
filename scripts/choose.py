"""Choose the random questions whose answers are stored: `python scripts/choose.py --seconds 9`.

Of a large draw of `scripts/questions.py`, of another seed than the judge's, those are taken which show most that the
others do not, for their seconds: which statements run, which way conditions go, which side of a maximum counts, where
another operator or a term left out would be another value, and what a command is told. Each counts three times, the
second and third less.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import heapq
import json
import math
import operator
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from probe import SOURCE, Marks, compiled_as, load_everything
from questions import Question, questions

WEIGHTS = (1.0, 0.4, 0.2)
"""What it counts that a question shows something that none, one and two others show."""
MOST_SECONDS, MOST_TEXT = 2.0, 6_000
SAYS = 4
"""What it counts as that a flag of a command has a value, or that a command is asked about a model or a place."""
STARTED = 0.008
"""Seconds of a test beside its question."""
# fmt: off
BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "Add": (operator.add, operator.sub), "Sub": (operator.sub, operator.add), "Mult": (operator.mul, operator.truediv),
    "Div": (operator.truediv, operator.mul), "FloorDiv": (operator.floordiv, operator.mul),
    "Mod": (operator.mod, operator.floordiv), "Pow": (operator.pow, operator.mul),
}
ORDERED = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge}
# fmt: on
PLAIN = (int, float)
PICKS = ("min", "max", "minimum", "maximum")


class TooLong(BaseException):
    """A question takes longer than a stored one may."""


def _too_long(*_: object) -> None:
    raise TooLong


class Shown:
    """What a question shows: places of a row of bytes, new ones as the code is compiled."""

    def __init__(self, ran: bytearray) -> None:
        self.ran = ran

    def new(self, count: int) -> int:
        """Return the first of some new places."""
        self.ran.extend(bytes(count))
        return len(self.ran) - count

    def binary(self, first: int, name: str, left: Any, right: Any) -> Any:
        """Return what an operator does; another one, the left and the right side alone would be other values."""
        does, other = BINARY[name]
        found, ran = does(left, right), self.ran
        if ran[first] and ran[first + 1] and ran[first + 2]:
            return found
        if type(left) in PLAIN and type(right) in PLAIN:
            ran[first + 1] |= left != found
            ran[first + 2] |= right != found
            try:
                ran[first] |= other(left, right) != found
            except (ArithmeticError, ValueError):
                ran[first] = 1
        elif isinstance(found, np.ndarray):
            with np.errstate(all="ignore"):
                ran[first] |= bool(np.any(other(left, right) != found))
            ran[first + 1] |= bool(np.any(left != found))
            ran[first + 2] |= bool(np.any(right != found))
        return found

    def ordered(self, first: int, name: str, left: Any, right: Any) -> Any:
        """Return a comparison, whether its sides are equal, and which way it goes."""
        found = ORDERED[name](left, right)
        if isinstance(found, (bool, np.bool_)):
            self.ran[first] |= bool(left == right)
            self.ran[first + 1 + bool(found)] = 1
        return found

    def truth(self, first: int, found: Any) -> Any:
        """Return what a condition is, and which way it goes."""
        if found is None or isinstance(found, (bool, int, float, str, tuple, list, dict)):
            self.ran[first + bool(found)] = 1
        return found

    def pick(self, first: int, does: Callable[..., Any], *given: Any, **how: Any) -> Any:
        """Return the least or most of some values, and which of the first four it is."""
        if len(given) == 1:
            given = (list(given[0]),)
        found = does(*given, **how)
        for place, one in enumerate((given[0] if len(given) == 1 else given)[:4]):
            if one is found or (isinstance(one, (int, float)) and isinstance(found, (int, float)) and one == found):
                self.ran[first + place] = 1
        return found


class Values(Marks):
    """Marks of statements, and of the values that expressions take."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Return the marked node."""
        node = super().generic_visit(node)
        if not self.depth:
            return node
        if isinstance(node, ast.BinOp) and type(node.op).__name__ in BINARY:
            return self._told(node, "binary", 3, ast.Constant(type(node.op).__name__), node.left, node.right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]).__name__ in ORDERED:
            name = ast.Constant(type(node.ops[0]).__name__)
            return self._told(node, "ordered", 3, name, node.left, node.comparators[0])
        if isinstance(node, ast.BoolOp):
            node.values = [self._told(one, "truth", 2, one) for one in node.values]
        elif isinstance(node, (ast.IfExp, ast.If)):
            node.test = self._told(node.test, "truth", 2, node.test)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PICKS:
            first = ast.Constant(self.shown.new(4))
            node.args = [first, node.func, *node.args]
            node.func = ast.parse("__shown__.pick", mode="eval").body
        return node

    @property
    def shown(self) -> Shown:
        """Return where values are written down."""
        return Shown(self.ran)

    def _told(self, node: ast.expr, name: str, count: int, *given: ast.expr) -> ast.expr:
        does = ast.parse(f"__shown__.{name}", mode="eval").body
        return ast.copy_location(ast.Call(does, [ast.Constant(self.shown.new(count)), *given], []), node)


def shows(seed: str, times: int) -> Iterator[tuple[Question, float, np.ndarray]]:
    """Yield the questions that can be stored, their seconds, and what each shows."""
    from command_line import inside_a_folder
    from test_whole_answers import run, sums

    ran = bytearray()
    builtins.__ran__, builtins.__shown__ = ran, Shown(ran)  # type: ignore[attr-defined]

    def marked(path: str) -> ast.AST | None:
        if not path.startswith(str(SOURCE)) or not path.endswith(".py"):
            return None
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        return ast.fix_missing_locations(Values(path, {}, ran).visit(tree))

    compiled_as(marked)
    load_everything()
    signal.signal(signal.SIGVTALRM, _too_long)
    with inside_a_folder():
        for asked in questions(seed, times):
            try:
                text = " ".join(asked.words) + "".join(data.decode() for data in asked.files.values())
            except UnicodeDecodeError:
                continue
            plain = all(word.isascii() and word.isprintable() and " " not in word for word in asked.words)
            # What the page of `sweep` shows rests on whether polars is there.
            paged = asked.words[0] == "sweep" and "--json" not in asked.words
            if not plain or paged or len(text) > MOST_TEXT:
                continue
            ran[:] = bytes(len(ran))
            for name, data in asked.files.items():
                Path(name).write_bytes(data)
            begin = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
            try:
                done = run(*asked.words)
            except TooLong:
                continue
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            seconds = time.process_time() - begin
            if done.status in (0, 1) and sums(done, asked.words[0]):
                yield asked, seconds, np.flatnonzero(np.frombuffer(bytes(ran), np.uint8))


def with_words(found: list[tuple[Question, float, np.ndarray]]) -> list[tuple[Question, float, np.ndarray]]:
    """Return questions that also show what they say: pairs of words that follow each other, within a command."""
    first = 1 + max(int(one.max(initial=0)) for _, _, one in found)
    known: dict[tuple[str, ...], int] = {}
    told = []
    for asked, seconds, shown in found:
        pairs = {(asked.words[0], *pair) for pair in zip(asked.words, (*asked.words[1:], ""), strict=True)}
        numbers = [first + SAYS * known.setdefault(pair, len(known)) + one for pair in pairs for one in range(SAYS)]
        told.append((asked, seconds, np.concatenate([shown, np.array(numbers, int)])))
    return told


def chosen(found: list[tuple[Question, float, np.ndarray]], seconds: float) -> list[int]:
    """Return the numbers of questions, those that show most for their seconds, until the seconds are spent."""
    often = np.zeros(1 + max(int(one.max(initial=0)) for _, _, one in found), int)
    weights = np.array([*WEIGHTS, 0.0])

    def worth(number: int) -> float:
        _, spent, shown = found[number]
        return float(weights[np.minimum(often[shown], len(WEIGHTS))].sum()) / (STARTED + spent)

    heap = [(-math.inf, number) for number in range(len(found))]
    taken: list[int] = []
    while heap and seconds > 0:
        _, number = heapq.heappop(heap)
        now = worth(number)
        if heap and -now > heap[0][0]:
            heapq.heappush(heap, (-now, number))
            continue
        if not now:
            break
        taken.append(number)
        often[found[number][2]] += 1
        seconds -= STARTED + found[number][1]
    return taken


def main() -> int:
    """Choose questions and store their answers; say how many and what they show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=9.0, help="what they may take in all, with the marks")
    parser.add_argument("--times", type=int, default=4, help="draw from so many times what the judge asks")
    asked = parser.parse_args()
    found = with_words(list(shows("stored", asked.times)))
    numbers = chosen(found, asked.seconds)
    every = len({*np.concatenate([one for _, _, one in found])})
    shown = len({*np.concatenate([found[number][2] for number in numbers])})
    print(
        f"{len(numbers)} of {len(found)} questions, {sum(found[n][1] for n in numbers):.1f} s, {shown} of {every} shown"
    )
    picked = [found[number][0] for number in sorted(numbers)]
    import test_whole_answers

    lines = [
        {"words": str(one), **({"files": {name: d.decode() for name, d in one.files.items()}} if one.files else {})}
        for one in picked
    ]
    test_whole_answers.SAMPLE.write_text(json.dumps(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
