"""Random inputs of the command line: words, files of every kind that is read, and streams that fail."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.read_alone import READ_ALONE, SERVED_ALONE
from shardwise.answers import _commands
from shardwise.answers._flags import Command, Flag
from shardwise.cli import main
from shardwise.models import catalogue

SCRIPTS = Path(__file__).parent.parent / "formats" / "scripts"
# Values that are none, or too many, or of another kind.
ODD = [
    *(
        "",
        " ",
        "0",
        "-1",
        "-0",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e-400",
        "1e308",
        "9" * 40,
        "9" * 5000,
        "\u00b2",
        "\uff18",
    ),
    *(
        "a\0b",
        "\udc80",
        "a" * 300,
        "[",
        "{}",
        "true",
        "on",
        "1,2,3",
        "tp=2,dp=4",
        "=",
        ",",
        "a=b",
        "1/2",
        "0x10",
        "1_000",
    ),
    *(
        "../..",
        "/dev/null",
        "/dev/zero",
        "-",
        "--",
        "-h",
        "--json",
        "tp-dp",
        "1.5",
        "8 ",
        "8\n",
        "80GiB",
        "400Gb/s",
        "5us",
    ),
    *(
        "1e3",
        "15T",
        "10000000000",
        "\u2588",
        "%s",
        "{0}",
        "$A",
        "\\",
        "'",
        '"',
        "*",
        "(?",
        "~x",
        "1..8",
        "1..100000000",
    ),
]
JSON_ODD: list[Any] = [
    *(None, True, False, [], {}, "", "x", [1], [[]], [None], {"a": 1}, 0, -1, 1, 2, 3, 7, 0.5, 1e308, 1e-308, 2**31),
    *(
        2**63,
        10**30,
        -(10**30),
        "1e400",
        "\u00b2",
        "a" * 300,
        [1] * 1000,
        ["x"] * 50,
        {"type": "x"},
        "none",
        "auto",
        64.0,
    ),
    *(float("nan"), float("inf"), [-1], [0, 0], [1e308], [{"a": []}], "\udc80", "a\0b"),
]
NUMBERS = [
    "0",
    "-1",
    "1e400",
    "nan",
    "9" * 30,
    "9" * 5000,
    "\u00b2",
    "1.5",
    "''",
    "1e308",
    "3",
    "100000000",
    "[1]",
    "0x7",
]
TOKENS = [
    "$((",
    "))",
    "${",
    "}",
    "$(",
    ")",
    "`",
    "if",
    "then",
    "fi",
    "for",
    "do",
    "done",
    "case",
    "esac",
    "function",
    "{",
]
TOKENS += [
    '"',
    "'",
    "\\",
    "|",
    "&&",
    "||",
    ";",
    ";;",
    "<<E",
    "\n",
    "#",
    "=",
    "+=",
    "(",
    "[",
    "]",
    "[[",
    "]]",
    "!",
    "-o",
    "eval",
]
TOKENS += [
    "$A",
    "A=$A$A",
    "f() { f; }",
    "--",
    "---",
    "- ",
    ": ",
    "&a",
    "*a",
    "!!x",
    "{",
    ",",
    '":',
    "null",
    "\t",
    "\0",
    "\u00e9",
]
MODELS = ["gpt2", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v2-lite", "mamba-2.8b", "t5-base", "bert-base", "qwen3-8b"]
PLACES = ["1xh100", "8xh100", "4x8xa100", "16xb200-sxm-180gb", "8xmi300x", "1xcpu-generic", "64xh100", "h100"]
# What a search or a page of changes is asked about: one of sixteen devices takes as long as 500 other inputs.
SMALL = ["1xh100", "2xh100", "4xa100", "2xmi300x"]
COUNTS = ["1", "2", "3", "4", "8", "16", "64", "1024", "4096"]
# Share of files that are only read, or asked about one micro-batch: what is asked of the rest takes ten times as long.
READ = 0.9
WRITES = {"save", "plot", "timeline", "write", "rows", "html"}
SLOW = {"plan", "compare", "explain"}
Files = dict[str, bytes]


@dataclass(frozen=True)
class Input:
    """One input: the words of a command line, files beside it by name, and how its standard output fails."""

    words: list[str]
    files: Files = field(default_factory=dict)
    stream: str = ""


def _value(random: random.Random, flag: Flag) -> str:
    """Return a value that a flag may take, or one that it should not."""
    if random.random() < 0.12:
        return random.choice(ODD)
    if flag.kind.word.startswith("{"):
        return random.choice(flag.kind.word[1:-1].split(","))
    by_word = {"N": COUNTS, "SHARE": ["0.5", "1", "0"], "RATE": ["50GB/s", "400Gb/s", "1e-5"], "SIZE": ["80GiB", "1GB"]}
    by_word |= {
        "TIME": ["5ms", "1h"],
        "X": ["1.2", "4"],
        "AXIS=N,...": ["tp=2", "tp=4,dp=2"],
        "N,N,...": ["4,4", "1,2,3"],
    }
    by_word |= {"A-B-...": ["tp-dp-pp", "tp-cp-ep-dp-pp"], "VALUE": ["400GB/s", "2", "80GiB", "1us"]}
    return random.choice(by_word.get(flag.kind.word, [*ODD, *MODELS, "vllm", "bf16", "fp8", "megatron"]))


def words(random: random.Random) -> Input:
    """Return a command line of some command's flags, one in five mutated."""
    name = random.choice([n for n in _commands.NAMES for _ in range(1 if n in SLOW else 4)])
    kind = random.choice(_commands.KINDS["plan"][1]) if name == "plan" else ""
    command: Command = _commands.command(name, kind)
    found = [name, *([kind] if kind else [])]
    if kind == "serve" and random.random() < 0.5:
        found += ["--rate", random.choice(["1/s", "20/s"])]
    for place in command.positionals:
        if place in ("model", "first", "search") and random.random() < 0.9:
            found.append(random.choice(MODELS))
        elif place not in ("what",) and random.random() < 0.5:
            found.append(random.choice(["megatron", "deepspeed", "fsdp", *ODD]))
    if "on" in command.flags and random.random() < 0.9:
        found += ["--on", random.choice(SMALL if name in SLOW else PLACES)]
    flags = [flag for key, flag in command.flags.items() if key not in WRITES and flag.group != "positional"]
    for flag in random.sample(flags, min(len(flags), random.choice([0, 1, 2, 3, 6]))):
        found += [flag.option] if flag.kind.switch and random.random() < 0.8 else [flag.option, _value(random, flag)]
    if random.random() < 0.08:
        found.insert(random.randrange(len(found) + 1), random.choice([*ODD, "--bogus", "--x[y", "-q"]))
    if random.random() < 0.05:
        found += ["--", random.choice(ODD), "--num-layers", "2"]
    return Input(_with_json(random, found))


def _with_json(random: random.Random, found: list[str]) -> list[str]:
    return [found[0], "--json", *found[1:]] if random.random() < 0.5 and found else found


def nudged(random: random.Random, text: str) -> str:
    """Return a text with some numbers in place of others, and a line left out or told twice."""
    for _ in range(random.choice([0, 1, 2, 3])):
        if numbers := list(re.finditer(r"\d+", text)):
            number = random.choice(numbers)
            text = (
                text[: number.start()] + random.choice([*COUNTS, "0", "5", "12", "100", "32000"]) + text[number.end() :]
            )
    lines = text.splitlines(keepends=True)
    if lines and random.random() < 0.3:
        at = random.randrange(len(lines))
        lines[at : at + 1] = random.choice([[], [lines[at]] * 2])
    return "".join(lines)


def _mutated(random: random.Random, text: str) -> str:
    """Return a text with slightly other numbers, or with a few cuts, twins, odd numbers and tokens in it."""
    if random.random() < 0.5:
        return nudged(random, text)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        at, end = sorted((random.randrange(len(text) + 1), random.randrange(len(text) + 1)))
        end = min(end, at + random.choice([1, 4, 40, 400]))
        kind = random.randrange(7)
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:end] + text[at:]
        elif kind == 2:
            text = text[:at]
        elif kind == 3:
            text = text[:at] + random.choice(TOKENS) * random.choice([1, 1, 2, 50]) + text[at:]
        elif kind == 4 and (numbers := list(re.finditer(r"\d+", text))):
            number = random.choice(numbers)
            text = text[: number.start()] + random.choice(NUMBERS) + text[number.end() :]
        elif kind == 5 and (lines := text.splitlines(keepends=True)):
            random.shuffle(lines)
            text = "".join(lines)
        else:
            text = text[:at] + random.choice(ODD) + text[end:]
    return text


def _encoded(random: random.Random, text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogatepass")
    return random.choice([b"\xff", b"\xef\xbb\xbf", b"\0"]) + data if random.random() < 0.03 else data


def script(random: random.Random) -> Input:
    """Return a launch script with mistakes."""
    text = random.choice(sorted(SCRIPTS.iterdir())).read_text(encoding="utf-8")
    start = ["train", "--from", "run.sh", "--on", random.choice(PLACES)]
    found = ["import", "run.sh"] if random.random() < READ else start
    for name in dict.fromkeys(re.findall(r"\$\{?([A-Z_]{3,20})\b", text)):
        if random.random() < 0.5 and f"{name}=" not in text:
            found += ["--set", f"{name}={random.choice(COUNTS) if random.random() < 0.9 else random.choice(ODD)}"]
            break
    if found[0] == "train" and random.random() < 0.6:
        found += ["--", "--vocab-size", "32000"]
    return Input(_with_json(random, found), {"run.sh": _encoded(random, _mutated(random, text))})


def _odd_tree(random: random.Random, tree: Any) -> Any:
    """Return a tree with some values in place of others."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(inner, (dict, list)):
                walk(inner)

    tree = json.loads(json.dumps(tree))
    walk(tree)
    for node, key in random.sample(places, min(len(places), random.choice([1, 1, 1, 2, 3, 6]))):
        if random.random() < 0.15 and isinstance(node, dict):
            node.pop(key, None)
        elif isinstance(node[key], int) and random.random() < 0.6:
            value = node[key]
            node[key] = random.choice([1, 2, 3, 4, 8, 64, 100, value * 2, value // 2, value + 1, not value])
        else:
            node[key] = random.choice(JSON_ODD)
    return tree


def config(random: random.Random) -> Input:
    """Return a config.json of a known model with odd values."""
    tree = _odd_tree(random, random.choice(list(catalogue().values()))["config"])
    text = json.dumps(tree)
    if random.random() < 0.2:
        text = _mutated(random, text)
    asked = ["train config.json --on 8xh100 --micro-batch 1", "infer config.json --on 8xh100"]
    first = "count config.json" if random.random() < READ else random.choice(asked)
    return Input(_with_json(random, first.split()), {"config.json": _encoded(random, text)})


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8, "mics_shard_size": 8,
                          "stage3_max_live_parameters": 1e9, "offload_optimizer": {"device": "none"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "tensor_parallel": {"autotp_size": 2},
    "sequence_parallel_size": 2, "data_types": {"grad_accum_dtype": "fp32"}, "torch_autocast": {"enabled": False},
}  # fmt: skip
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_activation_checkpointing: true
  fsdp_reshard_after_forward: true
parallelism_config:
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
  parallelism_config_dp_shard_size: 8
deepspeed_config:
  zero_stage: 3
  deepspeed_config_file: ds.json
"""
CLUSTER = """name = "lab"
device = "h100-sxm-80gb"
num_devices = 64
devices_per_node = 8
nics_per_node = 4
price = 2.1
[[tiers]]
name = "nvlink"
size = 8
bandwidth = "450GB/s"
latency = "3us"
[[tiers]]
name = "ib"
size = 64
bandwidth = "400Gb/s"
latency = "5us"
"""
MEASURED = """metric,value,model,device,seq_len,num_gpus,tp,pp,global_batch,micro_batch,framework
step_seconds,1.5,llama-3.1-8b,h100,4096,8,2,1,64,1,megatron
mfu,0.4,gpt2,a100,1024,8,1,1,64,8,pytorch
"""


TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
context_parallel_degree = 1
data_parallel_shard_degree = -1
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model", "loss"]
"""


def settings(random: random.Random) -> Input:
    """Return settings of DeepSpeed, accelerate or torchtitan with odd values."""
    deepspeed = json.dumps(_odd_tree(random, DEEPSPEED))
    deepspeed = _mutated(random, deepspeed) if random.random() < 0.3 else deepspeed
    yaml = ACCELERATE.replace("FSDP", "DEEPSPEED") if random.random() < 0.3 else ACCELERATE
    files = {"ds.json": _encoded(random, deepspeed), "a.yaml": _encoded(random, _mutated(random, yaml))}
    files["t.toml"] = _encoded(random, _mutated(random, TORCHTITAN))
    name = random.choice(list(files))
    found = ["import", name] if random.random() < READ else ["train", "gpt2", "--from", name, "--on", "16xh100"]
    # Which micro-batch is best is a search, so it is seldom left open.
    found += ["--micro-batch", "1"] if found[0] == "train" and random.random() < READ else []
    return Input(_with_json(random, found), files)


EXPORTED = {
    **dict.fromkeys(("torchtitan", "nanotron", "nemo"), "--tp 2 --micro-batch 1 --global-batch 64"),
    **dict.fromkeys(("torchtune", "axolotl", "llamafactory"), "--sharding fsdp --adapter lora --micro-batch 1"),
    **dict.fromkeys(("trl", "trl --wrap slurm"), "--sharding fsdp --adapter lora --micro-batch 1"),
    **dict.fromkeys(("vllm", "sglang", "trtllm", "dynamo"), "--tp 4 --batch 32"),
    "maxtext": "--tp 2 --sharding fsdp --recompute full --micro-batch 1 --global-batch 64",
    "verl": "--method grpo --sharding fsdp --micro-batch 1 --global-batch 64",
    "vllm --wrap kubernetes": "--tp 8 --batch 32",
}


@cache
def _exported(target: str) -> dict[str, str]:
    """Return the files that are written for another system, by name; they are what is read of it as well."""
    name, *wrap = target.split()
    asked = ["export", name, "llama-3.1-8b", "--on", "8xh100-sxm-80gb", *EXPORTED[target].split(), *wrap]
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert main([*asked, "--write", folder]) in (0, 1)
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())}


def launched(random: random.Random) -> Input:
    """Return a file of a trainer or an engine with mistakes, read by what reads it."""
    target = random.choice(list(EXPORTED))
    files = {name: _encoded(random, _mutated(random, text)) for name, text in _exported(target).items()}
    name = random.choice(sorted(files))
    served = target.split()[0] in ("vllm", "sglang", "trtllm", "dynamo")
    asked = ["infer --on 8xh100", "serve --on 8xh100 --rate 1/s --requests 50", "plan infer --on 1xh100 --batch 1,8"]
    asked = asked if served else ["train --on 8xh100", "comm --on 8xh100"]
    start = f"import {name}" if random.random() < READ else f"{random.choice(asked)} --from {name}"
    return Input(_with_json(random, start.split()), files)


def alone(random: random.Random) -> Input:
    """Return a file of a system whose files are read and never written, with mistakes."""
    name = random.choice(sorted(READ_ALONE))
    files = {name: _encoded(random, _mutated(random, READ_ALONE[name]))}
    asked = "infer --on 8xh100" if name in SERVED_ALONE else "train --on 8xh100 --micro-batch 1"
    start = f"import {name}" if random.random() < READ else f"{asked} --from {name}"
    return Input(_with_json(random, start.split()), files)


_VLLM_RESULT = {"input_lens": [9, 300, 70], "output_lens": [5, 60, 7], "start_times": [1.0, 1.5, 2.0]}
_GUIDELLM = {"request_start_time": 1.0, "prompt_tokens": 100, "output_tokens": 20, "start_time": 1.0}
_PERF = [{"start_time": 1.0, "error": None, "info": {"input_tokens": 100, "output_tokens": 20}}] * 3
LOADS = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51.2224670,879,55\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45,ChatGPT,1087,230\n",
    "own.csv": "arrival_seconds,input_tokens,output_tokens,conversation\n0,100,20,a\n1,150,30,a\n2,100,20,b\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 900, "output_length": 9, "hash_ids": [0, 1]}\n'
    '{"timestamp": 500, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]}\n',
    "vllm.json": json.dumps(_VLLM_RESULT),
    "guidellm.json": json.dumps({"benchmarks": [{"requests": {"successful": [_GUIDELLM] * 3}}]}),
    "perf.json": json.dumps(_PERF),
    "classes.toml": '[[class]]\nname = "chat"\nshare = 0.7\ninput_tokens = 300\noutput_tokens = "50..90"\n'
    'p99_ttft = "1s"\n[[class]]\nname = "code"\nshare = 0.3\ninput_tokens = 900\noutput_tokens = 9\n',
    "study.toml": 'task = "train"\ntop = 2\n[fixed]\non = "2xh100"\nglobal_batch = 8\nmicro_batch = 1\n[grid]\n'
    'model = ["gpt2"]\nseq_len = [512]\n',
}
_STAGES = [
    "5/s:10min,40/s:2min",
    "1/s:1s",
    "0/s:1s,1/s:5s",
    "1/s:0s",
    "5/s",
    "1/s:1e9h",
    ",",
    "1:1",
    "nan/s:1s",
    "1/s:nan",
]
_SCALES = [
    "running:32",
    "requests:2",
    "queue:0",
    "cache:0.8",
    "load:0.7",
    "load:nan",
    "cache:-1",
    "load",
    "x:1",
    "load:1e400",
]


def load(random: random.Random) -> Input:
    """Return requests of a trace, of classes or in stages with mistakes, or a study."""
    name = random.choice(list(LOADS))
    text = LOADS[name]
    if name.endswith(".json") and random.random() < 0.5:
        text = json.dumps(_odd_tree(random, json.loads(text)))
    files = {name: _encoded(random, _mutated(random, text))}
    if name == "study.toml":
        return Input(_with_json(random, ["sweep", name, "--out", "found", "--workers", "1"]), files)
    found = ["serve", "llama-3.1-8b", "--on", "1xh100", "--requests", "50"]
    if name == "classes.toml":
        found += ["--classes", name, "--rate", "2/s"]
    else:
        found += ["--trace", name] if random.random() < 0.7 else ["--stages", random.choice(_STAGES)]
    odd = {"--last": ["1h", "0s", "-1s", "1e400"], "--speed": ["2", "0", "nan", "1e300"], "--risk": ["80%", "1", "-1"]}
    odd |= {"--autoscale": _SCALES, "--startup-time": ["1min", "-1s", "1e9h"], "--max-replicas": ["4", "0"]}
    for flag in random.sample(sorted(odd), random.choice([0, 1, 2, 3])):
        found += [flag, random.choice([*odd[flag], random.choice(ODD)])]
    return Input(_with_json(random, found), files)


def case(random: random.Random) -> Input:
    """Return a case file, in TOML or JSON, of one command's flags."""
    given = words(random)
    table: dict[str, Any] = {"command": given.words[0], "model": "gpt2", "on": "8xh100"}
    table |= {"micro_batch": 1} if random.random() < READ else {}
    for key in random.sample(sorted(_commands.command("train").flags.keys() - WRITES), random.choice([0, 1, 2, 5])):
        flag = _commands.command("train").flags[key]
        table[key] = random.choice([*JSON_ODD, 8, 2]) if random.random() < 0.3 else _value(random, flag)
    text = json.dumps(table)
    if random.random() < 0.6:
        rows = {key: value for key, value in table.items() if isinstance(value, (str, int, float))}
        lines = [f"{key} = {_toml(value)}" for key, value in rows.items()]
        found = "\n".join(lines)
        text = _mutated(random, found) if random.random() < 0.4 else found
        return Input(_with_json(random, ["--config=case.toml"]), {"case.toml": _encoded(random, text)})
    text = _mutated(random, text) if random.random() < 0.3 else text
    return Input(["train", "--config", "case.json"], {"case.json": _encoded(random, text)})


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, bool) else str(value).lower()


def cluster(random: random.Random) -> Input:
    """Return a cluster's file with mistakes."""
    text = _mutated(random, CLUSTER)
    found = "count gpt2 --seq-len 64" if random.random() < READ else "train gpt2 --micro-batch 1"
    found = [*found.split(), "--on", "lab.toml"]
    return Input(_with_json(random, found), {"lab.toml": _encoded(random, text)})


def measurements(random: random.Random) -> Input:
    """Return a file of measurements with mistakes."""
    return Input(_with_json(random, ["validate", "m.csv"]), {"m.csv": _encoded(random, _mutated(random, MEASURED))})


def streams(random: random.Random) -> Input:
    """Return a command line whose standard output fails."""
    given = words(random)
    return Input(given.words, given.files, random.choice(["full", "closed", "none", "gone", "invalid"]))


KINDS: dict[str, tuple[Callable[[random.Random], Input], int]] = {
    "words": (words, 5), "script": (script, 4), "config": (config, 5), "settings": (settings, 3), "case": (case, 3),
    "cluster": (cluster, 2), "measurements": (measurements, 1), "streams": (streams, 1), "launched": (launched, 4),
    "load": (load, 2), "alone": (alone, 3),
}  # fmt: skip
"""Each kind of input with how often it is drawn."""


def drawn(seed: int, number: int) -> tuple[str, Input]:
    """Return the kind and the input of a number under a seed: the same for ever."""
    source = random.Random(f"{seed}/{number}")
    name = source.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    return name, KINDS[name][0](source)
