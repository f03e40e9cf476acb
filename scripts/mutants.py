"""Change the package in one small place at a time, and count the changes that move a number and that no test sees.

`python scripts/mutants.py ops cost --count 50 --seed 1` draws 50 changes of each part among the statements that a
question of `scripts/probe.py` runs, `--visible 15` ends a part with 15 that move a number, `--since COMMIT` draws from
the files that changed since, `--level` from defaults and tables alone. No file is written: in a process of its own a
function takes other code, or its module is compiled anew. A change is killed by stored answers (whole answers, sums of
random ones, frozen predictions) or, where it moves a number of the probe, by the tests that `PARTS` names, which must
pass without it. The probe's random questions are of another seed than the stored ones, so that none is asked twice.
What moves no number is not judged, nor what cannot be imported. `--kept FILE` keeps verdicts: a later run judges
survivors and new places alone, so that a score of an unseen draw is of a run without it. `--page` renews the table.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import gc
import hashlib
import importlib
import io
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from probe import (
    FROZEN,
    PYTEST,
    ROOT,
    SOURCE,
    Answer,
    Base,
    answered,
    base,
    compiled_as,
    load_everything,
    moved,
)

STORED = "killed by stored answers"
DIED = "ends a question that is not stored"
PAGE = ROOT / "accuracy" / "notes" / "wrong-answers.md"
MIXERS = "ops/ssm.py ops/latent.py ops/recurrent.py ops/compressed.py ops/attention.py"
TUNING = "ops/tuning.py ops/adapters.py plans/_tuning.py training/_tuning.py training/_savers.py search/_tuning.py"
IN_OPS = "tests/ops tests/serving/test_serving_ledger.py tests/laws/test_count_laws.py tests/models"
IN_TRAINING = "tests/training tests/laws/test_memory_laws.py tests/laws/test_time_laws.py tests/tuning"
PARTS = {
    "models": ("models", "tests/models src/shardwise/models tests/ops tests/serving/test_serving_exact.py"),
    "hardware": ("hardware", "tests/hardware src/shardwise/hardware tests/cost"),
    "plans": ("plans", "tests/plans src/shardwise/plans tests/ops"),
    "ledger": ("ledger", "tests/ledger src/shardwise/ledger tests/ops tests/laws/test_explain.py"),
    "cost": ("cost", "tests/cost src/shardwise/cost tests/laws/test_network_laws.py tests/serving"),
    "ops": ("ops", IN_OPS),
    "mixers": (MIXERS, IN_OPS),
    "experts": ("ops/experts.py ops/layout.py training/_expert_overlap.py", f"{IN_OPS} {IN_TRAINING}"),
    "training": ("training", IN_TRAINING),
    "comm": (
        "training/_comm.py training/_traffic.py training/_traffic_map.py",
        f"tests/answers/test_comm_command.py {IN_TRAINING}",
    ),
    "tuning": (TUNING, "tests/tuning tests/search/test_tuning_recipes.py tests/training"),
    "serving": ("serving", "tests/serving src/shardwise/serving"),
    "load": ("serving/load", "tests/serving src/shardwise/serving/load tests/search/test_plan_serve.py"),
    "search": ("search", "tests/search src/shardwise/search"),
    "formats": (
        "formats shell",
        "tests/formats src/shardwise/formats tests/shell src/shardwise/shell tests/answers/test_formats.py "
        "tests/serving/test_load.py",
    ),
    "measured": ("measured", "tests/measured src/shardwise/measured tests/answers/test_validate.py tests/validation"),
    "answers": ("answers units.py", "tests/answers src/shardwise/answers src/shardwise/units.py tests/test_docs.py"),
}
"""Folders and files of each part, and its tests, those that see most in the least time first."""
TIMED = ("test_executor.py",)
"""Files whose tests are of time, which a machine at work breaks by itself."""
MOST_PROBED = 3.0
"""Seconds of questions beside the stored ones that are asked about one change."""
MOST_SECONDS = {"import": 60, "stored": 40, "probe": 40, "tests": 400}

# fmt: off
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.NotIn: ast.In,
}
# fmt: on
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
TEXTS = {"Problem", "fail", "InputError", "TypeVar", "cast", "NewType"}
TYPES = {"annotation", "returns", "decorator_list", "bases", "type_params"}
Change = tuple[ast.AST, str, Callable[[], Any]]


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield (node, what, how to make it) for each change of a tree, leaving out types, texts and what is raised."""
    texts = isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)
    named = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in ("__repr__", "problems")
    alias = isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.dump(node.annotation)
    called = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in TEXTS
    if texts or named or alias or called:
        return
    yield from _terms(node)
    yield from _choices(node)
    for name, value in ast.iter_fields(node):
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST) and name not in TYPES:
                yield from changes(inner)


def _terms(node: ast.AST) -> Iterator[Change]:
    """Other operators and constants, and a term left out."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node.left):
        yield node, "other operator", _put(node, "op", OPERATORS[type(node.op)]())
        yield node, "left term alone", _become(node, node.left)
        yield node, "right term alone", _become(node, node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, "sign or not left out", _become(node, node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, "other truth", _put(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        more = node.value + 1 if isinstance(node.value, int) else node.value * 1.1 or 0.1
        yield node, "other constant", _put(node, "value", more)


def _choices(node: ast.AST) -> Iterator[Change]:
    """Other comparisons, conditions and branches."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield node, "other comparison", _put(node, "ops", [OPERATORS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield node, "and for or", _put(node, "op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.IfExp | ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
        yield node, "branches swapped", _put(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield node, "least for most", _put(node, "func", ast.Name(CALLS[node.func.id], ast.Load()))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _put(node: ast.AST, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _become(node: Any, other: Any) -> Callable[[], None]:
    def make() -> None:
        place = {name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
        node.__class__, node.__dict__ = other.__class__, {**other.__dict__, **place}

    return make


@dataclass(frozen=True)
class Place:
    """A change: a file, its number in it, the line of its statement, and the outermost function around it, if any."""

    path: Path
    number: int
    line: int
    function: str
    first: int


def places(path: Path) -> Iterator[Place]:
    """Yield every place of a module; what is evaluated as the module is loaded has no function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    around: dict[ast.AST, tuple[int, str, int]] = {}

    def walk(node: ast.AST, line: int, function: str, first: int) -> None:
        around[node] = line, function, first
        for name, value in ast.iter_fields(node):
            body = isinstance(node, ast.FunctionDef) and name == "body"
            for inner in value if isinstance(value, list) else [value]:
                if not isinstance(inner, ast.AST):
                    continue
                begin = min([node.lineno, *(one.lineno for one in node.decorator_list)]) if body else 0
                where = (function, first) if function or not body else (node.name, begin)
                walk(inner, inner.lineno if isinstance(inner, ast.stmt) and where[0] else line, *where)

    walk(tree, 0, "", 0)
    for number, (node, _, _) in enumerate(changes(tree)):
        yield Place(path, number, *around.get(node, (0, "", 0)))


def changed(place: Place) -> tuple[ast.AST, str]:
    """Return the tree of a module with one change, and where that stands and what it makes of what."""
    tree = ast.parse(place.path.read_text(encoding="utf-8"))
    node, what, make = list(changes(tree))[place.number]
    before = ast.unparse(node)
    make()
    after = ast.unparse(ast.fix_missing_locations(node))
    where = f"{place.path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
    return ast.fix_missing_locations(tree), f"{where} {what}: `{before:.90}` -> `{after:.90}`"


def load(place: Place, tree: ast.AST, unchanged: Base) -> None:
    """Make a change in this process: other code of its function, or every module loaded anew where that cannot do."""
    code = compile(tree, str(place.path), "exec")  # type: ignore[arg-type]
    if place.function and not unchanged.runs(unchanged.imports, place.path, place.line):
        inner = [one for one in _codes(code) if (one.co_name, one.co_firstlineno) == (place.function, place.first)]
        found = [
            one
            for one in gc.get_objects()
            if isinstance(one, FunctionType)
            and (one.__code__.co_filename, one.__code__.co_firstlineno) == (str(place.path), place.first)
            and one.__code__.co_name == place.function
        ]
        if len(inner) == 1 and found and all(one.__code__.co_freevars == inner[0].co_freevars for one in found):
            for one in found:
                one.__code__ = inner[0]
            return
    own = [name for name, one in sys.modules.items() if _is_own(getattr(one, "__file__", None))]
    for name in own:
        del sys.modules[name]
    compiled_as(lambda path: tree if path == str(place.path) else None)
    importlib.import_module(
        ".".join(place.path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def _is_own(file: str | None) -> bool:
    path = Path(file or "/")
    return path.is_relative_to(ROOT) and path.parent != ROOT / "scripts" and ".venv" not in path.parts


def asked_of(unchanged: Base, part: str, place: Place) -> Iterator[Answer]:
    """Yield answers that a place may move, stored ones and cheap ones first: some seconds of those that run it."""
    kinds = {"plan": ("search", "load", "answers", ""), "validate": ("measured", "answers", "")}
    most = MOST_PROBED
    for one in unchanged.answers if place.function else _of_a_file(unchanged, place):
        told = unchanged.runs(one.ran, place.path, place.line) if place.function else True
        if told and part in kinds.get(one.asked.words[0], (part,)):
            most -= 0 if one.asked.stored else one.seconds
            if most < 0:
                return
            yield one


def _of_a_file(unchanged: Base, place: Place) -> list[Answer]:
    """Return all answers, those first that run a statement of a place's file."""
    file = str(place.path.relative_to(ROOT))
    numbers = [number for (name, _), number in unchanged.numbered.items() if name == file]
    return sorted(
        unchanged.answers, key=lambda one: not any(number < len(one.ran) and one.ran[number] for number in numbers)
    )


def _failed(tests: list[str]) -> str:
    """Return the first test that fails, empty where none does."""
    import pytest

    class First:
        failed = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.failed = self.failed or (report.nodeid if report.failed else "")

    first = First()
    status = pytest.main([*PYTEST, *tests], [first])
    return first.failed or ("" if status in (0, 5) else "their collection")


def _nearest_first(tests: str, place: Place) -> list[str]:
    """Return the files of some tests, those first that name the module or the function that a place is in."""
    roots = [ROOT / word for word in tests.split()]
    files = [path for one in roots for path in ([one] if one.is_file() else sorted(one.rglob("*.py")))]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.name not in TIMED}
    held = [path for path, text in texts.items() if ">>>" in text or "def test_" in text]
    names = [name for name in (place.path.stem.strip("_"), place.function) if name]
    held.sort(key=lambda path: -sum(name in texts[path] or name in path.stem for name in names))
    return [str(path.relative_to(ROOT)) for path in held]


red: set[str] = set()
"""Tests that fail without any change, which kill none."""
sound: set[str] = set()


def judged(part: str, unchanged: Base, place: Place, stage: Callable[[str], None]) -> str:
    """Return what becomes of the change that is loaded; `stage` is told what is tried, in case this process ends."""
    from command_line import inside_a_folder

    with inside_a_folder():
        for one in asked_of(unchanged, part, place):
            stage("stored" if one.asked.stored else "probe")
            if moved(one.numbers, answered(one.asked)):
                if one.asked.stored:
                    return STORED
                break
        else:
            return "moves nothing"
    return tested(part, unchanged, place, str(one.asked), stage) if part else f"SURVIVED {one.asked}"


def tested(part: str, unchanged: Base, place: Place, where: str, stage: Callable[[str], None]) -> str:
    """Return what the tests of a part say of the change that is loaded, which moves a number of a question."""
    stage("tests")
    if (not place.function or unchanged.runs(unchanged.frozen, place.path, place.line)) and _failed([FROZEN]):
        return STORED
    files = _nearest_first(PARTS[part][1], place)
    for some in (files[:2], files[2:6], files[6:]):
        if some and (failed := _failed([*some, *(f"--deselect={test}" for test in red)])):
            return f"killed by {failed}"
    return f"SURVIVED {where}"


def apart(work: Callable[[Callable[[str], None]], str]) -> str:
    """Return what work in a process of its own comes to; one that ends by itself or takes too long is killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _child(work, writes)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as lines:
        said = lines.read().splitlines()
    os.waitpid(child, 0)
    stages = [line.removeprefix("stage ") for line in said if line.startswith("stage ")]
    if said and not said[-1].startswith(("stage ", "raised ")):
        return said[-1]
    ends = {"stored": STORED, "tests": "killed by tests", "probe": DIED}
    return ends.get(stages[-1] if stages else "", "is no module")


def _child(work: Callable[[Callable[[str], None]], str], writes: int) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def tell(line: str) -> None:
        os.write(writes, f"{line}\n".encode())

    def stage(name: str) -> None:
        tell(f"stage {name}")
        used = int(sum(os.times()[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (used + MOST_SECONDS[name], hard))

    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1), os.dup2(null, 2)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            tell(work(stage))
    except BaseException as error:
        tell(f"raised {type(error).__name__}")
    os._exit(0)


def drawn_of(asked: argparse.Namespace, part: str, unchanged: Base) -> tuple[list[Place], int]:
    """Return changes of a part that a question runs, in an order of the seed, and how many there are with the others.

    With `--since`, those of the files that changed since a commit.
    """
    roots = [SOURCE / name for name in PARTS[part][0].split()]
    paths = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    if asked.since:
        command = ["git", "diff", "--name-only", asked.since]
        named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        paths = [path for path in paths if str(path.relative_to(ROOT)) in named]
    found = [place for path in paths for place in places(path) if not (asked.level and place.function)]
    ran = bytearray(len(unchanged.frozen))
    for one in unchanged.answers:
        ran[: len(one.ran)] = bytes(map(max, one.ran, ran))
    run = [place for place in found if not place.function or unchanged.runs(bytes(ran), place.path, place.line)]
    random.Random(f"{asked.seed}/{part}").shuffle(run)
    return run, len(found)


def main() -> int:
    """Print a line for each change that survives and a row for each part; return 1 where more than 5 % survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--count", type=int, default=50, help="judge so many changes of a part at most")
    parser.add_argument("--visible", type=int, default=10**9, help="end a part with so many that move a number")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--since", default="")
    parser.add_argument("--level", action="store_true")
    parser.add_argument("--stored", action="store_true", help="ask no tests: what stored answers let pass survives")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no change of a part after so long")
    asked = parser.parse_args()
    os.chdir(ROOT)
    unchanged, worst = _unchanged(asked.kept), 100.0
    load_everything()
    for part in asked.parts or PARTS:
        worst = min(worst, _part(part, unchanged, asked))
    return 0 if worst >= 95 else 1


def _part(part: str, unchanged: Base, asked: argparse.Namespace) -> float:
    """Judge changes of a part, print each and the part's row, and return its score in percent."""
    kept = {}
    if asked.kept and asked.kept.exists():
        kept = dict(json.loads(line) for line in asked.kept.read_text().splitlines())
    found: Counter[str] = Counter()
    begin = time.monotonic()
    drawn, all_places = drawn_of(asked, part, unchanged)
    for place in drawn[: asked.count]:
        tree, told = changed(place)
        said = kept.get(f"{part} {told}", "SURVIVED")
        if said.startswith("SURVIVED"):
            if time.monotonic() - begin > 60 * asked.minutes:
                break
            said = verdict("" if asked.stored else part, unchanged, place, tree)
            print(f"{said}\n  {told}", flush=True)
            if asked.kept:
                with asked.kept.open("a") as file:
                    file.write(json.dumps([f"{part} {told}", said]) + "\n")
        found[said if said in (STORED, "moves nothing", "is no module") else said.split()[0]] += 1
        if found[STORED] + found["killed"] + found["SURVIVED"] >= asked.visible:
            break
    return _row(part, found, len(drawn) / max(all_places, 1), asked)


def verdict(part: str, unchanged: Base, place: Place, tree: ast.AST) -> str:
    """Return what becomes of a change; without a part, no tests are asked."""

    def work(stage: Callable[[str], None]) -> str:
        stage("import")
        load(place, tree, unchanged)
        return judged(part, unchanged, place, stage)

    def tests_alone(stage: Callable[[str], None]) -> str:
        load(place, tree, unchanged)
        return tested(part, unchanged, place, DIED, stage)

    said = apart(work)
    if not part:
        return said.replace(DIED, f"SURVIVED {DIED}")
    while said == DIED or (said.startswith("killed by ") and not _holds(said.removeprefix("killed by "))):
        said = apart(tests_alone)
    return said


def _holds(test: str) -> bool:
    """Return whether a test passes without any change."""

    def work(stage: Callable[[str], None]) -> str:
        stage("tests")
        return "fails" if _failed([test]) else "holds"

    if "::" in test and test not in sound:
        (sound if apart(work) == "holds" else red).add(test)
    return test not in red


def _unchanged(kept: Path | None) -> Base:
    """Return the answers of the unchanged package, asked in a process of its own, or kept of the same code."""
    asks = [
        *Path(__file__).parent.glob("*.py"),
        *(ROOT / "tests").glob("*.py"),
        *(ROOT / "tests" / "fuzz").glob("*.py"),
    ]
    texts = sorted([*SOURCE.rglob("*.*"), *asks, *(ROOT / "tests" / "data").glob("*.json")])
    data = b"".join(path.read_bytes() for path in texts if path.is_file() and path.suffix != ".pyc")
    code = hashlib.sha256(data).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        place = (kept.parent if kept else Path(folder)) / f"{code}.base"

        def work(stage: Callable[[str], None]) -> str:
            stage("tests")
            try:
                place.write_bytes(pickle.dumps(base()))
            except RuntimeError as error:
                return str(error)
            return "kept"

        said = "kept" if place.exists() else apart(work)
        if said != "kept":
            raise SystemExit(f"no answers of the unchanged package: {said}")
        found: Base = pickle.loads(place.read_bytes())
        return found


def _row(part: str, found: Counter[str], run: float, asked: argparse.Namespace) -> float:
    """Print a part's row of the table, write it into the page where that is asked, and return its score in percent."""
    killed = found[STORED] + found["killed"]
    visible = killed + found["SURVIVED"]
    score = 100 * killed / visible if visible else 100.0
    name = f"{part}, defaults and tables" if asked.level else part
    cells = [name, f"{100 * run:.0f} %", found.total(), visible, found[STORED], found["killed"], found["SURVIVED"]]
    row = f"| {' | '.join(map(str, [*cells, f'{score:.0f} %', asked.seed, datetime.date.today()]))} |"
    print(row, flush=True)
    if asked.page:
        text = PAGE.read_text(encoding="utf-8")
        text, times = re.subn(rf"^\| {name} \|.*$", row, text, flags=re.MULTILINE)
        PAGE.write_text(text if times else re.sub(r"(\| part \|.*\n\|---.*\n)", rf"\1{row}\n", text), encoding="utf-8")
    return score


if __name__ == "__main__":
    sys.exit(main())
