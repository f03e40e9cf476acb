"""torchtitan's command line since 2026-02: a function of a registry by its name, and settings that stand over it.

Sources: torchtitan 0.3.0 config/manager.py and config/configs.py, models/*/config_registry.py, whose values are
`registry` of torchtitan.toml. A function of one's own is not looked into.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.formats import _trainer
from shardwise.formats._imported import Keys, table
from shardwise.plans import LossKernel, Plan, Stack, find_stack
from shardwise.records import replace

_TABLE = "torchtitan.toml"
TELLING = frozenset(("--module", "--config"))
"""Arguments by which a launch of it is known."""


NO_CAST = "torchtitan 0.2.2 casts nothing beside tensor or pipeline parallelism without FSDP"


def wraps_one(keys: Keys) -> bool:
    """Return whether FSDP wraps one rank too, so that its casts apply.

    It does since commit 00b7f5693 (2026-04-09), models/llama3/parallelize.py; those of TOML files did not, their
    distributed/parallel_dims.py fsdp_enabled.
    """
    return "config" in keys.values


def uncast(keys: Keys, plan: Plan) -> bool:
    """Return whether nothing casts weights in fp32 (torchtitan 0.2.2 distributed/utils.py maybe_enable_amp).

    What is so read is noted among what is assumed.
    """
    bare = plan.tp * plan.pp > 1 == plan.dp * plan.cp and not wraps_one(keys)
    if bare:
        keys.assumed.append(f"precision fp32: {NO_CAST}")
    return bare


def names_function(text: str) -> bool:
    """Return whether a script starts torchtitan with a function of a registry.

    >>> names_function("torchrun -m torchtitan.train --module llama3 --config llama3_8b")
    True
    """
    return bool(re.search(r"--module[ =]\S+\s+(\\\s+)?--config[ =]\S+", text))


def settings_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line by dotted path, over those of the function that it names.

    tyro spells a switch that is off no-NAME, and the policy of checkpointing as a word of its own.

    >>> line = "--module llama3 --config llama3_8b --compile.enable activation-checkpoint:full"
    >>> own = settings_of(line.split())
    >>> own["training.seq_len"], own["compile.enable"], own["activation_checkpoint.mode"]
    (8192, True, 'full')
    """
    policies = [word.partition(":")[2] for word in arguments if word.startswith("activation-checkpoint:")]
    words = _trainer.spelled_words([word for word in arguments if not re.fullmatch(r"[a-z_-]+:[a-z_-]+", word)])
    off = {path: re.sub(r"(?<=\.)no_(?=\w+$)", "", path) for path in words}
    stated = {off[path]: False if off[path] != path and value is True else value for path, value in words.items()}
    registry, name = table(_TABLE)["registry"], str(stated.get("config") or "")
    if name not in registry:
        rule = "is no function of torchtitan's own registries that is known here"
        remedy = f"name one of {', '.join(registry)}, and say on the command line what differs"
        raise InputError([Problem("config", name, rule, remedy)])
    if policies:
        stated["activation_checkpoint.mode"] = policies[-1].replace("-", " ")
    return {"activation_checkpoint.selective_ac_option": "op", **registry[name], **stated}


def stack_of(compiled: bool, parts: Sequence[str], overlaps: bool) -> Stack:
    """Return the stack of a release with pieces of head and loss, compiled or not, each of its two components.

    >>> stack_of(True, ("model", "loss"), False).name, stack_of(True, ("loss",), False).loss_kernel
    ('torchtitan-2026-compiled', 'chunked-linear-compiled')
    """
    layers = compiled and "model" in parts
    stack = find_stack("torchtitan-2026" + ("-async-tp" if overlaps else "-compiled" if layers else ""))
    loss: LossKernel = "chunked-linear-compiled" if compiled and "loss" in parts else "chunked-linear"
    return stack if loss == stack.loss else replace(stack, settings=replace(stack.settings, loss=loss))
