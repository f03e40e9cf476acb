"""Launches within a scheduler's file: Kubernetes' objects have the fields of its API, and start what was exported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import run
from shardwise.formats import import_server

# Fields by the JSON names of github.com/kubernetes/api 10b39a39b {core,batch,apps}/v1/types.go and of
# github.com/kubernetes-sigs/lws 060ab4d api/leaderworkerset/v1/leaderworkerset_types.go; "" is any key of a map.
_POD: dict[str, Any] = {
    "containers": {"name": str, "image": str, "command": str, "resources": {"limits": {"": int}},
                   "volumeMounts": {"name": str, "mountPath": str}},
    "volumes": {"name": str, "emptyDir": {"medium": str}}, "restartPolicy": str, "subdomain": str,
}  # fmt: skip
_TEMPLATE = {"metadata": {"labels": {"": str}}, "spec": _POD}
_GROUPS = {"size": int, "workerTemplate": _TEMPLATE}
_COUNTS = dict.fromkeys(("completions", "parallelism", "backoffLimit"), int)
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "Service"): {"clusterIP": str, "selector": {"": str}, "publishNotReadyAddresses": bool},
    ("batch/v1", "Job"): {**_COUNTS, "completionMode": str, "template": _TEMPLATE},
    ("apps/v1", "Deployment"): {"replicas": int, "selector": {"matchLabels": {"": str}}, "template": _TEMPLATE},
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {"replicas": int, "leaderWorkerTemplate": _GROUPS},
}


def known(value: Any, shape: Any) -> bool:
    """Return whether a value has the fields and the types of the API alone."""
    if isinstance(value, list):
        return all(known(one, shape) for one in value)
    if isinstance(value, dict):
        return isinstance(shape, dict) and all(known(one, shape.get(key, shape.get(""))) for key, one in value.items())
    return isinstance(shape, type) and type(value) is shape


def objects(*words: str) -> list[dict[str, Any]]:
    """Return the objects of an export."""
    done = run("export", *words, "--wrap", "kubernetes", "--json")
    assert done.status in (0, 1), done.err
    return list(yaml.safe_load_all(done.tree["files"]["job.yaml"]))


TRAIN = ("llama-3.1-8b", "--seq-len", "512", "--global-batch", "16", "--on")
SERVE = ("--batch", "8", "--input-tokens", "500", "--output-tokens", "50", "--on")
CASES: tuple[tuple[tuple[str, ...], list[str], int, int], ...] = (
    (("megatron", *TRAIN, "16xh100"), ["Service", "Job"], 2, 8),
    (("torchtitan", *TRAIN, "4xh100"), ["Job"], 1, 4),
    (("llamafactory", *TRAIN, "16xmi300x", "--sharding", "fsdp"), ["Service", "Job"], 2, 8),
    (("vllm", "llama-3.1-8b", *SERVE, "8xh100", "--tp", "2"), ["Deployment"], 1, 8),
    (("vllm", "llama-3.1-405b", *SERVE, "32xh100", "--tp", "8", "--pp", "2"), ["LeaderWorkerSet"], 2, 8),
    (("sglang", "deepseek-v3", *SERVE, "16xh200", "--dp", "16", "--ep", "16"), ["LeaderWorkerSet"], 2, 8),
    (("trtllm", "llama-3.1-8b", *SERVE, "4xh100", "--tp", "2"), ["Deployment"], 1, 2),
)


@pytest.mark.parametrize(("words", "kinds", "nodes", "each"), CASES)
def test_objects_have_the_fields_of_the_api(words: tuple[str, ...], kinds: list[str], nodes: int, each: int) -> None:
    """Every field is one of its type, and a pod asks for the devices of its node."""
    found = objects(*words)
    assert [one["kind"] for one in found] == kinds
    for one in found:
        shape = SPECS[one["apiVersion"], one["kind"]]
        assert known({key: value for key, value in one.items() if key != "metadata"}, {
            "apiVersion": str, "kind": str, "spec": shape}), one  # fmt: skip
    spec = found[-1]["spec"]
    pod = spec.get("leaderWorkerTemplate", {}).get("workerTemplate") or spec["template"]
    assert list(pod["spec"]["containers"][0]["resources"]["limits"].values()) == [each]
    assert (spec.get("completions") or spec.get("leaderWorkerTemplate", {}).get("size") or 1) == nodes


def test_a_pod_starts_its_share_of_a_training(tmp_path: Path) -> None:
    """The second pod of a job runs the launcher under its own rank, at the address of the first."""
    _, job = objects("nemo", *TRAIN, "16xh100")
    program = '#!/bin/sh\necho "$NODE_RANK $MASTER_ADDR $PET_NODE_RANK $PET_MASTER_ADDR"\n'
    (tmp_path / "torchrun").write_text(program, encoding="utf-8")
    (tmp_path / "torchrun").chmod(0o755)
    where = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    said = subprocess.run(command, capture_output=True, text=True, env=where, cwd=tmp_path, check=True)
    host = "llama-3-1-8b-0.llama-3-1-8b"
    assert said.stdout == f"1 {host} 1 {host}\n"
    assert "tensor_model_parallel_size" in (tmp_path / "nemo.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [case[0] for case in CASES if case[0][0] in ("vllm", "sglang", "trtllm")])
def test_what_a_pod_serves_is_read_again(words: tuple[str, ...], tmp_path: Path) -> None:
    """The objects of a server are read as the launch line within them."""
    done = run("export", *words, "--wrap", "kubernetes", "--json")
    for name, text in done.tree["files"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    within, alone = (import_server(tmp_path / name) for name in ("job.yaml", f"{words[0]}.sh"))
    copies = within.num_devices // alone.num_devices
    kept = {key: value for key, value in alone.values.items() if key != "dp"}
    assert {key: value for key, value in within.values.items() if key != "dp"} == kept
    assert within.values.get("dp", 1) == alone.values.get("dp", 1) * copies


def test_what_nothing_starts_is_not_wrapped() -> None:
    """Several nodes of TensorRT-LLM start under srun itself, and a Mac has no plugin of Kubernetes."""
    done = run("export", "trtllm", "llama-3.1-405b", *SERVE, "16xh100", "--tp", "16", "--wrap", "kubernetes")
    assert done.status == 2 and "wrap = 'kubernetes': needs a command" in done.err
    done = run("export", "megatron", *TRAIN, "1xapple-m3-max-40core", "--precision", "fp16", "--wrap", "kubernetes")
    assert done.status == 2 and "has no name in Kubernetes" in done.err


_SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nfor node in 0 1; do SLURM_NODEID=$node "$@"; done\n'
_SAYS = '#!/bin/bash\necho "$NODE_RANK $PET_NODE_RANK $MASTER_ADDR $PET_MASTER_ADDR $MASTER_PORT ${@: -3}"\n'


@pytest.mark.parametrize(
    ("words", "program", "last"),
    [
        (("vllm", "llama-3.1-405b", *SERVE, "16xh100", "--tp", "8", "--pp", "2"), "vllm", "--headless"),
        (("trl", *TRAIN, "16xh100", "--method", "dpo"), "torchrun", "trl.yaml"),
        (("megatron", *TRAIN, "16xh100"), "torchrun", "--no-create-attention-mask-in-dataloader"),
    ],
)
def test_a_job_of_slurm_starts_each_node_under_its_rank(
    words: tuple[str, ...], program: str, last: str, tmp_path: Path
) -> None:
    """A task on each node knows its rank and the first node, words behind sbatch reach it, one node alone answers."""
    done = run("export", *words, "--wrap", "slurm", "--write", str(tmp_path), "--json")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in done.tree["files"]["job.sbatch"]
    for name, text in (("srun", _SRUN), ("scontrol", "#!/bin/sh\nprintf 'a1\\nb2\\n'\n"), (program, _SAYS)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    where = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "job.sbatch", "--seed", "1"]
    said = subprocess.run(command, capture_output=True, text=True, env=where, cwd=tmp_path, check=True)
    first, second = said.stdout.splitlines()
    assert first.split()[:5] == ["0", "0", "a1", "a1", "29500"]
    assert second == f"1 1 a1 a1 29500 {last} --seed 1"
    assert (last in first) == (program == "torchrun")
