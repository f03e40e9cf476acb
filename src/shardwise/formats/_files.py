"""Reading a file of another system: whose it is shows in its name and in its keys.

A system is a module, or a package, of one shape: `recognises(name, text)`, `read(text, source, around)` and
`export(case)`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from os import PathLike, fspath
from typing import cast

from shardwise import files
from shardwise.errors import InputError, Problem, Problems, bounded
from shardwise.field_types import typed
from shardwise.formats._imported import NOTHING, SIZES, ImportContext, Imported, matches
from shardwise.formats._launch import REMEDY, unread
from shardwise.formats._launched import Launched
from shardwise.formats._pointed import pointed
from shardwise.formats._systems import READ_ONLY, SYSTEMS
from shardwise.records import replace

_BESIDE_ENGINES = ("swift", "slime", "openrlhf")  # scripts of theirs may start a teacher's or a judge's engine too
MOST_BYTES = {".json": files.JSON_BYTES, ".yaml": files.YAML_BYTES, ".yml": files.YAML_BYTES}
"""Most bytes of a file by its ending; of any other, what a person writes."""


@typed
def import_file(
    path: str | PathLike[str], variables: Mapping[str, str] | None = None, around: ImportContext | None = None
) -> Imported:
    """Return the case of a file: of a trainer's settings by its keys, of a launch script by the arguments it gives.

    `variables` are those that the caller of a script would have set. Raises `InputError` with everything wrong.
    Nothing of a script is run. What was read of it, assumed and left out is told beside the case.

    >>> script = getfixture("tmp_path") / "tune.sh"
    >>> sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --seq-length 128"
    >>> more = "--max-position-embeddings 128 --micro-batch-size 1 --bf16"
    >>> _ = script.write_text(f"torchrun --nproc_per_node $GPUS pretrain_gpt.py {sizes} {more}")
    >>> case = import_file(script, {"GPUS": "8"})
    >>> case.system, case.num_devices, case.plan.dp, case.job.seq_len
    ('Megatron-LM', 8, 8, 128)
    """
    name, around = _called(fspath(path)), replace(around or ImportContext(), variables=dict(variables or {}))
    if starts_server(name):
        remedy = "ask count, infer, serve, plan infer or plan serve, or export to an engine"
        raise InputError([Problem("from", name, "starts a server, and this is asked of a training", remedy)])
    with bounded("from", name):
        text = read_text(name)
        if name.endswith((".yaml", ".yml")) and (kind := _WRAPS.search(text)):
            rule = f"is Kubernetes' {kind[1]} around what it starts, which is not looked into"
            raise InputError([Problem("from", name, rule, "give the script or the settings that it starts")])
        case = pointed(text, name, around)
        if case is None:
            modules = (import_module(f"shardwise.formats.{system}") for system in (*READ_ONLY, *SYSTEMS))
            read = next(module for module in modules if module.recognises(name, text)).read
            try:
                case = cast("Imported", read(text, name, around))
            except InputError:
                if name.endswith((".yaml", ".yml")):
                    _refuse_named(name, text)
                raise
    _refuse_foreign(case, name, text, around)
    if not case.job.targets:
        return case
    from shardwise.formats._targets import with_own_targets

    return with_own_targets(case)


def _refuse_foreign(case: Imported, name: str, text: str, around: ImportContext) -> None:
    """Raise `InputError` where most words are no settings of the system, or one that is none speaks of sizes."""
    strange = [one for one in case.unknown if one.value not in NOTHING]
    known = len(case.understood) + len(case.ignored) + len(case.silent)
    followed = case.understood or case.ignored
    if case.unknown and name.endswith((".yaml", ".yml")):
        _refuse_named(name, text)
    if case.unknown and (len(strange) >= known or not followed):
        _refuse_named(name, text)
        most = f"{len(case.unknown)} of {known + len(case.unknown)} words are no settings of {case.system}"
        rule = "has no setting of a system that is read" if not followed else f"is of no system that is read: {most}"
        if re.search(r'"(architectures|hidden_size|n_embd|d_model)"\s*:', text):
            raise InputError([Problem("from", name, "is a model's configuration", "give it in place of the model")])
        raise InputError([Problem("from", name, rule, REMEDY)])
    problems, skipped = Problems(), [word.lstrip("-") for word in around.skipped]
    for one in strange:
        word = one.argument.lstrip("-")
        if SIZES.search(word) and not matches(word, skipped):
            rule, remedy = f"is {one.meaning}, and its name speaks of sizes", f"say it in words of {case.system}"
            problems.add(one.argument, one.value, rule, f"{remedy}, or skip it: --skip {word}")
    problems.raise_if_any()


def _refuse_named(name: str, text: str) -> None:
    """Raise `InputError` where a file outside its comments has words of a system that is known and not read."""
    if other := unread(re.sub(r"(?m)(^|\s)#.*$", "", text)):
        raise InputError([Problem("from", name, f"is of {other}, which is not read", REMEDY)])


# Kinds of batch/v1, of Kubeflow's trainer, of Volcano and of KubeRay that run a program to its end.
_WRAPS = re.compile(r"(?m)^kind:[ \t]*[\"']?(Job|JobSet|PyTorchJob|MPIJob|TrainJob|RayJob)\b")
_CALLED = re.compile(r"\b(?:bash|sh) +([\w./-]+\.(?:sh|slurm))\b")
_STARTS_ITSELF = re.compile(r"\.py\b|\bpython|torchrun|\bserve\b|-server\b|\btrain\b")


def _called(path: str) -> str:
    """Return the script that a job script starts and does nothing beside, where it lies with it; else the path."""
    if path.endswith((*MOST_BYTES, ".toml")):
        return path
    code = re.sub(r"(?m)(^|\s)#.*$", "", read_text(path))
    named = {os.path.join(os.path.dirname(path), one) for one in _CALLED.findall(code)}
    there = [one for one in named if os.path.isfile(one) and os.path.realpath(one) != os.path.realpath(path)]
    return there[0] if len(there) == 1 and not _STARTS_ITSELF.search(_CALLED.sub("", code)) else path


def read_text(path: str) -> str:
    """Return the text of a file; raises `InputError` where it cannot be read."""
    from shardwise.formats import unsloth

    text = files.read_text(path, MOST_BYTES.get(os.path.splitext(path)[1], files.WRITTEN_BYTES), "from")
    if not text.strip():
        raise InputError([Problem("from", path, "is empty", "give a file that holds settings or a script")])
    if path.endswith((".py", ".ipynb")) and not unsloth.recognises(path, text):
        rule = "is a program: of those Unsloth's .py scripts alone are read"
        raise InputError([Problem("from", path, rule, "give the command that starts it, or the settings it is given")])
    return text


def starts_server(path: str | PathLike[str]) -> bool:
    """Return whether a file is the launch of a server rather than of a training."""
    from shardwise.formats import _vllm_recipes, dynamo
    from shardwise.formats._launched import engine_in

    name = _called(fspath(path))
    with bounded("from", name):
        text = read_text(name)
        if dynamo.recognises(name, text) or _vllm_recipes.recognises(name, text):
            return True
        if name.endswith(tuple(MOST_BYTES)):
            return False
        trainers = (system for system in (*_BESIDE_ENGINES, *SYSTEMS) if system not in ("fsdp", "megatron"))
        own = (import_module(f"shardwise.formats.{system}") for system in trainers)
        return bool(engine_in(text)) and not any(module.recognises(name, text) for module in own)


def import_server(
    path: str | PathLike[str], variables: Mapping[str, str] | None = None, num_devices: int = 0
) -> Launched:
    """Return the server that a file starts: a launch script or command line, or Kubernetes YAML of engines.

    `num_devices` are those of the question, over which recipes spread. Raises `InputError` with everything wrong.
    """
    from shardwise.formats import _vllm_recipes, dynamo, peft
    from shardwise.formats._launched import LaunchFiles

    name = _called(fspath(path))
    with bounded("from", name):
        text = read_text(name)
        folder, variables_of = os.path.dirname(name) or ".", dict(variables or {})
        if _vllm_recipes.recognises(name, text):
            return _vllm_recipes.read(text, name, variables_of, num_devices)
        if dynamo.recognises(name, text):
            return dynamo.read(text, name, variables_of, folder)
        if peft.recognises(name, text):
            return peft.serve(text, name)
        if not starts_server(name):
            _refuse_training(name, variables_of)
        if name.endswith(tuple(MOST_BYTES)):
            remedy = "give a line of an engine, or YAML of Kubernetes or docker compose that starts one"
            raise InputError([Problem("from", name, "starts no server that is known", remedy)])
        return dynamo.read_script(text, name, variables_of, LaunchFiles(folder))


def _refuse_training(name: str, variables: Mapping[str, str]) -> None:
    """Raise `InputError` where a file is of a training, whose model a server may have."""
    try:
        case = import_file(name, variables)
    except InputError:
        return
    if case.understood:
        named = f": {case.model.name}" if case.model and case.model.name else ""
        rule = f"is of a training ({case.system}), and starts no server"
        raise InputError([Problem("from", name, rule, f"name the model in its place{named}, or ask train")])
