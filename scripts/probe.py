"""What users see of the package, as numbers: questions of every command, their answers, and the statements they run.

Questions are those of the stored whole answers, random ones of the flags below, the files that the fuzzer starts from,
and published runs. Statements are written down as they begin, by a line put before each as its module is compiled.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import math
import os
import pkgutil
import random
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "shardwise"
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "benchmarks", "")]

FROZEN = "tests/validation/test_frozen.py"
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain")
MOST_SECONDS = 1.2
"""What a question may take: others would be asked too seldom."""


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


_TUNED = """
--adapter lora dora vera oft ia3 rslora
--rank 8 64
--targets all-linear q_proj,v_proj mlp
--base nf4 int8 fp8
--trains head last:2 norms
--method sft dpo grpo ppo kto
--optimizer adam8bit paged-adam8bit galore lion
--sharding fsdp zero2 zero3
--tp 1 2
--seq-len 2048
--micro-batch 1 2
--global-batch 16 64
--stack trl axolotl llamafactory torchtune megatron-core
--offload optimizer activations
--recompute none full
"""
_LOADED = """
--rate 1/s 3/s
--users 8
--input-cv 1
--output-cv 0.5
--input-tokens 200 100..900
--output-tokens 60
--arrivals constant gamma:2
--stages 1/s:30s,4/s:10s
--prefix-tokens 100
--cached-share 0.4
--router round-robin least-loaded prefix-aware
--engine vllm sglang tensorrt-llm
--tp 1 2
--dp 2 4
--prefill-workers 2
--max-sequences 4 32
--max-batched-tokens 512
--autoscale queue:2 load:0.7 running:8
--p99-ttft 400ms
--mean-tpot 20ms
--num-speculative-tokens 3
--weights fp8
"""
_PLANNED = """
--rate 2/s 20/s
--input-tokens 1000
--output-tokens 100
--p99-ttft 1s
--mean-tpot 30ms
--engine vllm
--tp 1,2
--objective cost
--top 2
"""
FLAGS |= {"train tuned": _flags(_TUNED), "serve loaded": _flags(_LOADED), "plan serve": _flags(_PLANNED)}
MIX |= {"train tuned": 5, "serve loaded": 6}
SEARCHES |= {"plan serve": 1}
SMALL = _words("llama-3.1-8b qwen3-8b gpt-oss-20b")
LISTED = """
devices --json
devices h100-sxm-80gb
devices mi300x --json
models --json
models deepseek-v3 --json
dtypes --json
dtypes
schema --json
explain gpt3-1.3b --on 8xa100-sxm-80gb --tp 2 --seq-len 2048 --global-batch 16 --json
explain llama-3.1-8b --on 8xh100-sxm-80gb --json
explain llama-3.1-8b --on 1xh100-sxm-80gb --batch 8 --json
compare case.toml other.toml --json
compare case.toml other.toml
train --config case.toml --sensitivity --json
infer llama-3.1-8b --on 8xh100-sxm-80gb --batch 8 --vary tp=1..4 --json
train llama-3.1-8b --on 8xh100-sxm-80gb --vary micro_batch=1..4 --global-batch 64
train llama-3.1-8b --on 8xh100-sxm-80gb --solve micro_batch --global-batch 64 --json
infer qwen3-8b --on 1xh100-sxm-80gb --solve batch --max-tpot 20ms --json
train llama-3.1-8b --on p5.48xlarge --host-memory 100GiB --offload optimizer --json
train t5-base --on 8xa100-sxm-80gb --json
count qwen2.5-vl-7b --json
infer qwen2.5-vl-7b --on 1xh100-sxm-80gb --images 2 --json
sweep study.toml --out found --workers 1 --json
"""
CASES = {
    "case.toml": b'command = "train"\nmodel = "gpt3-1.3b"\non = "8xa100-sxm-80gb"\ntp = 2\nglobal_batch = 16\n',
    "other.toml": b'command = "train"\nmodel = "gpt3-1.3b"\non = "8xh100-sxm-80gb"\nsharding = "zero1"\n'
    b"global_batch = 16\n",
}


@dataclass(frozen=True)
class Question:
    """The words of a command line, files that lie beside it, and whether its answer is stored."""

    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    stored: bool = False

    def __str__(self) -> str:
        return " ".join(self.words)


def questions() -> Iterator[Question]:
    """Yield the stored whole answers' command lines, then what is asked beside them, always the same."""
    from test_whole_answers import CASES as STORED

    for words in STORED.values():
        yield Question((*words.split(), "--json"), stored=True)
    drawn = random.Random(0)
    for mix, count in ((MIX, 400), (SEARCHES, 24), (EXPORTS, 40)):
        for kind in drawn.choices(list(mix), list(mix.values()), k=count):
            asked = _random(drawn, kind)
            yield Question((*asked, "--json"))
            if kind not in EXPORTS and drawn.random() < 0.3:
                yield Question(tuple(asked))
    yield from _of_files()
    data = ROOT / "accuracy" / "data"
    rows = [str(data / f"{name}.csv") for name in ("training_runs", "training_cpu", "inference_runs", "inference_cpu")]
    yield from (Question(("validate", row, "--json")) for row in rows)
    yield Question(("validate", rows[1], rows[3], "--by", "metric"))


def _random(drawn: random.Random, kind: str) -> list[str]:
    """Return the words of a question of a kind with a few of its flags."""
    few = kind in SEARCHES or kind in ("train tuned", "serve loaded")
    words = [*kind.removesuffix(" tuned").removesuffix(" loaded").split(), drawn.choice(SMALL if few else MODELS)]
    words += ["--on", drawn.choice(HERE[:2] if few else HERE)] if kind != "count" else []
    flags = FLAGS[kind]
    for name in drawn.sample(sorted(flags), min(len(flags), drawn.randint(1, 5))):
        words += [name, *drawn.sample(flags[name], 1)] if flags[name] else [name]
    return [*words, "--requests", "60"] if kind == "serve loaded" else words


def _of_files() -> Iterator[Question]:
    """Yield questions of files: those that the fuzzer starts from as they are, some of them nudged, and cases."""
    from fuzz import inputs

    files = {**CASES, **{name: text.encode() for name, text in inputs.LOADS.items()}}
    yield from (Question(tuple(line.split()), files) for line in LISTED.splitlines() if line)
    for name in inputs.LOADS:
        how = "--classes" if name == "classes.toml" else "--trace"
        if name != "study.toml":
            yield Question(
                tuple(f"serve qwen3-8b --on 1xh100 --rate 2/s --requests 50 {how} {name} --json".split()), files
            )
            yield Question(tuple(f"serve qwen3-8b --on 1xh100 --requests 50 {how} {name} --json".split()), files)
    for name, flags in inputs.EXPORTED.items():
        target, *wrap = name.split()
        words = f"export {target} llama-3.1-8b --on 8xh100-sxm-80gb {flags}".split()
        yield Question((*words, *wrap, "--json"))
    for path in sorted(inputs.SCRIPTS.iterdir()):
        yield Question(("import", path.name, "--json"), {path.name: path.read_bytes()})
    kinds = (inputs.launched, inputs.settings, inputs.script, inputs.config, inputs.cluster, inputs.measurements)
    for number in range(500):
        drawn = random.Random(f"probe/{number}")
        given = kinds[number % len(kinds)](drawn)
        yield Question(tuple(given.words), given.files)


def answered(asked: Question) -> dict[str, float] | None:
    """Return the numbers of an answer, None where a question is refused; what varies from run to run is left out."""
    from command_line import run
    from test_whole_answers import numbers

    for name, data in asked.files.items():
        Path(name).write_bytes(data)
    done = run(*asked.words)
    if done.status not in (0, 1):
        return None
    found = {"status": float(done.status)}
    if asked.words[0] in ("import", "export"):
        found["text"] = float(zlib.crc32(done.out.encode()))
    if "--json" not in asked.words:
        lines = (line for line in done.out.splitlines() if not re.search(r"seconds of", line))
        # How long a search took stands in a sentence that may be wrapped anywhere.
        page = re.sub(r"\bin\s+[\d.,]+\s+(ms|s|min|h)\b", "", "\n".join(lines))
        return found | {str(place): float(one) for place, one in enumerate(re.findall(r"\d+\.?\d*", page))}
    tree = done.tree
    tree.get("search", {}).pop("seconds", None)
    return found | {name: value for name, value in numbers(tree) if not name.endswith("/elapsed_seconds")}


def moved(before: dict[str, float], after: dict[str, float] | None) -> bool:
    """Return whether any number of an answer is another, or is gone or new."""
    if after is None or before.keys() != after.keys():
        return True
    return any(not math.isclose(value, after[name], rel_tol=1e-9, abs_tol=1e-15) for name, value in before.items())


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


class _Marks(ast.NodeTransformer):
    """Writes a line before every statement of every function that says that it was begun."""

    def __init__(self, file: str, numbered: dict[tuple[str, int], int], ran: bytearray) -> None:
        self.file, self.numbered, self.ran, self.depth = file, numbered, ran, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
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

    def marked(path: str) -> ast.AST | None:
        if not (path.startswith(f"{SOURCE}{os.sep}") and path.endswith(".py")):
            return None
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        return ast.fix_missing_locations(_Marks(str(Path(path).relative_to(ROOT)), numbered, ran).visit(tree))

    compiled_as(marked)
    load_everything()
    imports, answers = bytes(ran), []
    with inside_a_folder():
        for asked in list(questions()):
            ran[:] = bytes(len(ran))
            begin = time.process_time()
            numbers = answered(asked)
            seconds = time.process_time() - begin
            if numbers is not None and (asked.stored or seconds < MOST_SECONDS) and not moved(numbers, answered(asked)):
                answers.append(Answer(asked, numbers, seconds, bytes(ran)))
    import pytest

    ran[:] = bytes(len(ran))
    pytest.main([*PYTEST, FROZEN])
    return Base(sorted(answers, key=lambda one: (not one.asked.stored, one.seconds)), numbered, imports, bytes(ran))


@contextlib.contextmanager
def inside_a_folder() -> Iterator[None]:
    """Work in a folder of its own, gone at the end, whose name is always the same: models are named after it."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe").mkdir()
        os.chdir(Path(folder) / "probe")
        try:
            yield
        finally:
            os.chdir(before)
