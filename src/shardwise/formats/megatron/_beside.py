"""Settings of Megatron-Core among those of a trainer that runs it: verl, LLaMA-Factory, slime, Primus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.formats._imported import Keys
from shardwise.formats.megatron import _job, _plan
from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import GivenArguments, by_name, facts
from shardwise.models import Model
from shardwise.plans import Plan, Stack, with_stage_layers

NAMES = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""Fields of Megatron-Core -> the arguments of Megatron-LM that set them."""
_USUAL = {"bf16": True, "micro_batch_size": 1}


def plan_beside(
    keys: Keys, paths: Mapping[str, str], devices: int, model: tuple[str, Model | None], usual: Mapping[str, object]
) -> tuple[Plan, Stack]:
    """Return plan and stack of Megatron-Core's settings, by the names of its fields.

    `model` stands behind its key, `usual` is what the trainer sets where nobody says.
    """
    named, known = model
    values = {NAMES.get(name, name): path for name, path in paths.items()}
    given = GivenArguments(values={name: keys.values[path] for name, path in values.items()}, options=values)
    given.problems.items = keys.problems.items
    given.values = _USUAL | dict(usual) | {name: value for name, value in given.values.items() if value is not None}
    if not given.values.get("recompute_granularity"):
        for name in ("recompute_modules", "recompute_method", "recompute_num_layers"):
            given.values.pop(name, None)
    reader = Reader(given)
    ep = reader.count("expert_model_parallel_size")
    given.values["num_experts"] = ep if (known.has_experts if known else ep > 1) else 0
    if known is None:
        _plan.stand_in_layers(reader, f"name the model by its hub id in {named}")
    else:
        given.values["num_layers"] = known.num_layers
        pieces = reader.count("pipeline_model_parallel_size") * reader.count("num_virtual_stages_per_pipeline_rank")
        if known.num_layers % pieces and not any(map(reader.has, (*_plan.COUNTED, "pipeline_model_parallel_layout"))):
            return _cut(keys, reader, known.num_layers, devices), _job.stack(reader)
    plan = _plan.build(reader, devices)
    keys.assumed += reader.assumed
    return plan, _job.stack(reader)


def _cut(keys: Keys, reader: Reader, layers: int, devices: int) -> Plan:
    """Return a plan whose stages are as even as the layers allow, where they do not divide."""
    pp, vpp = reader.count("pipeline_model_parallel_size"), reader.count("num_virtual_stages_per_pipeline_rank")
    reader.given.values["num_layers"] = pp * vpp
    keys.assumed.append(f"stages as even as {layers} layers allow: the model's own bridge cuts them")
    return with_stage_layers(_plan.build(reader, devices), layers, "uniform")


def worded(keys: Keys) -> dict[str, Any]:
    """Return the table with what Megatron-LM's arguments are, by name, as their own table has them."""
    words, ours = by_name(), keys.table
    named = {path: words[path] for path in keys.values if path in words and path not in ours["read"]}
    reasons = {
        f"core {word}": {"because": because, "keys": [path for path, one in named.items() if one.meaning == word]}
        for word, because in facts()["reasons"].items()
    }
    quiet = [path for path, one in named.items() if one.meaning == "none" or one.meaning.startswith("!")]
    return {
        **ours,
        "read": ours["read"] | {path: one.meaning[5:] for path, one in named.items() if one.read},
        "reasons": ours["reasons"] | reasons,
        "silent": {"keys": [*ours["silent"]["keys"], *quiet]},
    }
