"""Settings that become launch lines of engines: srt-slurm's recipes, and values of vLLM production-stack's chart.

Sources: github.com/NVIDIA/srt-slurm c88ef731 src/srtctl/backends/{sglang,vllm,trtllm}.py and core/schema.py;
github.com/vllm-project/production-stack a6c01db0 helm/templates/deployment-vllm-multi.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.formats._around import release_of
from shardwise.formats._launched import Launched
from shardwise.formats._yaml import mapping
from shardwise.models import load_model
from shardwise.records import replace

_POOLS = {"prefill": "prefill", "decode": "decode", "aggregated": ""}
_WORKERS = {"prefill": "prefill", "decode": "decode", "aggregated": "agg"}
_MODEL = {"sglang": "--model-path", "vllm": "--model", "trtllm": "--model-path"}
_ENGINES = tuple(f"{name}_config" for name in _MODEL)
# What a recipe calls the type of its checkpoint -> the types of weights that are such, first the one that is meant.
_PRECISIONS = {"fp4": ("nvfp4", "mxfp4", "int4", "nf4"), "fp8": ("fp8", "mxfp8"), "fp16": ("bf16",), "bf16": ("bf16",)}


def is_recipe(text: str) -> bool:
    """Return whether a file is a recipe of srt-slurm, or values of production-stack's chart."""
    recipe = re.search(r"(?m)^resources:", text) and re.search(r"(?m)^\s+(sglang|vllm|trtllm)_config:", text)
    chart = re.search(r"(?m)^servingEngineSpec:", text) and re.search(r"(?m)^\s+modelSpec:", text)
    return bool(recipe and re.search(r"(?m)^backend:", text)) or bool(chart)


def containers_of(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the containers that an orchestrator makes of its settings, none where they are of no such."""
    return [*_of_recipe(tree), *_of_values(tree)]


def _engine(tree: Mapping[str, Any]) -> str:
    """Return the engine of a recipe, empty where it is none; SGLang is meant where none is named."""
    backend = mapping(tree.get("backend"))
    name = str(backend.get("type") or "sglang")
    return name if name in _MODEL and any(key in backend for key in _ENGINES) and "resources" in tree else ""


def _of_recipe(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a container of each pool of an srt-slurm recipe, as many as it has workers."""
    if not (engine := _engine(tree)):
        return
    backend, resources = mapping(tree["backend"]), mapping(tree["resources"])
    for pool, role in _POOLS.items():
        config = mapping(backend.get(f"{engine}_config")).get(pool)
        copies = resources.get(f"{_WORKERS[pool]}_workers")
        if not isinstance(config, Mapping) or copies == 0:
            continue
        words = ["python3", "-m", f"dynamo.{engine}", _MODEL[engine], _named(tree)]
        if engine == "trtllm":
            words += ["--extra-engine-args", f"{pool}.yaml"]
        else:
            words += _flags(config)
        words += ["--disaggregation-mode", role] if role else []
        own = {**mapping(tree.get("environment")), **mapping(backend.get(f"{pool}_environment"))}
        variables = [{"name": name, "value": value} for name, value in own.items()]
        yield {"command": words, "env": variables, "replicas": copies or 1, "subComponentType": role}


def _named(tree: Mapping[str, Any]) -> str:
    """Return the model of a recipe: the repository of its checkpoint, else a path or a word of the cluster's."""
    repository = mapping(mapping(tree.get("identity")).get("model")).get("repo")
    return str(repository or mapping(tree.get("model")).get("path", "")).removeprefix("hf:")


def _flags(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of a worker as the flags that they become: a switch that is off is left out."""
    words: list[str] = []
    for key, value in config.items():
        listed = value if isinstance(value, list) else [value]
        if value is not False and value is not None:
            words += [f"--{key}".replace("_", "-")]
            words += [] if value is True else [json.dumps(v) if isinstance(v, Mapping) else str(v) for v in listed]
    return words


def files_of(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files of options that a recipe writes for TensorRT-LLM, by name."""
    if _engine(tree) == "trtllm":
        pools = mapping(mapping(tree["backend"]).get("trtllm_config"))
        yield from ((f"{pool}.yaml", json.dumps(config)) for pool, config in pools.items())


# A chart's value -> the flag it becomes; a switch that is off becomes the other flag.
_VALUES = {
    "maxModelLen": "--max-model-len", "dtype": "--dtype", "tensorParallelSize": "--tensor-parallel-size",
    "pipelineParallelSize": "--pipeline-parallel-size", "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization", "maxLoras": "--max-loras", "runner": "--runner",
    "convert": "--convert",
}  # fmt: skip
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def _of_values(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the container of each model in the values of vLLM production-stack's chart."""
    listed = mapping(tree.get("servingEngineSpec")).get("modelSpec")
    for one in listed if isinstance(listed, list) else ():
        config, cache = mapping(mapping(one).get("vllmConfig")), mapping(mapping(one).get("lmcacheConfig"))
        words = ["vllm", "serve", str(mapping(one).get("modelURL", ""))]
        words += ["--enable-lora"] if mapping(one).get("enableLoRA") else []
        if "enableChunkedPrefill" in config:
            words += ["--enable-chunked-prefill" if config["enableChunkedPrefill"] else "--no-enable-chunked-prefill"]
        if config:
            words += ["--enable-prefix-caching" if config.get("enablePrefixCaching") else "--no-enable-prefix-caching"]
        words += [word for key, flag in _VALUES.items() if key in config for word in (flag, str(config[key]))]
        more = config.get("extraArgs")
        words += [str(word) for word in more] if isinstance(more, list) else []
        role = _ROLES.get(str(cache.get("kvRole", "")), "") if cache.get("enablePD") else ""
        own = mapping(one).get("env") or []
        image = f"{mapping(one).get('repository', '')}:{mapping(one).get('tag', '')}"
        copies = mapping(one).get("replicaCount", 1)
        yield {"command": words, "image": image, "env": own, "replicas": copies, "subComponentType": role}


def with_precision(tree: Mapping[str, Any], one: Launched) -> Launched:
    """Return a server with what its recipe says beside the launch: types of weights, release, how it is asked."""
    if not _engine(tree):
        return one
    notes = list(one.assumed)
    precision, model = str(mapping(tree.get("model")).get("precision", "")), str(one.values.get("model", ""))
    weights = "" if one.values.get("weights") else _weights(precision, model)
    if weights:
        notes.append(f"weights {weights}: model.precision {precision}, which is not how {model} is stored")
    bench = mapping(tree.get("benchmark"))
    if type(bench.get("isl")) is int and type(bench.get("osl")) is int:
        flags = f"--input-tokens {bench['isl']} --output-tokens {bench['osl']}"
        notes.append(f"lengths and load are left to the question: its benchmark has {flags}")
    values = {**one.values, **({"weights": weights} if weights else {})}
    return replace(one, values=values, assumed=tuple(notes), release=_release(tree))


# What a recipe calls its engine -> the engine among the frameworks that its identity names.
_FRAMEWORKS = {"sglang": "sglang", "vllm": "vllm", "trtllm": "tensorrt_llm"}


def _release(tree: Mapping[str, Any]) -> str:
    """Return the release of the engine that a recipe was made with, or of its container; empty where none is said."""
    engine, identity = _engine(tree), mapping(tree.get("identity"))
    stated = mapping(identity.get("frameworks")).get(_FRAMEWORKS[engine])
    images = (
        str(mapping(identity.get("container")).get("image", "")),
        str(mapping(tree.get("model")).get("container", "")),
    )
    return str(stated or "") or next((tag for one in images if (tag := release_of(engine, one))), "")


def _weights(precision: str, model: str) -> str:
    """Return the type of weights that a checkpoint is said to have, empty where a model is stored so or none is known.

    >>> _weights("fp4", "deepseek-ai/DeepSeek-R1"), _weights("fp8", "deepseek-ai/DeepSeek-R1")
    ('nvfp4', '')
    """
    types = _PRECISIONS.get(precision, ())
    try:
        stored = load_model(model).quantization if types else ""
    except InputError:
        return ""
    return types[0] if types and not any(kind in (stored or "bf16") for kind in types) else ""
