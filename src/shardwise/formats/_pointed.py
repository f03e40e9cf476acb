"""A launch that starts a trainer with its file of settings: the file is read, with what the command says over it.

Sources: axolotl 0.19 cli/main.py, llamafactory 0.9.5 launcher.py, torchtune 0.6.1 _cli/run.py, trl 1.16.0 cli,
torchtitan v0.2.2 config/manager.py, nanotron run_train.py, ms-swift 4.6.0 cli/main.py; the alignment handbook's
scripts take their YAML first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.files import YAML_BYTES, below, parse_toml, read_text
from shardwise.formats import _trainer, _yaml
from shardwise.formats._imported import ImportContext, Imported
from shardwise.formats._launch import Named, named_file
from shardwise.records import replace

_STARTS = (
    r"axolotl[ .](cli\.)?train$|axolotl/cli/train\.py$|llamafactory-cli (train|sft)$|train_bash\.py$|^tune run$"
    r"|^trl (sft|dpo|grpo|reward|kto|rloo)$|trl\.scripts\.\w+$|torchtitan[./]train(\.py)?$|run_train\.py$"
    r"|run_(sft|dpo|orpo|cpt)\.py$|(^| )(\S*/)?(sft|dpo|grpo)\.py$|^(swift|megatron) (sft|pt|rlhf)$"
)
_FILES = re.compile(r"\.(ya?ml|toml)\b")
_READERS = ("swift", "axolotl", "llamafactory", "llamafactory_v1", "torchtune", "nanotron", "trl", "torchtitan")


def pointed(text: str, source: str, around: ImportContext) -> Imported | None:
    """Return the case of the file that a script starts a trainer with, None where it starts none so."""
    if source.endswith((".yaml", ".yml", ".json", ".toml")) or not _FILES.search(text):
        return None
    named = named_file(text, _STARTS, source, around.variables)
    if named is None:
        return None
    path = _place(named.file, source, around)
    inner = read_text(path, YAML_BYTES, "from")
    reader = next((m for m in map(_reader, _READERS) if m.recognises(path, inner)), None)
    if reader is None:
        rule = f"is named by {source} and has no setting of a trainer that is read so"
        raise InputError([Problem("from", named.file, rule, f"use a file of {', '.join(_READERS)}")])
    return _read(reader, inner, path, (named, source, around))


def _reader(name: str) -> Any:
    return import_module(f"shardwise.formats.{name}")


def _place(file: str, source: str, around: ImportContext) -> str:
    """Return where a file is: people start trainers from the folder above it, or from that of the script."""
    here = not os.path.exists(os.path.join(os.path.dirname(source), file)) and os.path.exists(file)
    return below("" if here else source, file, around.follow, "from")


def _read(reader: Any, inner: str, path: str, asked: tuple[Named, str, ImportContext]) -> Imported:
    """Return the case of a file under the words of the command and the devices of its launch."""
    named, source, around = asked
    pairs, words = _yaml.assigned(named.words)
    over = pairs | _trainer.spelled_words(words[next((i for i, w in enumerate(words) if w[:2] == "--"), len(words)) :])
    tree = parse_toml(inner, path) if path.endswith(".toml") else _yaml.parse(inner, path)
    known = {key.replace(".", "_"): key for key in over} | {key: key for key in tree}
    for key, value in over.items():
        _put(tree, known.get(key, key), value)
    launch = named.launch
    devices = around.num_devices or launch.num_devices or (launch.devices_per_node if not launch.config_file else 0)
    accelerate = None
    if launch.config_file:
        from shardwise.formats import fsdp

        place = _place(launch.config_file, source, around)
        alone = replace(around, num_devices=devices, variables={}, more=())
        accelerate = fsdp.read(read_text(place, YAML_BYTES, "config_file"), place, alone)
        devices = devices or accelerate.num_devices
    within = replace(around, num_devices=devices, variables={}, more=())
    case: Imported = reader.read(_text(tree, path), path, within)
    if accelerate is not None and case.plan.sharding == "none":
        plan = replace(
            case.plan, sharding=accelerate.plan.sharding, shard=accelerate.plan.shard, offload=accelerate.plan.offload
        )
        case = replace(case, plan=plan)
    each = 0 if around.num_devices else case.devices_per_node or launch.devices_per_node
    notes = (f"settings of {named.file}, which {source} names", *named.notes)
    return replace(
        case, source=source, num_devices=case.num_devices or devices, devices_per_node=each,
        assumed=(*notes, *case.assumed),
    )  # fmt: skip


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its dotted path."""
    *folders, last = path.split(".")
    for folder in folders:
        inner = tree.setdefault(folder, {})
        tree = inner if isinstance(inner, dict) else {}
    tree[last] = value


def _text(tree: Mapping[str, Any], path: str) -> str:
    if path.endswith(".toml"):
        import tomli_w

        return tomli_w.dumps(tree)
    return _yaml.dump(dict(tree))
