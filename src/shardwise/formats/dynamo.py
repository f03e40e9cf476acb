"""YAML of containers that start engines: NVIDIA Dynamo's graphs, llm-d's groups, plain Deployments, docker compose.

Sources: github.com/ai-dynamo/dynamo examples/backends/*/deploy (nvidia.com/v1alpha1 at 0044eb9035, v1beta1 at
14a3b0d913), whose workers' flags are those of ai-dynamo 1.6.1 dynamo/vllm/{args,backend_args}.py;
github.com/kubernetes-sigs/lws 53bce0dc16 docs/examples/vllm; github.com/llm-d/llm-d 03da3b0079 guides. Each container
with the launch line of an engine is a set of like replicas, of which two may be a prefill and a decode pool.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.errors import InputError, Problem, cut
from shardwise.formats import _operators, _yaml, vllm
from shardwise.formats._around import with_image
from shardwise.formats._exported import Exported
from shardwise.formats._launched import Launched, LaunchFiles, engine_in, first_of, launches_of, read_launch
from shardwise.formats._operators import is_operated
from shardwise.formats._pods import Service, services_of
from shardwise.formats._recipes import containers_of, files_of, is_recipe, with_precision
from shardwise.formats._served import PLAIN, Asked, Deployment, engine_note, given_words, lost, stage_variable
from shardwise.formats._wrapped import resource_of
from shardwise.records import replace
from shardwise.serving import InferReport
from shardwise.units import counted

_Servers = Sequence[tuple[Service, Launched]]

# Objects of any operator hold their pods' containers alike; docker compose has services.
_KINDS = re.compile(r"(?m)^kind:\s*\S|^services:")
_NO_SERVER = re.compile(r"(?m)^kind:\s*(PyTorchJob|MPIJob|TrainJob|RayJob|CustomResourceDefinition)\b")
# A variable of docker compose, with what stands in its place where nobody sets it (compose-spec 12-interpolation.md).
_VARIABLE = re.compile(r"\$\{(\w+)(:?-([^{}]*))?\}|\$(\w+)")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is Kubernetes YAML that starts an engine."""
    kinds = _KINDS.search(text) and (engine_in(_joined(text)) or is_operated(text)) and not _NO_SERVER.search(text)
    return name.endswith((".yaml", ".yml")) and bool(kinds or is_recipe(text) or is_operated(text))


def _joined(text: str) -> str:
    """Return the words of a YAML file in one line: launches may be lists of words."""
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    return " ".join(re.sub(r"(?m)^\s*-\s+|[\"',\[\]]", " ", code).split())


def read(text: str, source: str, variables: Mapping[str, str], folder: str = ".") -> Launched:
    """Return the server, or the two pools, that a file's containers start."""
    trees = [_yaml.parse(part, source) for part in re.split(r"(?m)^---\s*$", text) if part.strip()]
    files = LaunchFiles(folder, named={name: text for tree in trees for name, text in _files(tree)})
    services = [one for tree in trees for one in services_of(_composed(tree, variables))]
    launches = [(one, _read(one, source, variables, files)) for one in services]
    if not launches:
        rule = "starts no engine that is known"
        raise InputError([Problem("from", source, rule, "give a file with the launch line of an engine")])
    pools: dict[str, tuple[Service, Launched]] = {}
    for service, one in launches:
        role = one.role or service.role
        pools.setdefault(role if role in ("prefill", "decode") else "both", (service, one))
    if "prefill" in pools and ("decode" in pools or "both" in pools):
        last = pools.get("decode") or pools["both"]
        return with_precision(trees[0], _first(_pools(pools["prefill"], last), [pools["prefill"], last], launches))
    service, one = next(iter(pools.values()))
    return with_precision(trees[0], _first(_replicated(service, one), [(service, one)], launches))


def read_script(text: str, source: str, variables: Mapping[str, str], files: LaunchFiles) -> Launched:
    """Return the server that a script starts, or both pools where it starts the workers of two."""
    servers = launches_of(text, source, variables, files)
    one = first_of(servers)
    if one.role not in ("prefill", "decode") or not 1 < len(servers) <= _MOST_WORKERS:
        return one
    pools: dict[str, list[Launched]] = {"prefill": [], "decode": []}
    for server in (read_one() for read_one in servers):
        pools.get(server.role, []).append(server)
    if not all(pools.values()):
        return one
    first, last = ((Service(replicas=len(like)), like[0]) for like in pools.values())
    return _pools(first, last)


_MOST_WORKERS = 64


def _read(service: Service, source: str, variables: Mapping[str, str], files: LaunchFiles) -> Launched:
    """Return the server that a container starts, with the release of its image."""
    one = read_launch(service.text, source, {**service.variables, **variables}, files)
    return with_image(one, service.image)


def _first(one: Launched, read: _Servers, there: _Servers) -> Launched:
    """Return a server with a note where a file starts others beside those that are read."""
    others = len(there) - len(read)
    if not others:
        return one
    shown = ", ".join(
        dict.fromkeys(str(other.values.get("model", "")) for _, other in there if other is not read[-1][1])
    )
    note = f"the first of {counted(len(there), 'server')} that the file starts; {others} left out: {cut(shown)}"
    return replace(one, assumed=(*one.assumed, note))


def _composed(tree: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
    """Return docker compose's services as containers: an image's entry point takes what is called its command."""
    if made := [*containers_of(tree), *_operators.containers_of(tree)]:
        return {"containers": made}
    named = tree.get("services")
    if "kind" in tree or not isinstance(named, Mapping):
        return tree
    return {"containers": [_container(one, variables) for one in named.values() if isinstance(one, Mapping)]}


def _container(one: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    environment = one.get("environment", {})
    pairs = (
        environment.items()
        if isinstance(environment, Mapping)
        else (str(word).partition("=")[::2] for word in environment or ())
    )
    own = {str(name): str(value) for name, value in pairs if value not in (None, "")}

    def filled(word: str) -> str:
        for _ in range(3):  # a variable of the container's may name one of the file's
            word = _VARIABLE.sub(
                lambda m: variables.get(m[1] or m[4], own.get(m[1] or m[4], m[0] if m[2] is None else m[3])), word
            )
        return word

    def words(key: str) -> list[str]:
        value = one.get(key) or []
        text = value if isinstance(value, list) else shlex.split(filled(str(value)))
        return [filled(str(word)) for word in text]

    deploy = one.get("deploy", {})
    copies = deploy.get("replicas") if isinstance(deploy, Mapping) else None
    started = {"command": words("entrypoint")} if one.get("entrypoint") else {}
    container = {"image": filled(str(one.get("image", ""))), **started, "args": words("command"), "replicas": copies}
    return {key: value for key, value in container.items() if value is not None}


def _files(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files of a ConfigMap, by name."""
    yield from files_of(tree)
    data = tree.get("data") if tree.get("kind") == "ConfigMap" else None
    yield from ((str(name), text) for name, text in (data or {}).items() if isinstance(text, str))


def _replicated(service: Service, one: Launched) -> Launched:
    """Return so many copies of a server."""
    dp = int(one.values.get("dp", 1)) * service.replicas
    return replace(
        one, values={**one.values, **({"dp": dp} if dp > 1 else {})}, num_devices=one.num_devices * service.replicas
    )


_STEP = "max_batched_tokens"
# What both pools have of one, the pool that decodes: settings of the other are told.
_OWN = ("engine", "weights", "kv_cache", "memory_fraction", "max_sequences", "max_total_tokens", "kv_cache_memory")


def _prefill(replicas: int, values: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the fields of a pool of so many servers that compute prompts, and what is assumed of it.

    Groups of attention that share their experts are one worker, on all their devices; others are a worker each.
    """
    tp, dp, ep = (int(values.get(axis, 1)) for axis in ("tp", "dp", "ep"))
    sharing = max(ep * int(values.get("etp", 1)), tp)
    pool = {
        "prefill_workers": replicas * max(tp * dp // sharing, 1),
        "prefill_tp": tp,
        "prefill_pp": values.get("pp", 1),
    }
    if "ep" not in values:
        return pool, []
    if ep == sharing or sharing == tp:
        return pool | {"prefill_ep": ep}, []
    note = f"prefill_ep {sharing}: a pool for prompts splits experts among its groups of attention, not each of them"
    return pool | {"prefill_ep": sharing}, [note]


def _pools(first: tuple[Service, Launched], last: tuple[Service, Launched]) -> Launched:
    """Return a decode pool with the pool before it that computes prompts."""
    prompts, decode = _replicated(*first), _replicated(*last)
    values = decode.values
    pool, notes = _prefill(first[0].replicas, first[1].values)
    # The tokens of a step are those of prompts, which the other pool does not compute.
    values = {key: value for key, value in values.items() if key != _STEP}
    values |= {_STEP: first[1].values[_STEP]} if _STEP in first[1].values else {}
    other = [key for key in _OWN if first[1].values.get(key) != last[1].values.get(key)]
    if other:
        settings = ", ".join(f"{key} {first[1].values.get(key, 'left out')}" for key in other)
        notes.append(f"of the pool for prompts {settings}: not taken, both have those of the pool that decodes")
    return replace(
        decode, values={**values, **pool}, num_devices=decode.num_devices + prompts.num_devices, role="",
        understood=(*decode.understood, *prompts.understood),
        assumed=tuple(dict.fromkeys((*decode.assumed, *prompts.assumed, *notes))),
        ignored=(*decode.ignored, *prompts.ignored), silent=(*decode.silent, *prompts.silent),
        unknown=(*decode.unknown, *prompts.unknown),
    )  # fmt: skip


def export(report: InferReport, asked: Asked = PLAIN, prefill: InferReport | None = None) -> Exported:
    """Return a graph of workers, each a vLLM server as an answer assumed it, behind Dynamo's frontend.

    With a `prefill` pool its workers compute prompts, and the others decode.
    """
    pools = {"": report} if prefill is None else {"prefill": prefill, "decode": report}
    read: list[str] = []
    workers = [
        _worker(Deployment(report=pool, asked=asked, apart=True, role=role), read) for role, pool in pools.items()
    ]
    name = re.sub(r"[^a-z0-9]+", "-", report.case.model.name.lower()).strip("-")
    tree = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {"components": [{"name": "Frontend", "type": "frontend", "replicas": 1}, *workers]},
    }
    notes = ("the images of frontend and workers are the cluster's to name", *dict.fromkeys(read))
    return Exported(system="Dynamo", version="v1beta1", files={"dynamo.yaml": _yaml.dump(tree)}, notes=notes)


def _worker(one: Deployment, read: list[str]) -> dict[str, Any]:
    """Return the component of like workers; what its line is to be read with is put behind `read`."""
    words = vllm.words_of(one)
    words |= {"--disaggregation-mode": one.role} if one.role else {}
    model, each = one.model, one.plan.tp * one.plan.pp * one.together
    flags = [part for name, value in words.items() for part in (name, *given_words(value))]
    line = stage_variable(one, "VLLM_PP_LAYER_PARTITION")
    line += shlex.join(["python3", "-m", "dynamo.vllm", "--model", model, *flags])
    read += engine_note(one, "vllm", lost(one, "vllm", line))
    limits = {resource_of(one.report.case.cluster.device): str(each // max(one.nodes, 1))}
    container = {"name": "main", "command": ["/bin/sh", "-c"], "args": [line], "resources": {"limits": limits}}
    worker: dict[str, Any] = {
        "name": f"{one.role.title()}Worker",
        "type": one.role or "worker",
        "replicas": max(one.plan.dp // one.together, 1),
        "podTemplate": {"spec": {"containers": [container]}},
    }
    if one.nodes > 1:
        worker["multinode"] = {"nodeCount": one.nodes}
    return worker
