"""Change the package in one small place at a time, and count the changes that move a number and that no test sees.

`python scripts/mutants.py ops cost --count 50 --seed 1` draws 50 changes of each package, `--since COMMIT` draws them
from the files that changed since. A change is made as its module is compiled, in a process of its own: no file is
written. It is killed by stored answers (whole answers, frozen predictions) or, where it moves a number of the probe
(random questions of the command line), by the tests that `TESTS` names, which must pass without it. What moves no
number is not judged.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import io
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "shardwise"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT)]

STORED = "killed by stored answers"
FROZEN = "tests/validation/test_frozen.py"
TESTS = {
    "ops": "tests/ops tests/serving/test_serving_ledger.py tests/laws/test_count_laws.py",
    "ledger": "tests/ledger src/shardwise/ledger tests/ops tests/laws/test_explain.py",
    "training": "tests/training tests/laws/test_memory_laws.py tests/laws/test_time_laws.py",
    "serving": "tests/serving src/shardwise/serving",
    "cost": "tests/cost src/shardwise/cost tests/laws/test_network_laws.py tests/serving/test_serving_kernels.py",
    "plans": "tests/plans src/shardwise/plans tests/ops",
    "search": "tests/search src/shardwise/search --ignore=tests/search/test_executor.py",
    "models": "tests/models src/shardwise/models tests/ops tests/serving/test_serving_exact.py",
    "hardware": "tests/hardware src/shardwise/hardware tests/cost",
}
"""Tests of each package, those that see most in the least time first."""
MOST_SECONDS = {"stored": 100, "probe": 100, "tests": 400}

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


def changed(path: Path, number: int) -> tuple[ast.AST, str]:
    """Return the tree of a module with one change, and where that stands and what it makes of what."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node, what, make = list(changes(tree))[number]
    before = ast.unparse(node)
    make()
    after = ast.unparse(ast.fix_missing_locations(node))
    where = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
    return ast.fix_missing_locations(tree), f"{where} {what}: `{before:.90}` -> `{after:.90}`"


def load_with(path: Path, tree: ast.AST) -> None:
    """Make the import of a module compile another tree; nothing of the package is loaded yet."""
    before = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        return compile(tree, str(path), "exec") if self.path == str(path) else before(self, name)  # type: ignore[arg-type]

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _words(text: str) -> list[str]:
    return text.split()


MODELS = _words("""
llama-3.1-8b qwen3-30b-a3b gpt-oss-20b gemma-2-9b deepseek-v2-lite nemotron-h-8b gpt3-1.3b mamba-2.8b bert-large
kimi-linear-48b-a3b qwen3-next-80b-a3b deepseek-v3.2 jamba-v0.1 opt-13b llama-4-scout falcon-40b lfm2-1.2b minimax-m2
glm-4.5-air gemma-3n-e2b mpt-7b phi-3.5-moe
""")
HERE = _words("8xh100-sxm-80gb 16xa100-sxm-80gb 64xh100-sxm-80gb 32xb200-sxm-180gb 16xmi300x 8xl40s 4xa10")


def _flags(text: str) -> dict[str, list[str]]:
    """Return the values of each flag, a line each; a switch has none."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}


_DEGREES = """
--tp 1 2 4 8
--pp 1 2 4
--ep 1 2 4 8
--etp 1 2
"""
_JOB = f"""{_DEGREES}
--cp 1 2 4
--cp-kind ring all-gather all-to-all
--layout 1d summa
--tp2 1 2
--schedule gpipe 1f1b interleaved zb-h1 dualpipe
--vpp 1 2
--seq-len 1024 4096 32768
--global-batch 32 64 256
--micro-batch 1 2 4
--sharding none zero1 zero2 zero3 fsdp hsdp distributed-optimizer
--shard 2 4
--recompute none selective attention full
--recompute-layers 1 3
--optimizer adam adam8bit lion muon sgd
--precision bf16 fp16 fp8 amp-bf16 bf16-grads16
--stack pytorch fsdp2 megatron-core deepspeed nemo
--expert-imbalance 1.3
--order tp-cp-ep-dp-pp dp-tp-pp
--dropout
"""
_SERVED = f"""{_DEGREES}
--batch 1 8 64 300
--input-tokens 1 512 8000 60000
--output-tokens 1 200 2000
--weights fp8 int4 int8-w8a8 nvfp4 q4_k_m mxfp4
--kv-cache fp8 int8 bf16
--engine vllm sglang tensorrt-llm transformers llama.cpp
--max-batched-tokens 2048 8192
--memory-fraction 0.8
--adapter-rank 16
--prefix-tokens 256
--shard-weights
--same-prompts
--no-use-kv-cache
"""
_SEARCH = """
--seq-len 2048
--global-batch 64
--stack pytorch fsdp2 megatron-core
--objective cost memory
--sharding zero1,fsdp
--recompute none,full
--pp 1,2 1..4
--tp 1..4
--at-most
"""
_SERVING_SEARCH = """
--batch 1..64 8,32
--engine vllm,sglang
--objective cost ttft latency
--tp 1..8
--weights bf16,fp8
--max-tpot 20ms
--input-tokens 2000
--top 3
--at-most
"""
_LOAD = """
--rate 1/s 5/s
--output-cv 1
--tp 1 2
--prefix-tokens 200
--engine vllm sglang
"""
FLAGS = {
    **{name: _flags(_JOB) for name in ("train", "comm")},
    **{name: _flags(_SERVED) for name in ("infer", "roofline")},
    "count": _flags("--seq-len 2048\n--tp 1 2 4\n--recompute full\n--batch 4\n--cp 2"),
    "serve": _flags(_LOAD),
    "plan train": _flags(_SEARCH),
    "plan infer": _flags(_SERVING_SEARCH),
}
MIX = {"train": 9, "infer": 9, "count": 1, "comm": 2, "roofline": 1, "serve": 1}
SEARCHES = {"plan train": 2, "plan infer": 1}


def questions() -> list[str]:
    """Return the stored whole answers' command lines, then random ones of each kind, always the same."""
    from test_whole_answers import CASES

    drawn, found = random.Random(0), [f"{words} --json" for words in CASES.values()]
    for mix, count in ((MIX, 120), (SEARCHES, 16)):
        for kind in drawn.choices(list(mix), list(mix.values()), k=count):
            searched = kind in SEARCHES
            words = [kind, drawn.choice(MODELS[:3] if searched else MODELS)]
            words += ["--on", drawn.choice(HERE[:2] if searched else HERE)] if kind != "count" else []
            flags = FLAGS[kind]
            for name in drawn.sample(sorted(flags), min(len(flags), drawn.randint(1, 5))):
                words += [name, *drawn.sample(flags[name], 1)] if flags[name] else [name]
            found.append(" ".join([*words, "--json"]))
    return found


def probed(words: str) -> dict[str, float] | None:
    """Return the numbers of an answer, None where a question is refused; what varies from run to run is left out."""
    from command_line import run
    from test_whole_answers import numbers

    done = run(*words.split())
    tree = done.tree if done.status in (0, 1) else None
    if tree and "search" in tree:
        tree["search"].pop("seconds", None)
    return dict(numbers(tree)) if tree else None


@dataclass
class Base:
    """What the unchanged package answers: each question with its numbers and the functions that it enters."""

    numbers: dict[str, dict[str, float]]
    entered: dict[str, set[tuple[str, int]]]
    stored: int

    def asked(self, place: Place, search: bool) -> Iterator[tuple[str, bool]]:
        """Yield (question, whether its answer is stored) of those that a place may move."""
        for i, words in enumerate(self.numbers):
            enters = any(
                file == str(place.path) and place.first <= line <= place.last for file, line in self.entered[words]
            )
            if (enters or not place.last) and (search or not words.startswith("plan")):
                yield words, i < self.stored


@dataclass(frozen=True)
class Place:
    """A change: a file, its number in it, and the lines of the function around it, 0 at the level of the module."""

    path: Path
    number: int
    first: int
    last: int


def base_of(asked: list[str], stored: int) -> Base:
    """Return the answers to questions, and what each enters."""
    base, codes = Base({}, {}, stored), set[tuple[str, int]]()

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            codes.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    for words in asked:
        codes.clear()
        sys.setprofile(profile)
        try:
            numbers = probed(words)
        finally:
            sys.setprofile(None)
        if numbers is not None:
            base.numbers[words], base.entered[words] = numbers, set(codes)
    return base


def _moved(before: dict[str, float] | None, after: dict[str, float] | None) -> bool:
    if before is None or after is None or before.keys() != after.keys():
        return before is not after
    return any(not math.isclose(value, after[name], rel_tol=1e-9, abs_tol=1e-15) for name, value in before.items())


def _failed(tests: list[str]) -> str:
    """Return the first test that fails, empty where none does."""
    import pytest

    class First:
        failed = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.failed = self.failed or (report.nodeid if report.failed else "")

    first = First()
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", *tests], [first])
    return first.failed or ("" if status in (0, 5) else "their collection")


def judged(package: str, base: Base, place: Place, stage: Callable[[str], None]) -> str:
    """Return what becomes of the change that is loaded; `stage` is told what is tried, in case this process ends."""
    where = ""
    for words, stored in base.asked(place, package == "search"):
        stage("stored" if stored else "probe")
        if _moved(base.numbers[words], probed(words)):
            if stored:
                return STORED
            where = words
            break
    if not where:
        return "moves nothing"
    stage("tests")
    if _failed([FROZEN]):
        return STORED
    failed = _failed(TESTS[package].split())
    return f"killed by {failed}" if failed else f"SURVIVED {where}"


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
    return (
        STORED if stages[-1:] in ([], ["stored"]) else "killed by tests" if stages[-1] == "tests" else "raises unseen"
    )


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


def drawn_of(package: str, since: str, count: int, seed: int) -> list[Place]:
    """Return so many changes of a package, or of its files that changed since a commit."""
    paths = sorted((SOURCE / package).rglob("*.py"))
    if since:
        command = ["git", "diff", "--name-only", since]
        named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        paths = [path for path in paths if str(path.relative_to(ROOT)) in named]
    places = [place for path in paths for place in _places(path)]
    return random.Random(f"{seed}/{package}").sample(places, min(count, len(places)))


def _places(path: Path) -> Iterator[Place]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions: dict[ast.AST, ast.FunctionDef] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            functions |= {node: function for node in ast.walk(function) if node not in functions}
    for number, (node, _, _) in enumerate(changes(tree)):
        around = functions.get(node)
        begin = min([around.lineno, *(d.lineno for d in around.decorator_list)]) if around else 0
        yield Place(path, number, begin, around.end_lineno or 0 if around else 0)


def main() -> int:
    """Print a line for each change that survives and a row for each package; return 1 where more than 5 % survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", choices=[*TESTS, []], default=[])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--since", default="")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    os.chdir(ROOT)
    base, worst = _unchanged(), 100.0
    for package in asked.packages or TESTS:
        found: Counter[str] = Counter()
        for place in drawn_of(package, asked.since, asked.count, asked.seed):
            tree, told = changed(place.path, place.number)

            def work(stage: Callable[[str], None], place: Place = place, tree: ast.AST = tree) -> str:
                load_with(place.path, tree)
                return judged(package, base, place, stage)  # noqa: B023

            said = apart(work) if any(base.asked(place, package == "search")) else "moves nothing"
            found[said if said in (STORED, "moves nothing") else said.split()[0]] += 1
            if asked.verbose or said.startswith("SURVIVED"):
                print(f"{said}\n  {told}", flush=True)
        worst = min(worst, _row(package, found, asked.seed))
    return 0 if worst >= 95 else 1


def _unchanged() -> Base:
    """Return the answers of the unchanged package, asked in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "base"

        def work(stage: Callable[[str], None]) -> str:
            from test_whole_answers import CASES

            stage("tests")
            kept.write_bytes(pickle.dumps(base_of(questions(), len(CASES))))
            return "kept"

        apart(work)
        base: Base = pickle.loads(kept.read_bytes())
        return base


def _row(package: str, found: Counter[str], seed: int) -> float:
    """Print a package's row of the table, and return its score in percent."""
    killed = found[STORED] + found["killed"]
    score = 100 * killed / max(1, killed + found["SURVIVED"])
    cells = [package, found.total(), found[STORED], found["killed"], found["SURVIVED"], found["moves nothing"]]
    cells += [f"{score:.0f} %", seed, datetime.date.today()]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return score


if __name__ == "__main__":
    sys.exit(main())
