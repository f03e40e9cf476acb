"""A scheduler's file around the command that starts an export: Slurm's script, or objects of Kubernetes.

Sources: slurm.schedmd.com/sbatch.html and srun.html; torch 2.13 distributed/argparse_util.py, by which torchrun takes
PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT where no argument says them; LLaMA-Factory reads the plain names.
github.com/kubernetes/api 10b39a39b batch/v1 (an indexed Job names its pods by their index), apps/v1 and core/v1;
github.com/kubernetes-sigs/lws 060ab4d api/leaderworkerset/v1 for the variables that its pods are given.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.formats import _yaml
from shardwise.formats._exported import Exported
from shardwise.hardware import Device
from shardwise.records import replace

_PORT = 29500
_SLURM = """#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}{whole}
# The account, the partition and the time limit are yours to add, here or as arguments of sbatch.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT={port}
export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c {inner} -- "$@"
"""
# The names under which the device plugins of vendors offer what a pod asks for.
_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Google": "google.com/tpu", "Intel": "habana.ai/gaudi",
              "AWS": "aws.amazon.com/neuron"}  # fmt: skip


def resource_of(device: Device) -> str:
    """Return what a pod asks for devices as.

    >>> from shardwise.hardware import find_device
    >>> resource_of(find_device("mi300x").device)
    'amd.com/gpu'
    """
    if device.vendor not in _RESOURCES:
        rule = f"has no name in Kubernetes, as others of {device.vendor}"
        known = ", ".join(_RESOURCES)
        raise InputError([Problem("on", device.name, rule, f"use a device of {known}, or a launch script")])
    return _RESOURCES[device.vendor]


def wrapped(way: str, exported: Exported, name: str, device: Device) -> Exported:
    """Return an export with a scheduler's file around its launch; raises `InputError` where nothing starts it."""
    if not exported.launch:
        rule = f"needs a command that starts it on several nodes, which {exported.system}'s files do not have"
        remedy = "export megatron, nemo, torchtitan, maxtext, trl, axolotl, llamafactory, torchtune, nanotron or vllm"
        raise InputError([Problem("wrap", way, rule, remedy)])
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")  # a Service's name begins with a letter
    return _slurm(exported, plain) if way == "slurm" else _kubernetes(exported, plain, device)


def _slurm(exported: Exported, name: str) -> Exported:
    # One task a node starts its processes itself: it needs all cores, which srun would bind it to one of.
    inner = f'export NODE_RANK=$SLURM_NODEID PET_NODE_RANK=$SLURM_NODEID; {exported.launch} "$@"'
    whole = "\n#SBATCH --exclusive" if exported.node_devices > 1 else ""
    text = _SLURM.format(
        job=name, whole=whole, nodes=exported.nodes, each=exported.node_devices, port=_PORT, inner=shlex.quote(inner)
    )
    more = ("one such job for each server",) if exported.copies > 1 else ()
    notes = (*exported.notes, "submit it: sbatch job.sbatch", *more)
    return replace(exported, files={**exported.files, "job.sbatch": text}, notes=notes)


def _kubernetes(exported: Exported, name: str, device: Device) -> Exported:
    """Return an export with its objects: a Job of indexed pods for a training, a Deployment or a LeaderWorkerSet."""
    resource = resource_of(device)
    if exported.serves:
        trees = [_replicas(exported, name, resource) if exported.nodes == 1 else _groups(exported, name, resource)]
    else:
        trees = [*([_service(name)] if exported.nodes > 1 else []), _job(exported, name, resource)]
    text = "---\n".join(_yaml.dump(tree) for tree in trees)
    notes = (*exported.notes, "the image is yours to name in job.yaml; start it: kubectl apply -f job.yaml")
    return replace(exported, files={**exported.files, "job.yaml": text}, notes=notes)


def _pod(exported: Exported, variables: str, resource: str) -> dict[str, Any]:
    """Return the specification of a pod of one node, which writes the files and starts them."""
    container = {
        "name": "main",
        "image": "IMAGE",
        "command": ["bash", "-c", _script(exported, variables)],
        "resources": {"limits": {resource: exported.node_devices}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}


def _script(exported: Exported, variables: str) -> str:
    """Return what a pod runs: its files as here-documents but the script that is started last, then that."""
    last = next((name for name in exported.files if exported.launch.startswith(f"bash {shlex.quote(name)}")), "")
    own = exported.files.get(last, "")
    others = {name: text for name, text in exported.files.items() if name != last}
    parts = [f"cat > {shlex.quote(name)} <<'EOF'\n{text}EOF" for name, text in others.items()]
    lines = [line for line in own.splitlines() if not line.startswith("#")]
    rest = exported.launch.removeprefix(f"bash {shlex.quote(last)}").strip()
    body = "\n".join(lines).replace('"$@"', rest or '"$@"') if own else exported.launch
    return "\n".join([variables, *parts, body]).strip() + "\n"


def _job(exported: Exported, name: str, resource: str) -> dict[str, Any]:
    index = "NODE_RANK=$JOB_COMPLETION_INDEX PET_NODE_RANK=$JOB_COMPLETION_INDEX"
    host = f"{name}-0.{name}"
    address = f"MASTER_ADDR={host} MASTER_PORT={_PORT} PET_MASTER_ADDR={host} PET_MASTER_PORT={_PORT}"
    several = exported.nodes > 1
    pod = _pod(exported, f"export {index} {address}" if several else "", resource)
    pod |= {"restartPolicy": "Never"} | ({"subdomain": name} if several else {})
    count = {
        "completions": exported.nodes,
        "parallelism": exported.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
    }
    spec = {**count, "template": {"metadata": {"labels": {"app": name}}, "spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _service(name: str) -> dict[str, Any]:
    """Return the headless service that gives the pods of a job their addresses."""
    spec = {"clusterIP": "None", "selector": {"app": name}, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _replicas(exported: Exported, name: str, resource: str) -> dict[str, Any]:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": _pod(exported, "", resource)}
    spec = {"replicas": exported.copies, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def _groups(exported: Exported, name: str, resource: str) -> dict[str, Any]:
    variables = "export NODE_RANK=$LWS_WORKER_INDEX MASTER_ADDR=$LWS_LEADER_ADDRESS"
    template = {"size": exported.nodes, "workerTemplate": {"spec": _pod(exported, variables, resource)}}
    spec = {"replicas": exported.copies, "leaderWorkerTemplate": template}
    named = {"metadata": {"name": name}}
    return {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", **named, "spec": spec}
