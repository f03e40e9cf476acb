"""Settings of operators that start vLLM themselves: Ray Serve's LLM configurations, and KServe's two kinds of services.

Sources: docs.ray.io, serve/llm/user-guides/configuration.html (LLMConfig; a RayService has it in serveConfigV2);
github.com/kserve/kserve 01b1241 config/llmisvcconfig/config-llm-worker-data-parallel.yaml and
python/huggingfaceserver/huggingfaceserver/__main__.py, whose arguments but for its own are vLLM's.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.formats import _yaml
from shardwise.formats._yaml import mapping

_LOADING = r"(?m)^[ -]*model_loading_config:"


def is_operated(text: str) -> bool:
    """Return whether a file holds such settings."""
    ray = re.search(r"(?m)^[ -]*(llm_configs?|decode_config):", text) and re.search(_LOADING, text)
    service = re.search(r"(?m)^kind:\s*[\"']?InferenceService\b", text) and re.search(r"name:\s*huggingface\b", text)
    return bool(ray or service or re.search(r"(?m)^kind:\s*[\"']?LLMInferenceService[\"']?\s*$", text))


def containers_of(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the containers that an operator makes of its settings, none where they are of no such."""
    kind = tree.get("kind")
    if kind == "LLMInferenceService":
        return [] if _commanded(mapping(tree.get("spec"))) else [*_of_llm_service(mapping(tree.get("spec")))]
    if kind == "InferenceService":
        return [*_of_service(mapping(mapping(tree.get("spec")).get("predictor")))]
    if kind == "RayService":
        text = mapping(tree.get("spec")).get("serveConfigV2")
        return [*_of_ray(_yaml.parse(text, "serveConfigV2"))] if isinstance(text, str) else []
    return [*_of_ray(tree)]


# The arguments of build_openai_app, build_dp_openai_app and build_pd_openai_app -> the pool that each is.
_POOLS = {"llm_configs": "", "llm_config": "", "prefill_config": "prefill", "decode_config": "decode"}


def _of_ray(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a container of each model of Ray Serve's applications, as many as it has replicas at most."""
    for application in _list(tree.get("applications")) or [{"args": tree}]:
        arguments = mapping(mapping(application).get("args"))
        for name, role in _POOLS.items():
            stated = arguments.get(name)
            for one in map(mapping, stated if isinstance(stated, list) else [stated]):
                if "model_loading_config" in one:
                    yield _replica(one, role)


def _replica(config: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Return the container of a model that Ray Serve runs, in vLLM unless it names SGLang."""
    loading, settings = mapping(config.get("model_loading_config")), mapping(config.get("deployment_config"))
    model = str(loading.get("model_source") or loading.get("model_id") or "")
    engine = str(config.get("server_cls", "")) + str(config.get("llm_engine", ""))
    start = ["python3", "-m", "sglang.launch_server", "--model-path"] if "sglang" in engine.lower() else _SERVE
    scaled = mapping(settings.get("autoscaling_config"))
    copies = settings.get("num_replicas") or scaled.get("max_replicas") or 1
    words = [*start, model, *_flags(mapping(config.get("engine_kwargs")))]
    return {"command": words, "replicas": copies, "subComponentType": role}


_SERVE = ["vllm", "serve"]


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Return arguments of an engine by their names in Python as flags: a switch that is off is the other flag."""
    words: list[str] = []
    for key, value in settings.items():
        flag = f"--{key}".replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, json.dumps(value) if isinstance(value, (Mapping, list)) else str(value)]
    return words


# huggingfaceserver's own arguments, behind which no engine's stand, and those that are the name of the model.
_OWN = ("model_name", "backend", "task", "tensor_input_names", "return_token_type_ids", "disable_lower_case")
_MODEL = ("model_id", "model_dir")


def _of_service(predictor: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the container of a service whose model has the format of Hugging Face."""
    model, workers = mapping(predictor.get("model")), mapping(predictor.get("workerSpec"))
    if mapping(model.get("modelFormat")).get("name") != "huggingface":
        return
    named, words = str(model.get("storageUri", "")).removeprefix("hf://"), list[str]()
    rest = [str(word) for word in _list(model.get("args"))]
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        name = key.lstrip("-").replace("-", "_")
        if name in (*_OWN, *_MODEL):
            value = value if equals or not rest or rest[0].startswith("-") else rest.pop(0)
            named = value if name == "model_id" or (name in _MODEL and not named) else named
            if (name, value) == ("backend", "huggingface"):
                return  # transformers' own generate
        else:
            words += [key + equals + value]
    sizes = (("--tensor-parallel-size", "tensorParallelSize"), ("--pipeline-parallel-size", "pipelineParallelSize"))
    words += [word for flag, size in sizes if workers.get(size) for word in (flag, str(workers[size]))]
    yield {
        "command": ["vllm", "serve", named, *words], "env": model.get("env") or [],
        "replicas": predictor.get("minReplicas", 1),
    }  # fmt: skip


# KServe's names of degrees, by the flags that its templates pass to vLLM.
_DEGREES = {"tensor": "--tensor-parallel-size", "pipeline": "--pipeline-parallel-size", "data": "--data-parallel-size"}
_ADDED = "VLLM_ADDITIONAL_ARGS"


def _commanded(tree: Any) -> bool:
    """Return whether a container has a command of its own, in place of its template's."""
    if isinstance(tree, Mapping):
        return bool(tree.get("command")) or any(map(_commanded, tree.values()))
    return isinstance(tree, list) and any(map(_commanded, tree))


def _of_llm_service(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the containers that KServe makes of a service without a command of its own: vLLM, with a prefill pool."""
    model, first = mapping(spec.get("model")), mapping(spec.get("prefill"))
    name = str(model.get("uri", "")).removeprefix("hf://")
    name = name if "://" not in name and name else str(model.get("name", ""))
    for pool, role in ((spec, "decode" if first else ""), (first, "prefill")):
        if not pool:
            continue
        degrees = mapping(pool.get("parallelism"))
        words = [f"{flag} {degrees[axis]}" for axis, flag in _DEGREES.items() if degrees.get(axis)]
        words += ["--enable-expert-parallel"] if degrees.get("expert") else []
        containers = [mapping(one) for one in _list(mapping(pool.get("template")).get("containers"))]
        text = " ".join([f"vllm serve {shlex.quote(name)}", *words, *map(_words_of, containers)])
        image = next((str(one["image"]) for one in containers if one.get("image")), "")
        copies = pool.get("replicas", 1)
        yield {
            "command": ["sh", "-c"], "args": [text], "replicas": copies, "subComponentType": role, "image": image,
        }  # fmt: skip


def _words_of(container: Mapping[str, Any]) -> str:
    """Return what a container adds to the command of its template: a variable's words, and arguments."""
    variables = map(mapping, _list(container.get("env")))
    added = [str(one.get("value", "")) for one in variables if one.get("name") == _ADDED]
    return " ".join([*added, *(shlex.quote(str(word)) for word in _list(container.get("args")))])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
