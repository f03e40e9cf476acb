"""Whole answers of cases that no published run covers, and sums of the answers to random questions, are what they were.

State-space, sparse, linear and recurrent mixers, experts over etp, rare schedules, 8-bit optimizers, adapters, fleets,
searches, CPUs and engines of small machines: every number of their JSON is stored. Of random questions of every command
and of files, chosen so that together they run what questions can run (`scripts/choose.py`), a few numbers and a sum for
each part of the answer are. A change that moves one on purpose stores both anew:
`PYTHONPATH=tests python tests/test_whole_answers.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from command_line import Done, inside_a_folder, run

DATA = Path(__file__).parent / "data/whole_answers.json"
SAMPLE = DATA.with_name("random_answers.json")
CASES = {
    "nemotron-h, trained": "train nemotron-h-8b --on 8xh100-sxm-80gb --tp 2 --seq-len 4096 --global-batch 16",
    "nemotron-h, served": "infer nemotron-h-8b --on 1xh100-sxm-80gb --batch 4 --input-tokens 2048 --output-tokens 64",
    "mamba, trained": "train mamba-2.8b --on 8xa100-sxm-80gb --cp 2 --seq-len 4096 --global-batch 32",
    "mamba, served": "infer mamba-2.8b --on 1xa100-sxm-80gb --batch 8",
    "deepseek-v3.2, trained": "train deepseek-v3.2 --on 256xh800 --pp 16 --ep 16 --seq-len 4096 --global-batch 256"
    " --stage-layers 4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1 --recompute full",
    "deepseek-v3.2, served": "infer deepseek-v3.2 --on 16xh200 --tp 16 --batch 32 --input-tokens 8192",
    "zamba, trained": "train zamba2-7b --on 8xh100-sxm-80gb --sharding zero2 --seq-len 4096 --global-batch 16",
    "zamba, served": "infer zamba2-7b --on 1xh100-sxm-80gb --batch 2",
    "rwkv, trained": "train rwkv-4-169m --on 1xa100-sxm-80gb --seq-len 1024 --global-batch 8",
    "xlstm, trained": "train xlstm-7b --on 8xh100-sxm-80gb --sharding fsdp --seq-len 2048 --global-batch 16",
    "minimax, trained": "train minimax-m2 --on 64xh100-sxm-80gb --tp 4 --ep 8 --etp 2 --sequence-parallel"
    " --sharding zero1 --seq-len 4096 --global-batch 64 --recompute full",
    "minimax, served": "infer minimax-m2 --on 8xh200 --tp 8 --ep 8 --batch 16",
    "kimi-linear, trained": "train kimi-linear-48b-a3b --on 32xh100-sxm-80gb --ep 8 --sharding zero1 --seq-len 8192"
    " --global-batch 32",
    "recurrentgemma, trained": "train recurrentgemma-2b --on 8xh100-sxm-80gb --tp 2 --seq-len 2048 --global-batch 16",
    "lfm2, trained": "train lfm2-1.2b --on 1xh100-sxm-80gb --seq-len 2048 --global-batch 8",
    "adam8bit": "train llama-3.1-8b --on 8xh100-sxm-80gb --sharding fsdp --optimizer adam8bit --global-batch 8",
    "a CPU, trained": "train gpt2 --on 1xcpu-x86-2core --stack pytorch-cpu --seq-len 256 --global-batch 2",
    "a CPU in 8 bits": "infer llama-3.2-1b --on 1xcpu-epyc-zen4-2core --engine llama.cpp --weights q8_0 --batch 1",
    "int8": "infer llama-3.1-8b --on 1xl40s --weights int8-w8a8 --batch 8",
    "llama.cpp": "infer llama-3.1-8b --on 1xapple-m2-ultra-76core --engine llama.cpp --weights q4_k_m --batch 1",
    "mamba, split": "train mamba-2.8b --on 8xh100-sxm-80gb --tp 4 --seq-len 4096 --global-batch 16",
    "jamba, its messages": "comm jamba-v0.1 --on 16xh100-sxm-80gb --tp 4 --ep 4 --etp 2 --sharding zero1"
    " --seq-len 4096 --global-batch 16",
    "jamba, served": "infer jamba-v0.1 --on 4xh100-sxm-80gb --tp 4 --batch 4 --input-tokens 4096",
    "deepseek-v4, trained": "train deepseek-v4-flash --on 256xh200 --tp 2 --ep 32 --sharding zero1 --seq-len 8192"
    " --global-batch 256 --recompute full",
    "deepseek-v4, served": "infer deepseek-v4-flash --on 8xh200 --tp 8 --batch 16 --input-tokens 20000",
    "deepseek-v3.2, counted": "count deepseek-v3.2 --seq-len 4096",
    "qwen3-next, split": "train qwen3-next-80b-a3b --on 64xh100-sxm-80gb --tp 2 --ep 8 --sharding zero1 --seq-len 4096"
    " --global-batch 64 --recompute selective",
    "rwkv, split": "train rwkv-4-169m --on 8xa100-sxm-80gb --tp 2 --seq-len 1024 --global-batch 16",
    "xlstm, split": "train xlstm-7b --on 8xh100-sxm-80gb --tp 2 --seq-len 2048 --global-batch 16",
    "experts over etp, their messages": "comm qwen3-30b-a3b --on 64xh100-sxm-80gb --tp 4 --ep 4 --etp 2 --cp 2 --pp 2"
    " --sharding zero1 --seq-len 4096 --global-batch 64",
    "dualpipe": "train deepseek-v2-lite --on 32xb200-sxm-180gb --pp 4 --ep 4 --schedule dualpipe --precision fp8"
    " --stack hai-llm --seq-len 4096 --global-batch 64",
    "gpipe": "train gpt-oss-20b --on 32xh100-sxm-80gb --pp 2 --schedule gpipe --tp 2 --ep 4 --cp 2"
    " --cp-kind all-to-all --stack fsdp2 --seq-len 8192 --global-batch 64",
    "lora": "train llama-3.1-8b --on 8xh100-sxm-80gb --adapter lora --rank 16 --seq-len 2048 --global-batch 16",
    "lora of experts": "train gpt-oss-20b --on 8xh100-sxm-80gb --adapter lora --targets experts --global-batch 16",
    "lora everywhere": "train minimax-m2 --on 64xh100-sxm-80gb --adapter lora --targets all-linear --sharding fsdp",
    "lora beside nf4": "train llama-3.1-8b --on 1xh100-sxm-80gb --adapter lora --base nf4 --seq-len 2048"
    " --global-batch 8 --micro-batch 1",
    "dora": "train llama-3.1-8b --on 8xh100-sxm-80gb --adapter dora --targets embedding,head,mlp --tp 2 --pp 2",
    "vera": "train llama-3.1-8b --on 8xh100-sxm-80gb --adapter vera --seq-len 2048 --global-batch 16 --micro-batch 1",
    "oft": "train llama-3.1-8b --on 8xh100-sxm-80gb --adapter oft --seq-len 2048 --global-batch 16 --micro-batch 1",
    "a prefix": "train qwen3-8b --on 8xh100-sxm-80gb --adapter prefix --global-batch 16 --micro-batch 1",
    "a fleet": "serve llama-3.1-8b --on 1xh100-sxm-80gb --rate 2/s",
    "a search for training": "plan train gpt3-1.3b --on 8xa100-sxm-80gb --seq-len 2048 --global-batch 64 --top 3",
    "a search of experts": "plan train qwen3-30b-a3b --on 32xh100-sxm-80gb --seq-len 4096 --global-batch 64 --top 2"
    " --sharding zero1 --recompute none,full --tp 1,2 --pp 1,2",
    "a search for serving": "plan infer qwen3-30b-a3b --on 8xh100-sxm-80gb --batch 1..32 --input-tokens 2000 --top 3",
    "a search for the first token": "plan infer qwen3-30b-a3b --on 8xh100-sxm-80gb --objective ttft --max-tpot 20ms"
    " --top 2",
    "a search for cost": "plan train gpt3-1.3b --on 16xa100-sxm-80gb --at-most --objective cost --global-batch 64"
    " --sharding zero1,fsdp --pp 1,2 --top 2",
    "a search under load": "plan serve llama-3.1-8b --on 8xa100-sxm-80gb --rate 9/s --p99-ttft 800ms --tp 1,2 --top 2",
    "the cheapest deployment": "plan serve gpt-oss-20b --on 2xh100-sxm-80gb --rate 3/s --input-tokens 1500"
    " --output-tokens 200 --mean-tpot 30ms --objective cost --engine sglang --top 2",
    "a search of two batches": "plan train gpt-oss-20b --on 8xh100-sxm-80gb --max-step 10min --global-batch 32,64"
    " --sharding zero1,fsdp --tp 1,2 --pp 1 --top 2",
    "ppo with adapters": "train gpt-oss-20b --on 16xa100-sxm-80gb --method ppo --adapter oft --seq-len 2048"
    " --micro-batch 2",
    "a roofline": "roofline nemotron-h-8b --on 8xh100-sxm-80gb --pp 4 --engine sglang",
    "gemma-3n without a cache": "infer gemma-3n-e2b --on 32xb200-sxm-180gb --output-tokens 200 --no-use-kv-cache",
    "experts over etp, their replicas": "comm qwen3-30b-a3b --on 64xh100-sxm-80gb --etp 2 --sharding zero2",
    "a zero bubble": "train falcon-40b --on 8xl40s --global-batch 64 --schedule zb-h1 --vpp 1 --seq-len 4096",
    "experts over etp, served": "infer glm-4.5-air --on 8xl40s --etp 2",
    "adapters, served": "infer gemma-2-9b --on 32xb200-sxm-180gb --adapter-rank 16 --shard-weights",
    "an encoder": "train bert-large --on 8xl40s --cp 2",
    "hybrid sharding": "train kimi-linear-48b-a3b --on 8xh100-sxm-80gb --sharding hsdp --shard 2 --cp-kind all-gather",
    "muon": "train jamba-v0.1 --on 16xmi300x --optimizer muon --ep 2",
    "llama-4 without a cache": "infer llama-4-scout --on 8xh100-sxm-80gb --no-use-kv-cache --ep 4",
    "alibi, a prefix and adapters": "infer mpt-7b --on 8xh100-sxm-80gb --adapter-rank 16 --prefix-tokens 256",
    "kimi-linear, served": "infer kimi-linear-48b-a3b --on 16xmi300x --same-prompts --tp 2 --weights fp8"
    " --prefix-tokens 256",
    "fp16 of autocast": "comm opt-13b --on 32xb200-sxm-180gb --precision amp-bf16 --order tp-cp-ep-dp-pp",
    "a mixture, counted": "count gemma-3n-e2b --recompute full --cp 2",
    "rwkv, served": "infer rwkv-4-169m --on 8xl40s --input-tokens 60000",
    "a fleet of sglang": "serve lfm2-1.2b --on 32xb200-sxm-180gb --engine sglang --rate 5/s",
}


# Nearest changes are a search; bands and chances are statistics of published runs. Each is held by tests of its own.
APART = ("changes", "interval", "chance_to_fit")


def numbers(tree: Any, path: str = "", texts: bool = False) -> Iterator[tuple[str, float]]:
    """Yield every number of a tree with its path; truth values are numbers too, and texts where they are asked for."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from numbers(value, f"{path}/{name}", texts)
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from numbers(value, f"{path}/{place}", texts)
    elif isinstance(tree, (int, float)):
        yield path, float(tree)
    elif texts and isinstance(tree, str):
        lines = (line for line in tree.splitlines() if not line.lstrip().startswith("#"))
        yield path, float(zlib.crc32("\n".join(lines).encode(errors="backslashreplace")))


def untimed(page: str) -> str:
    """A page without how long a search took, which stands in a sentence that may be wrapped anywhere."""
    lines = (line for line in page.splitlines() if not re.search(r"seconds of", line))
    return re.sub(r"\bin\s+[\d.,]+\s+(ms|s|min|h)\b", "", "\n".join(lines))


def weighed(found: Iterable[tuple[str, float]]) -> float:
    """One number of many, which moves by about the relative change of any of them, other for each place."""
    return math.fsum((1 + zlib.crc32(path.encode()) / 2**32) * (1 + math.asinh(value / 1e-7)) for path, value in found)


def sums(done: Done, command: str) -> dict[str, float]:
    """What is stored of an answer: its status, up to three numbers to read, and a sum for each part of it."""
    found = {"status": float(done.status)}
    if done.status not in (0, 1):
        return found
    if not done.out.startswith("{"):
        numbered = enumerate(re.findall(r"\d+\.?\d*", untimed(done.out)))
        return found | {"sum": round(weighed((str(place), float(one)) for place, one in numbered), 9)}
    tree = done.tree
    files = command in ("import", "export")
    for name in ("schema", "assumptions", *(("version", "assumed", "notes", "source") if files else ())):
        tree.pop(name, None)
    tree.get("search", {}).pop("seconds", None)
    plain = {name: part for name, part in tree.items() if isinstance(part, (int, float))}
    read = [name for name in plain if name.endswith(("_seconds", "_bytes", "parameters", "_concurrency"))][:3]
    found |= {name: float(f"{plain.pop(name):.10g}") for name in read}
    parts = {"sum": plain, **{f"sum of {name}": part for name, part in tree.items() if isinstance(part, (dict, list))}}
    told = {name: [one for one in numbers(part, "", files) if "elapsed" not in one[0]] for name, part in parts.items()}
    return found | {name: round(weighed(one), 9) for name, one in told.items() if one}


def near(name: str, before: float, after: float) -> bool:
    """Whether a number of that name is what it was but for rounding."""
    if name.startswith("sum"):
        return abs(before - after) < 1e-8
    return math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-15)


def answer(case: str) -> dict[str, Any]:
    """The answer to one case, without what varies."""
    done = run(*CASES[case].split(), "--json")
    assert done.status in (0, 1), done.out
    tree = done.tree
    tree.get("search", {}).pop("seconds", None)
    return {name: part for name, part in tree.items() if name not in APART}


def told(tree: Any) -> Any:
    """A tree as it is stored: texts left out, 11 digits."""
    if isinstance(tree, dict):
        return {name: told(part) for name, part in tree.items() if not isinstance(part, str)}
    if isinstance(tree, list):
        return [] if all(isinstance(part, str) for part in tree) else [told(part) for part in tree]
    return float(f"{tree:.11g}") if isinstance(tree, float) else None if isinstance(tree, str) else tree


@cache
def stored() -> dict[str, Any]:
    """Every answer as it was."""
    return dict(json.loads(DATA.read_text()))


@pytest.mark.parametrize("case", CASES)
def test_no_number_of_an_answer_moved(case: str) -> None:
    """Every number that was there is, and within 1e-9 of what it was; further ones are held once they are stored."""
    now, then = dict(numbers(answer(case))), dict(numbers(stored()[case]))
    moved = {
        path: (value, now.get(path))
        for path, value in then.items()
        if path not in now or not near(path, value, now[path])
    }
    assert moved == {}


@cache
def sample() -> list[dict[str, Any]]:
    """The random questions, each with its files and what is stored of its answer."""
    return list(json.loads(SAMPLE.read_text(encoding="utf-8")))


def asked_again(one: dict[str, Any]) -> dict[str, float]:
    """What is stored of the answer to a random question, as it is today."""
    with inside_a_folder():
        for name, text in one.get("files", {}).items():
            Path(name).write_bytes(text.encode())
        words = one["words"].split(" ")
        return sums(run(*words), words[0])


@pytest.mark.parametrize("number", range(len(sample())))
def test_no_part_of_a_random_answer_moved(number: int) -> None:
    """No random question is answered otherwise than it was: to see how, ask it here and on the commit before."""
    one = sample()[number]
    now, then = asked_again(one), one["told"]
    moved = {
        name: (then.get(name), now.get(name))
        for name in sorted({*now, *then})
        if name not in now or name not in then or not near(name, then[name], now[name])
    }
    assert moved == {}, (
        f"`shardwise {one['words']}`, {len(one.get('files', {}))} files beside it: see the module's text"
    )


def stores(found: list[dict[str, Any]]) -> None:
    """Write what is told of random questions, a line each."""
    lines = (json.dumps(one | {"told": asked_again(one)}, separators=(",", ":")) for one in found)
    SAMPLE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["SHARDWISE_CACHE"] = "off"
    lines = (f" {json.dumps(case)}: {json.dumps(told(answer(case)), separators=(',', ':'))}" for case in CASES)
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    stores(sample())
