"""Whether systems' own parsers take what is exported to them, and understand the same by it.

`python benchmarks/parsers.py` runs where the systems are installed (without their dependencies will do, beside
torch and what their parsers import), prints a table and stores it (parsers.json); a system that is not
installed keeps its stored answers. It fails where a parser refuses a file or reads another value from it.
What a parser read is in parsers_read.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import parsers_read as read

import shardwise as sw
from shardwise.formats import ExportCase
from shardwise.formats._exported import worded
from shardwise.plans import Plan, Training, find_stack, shard_of

STORED = Path(__file__).with_name("parsers.json")
_DEVICES = 8
_LORA = {"adapter": "lora", "rank": 16, "adapter_alpha": 32.0, "adapter_dropout": 0.05}
_FSDP = {"sharding": "fsdp", "recompute": "full"}
_ZERO1 = {"sharding": "distributed-optimizer"}
_HOST = ("optimizer", "gradients", "parameters")
# Case -> what its plan and its job have beside eight replicas of one sequence.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicated": ({}, {}),
    "fsdp": (_FSDP, {}),
    "shard-grad-op": (_FSDP | {"sharding": "shard-grad-op"}, {}),
    "hsdp": (_FSDP | {"sharding": "hsdp", "shard": 4}, {}),
    "fsdp, tp 2": (_FSDP | {"dp": 4, "tp": 2}, {}),
    "fsdp, tp 2 with sp": (_FSDP | {"dp": 4, "tp": 2, "sequence_parallel": True}, {}),
    "fsdp, cp 2": (_FSDP | {"dp": 4, "cp": 2}, {}),
    "fsdp, cp 2, two sequences": (_FSDP | {"dp": 4, "cp": 2, "micro_batch": 2}, {}),
    "fsdp, pp 2": (_FSDP | {"dp": 4, "pp": 2}, {}),
    "distributed optimizer, tp 2 with sp": (_ZERO1 | {"dp": 4, "tp": 2, "sequence_parallel": True}, {}),
    "distributed optimizer, pp 2, vpp 2": (_ZERO1 | {"dp": 4, "pp": 2, "vpp": 2, "schedule": "interleaved"}, {}),
    "distributed optimizer, cp 2": (_ZERO1 | {"dp": 4, "cp": 2, "recompute": "full"}, {}),
    "zero1, tp 2 with sp, pp 2": (
        _ZERO1 | {"sharding": "zero1", "dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True},
        {},
    ),
    "zero1, cp 2, recomputed": ({"sharding": "zero1", "dp": 4, "cp": 2, "recompute": "full"}, {}),
    "zero1, pure bf16": ({"sharding": "zero1"}, {"precision": "bf16-pure"}),
    "gpipe": ({"dp": 4, "pp": 2, "schedule": "gpipe"}, {"precision": "fp32"}),
    "offload": (_FSDP | {"offload": _HOST}, {}),
    "offload of activations": (_FSDP | {"offload": ("activations",)}, {}),
    "zero2": ({"sharding": "zero2"}, {}),
    "zero3": ({"sharding": "zero3"}, {}),
    "zero3, offload": ({"sharding": "zero3", "offload": _HOST}, {}),
    "pure bf16": (_FSDP, {"precision": "bf16-pure"}),
    "fp32": (_FSDP, {"precision": "fp32"}),
    "fp8": (_FSDP, {"precision": "fp8-amp"}),
    "adam8bit": ({}, {"optimizer": "adam8bit"}),
    "muon": ({}, {"optimizer": "muon"}),
    "100 steps": ({"sharding": "fsdp"}, {"token_budget": 4096.0 * 64 * 100}),
    "lora": ({"recompute": "full"}, _LORA),
    "lora, fsdp": (_FSDP, _LORA),
    "dora": ({"recompute": "full"}, _LORA | {"adapter": "dora"}),
    "qlora": ({"recompute": "full"}, _LORA | {"base": "nf4-dq"}),
    "qlora on one device": ({"dp": 1}, _LORA | {"base": "nf4-dq"}),
}
# Case -> the words of an export around which Kubernetes' objects lie, and what those should say.
_TRAIN, _SERVE = "--seq-len 512 --global-batch 16", "--batch 8 --input-tokens 500 --output-tokens 50"
WRAPPED: dict[str, tuple[str, read.Words]] = {
    "training on a node": (
        f"torchtitan llama-3.1-8b {_TRAIN} --on 4xh100",
        {"kind": "Job", "nodes": 1, "each": 4, "copies": 1},
    ),
    "training on two nodes": (
        f"megatron llama-3.1-8b {_TRAIN} --on 16xh100",
        {"kind": "Job", "nodes": 2, "each": 8, "copies": 1},
    ),
    "two servers of a device": (
        f"trtllm llama-3.1-8b {_SERVE} --on 2xh100 --tp 1",
        {"kind": "Deployment", "nodes": 1, "each": 1, "copies": 2},
    ),
    "server on two nodes": (
        f"vllm llama-3.1-405b {_SERVE} --on 16xh100 --tp 8 --pp 2",
        {"kind": "LeaderWorkerSet", "nodes": 2, "each": 8, "copies": 1},
    ),
}

_ASKED = "--batch 32 --input-tokens 1000 --output-tokens 200 --memory-fraction 0.85"
_USUAL: read.Words = {
    "tp": 1, "pp": 1, "dp": 1, "experts": False, "longest": 1200, "sequences": 32, "step_tokens": 8192, "share": 0.85,
    "prefixes": False, "weights": "", "cache": "", "nodes": 1, "adapters": 0, "rank": 0, "proposed": 0, "method": "",
}  # fmt: skip
# Case -> the words of a server's export, and what differs from one device with bf16 weights in them.
SERVED: dict[str, tuple[str, read.Words]] = {
    "one device": ("llama-3.1-8b --on 1xh100", {}),
    "fp8 on four devices, twice": (
        "llama-3.1-70b --on 8xh100 --tp 4 --weights fp8 --kv-cache fp8 --max-batched-tokens 4096",
        {"tp": 4, "dp": 2, "weights": "fp8", "cache": "fp8", "step_tokens": 4096},
    ),
    "two nodes": ("llama-3.1-405b --on 16xh100 --tp 8 --pp 2", {"tp": 8, "pp": 2, "nodes": 2}),
    "experts spread": ("deepseek-v3 --on 8xh200 --dp 8 --ep 8", {"dp": 8, "experts": True}),
    "adapters": ("llama-3.1-8b --on 1xh100 --adapters 4 --adapter-rank 16", {"adapters": 4, "rank": 16}),
    "guesses of its own": (
        "deepseek-v3 --on 8xh200 --tp 8 --ep 8 --speculative-method mtp --num-speculative-tokens 2 "
        "--acceptance-rate 0.8",
        {"tp": 8, "experts": True, "method": "mtp", "proposed": 2},
    ),
    "guesses by n-grams": (
        "llama-3.1-8b --on 1xh100 --speculative-method ngram --num-speculative-tokens 4 --acceptance-rate 0.5",
        {"method": "ngram", "proposed": 4},
    ),
}  # fmt: skip
POOLS: dict[str, tuple[str, read.Words]] = {
    "two pools": (
        "llama-3.1-8b --on 8xh100 --tp 2 --rate 2/s --requests 50 --prefill-workers 3 --prefill-tp 2",
        {"tp": 2, "prefill": 3, "decode": 1},
    ),
}
# Of a server of slots, whose context is that of all of them: what lies on the devices, and nothing of their memory.
_SLOTS = "--batch 32 --input-tokens 1000 --output-tokens 200"
_OF_SLOTS = _USUAL | {"step_tokens": 512, "on_device": "all"}
SLOTTED: dict[str, tuple[str, read.Words]] = {
    "one device": ("llama-3.1-8b --on 1xh100 --weights q8_0", {"weights": "q8_0"}),
    "layers on two devices": (
        "llama-3.1-70b --on 2xh100 --pp 2 --weights q4_k_m --kv-cache int8 --max-batched-tokens 256",
        {"pp": 2, "weights": "q4_k_m", "cache": "q8_0", "step_tokens": 256},
    ),
    "rows on two devices": ("llama-3.1-70b --on 2xh100 --tp 2 --weights q4_k_m", {"tp": 2, "weights": "q4_k_m"}),
    "layers on the host": (
        "llama-3.1-8b --on 1xrtx4090 --weights q4_k_m --gpu-layers 20 --host cpu-x86-2core",
        {"weights": "q4_k_m", "on_device": "20"},
    ),
}
# Target -> the cases of its servers, what all of them are asked, and what they say where a case says nothing else.
ASKED: dict[str, tuple[dict[str, tuple[str, read.Words]], str, read.Words]] = {
    "vllm": (SERVED, _ASKED, _USUAL),
    "sglang": (SERVED, _ASKED, _USUAL),
    "dynamo": (SERVED | POOLS, _ASKED, _USUAL),
    "llamacpp": (SLOTTED, _SLOTS, _OF_SLOTS),
}


def made(stack: str, case: str) -> ExportCase:
    """Return a case in a stack: Llama 3.1 8B on eight H100s, 64 sequences of 4096 tokens a step."""
    plan, job = CASES[case]
    if stack == "verl":
        job = job | {"method": "grpo"} | ({"adapter_dropout": 0.0} if "adapter" in job else {})
    if stack in ("verl", "llama-factory-v1") and "cp" in plan:
        plan = plan | {"cp_kind": "all-to-all"}
    whole = Plan(**{"dp": _DEVICES, "micro_batch": 1, "sequence_parallel": False} | plan)
    return ExportCase(
        model=sw.load_model("llama-3.1-8b"),
        cluster=sw.Cluster.parse(f"{whole.num_devices}xh100-sxm-80gb"),
        plan=whole,
        job=Training(**{"seq_len": 4096, "global_batch": 64} | job),
        stack=find_stack(stack),
    )


def expected(case: ExportCase) -> read.Words:
    """Return what a parser should read from a case, by the name of ours."""
    p, job = case.plan, case.job
    sharded, word = {"shard": shard_of(p) if p.sharding != "none" else 1}, worded(case).plan.sharding
    return {
        "tp": p.tp, "cp": p.cp, "pp": p.pp, "dp": p.dp, "micro_batch": p.micro_batch, **sharded,
        "accumulation": job.global_batch // (p.micro_batch * p.dp), "global_batch": job.global_batch,
        "seq_len": job.seq_len, "sharded": p.sharding != "none", "recompute": p.recompute == "full",
        "reshard": p.sharding not in ("none", "shard-grad-op"), "offload": "parameters" in p.offload,
        "activations": "activations" in p.offload, "stage": int(word[4:]) if word.startswith("zero") else 0,
        "adapter": bool(job.adapter), "rank": job.rank, "alpha": job.adapter_alpha, "dropout": job.adapter_dropout,
        "four_bits": job.base.startswith("nf4"), "dora": job.adapter == "dora",
        "vpp": p.vpp, "sequence_parallel": p.sequence_parallel, "narrow": job.precision != "fp32",
        "strategy": "no_shard" if p.sharding in ("none", "zero1", "distributed-optimizer")
        else {"zero2": "optim_grads"}.get(p.sharding, "optim_grads_params"),
        "layers": case.model.num_layers, "heads": case.model.layers[0].mixers[0].heads,
        "steps": round(job.run_tokens / job.tokens_per_step) if job.run_tokens else -1, "devices": p.num_devices,
    }  # fmt: skip


# System -> the stack whose cases are exported, the target, and its parser.
PARSERS: dict[str, tuple[str, str, Callable[[Path, ExportCase], read.Words]]] = {
    "axolotl": ("axolotl", "axolotl", read.axolotl),
    "llamafactory": ("llama-factory", "llamafactory", read.llamafactory),
    "llamafactory_v1": ("llama-factory-v1", "llamafactory_v1", read.llamafactory_v1),
    "transformers": ("transformers", "transformers", read.transformers),
    "accelerate": ("accelerate", "fsdp", read.accelerate),
    "deepspeed": ("deepspeed", "deepspeed", read.deepspeed),
    "torchtitan": ("fsdp2", "torchtitan", read.torchtitan),
    "peft": ("axolotl", "axolotl", read.peft),
    "trl": ("trl", "trl", read.trl),
    "verl": ("verl", "verl", read.verl),
    "megatron": ("megatron", "megatron", read.megatron),
    "megatron-bridge": ("megatron-bridge", "nemo", read.nemo),
    "nanotron": ("nanotron", "nanotron", read.nanotron),
    "torchtune": ("torchtune", "torchtune", read.torchtune),
    "vllm": ("", "vllm", read.vllm),
    "sglang": ("", "sglang", read.sglang),
    "ai-dynamo": ("", "dynamo", read.dynamo),
    "llama.cpp": ("", "llamacpp", read.llamacpp),
    "kubernetes": ("", "", read.kubernetes),
}


def judged(system: str) -> dict[str, Any]:
    """Return by case what the parser of a system says: how many values it reads as meant, or what is wrong."""
    stack, target, parse = PARSERS[system]
    if system == "kubernetes":
        words = {name: f"{words} --wrap kubernetes" for name, (words, _) in WRAPPED.items()}
        return {name: _read(parse, _exported(words[name]), None, wanted) for name, (_, wanted) in WRAPPED.items()}
    if target in ASKED:
        cases, asked, usual = ASKED[target]
        return {
            name: _read(parse, _exported(f"{target} {words} {asked}"), None, usual | wanted)
            for name, (words, wanted) in cases.items()
        }
    exporter, said = import_module(f"shardwise.formats.{target}"), {}
    for name in CASES:
        case = made(stack, name)
        try:
            files = exporter.export(case).files
        except sw.InputError:
            continue  # what a system cannot be told is refused here, and never reaches it
        if system != "peft" or case.job.adapter:
            said[name] = _read(parse, files, case, expected(case))
    return said


def _exported(words: str) -> read.Words:
    """Return the files that a command line exports."""
    line = [sys.executable, "-m", "shardwise", "export", *words.split(), "--json"]
    return json.loads(subprocess.run(line, capture_output=True, text=True).stdout)["files"]


def _read(
    parse: Callable[[Path, Any], read.Words], files: Mapping[str, str], case: ExportCase | None, wanted: read.Words
) -> Any:
    """Return how many values a parser reads as meant from files, the others, or why it refuses them."""
    with tempfile.TemporaryDirectory() as made_in:
        folder = Path(made_in)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        try:
            found = parse(folder, case)
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    other = {name: [wanted[name], value] for name, value in found.items() if wanted[name] != value}
    return other or len(found)


def main() -> int:
    """Print and store the table, or fail where a file is refused or understood otherwise."""
    kept: dict[str, Any] = json.loads(STORED.read_text(encoding="ascii"))
    for system in sys.argv[1:] or PARSERS:
        version = read.version_of(system)
        if not version:
            print(f"{system} is not installed: its stored answers are kept")
            continue
        kept[system] = {"version": version, "date": date.today().isoformat(), "fields": judged(system)}
    lines = [(system, *pair) for system, one in kept.items() for pair in one["fields"].items()]
    for system, case, said in lines:
        print(f"{system:<13} {case:<26} {f'{said} fields alike' if isinstance(said, int) else said}")
    STORED.write_text(json.dumps(kept, indent=1) + "\n", encoding="ascii")
    return int(any(not isinstance(said, int) for *_, said in lines))


if __name__ == "__main__":
    read.as_if_on_a_gpu()
    sys.exit(main())
