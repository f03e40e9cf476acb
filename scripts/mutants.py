"""Change the package in one small place at a time, and count the changes that move a number and that no test sees.

`python scripts/mutants.py ops cost --count 50 --seed 1` draws 50 changes of each part, `--since COMMIT` draws them
from the files that changed since, `--level` from defaults and tables alone. A change is made as its module is compiled,
in a process of its own: no file is written. It is killed by stored answers (whole answers, frozen predictions) or,
where it moves a number of the probe (random questions of the command line, their pages, files read and written), by the
tests that `PARTS` names, which must pass without it. What moves no number is not judged, nor what cannot be imported.
`--kept FILE` keeps verdicts: a later run judges survivors and new places alone. `--page` renews the table of the docs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
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
import zlib
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
DIED = "ends a question that is not stored"
PAGE = ROOT / "docs" / "limits.md"
MIXERS = "ops/ssm.py ops/latent.py ops/recurrent.py ops/compressed.py ops/attention.py"
TUNING = "ops/tuning.py ops/adapters.py plans/_tuning.py training/_tuning.py training/_savers.py search/_tuning.py"
IN_OPS = "tests/ops tests/serving/test_serving_ledger.py tests/laws/test_count_laws.py"
IN_TRAINING = "tests/training tests/laws/test_memory_laws.py tests/laws/test_time_laws.py"
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
        "training/_comm.py training/_traffic.py training/_wires.py",
        f"tests/answers/test_comm_command.py {IN_TRAINING}",
    ),
    "tuning": (TUNING, "tests/tuning tests/search/test_tuning_recipes.py tests/training"),
    "serving": ("serving", "tests/serving src/shardwise/serving"),
    "load": ("serving/load", "tests/serving src/shardwise/serving/load tests/search/test_plan_serve.py"),
    "search": ("search", "tests/search src/shardwise/search"),
    "formats": ("formats shell", "tests/formats src/shardwise/formats tests/shell src/shardwise/shell"),
    "measured": ("measured", "tests/measured src/shardwise/measured tests/answers/test_validate.py tests/validation"),
    "answers": ("answers units.py", "tests/answers src/shardwise/answers src/shardwise/units.py tests/test_docs.py"),
}
"""Folders and files of each part, and its tests, those that see most in the least time first."""
TIMED = ("test_executor.py",)
"""Files whose tests are of time, which a machine at work breaks by itself."""
MOST_SECONDS = {"import": 60, "stored": 100, "probe": 100, "tests": 400}

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
glm-4.5-air gemma-3n-e2b mpt-7b phi-3.5-moe deepseek-v4-flash zamba2-7b rwkv-4-169m xlstm-7b recurrentgemma-2b
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
    **{f"export {name}": _flags(_JOB) for name in ("megatron", "deepspeed", "fsdp", "torchtitan")},
    **{f"export {name}": _flags(_SERVED) for name in ("vllm", "sglang", "trtllm")},
}
MIX = {"train": 9, "infer": 9, "count": 1, "comm": 2, "roofline": 1, "serve": 1}
SEARCHES = {"plan train": 2, "plan infer": 1}
EXPORTS = dict.fromkeys((name for name in FLAGS if name.startswith("export")), 1)
SCRIPTS = ROOT / "tests" / "formats" / "scripts"


def questions() -> list[str]:
    """Return the stored whole answers' command lines, then random ones of each kind, always the same."""
    from test_whole_answers import CASES

    drawn, found = random.Random(0), [f"{words} --json" for words in CASES.values()]
    for mix, count in ((MIX, 150), (SEARCHES, 16), (EXPORTS, 28)):
        for kind in drawn.choices(list(mix), list(mix.values()), k=count):
            searched = kind in SEARCHES
            words = [kind, drawn.choice(MODELS[:3] if searched else MODELS)]
            words += ["--on", drawn.choice(HERE[:2] if searched else HERE)] if kind != "count" else []
            flags = FLAGS[kind]
            for name in drawn.sample(sorted(flags), min(len(flags), drawn.randint(1, 5))):
                words += [name, *drawn.sample(flags[name], 1)] if flags[name] else [name]
            found.append(" ".join([*words, "--json"]))
            if kind not in EXPORTS and len(found) % 3 == 0:
                found.append(" ".join(words))
    scripts = [f"import {path.relative_to(ROOT)} --json" for path in sorted(SCRIPTS.iterdir())]
    data = ROOT / "accuracy" / "data"
    rows = [str(data / f"{name}.csv") for name in ("training_runs", "training_cpu", "inference_runs", "inference_cpu")]
    return [*found, *scripts, *(f"validate {path} --json" for path in rows), f"validate {' '.join(rows)} --by metric"]


def probed(words: str) -> dict[str, float] | None:
    """Return the numbers of an answer, None where a question is refused; what varies from run to run is left out."""
    from command_line import run
    from test_whole_answers import numbers

    done = run(*words.split())
    if done.status not in (0, 1):
        return None
    if "--json" not in words:
        lines = (line for line in done.out.splitlines() if not re.search(r"seconds of", line))
        # How long a search took stands in a sentence that may be wrapped anywhere.
        page = re.sub(r"\bin\s+[\d.,]+\s+(ms|s|min|h)\b", "", "\n".join(lines))
        return {str(place): float(found) for place, found in enumerate(re.findall(r"\d+\.?\d*", page))}
    tree = done.tree
    tree.get("search", {}).pop("seconds", None)
    texts = words.startswith(("import", "export"))
    return {**dict(numbers(tree)), **({"text": float(zlib.crc32(done.out.encode()))} if texts else {})}


@dataclass
class Base:
    """What the unchanged package answers: each question with its numbers and the functions that it enters."""

    numbers: dict[str, dict[str, float]]
    entered: dict[str, set[tuple[str, int]]]
    stored: int

    def asked(self, place: Place) -> Iterator[tuple[str, bool]]:
        """Yield (question, whether its answer is stored) of those that a place may move: searches for few parts."""
        searched = place.path.relative_to(SOURCE).parts[0] in ("search", "answers")
        for i, words in enumerate(self.numbers):
            enters = any(
                file == str(place.path) and place.first <= line <= place.last for file, line in self.entered[words]
            )
            if (enters or not place.last) and (searched or not words.startswith("plan")):
                yield words, i < self.stored


@dataclass(frozen=True)
class Place:
    """A change: a file, its number in it, and the lines of the function around it, 0 at the level of the module."""

    path: Path
    number: int
    first: int
    last: int
    around: str


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


def _nearest_first(tests: str, place: Place) -> list[str]:
    """Return the files of some tests, those first that name the module or the function that a place is in."""
    roots = [ROOT / word for word in tests.split()]
    files = [path for one in roots for path in ([one] if one.is_file() else sorted(one.rglob("*.py")))]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.name not in TIMED}
    held = [path for path, text in texts.items() if ">>>" in text or "def test_" in text]
    names = [name for name in (place.path.stem.strip("_"), place.around) if name]
    held.sort(key=lambda path: -sum(name in texts[path] or name in path.stem for name in names))
    return [str(path.relative_to(ROOT)) for path in held]


def judged(part: str, base: Base, place: Place, stage: Callable[[str], None]) -> str:
    """Return what becomes of the change that is loaded; `stage` is told what is tried, in case this process ends."""
    stage("import")
    importlib.import_module(
        ".".join(place.path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    )
    importlib.import_module("shardwise.cli")
    for words, stored in base.asked(place):
        stage("stored" if stored else "probe")
        if _moved(base.numbers[words], probed(words)):
            return STORED if stored else tested(part, place, words, stage) if part else f"SURVIVED {words}"
    return "moves nothing"


red: set[str] = set()
"""Tests that fail without any change, which kill none."""
sound: set[str] = set()


def tested(part: str, place: Place, where: str, stage: Callable[[str], None]) -> str:
    """Return what the tests of a part say of the change that is loaded, which moves a number of a question."""
    stage("tests")
    if _failed([FROZEN]):
        return STORED
    failed = _failed([*_nearest_first(PARTS[part][1], place), *(f"--deselect={test}" for test in red)])
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


def drawn_of(asked: argparse.Namespace, part: str) -> list[Place]:
    """Return so many changes of a part, or of its files that changed since a commit, in an order of the seed."""
    roots = [SOURCE / name for name in PARTS[part][0].split()]
    paths = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    if asked.since:
        command = ["git", "diff", "--name-only", asked.since]
        named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        paths = [path for path in paths if str(path.relative_to(ROOT)) in named]
    places = [place for path in paths for place in _places(path) if not (asked.level and place.last)]
    random.Random(f"{asked.seed}/{part}").shuffle(places)
    return places[: asked.count]


def _places(path: Path) -> Iterator[Place]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions: dict[ast.AST, ast.FunctionDef] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            functions |= {node: function for node in ast.walk(function) if node not in functions}
    for number, (node, _, _) in enumerate(changes(tree)):
        around = functions.get(node)
        begin = min([around.lineno, *(d.lineno for d in around.decorator_list)]) if around else 0
        yield Place(path, number, begin, around.end_lineno or 0 if around else 0, around.name if around else "")


def main() -> int:
    """Print a line for each change that survives and a row for each part; return 1 where more than 5 % survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--since", default="")
    parser.add_argument("--level", action="store_true")
    parser.add_argument("--stored", action="store_true", help="ask no tests: what stored answers let pass survives")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no change of a part after so long")
    asked = parser.parse_args()
    os.chdir(ROOT)
    base, worst = _unchanged(asked.kept), 100.0
    kept = (
        dict(json.loads(line) for line in asked.kept.read_text().splitlines())
        if asked.kept and asked.kept.exists()
        else {}
    )
    for part in asked.parts or PARTS:
        found: Counter[str] = Counter()
        begin = time.monotonic()
        for place in drawn_of(asked, part):
            tree, told = changed(place.path, place.number)
            said = kept.get(f"{part} {told}", "SURVIVED")
            if said.startswith("SURVIVED"):
                if time.monotonic() - begin > 60 * asked.minutes:
                    break
                said = verdict("" if asked.stored else part, base, place, tree)
                print(f"{said}\n  {told}", flush=True)
                if asked.kept:
                    with asked.kept.open("a") as file:
                        file.write(json.dumps([f"{part} {told}", said]) + "\n")
            found[said if said in (STORED, "moves nothing", "is no module") else said.split()[0]] += 1
        worst = min(worst, _row(part, found, asked))
    return 0 if worst >= 95 else 1


def verdict(part: str, base: Base, place: Place, tree: ast.AST) -> str:
    """Return what becomes of a change; without a part, no tests are asked."""
    if not any(base.asked(place)):
        return "moves nothing"

    def work(stage: Callable[[str], None]) -> str:
        load_with(place.path, tree)
        return judged(part, base, place, stage)

    def tests_alone(stage: Callable[[str], None]) -> str:
        load_with(place.path, tree)
        return tested(part, place, DIED, stage)

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
    texts = sorted([*SOURCE.rglob("*.*"), Path(__file__)])
    code = hashlib.sha256(b"".join(path.read_bytes() for path in texts if path.suffix != ".pyc")).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        place = (kept.parent if kept else Path(folder)) / f"{code}.base"

        def work(stage: Callable[[str], None]) -> str:
            from test_whole_answers import CASES

            stage("tests")
            place.write_bytes(pickle.dumps(base_of(questions(), len(CASES))))
            return "kept"

        if not place.exists():
            apart(work)
        base: Base = pickle.loads(place.read_bytes())
        return base


def _row(part: str, found: Counter[str], asked: argparse.Namespace) -> float:
    """Print a part's row of the table, write it into the page where that is asked, and return its score in percent."""
    killed = found[STORED] + found["killed"]
    visible = killed + found["SURVIVED"]
    score = 100 * killed / visible if visible else 100.0
    name = f"{part}, defaults and tables" if asked.level else part
    cells = [name, found.total(), visible, found[STORED], found["killed"], found["SURVIVED"]]
    row = f"| {' | '.join(map(str, [*cells, f'{score:.0f} %', asked.seed, datetime.date.today()]))} |"
    print(row, flush=True)
    if asked.page:
        text = PAGE.read_text(encoding="utf-8")
        text, times = re.subn(rf"^\| {name} \|.*$", row, text, flags=re.MULTILINE)
        PAGE.write_text(text if times else re.sub(r"(\| part \|.*\n\|---.*\n)", rf"\1{row}\n", text), encoding="utf-8")
    return score


if __name__ == "__main__":
    sys.exit(main())
