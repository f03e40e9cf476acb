"""Recipes of vllm-project/recipes: a model, the variants of its checkpoint, and strategies, which become `vllm serve`.

Source: github.com/vllm-project/recipes 2026-08 src/lib/command-synthesis.js resolveCommand (arguments of the model, of
the variant, of the strategy, of the recipe for it and of the hardware, in that order) and strategies/*.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.formats import _yaml, vllm
from shardwise.formats._launched import Launched
from shardwise.formats._yaml import mapping
from shardwise.records import replace

_TP, _EXPERTS = "--tensor-parallel-size", "--enable-expert-parallel"
# A strategy -> the flag that takes all devices, and the others that it gives.
_STRATEGIES: dict[str, tuple[str, tuple[str, ...]]] = {
    f"{where}_{name}": (flag, words)
    for where in ("single_node", "multi_node")
    for name, flag, words in (
        ("tp", _TP, ()),
        ("tep", _TP, (_EXPERTS,)),
        ("dep", "--data-parallel-size", (_EXPERTS,)),
    )
}
_CHOICES = {"VARIANT": "variants", "STRATEGY": "compatible_strategies", "HARDWARE": "hardware_overrides"}


def recognises(name: str, text: str) -> bool:
    """Return whether a file is such a recipe."""
    keys = (r"(?m)^compatible_strategies:", r"(?m)^variants:", r"(?m)^[ ]+[\"']?model_id[\"']?:")
    return name.endswith((".yaml", ".yml")) and all(re.search(key, text) for key in keys)


def read(text: str, source: str, variables: Mapping[str, str], num_devices: int = 0) -> Launched:
    """Return the server of a recipe's default, or of the VARIANT, STRATEGY and HARDWARE that variables choose.

    A strategy spreads over all devices of a question, where the recipe does not say over how many.
    """
    # What the page of a recipe says in Markdown is as long as a file may be.
    tree = _yaml.parse(re.sub(r"(?m)^guide: *\|.*\n(?:[ \t].*\n|\n)*", "", text + "\n"), source)
    _check(tree, source, variables)
    strategy = variables.get("STRATEGY") or _usual(tree)
    flag, own = _STRATEGIES[strategy]
    variant = mapping(mapping(tree.get("variants")).get(variables.get("VARIANT", "default")))
    override, hardware = mapping(mapping(tree.get("strategy_overrides")).get(strategy)), variables.get("HARDWARE", "")
    count = _count(variant, override, hardware) if strategy == "single_node_tp" else 0
    spread = count or num_devices
    words = [str(variant.get("model_id") or mapping(tree.get("model")).get("model_id", ""))]
    words += _words(mapping(tree.get("model")).get("base_args")) + _words(variant.get("extra_args"))
    words += [*own, *([flag, str(spread)] if spread else [])]
    words += _words(override.get("extra_args")) + _words(override.get("vllm_args"))
    words += [word for one in (variant, override, tree) for word in _of_hardware(one, hardware)]
    left = _words(tree.get("opt_in_features"))
    for name, feature in mapping(tree.get("features")).items():
        words += _words(mapping(feature).get("args")) if name not in left else []
    one = vllm.read_words(words, source)
    notes = [f"strategy {strategy}, variant {variables.get('VARIANT', 'default')}"]
    notes += [] if spread else [f"{flag} 1: the strategy takes every device, and none are counted"]
    notes += [f"not read: {', '.join(names)}; --set {choice}= chooses" for choice, names in _left(tree, variables)]
    return replace(one, assumed=(*one.assumed, *notes), num_devices=one.num_devices if spread else 0)


def _check(tree: Mapping[str, Any], source: str, variables: Mapping[str, str]) -> None:
    """Raise `InputError` where a choice is none of the recipe's, or is none of one kind of servers."""
    known: dict[str, list[str]] = {name: _words(tree.get(key)) for name, key in _CHOICES.items()}
    known["STRATEGY"] = [one for one in known["STRATEGY"] if one in _STRATEGIES]
    problems = [
        Problem("set", f"{name}={variables[name]}", f"is none of {source}", "use one of " + ", ".join(known[name]))
        for name in ("VARIANT", "STRATEGY")
        if name in variables and variables[name] not in known[name]
    ]
    if not known["STRATEGY"]:
        rule = "has no strategy of one pool with one degree, and no other is read"
        problems.append(Problem("from", source, rule, "give the commands that the page of the recipe shows"))
    if problems:
        raise InputError(problems)


def _usual(tree: Mapping[str, Any]) -> str:
    """Return the strategy that the page of a recipe shows first (command-synthesis.js recommendStrategy)."""
    listed = [one for one in _words(tree.get("compatible_strategies")) if one in _STRATEGIES]
    stated = str(tree.get("default_strategy", ""))
    return next((one for one in (stated, "single_node_tp") if one in listed), listed[0])


def _count(variant: Mapping[str, Any], override: Mapping[str, Any], hardware: str) -> int:
    """Return the devices of one server as the variant or else the strategy says them, 0 where none does."""
    for stated in (variant.get("tp"), override.get("tp")):
        number = stated.get(hardware, stated.get("default")) if isinstance(stated, Mapping) else stated
        if type(number) is int and number > 0:
            return number
    return 0


def _of_hardware(tree: Mapping[str, Any], hardware: str) -> list[str]:
    return _words(mapping(mapping(tree.get("hardware_overrides")).get(hardware)).get("extra_args")) if hardware else []


def _left(tree: Mapping[str, Any], variables: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return which choices the recipe has beside what is read, but strategies, which are read by their name."""
    variants = [f"variant {one}" for one in mapping(tree.get("variants")) if one != "default"]
    devices = [
        f"arguments for {name}"
        for name, one in mapping(tree.get("hardware_overrides")).items()
        if mapping(one).get("extra_args")
    ]
    pairs = (("VARIANT", variants), ("HARDWARE", devices))
    return [(name, others) for name, others in pairs if others and name not in variables]


def _words(value: Any) -> list[str]:
    """Return a list, or the names of an object, as texts; nothing else holds any."""
    return [str(one) for one in value] if isinstance(value, (list, Mapping)) else []
