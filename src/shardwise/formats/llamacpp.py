"""The command line of llama.cpp's server: `llama-server -m FILE --flags`.

Source: github.com/ggml-org/llama.cpp 00dc8057ab tools/server/README.md. Its context is that of all slots together; a
split by layers is a pipeline, one by rows tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardwise.formats._launched import HERE, Launched, LaunchFiles, LaunchLine
from shardwise.models import load_model
from shardwise.models._model import namesake
from shardwise.serving._formats import format_names

STARTS = r"(\bllama-server|\bllama\.cpp\S*[/:]server\S*|(^|\s)\./server)(?=\s|$)"
_CACHES = {"f32": "fp32", "f16": "", "bf16": "bf16", "q8_0": "int8", "q4_0": "int4"}
_USUAL = "q4_k_m"
_EVERY = 10_000  # more layers than a model has
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


def read_words(words: Sequence[str], source: str, beside: LaunchFiles = HERE) -> Launched:
    """Return the server of a command line, by the words behind `llama-server`.

    >>> one = read_words("-hf bartowski/Llama-3.1-8B-GGUF:Q8_0 -c 32768 -np 4 -ctk q8_0 -ctv q8_0".split(), "run.sh")
    >>> one.values["weights"], one.values["max_sequences"], one.values["max_context"], one.values["kv_cache"]
    ('q8_0', 4, 8192, 'int8')
    """
    line = LaunchLine(words, "llamacpp.toml", source)
    file = str(line.values.get("--hf-repo") or line.values.get("--model", ""))
    weights = _quantised(file)
    model = namesake(_ENDINGS.sub("", file)) or ""
    if not weights and file and not (model and load_model(model).quantization):
        weights = _USUAL
        line.assumed.append(f"weights {_USUAL}: the name of the file does not say")
    unnamed = "model: a file of weights has no name of a catalogue, give one"
    line.assumed.append(f"model {model}: {file} is named after it" if model else unnamed)
    slots = max(line.whole("--parallel") or 1, 1)
    if slots == 1 and "--parallel" not in line.values:
        line.assumed.append("one slot: how many the server takes by itself is not known")
    shares = [one for one in line.word("--tensor-split").split(",") if one]
    devices = max(len(shares), 1)
    alone = line.values.get("--split-mode") == "none"  # one device holds all of it, whatever the shares are
    devices = 1 if alone else devices
    split = line.named("--split-mode", {"layer": "layer", "row": "row", "tensor": "row"}) or "layer"
    kept = {line.named(flag, _CACHES) for flag in ("--cache-type-k", "--cache-type-v")}  # one that is silent is f16
    if len(kept) > 1:
        rule = "keys and values of two types are not modelled"
        line.problems.add("--cache-type-v", line.word("--cache-type-v"), rule, "give both the same type")
    layers, all_of_them = line.word("--n-gpu-layers"), ("", "all", "auto")
    experts = line.whole("--n-cpu-moe")
    moved = line.word("--override-tensor")
    if "--cpu-moe" in line.values or _ALL_EXPERTS.fullmatch(moved):
        experts = _EVERY
    elif moved:
        line.assumed.append(
            f"--override-tensor {moved} moves nothing: whole experts of all layers alone are read of it"
        )
    values: dict[str, Any] = {
        "model": model, "engine": "llama.cpp", "weights": weights, "max_sequences": slots,
        "max_batched_tokens": line.whole("--ubatch-size"), "max_context": line.whole("--ctx-size") // slots,
        "kv_cache": next(iter(kept), ""), "tp": devices if split == "row" else 1,
        "pp": devices if split == "layer" else 1, "cpu_experts": experts,
    }  # fmt: skip
    if layers not in all_of_them:
        values["gpu_layers"] = line.whole("--n-gpu-layers", 0)
    return line.launched(values, devices if shares else 0)
