"""The command line of llama.cpp's server: `llama-server -m FILE --flags`.

Source: github.com/ggml-org/llama.cpp b11434 tools/server/README.md. Its context is that of all slots together; a
split by layers is a pipeline, one by rows tensor parallelism.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shardwise.errors import Problems
from shardwise.formats._exported import Exported
from shardwise.formats._launched import HERE, Launched, LaunchFiles, LaunchLine
from shardwise.formats._served import PLAIN, Asked, Deployment, Words, check, refuse, written
from shardwise.hardware import find_device
from shardwise.models import MOST_LAYERS, load_model, namesake
from shardwise.serving import InferReport, find_engine, format_names, launched_engine, step_tokens_of

STARTS = r"(\bllama-server|\bllama\.cpp\S*[/:]server\S*|(^|\s)\./server)(?=\s|$)"
_CACHES = {"f32": "fp32", "f16": "", "bf16": "bf16", "q8_0": "int8", "q4_0": "int4"}
# Ways to split a model, as `launched_with` of engines.toml says them.
_SPLITS = {"none": "split_none", "row": "split_rows", "tensor": "split_tensors"}
_USUAL = "q4_k_m"
_USUAL_SLOTS = 4
# Patterns that send the experts of every layer to the host: no number of a layer stands in them.
_ALL_EXPERTS = re.compile(r"[^0-9,]*exps[^0-9,]*=CPU")

# What the names of files and of repositories end in: the format, and that it is GGUF.
_ENDINGS = re.compile(r"([-.](i?q\d\w*|b?f16|f32|mxfp4\w*))?([-_.]gguf)?(:\w+)?$", re.ASCII | re.IGNORECASE)


def _quantised(name: str) -> str:
    """Return the format that a file's name ends in, empty where it says none.

    >>> _quantised("Llama-3.1-8B-Q4_K_M.gguf"), _quantised("ggml-org/GLM-GGUF:Q8_0"), _quantised("x.gguf")
    ('q4_k_m', 'q8_0', '')
    """
    words = re.split(r"[-.:/]", name.lower())
    return next((word for word in reversed(words) if word in format_names()), "")


def words_of(one: Deployment) -> Words:
    """Return the flags of a deployment; raises `InputError` naming every field that llama.cpp cannot be told."""
    types = check(one, "llamacpp", _written_formats())
    p, job, cache = one.plan, one.job, one.job.kv_cache
    for name in ("adapter_rank", "speculative_method"):
        if value := getattr(job, name):
            types.add(name, value, "is a file of its own to llama.cpp", "leave it out, and add --lora or --model-draft")
    if job.memory_fraction:
        rule = "llama.cpp takes what its buffers need, whatever the share"
        types.add("memory_fraction", job.memory_fraction, rule, "leave it out")
    kinds = {ours or "fp16": theirs for theirs, ours in _CACHES.items()}
    if cache and cache not in kinds:
        types.add("kv_cache", cache, "is no type of a cache of llama.cpp", "use one of " + ", ".join(kinds))
    slots, devices = one.sequences, p.tp * p.pp
    words: Words = {"--ctx-size": slots * one.context, "--parallel": slots}
    words["--n-gpu-layers"] = job.gpu_layers if job.gpu_layers >= 0 else "all"
    modes = (name for name, way in _SPLITS.items() if way in one.report.case.engine.launched_with)
    mode = next(modes, "tensor" if p.tp > 1 else "layer" if devices > 1 else "")
    words |= {"--split-mode": mode} if mode else {}
    if devices > 1:
        words["--tensor-split"] = ",".join(map(str, _shares(one)))
    if job.cpu_experts:
        words["--n-cpu-moe"] = job.cpu_experts
    if cache:
        words |= {"--cache-type-k": kinds.get(cache, ""), "--cache-type-v": kinds.get(cache, "")}
    if one.report.case.step_tokens:
        words["--ubatch-size"] = one.step_tokens
        # No ubatch is longer than a logical batch: src/llama-context.cpp, cparams.n_ubatch.
        if one.step_tokens > step_tokens_of(one.report.case.engine.name, one.report.case.cluster.device, 0):
            words["--batch-size"] = one.step_tokens
    if not one.asked.prefixes:
        words["--no-cache-prompt"] = True
    if "whole_windows" in one.report.case.engine.launched_with:
        words["--swa-full"] = True
    refuse(types)
    return words


def _shares(one: Deployment) -> tuple[int, ...]:
    """Return what each device takes of the model: of its layers and the head, which counts as one of them."""
    p, layers = one.plan, one.report.case.model.num_layers
    if p.tp > 1:
        return (1,) * p.tp
    *first, last = p.stage_layers or (layers // p.pp,) * p.pp
    return *first, last + 1


def _stages(shares: Sequence[float], layers: int) -> tuple[int, ...]:
    """Return the layers of each device by its share, the head being one more behind them.

    llama.cpp src/llama-model.cpp get_layer_buft_list: the first whose shares up to it are more than what is before.

    >>> _stages([15, 18], 32), _stages([1, 1], 32), _stages([3, 1], 32)
    ((15, 17), (17, 15), (25, 7))
    """
    ends = [end / sum(shares) for end in accumulate(shares)]
    owners = [bisect_right(ends, layer / (layers + 1)) for layer in range(layers)]
    return tuple(owners.count(device) for device in range(len(shares)))


def _numbers(line: LaunchLine, shares: Sequence[str]) -> list[float]:
    """Return shares as numbers; what is none is a problem, and counts as one."""
    numbers = []
    for share in shares:
        number = float(share) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", share, re.ASCII) else 0.0
        if not number:
            line.problems.add("--tensor-split", share, "must be shares above 0", "write for example 3,1")
        numbers.append(number or 1.0)
    return numbers


def _written_formats() -> tuple[str, ...]:
    """Return the formats that files of GGUF are written in."""
    return tuple(name for name in format_names() if re.fullmatch(r"i?q\d\w*", name))


def export(report: InferReport, asked: Asked = PLAIN, role: str = "") -> Exported:
    """Return the script that starts a server as an answer assumed it."""
    one = Deployment(report=report, asked=asked, apart=True)
    kind = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}.get(report.case.format.name, report.case.format.name.upper())
    file = f"{one.model.rpartition('/')[2]}-{kind}.gguf"
    if one.nodes > 1:
        problems = Problems()
        problems.add(
            "on", report.case.cluster.name, "llama.cpp's server runs on one node", "use the devices of one node"
        )
        refuse(problems)
    notes = [f"{file} is yours to make or to fetch"]
    return written(one, "llamacpp", f"llama-server --model {shlex.quote(file)}", words_of(one), notes)


def _slots(line: LaunchLine) -> tuple[int, int]:
    """Return the slots of a server, and the longest request of one, 0 where the model's own bounds it.

    tools/server/server.cpp: where nobody says how many there are, four with one cache for all of them, of which a
    request may fill what is free; said, each has its part unless --kv-unified keeps them together.
    """
    stated = "" if line.values.get("--parallel") == "-1" else line.word("--parallel")
    slots = line.whole("--parallel") if stated else _USUAL_SLOTS
    together = "--kv-unified" in line.values or not stated
    # 0 is the context of the model (common/arg.cpp, --ctx-size).
    context, each = line.whole("--ctx-size", 0), line.whole("--kv-unified-per-slot")
    if not stated:
        line.assumed.append(f"{slots} slots: llama.cpp's own where a launch says none")
    if not together or slots == 1:
        return max(slots, 1), context // max(slots, 1)
    if context and not each:
        line.assumed.append(
            f"one cache of {context} tokens for {slots} slots: that they are full together is not modelled"
        )
    return max(slots, 1), each or context


def _ubatch(line: LaunchLine) -> int:
    """Return the tokens of a ubatch, 0 where a launch leaves them as they are.

    src/llama-context.cpp: cparams.n_ubatch is the lesser of n_batch and n_ubatch, or n_batch where the latter is 0.
    """
    usual = step_tokens_of("llama.cpp", find_device("generic-80gb").device, 0)  # the same on all devices
    logical, asked = line.whole("--batch-size") or usual, line.whole("--ubatch-size", 0)
    physical = asked or (logical if line.word("--ubatch-size") else find_engine("llama.cpp").prefill.chunk_tokens)
    if asked > logical:
        line.assumed.append(f"ubatches of {logical} tokens: --batch-size bounds them, and --ubatch-size is {asked}")
    if logical != usual:
        line.assumed.append(f"--batch-size {logical} bounds ubatches alone: a server's steps have {usual} tokens here")
    return min(physical, logical) if line.word("--ubatch-size") or logical < physical else 0


def _engine(line: LaunchLine, split: str, devices: int) -> str:
    """Return the engine that a launch runs as by how it splits a model and keeps windows.

    A degree of tensor parallelism says that tensors are split, so that the engine does only where there is none.
    """
    if not line.flag("--swa-full"):
        known = split == "layer" or (split == "tensor" and devices > 1)
        return launched_engine("llama.cpp", *[_SPLITS.get(split, "")] * (not known))
    if split in ("none", "row"):
        line.assumed.append(f"--split-mode {split} beside --swa-full: is taken as the split that it has by itself")
    return launched_engine("llama.cpp", "whole_windows")


def read_words(words: Sequence[str], source: str, files: LaunchFiles = HERE) -> Launched:
    """Return the server of a command line, by the words behind `llama-server`.

    >>> one = read_words("-hf bartowski/Llama-3.1-8B-GGUF:Q8_0 -c 32768 -np 4 -ctk q8_0 -ctv q8_0".split(), "run.sh")
    >>> one.values["weights"], one.values["max_sequences"], one.values["max_context"], one.values["kv_cache"]
    ('q8_0', 4, 8192, 'int8')
    """
    line = LaunchLine(words, "llamacpp.toml", source)
    file = str(line.values.get("--hf-repo") or line.values.get("--model", ""))
    weights = _quantised(str(line.values.get("--hf-file") or file))
    model = namesake(_ENDINGS.sub("", file)) or ""
    if not weights and file and not (model and load_model(model).quantization):
        weights = _USUAL
        line.assumed.append(f"weights {_USUAL}: the name of the file does not say")
    unnamed = "model: a file of weights has no name of a catalogue, give one"
    line.assumed.append(f"model {model}: {file} is named after it" if model else unnamed)
    slots, context = _slots(line)
    shares = [one for one in line.word("--tensor-split").split(",") if one]
    devices = max(len(shares), 1)
    alone = line.values.get("--split-mode") == "none"
    split = "none" if alone else line.named("--split-mode", {one: one for one in ("layer", "row", "tensor")}) or "layer"
    devices = 1 if split == "none" else devices  # one device holds all of it, whatever the shares are
    by_rows = split in ("row", "tensor")
    kept = {line.named(flag, _CACHES) for flag in ("--cache-type-k", "--cache-type-v")}  # one that is silent is f16
    if len(kept) > 1:
        rule = "keys and values of two types are not modelled"
        line.problems.add("--cache-type-v", line.word("--cache-type-v"), rule, "give both the same type")
    # -1 is auto, and -2 all (common/arg.cpp, --n-gpu-layers).
    layers, all_of_them = line.word("--n-gpu-layers"), ("", "all", "auto", "-1", "-2")
    experts = line.whole("--n-cpu-moe")
    moved = line.word("--override-tensor")
    if "--cpu-moe" in line.values or _ALL_EXPERTS.fullmatch(moved):
        experts = MOST_LAYERS
    elif moved:
        line.assumed.append(
            f"--override-tensor {moved} moves nothing: whole experts of all layers alone are read of it"
        )
    values: dict[str, Any] = {
        "model": model, "engine": _engine(line, split, devices),
        "weights": weights, "max_sequences": slots,
        "max_batched_tokens": _ubatch(line), "max_context": context,
        "kv_cache": next(iter(kept), ""), "tp": devices if by_rows else 1,
        "pp": devices if split == "layer" else 1, "cpu_experts": experts,
    }  # fmt: skip
    if split == "layer" and devices > 1 and model:
        stages = _stages(_numbers(line, shares), load_model(model).num_layers)
        values["stage_layers"] = stages if min(stages) and len(set(stages)) > 1 else ()
    if layers not in all_of_them:
        values["gpu_layers"] = line.whole("--n-gpu-layers", 0)
    return line.launched(values, devices if shares else 0)
