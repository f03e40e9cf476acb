"""Random questions of every command, of its flags and of files: the same ones for ever under a seed.

The judge of small changes asks those of one seed, the stored answers are chosen among those of another.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _words(text: str) -> list[str]:
    return text.split()


MODELS = _words("""
llama-3.1-8b qwen3-30b-a3b gpt-oss-20b gemma-2-9b deepseek-v2-lite nemotron-h-8b gpt3-1.3b mamba-2.8b bert-large
kimi-linear-48b-a3b qwen3-next-80b-a3b deepseek-v3.2 jamba-v0.1 opt-13b llama-4-scout falcon-40b lfm2-1.2b minimax-m2
glm-4.5-air gemma-3n-e2b mpt-7b phi-3.5-moe deepseek-v4-flash zamba2-7b rwkv-4-169m xlstm-7b recurrentgemma-2b
""")
PLACES = _words("""
8xh200 8xmi355x 4xrtx-4090 16xgb200 8xtpu-v5p 64xa100-pcie-40gb 8xgaudi3 p5.48xlarge 16xtrainium2 2xl4 1xh100-sxm-80gb
1xcpu-x86-2core 1xcpu-epyc-zen4-2core 1xapple-m2-ultra-76core 1xrtx-5090 32xa100-sxm-80gb 8xmi250x 256xh100-sxm-80gb
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
explain MODEL --on PLACE --tp 2 --seq-len 2048 --global-batch 64 --json
explain MODEL --on PLACE --json
explain MODEL --on 1xh100-sxm-80gb --batch 8 --json
compare case.toml other.toml --json
compare case.toml other.toml
train --config case.toml --sensitivity --json
infer MODEL --on PLACE --batch 8 --vary tp=1..4 --json
train MODEL --on PLACE --vary micro_batch=1..4 --global-batch 64
train MODEL --on PLACE --solve micro_batch --global-batch 64 --json
infer MODEL --on PLACE --solve batch --max-tpot 20ms --json
train MODEL --on p5.48xlarge --host-memory 100GiB --offload optimizer --json
train t5-base --on PLACE --json
sweep study.toml --out found --workers 1 --json
"""
CASES = {
    "case.toml": b'command = "train"\nmodel = "gpt3-1.3b"\non = "8xa100-sxm-80gb"\ntp = 2\nglobal_batch = 16\n',
    "other.toml": b'command = "train"\nmodel = "gpt3-1.3b"\non = "8xh100-sxm-80gb"\nsharding = "zero1"\n'
    b"global_batch = 16\n",
}

ON_ONE = _words("llama-3.2-1b qwen3-0.6b gpt2 smollm2-135m llama-2-7b gemma-2-2b qwen3-30b-a3b")
LOCAL = _words("1xcpu-x86-2core 1xcpu-epyc-zen4-2core 1xapple-m2-ultra-76core 1xrtx-4090 2xrtx-3090 1xh100-sxm-80gb")
_LOCAL = """
--engine llama.cpp transformers vllm
--weights q8_0 q4_k_m q4_0 bf16 iq4_xs q6_k
--kv-cache q8_0 fp16
--batch 1 4
--input-tokens 128 2000
--output-tokens 32 256
--gpu-layers 8 20
--cpu-experts 4
--host cpu-generic
"""
FLAGS["infer local"] = _flags(_LOCAL)
MIX["infer local"] = 3
COMMANDS = _words("train infer count comm roofline serve explain plan/train plan/infer plan/serve export")
"""Commands of which any flag is drawn."""
BY_WORD = _flags("""
N 1 2 4 8 64 1024
SHARE 0.5 0.9
X 1.2 2
RATE 50GB/s 400TFLOP/s 2/s 1e-6
TIME 20ms 1s 10min
SIZE 2GiB
CHANCE 80%
USD 1000
N|A..B 300 100..900
N|A..B|N,N 1,2 1..4
N|A..B|A,B 32,64 64
AXIS=N,... tp=2 dp=4
A-B-... tp-cp-ep-dp-pp pp-dp-tp
N,N,... 16,16 12,20 512,1024,300
FIELD=A..B tp=1..4 micro_batch=1..3 batch=1..9
RATE:TIME,... 1/s:20s,3/s:20s
""")
BY_NAME = _flags("""
on 8xh100-sxm-80gb 16xmi300x
stack pytorch fsdp2 megatron-core deepspeed nemo torchtitan trl axolotl
dtype bf16 fp8 w8a16 w4a16
weights bf16 fp8 int8 int4 nvfp4 mxfp4 q4_k_m awq
kv_cache bf16 fp8 int8
compute bf16 fp8
engine vllm sglang tensorrt-llm transformers llama.cpp
draft_model llama-3.2-1b qwen3-0.6b
host cpu-generic cpu-epyc-zen4-2core
arrivals constant poisson gamma:2
autoscale queue:2 load:0.7 running:8
solve micro_batch batch tp input_tokens seq_len global_batch
targets all-linear q_proj,v_proj mlp
trains head last:2 norms
offload optimizer activations parameters
modules attention mlp
sharding zero1,fsdp none,zero2
recompute none,full
schedule 1f1b,gpipe
devices_per_node 4 16
fast_domain 4 16
fast_bandwidth 200GB/s 900GB/s
fast_latency 2us
slow_bandwidth 25GB/s 100GB/s
slow_latency 8us
nics_per_node 1 4
nic_bandwidth 25GB/s
rails 2 4
oversubscription 2
price 2.5
host_memory 256GiB
memory 48GiB 100GiB
memory_bandwidth 2TB/s
peak_flops 500TFLOP/s
peak_flops.bf16 400TFLOP/s
peak_flops.fp8 900TFLOP/s
""")


@dataclass(frozen=True)
class Question:
    """The words of a command line, files that lie beside it, and where its answer is stored: `whole`, `random`."""

    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    stored: str = ""

    def __str__(self) -> str:
        return " ".join(self.words)


def questions(seed: str, times: int = 1) -> Iterator[Question]:
    """Yield random questions of a seed, always the same: of the flags above, of any flag, and of files."""
    drawn = random.Random(seed)
    for mix, count in ((MIX, 400), (SEARCHES, 24), (EXPORTS, 40)):
        for kind in drawn.choices(list(mix), list(mix.values()), k=count * times):
            asked = _random(drawn, kind)
            yield Question((*asked, "--json"))
            if kind not in EXPORTS and drawn.random() < 0.3:
                yield Question(tuple(asked))
    yield from (_any(drawn) for _ in range(300 * times))
    yield from (one for _ in range(times) for one in _of_cases(drawn))
    yield from (_measured(drawn) for _ in range(12 * times))
    for number in range(600 * times):
        yield _of_files(random.Random(f"{seed}/{number}"), number)


def _random(drawn: random.Random, kind: str) -> list[str]:
    """Return the words of a question of a kind with a few of its flags."""
    few = kind in SEARCHES or kind in ("train tuned", "serve loaded")
    models, places = (SMALL, HERE[:2]) if few else (MODELS, HERE)
    if kind == "infer local":
        models, places = ON_ONE, LOCAL
    words = [*kind.removesuffix(" tuned").removesuffix(" loaded").removesuffix(" local").split(), drawn.choice(models)]
    words += ["--on", drawn.choice(places)] if kind != "count" else []
    flags = FLAGS[kind]
    for name in drawn.sample(sorted(flags), min(len(flags), drawn.randint(1, 5))):
        words += [name, *drawn.sample(flags[name], 1)] if flags[name] else [name]
    return [*words, "--requests", "60"] if kind == "serve loaded" else words


def _any(drawn: random.Random) -> Question:
    """Return a question with one to three of all the flags of its command, half of them about a known model."""
    from fuzz import inputs
    from shardwise.answers import _commands
    from shardwise.models import catalogue

    words = drawn.choice(COMMANDS).split("/")
    flags = _commands.command(*words).flags
    models = SMALL if words[0] in ("plan", "serve") else MODELS if drawn.random() < 0.5 else sorted(catalogue())
    place = drawn.choice(HERE[:2] if words[0] == "plan" else [*HERE, *PLACES])
    words += [drawn.choice(flags["target"].kind.word[1:-1].split(","))] if words[0] == "export" else []
    words += [drawn.choice(models), *(["--on", place] if words[0] != "count" else [])]
    words += ["--rate", "2/s"] if "serve" in words else []
    left = inputs.WRITES | {"on", "rate", "json", "help", "width", "dark", "size", "what", "target", "address", "part"}
    known = sorted(
        key for key, flag in flags.items() if key not in left and flag.group != "positional" and _values(key, flag)
    )
    for key in drawn.sample(known, drawn.choice([1, 1, 2, 3])):
        value = drawn.choice(_values(key, flags[key]))
        words += [flags[key].option, *([value] if value else [])]
    return Question((*words, *(["--json"] if drawn.random() < 0.8 else [])))


def _values(key: str, flag: Any) -> list[str]:
    """Return values that a flag may have, one empty text for a switch, none where none are known."""
    word = flag.kind.word
    choices = word[1 : word.index("}")].split(",") if word.startswith("{") else []
    return [""] if flag.kind.switch else BY_NAME.get(key) or choices or BY_WORD.get(word, [])


def _of_cases(drawn: random.Random) -> Iterator[Question]:
    """Yield the lines above about models and devices that are drawn, and requests of files with other numbers."""
    from fuzz import inputs

    files = {name: text.encode() for name, text in inputs.LOADS.items()} | CASES
    for line in LISTED.splitlines():
        words = line.replace("MODEL", drawn.choice(SMALL)).replace("PLACE", drawn.choice(HERE)).split()
        if words:
            nudged = {
                name: inputs.nudged(drawn, data.decode()).encode() for name, data in files.items() if name in words
            }
            yield Question(tuple(words), nudged)
    for name, text in inputs.LOADS.items():
        if name != "study.toml":
            how = "--classes" if name == "classes.toml" else "--trace"
            words = f"serve {drawn.choice(SMALL)} --on 1xh100 --requests 50 {how} {name}".split()
            words += drawn.choice([[], ["--rate", "2/s"]]) + drawn.choice([[], ["--json"], ["--json"]])
            yield Question(tuple(words), {name: inputs.nudged(drawn, text).encode()})
    for name, flags in inputs.EXPORTED.items():
        target, *wrap = name.split()
        words = f"export {target} {drawn.choice(SMALL)} --on 8xh100-sxm-80gb {flags}".split()
        yield Question((*words, *wrap, "--json"))


def _measured(drawn: random.Random) -> Question:
    """Return a question about some published runs, each file with its models."""
    folder = ROOT / "accuracy" / "data"
    name = drawn.choice(["training_runs", "training_cpu", "inference_runs", "inference_cpu"])
    head, *rows = csv.reader(io.StringIO((folder / f"{name}.csv").read_text(encoding="utf-8")))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *drawn.sample(rows, 6)])
    how = drawn.choice([["--json"], ["--json"], ["--by", "metric"], ["--by", "device", "--json"]])
    return Question(("validate", "runs.csv", *how), {"runs.csv": text.getvalue().encode()})


def _of_files(drawn: random.Random, number: int) -> Question:
    """Return a question of a file that the fuzzer makes, of each kind in turn."""
    from fuzz import inputs

    kinds = (
        inputs.launched, inputs.settings, inputs.script, inputs.config, inputs.cluster, inputs.measurements,
        inputs.case, inputs.load,
    )  # fmt: skip
    given = kinds[number % len(kinds)](drawn)
    return Question(tuple(given.words), given.files)
