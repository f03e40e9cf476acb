"""peft's adapter_config.json, which stands beside an adapter's weights: read for a training and for a server.

Source: peft 0.21.2 tuners/*/config.py and utils/save_and_load.py. It says nothing of how a training is laid out, so a
plan is not written as one: exports of TRL, axolotl, LLaMA-Factory and torchtune say the adapter with the rest.
"""

from __future__ import annotations

from typing import Any

from shardwise.files import parse_json
from shardwise.formats import _trainer
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys
from shardwise.formats._launched import Launched
from shardwise.plans import ADAPTERS, OFT_BLOCK, Plan, Training, default_stack, find_stack
from shardwise.records import replace

_TABLE = "peft.toml"
_METHODS = {"prefix-tuning": "prefix", "prompt-tuning": "prompt", "p-tuning": "prompt", "trainable-tokens": ""}
_KEYS = _trainer.AdapterKeys(
    rank="r", alpha="lora_alpha", dropout="lora_dropout", targets="target_modules", saved="modules_to_save",
    usual_rank=8, usual_targets=("q", "v"), parameters="target_parameters",
)  # fmt: skip


def recognises(name: str, text: str) -> bool:
    """Return whether a file is of an adapter: JSON that says its type."""
    return name.endswith(".json") and '"peft_type"' in text


def read(text: str, source: str = "adapter_config.json", around: ImportContext = PLAIN) -> Imported:
    """Return the case of an adapter; how it is trained is left to flags.

    >>> case = read('{"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "r": 16}')
    >>> case.model.name, case.job.adapter, case.job.rank, case.job.targets
    ('llama-3.1-8b', 'lora', 16, ('q', 'v'))
    """
    around.settings_alone(source)
    keys = Keys(parse_json(text, source), _TABLE, source)
    model = _trainer.model_named(keys, "base_model_name_or_path")
    job = Training(seq_len=0, global_batch=0, **_adapter(keys))
    stack = find_stack(default_stack(Plan(), job.adapter))
    plan = Plan(dp=around.num_devices, micro_batch=0, sequence_parallel=False)
    return keys.case(source, model=model, plan=plan, job=job, stack=stack, num_devices=around.num_devices)


def _adapter(keys: Keys) -> dict[str, Any]:
    word = keys.word("peft_type").replace("_", "-")
    switches = {"use_dora": "dora", "use_rslora": "rslora"}
    method = next((ours for theirs, ours in switches.items() if keys.flag(theirs)), _METHODS.get(word, word))
    if method not in ADAPTERS:
        keys.fail("peft_type", "is not a method that is read", "use one of " + ", ".join(ADAPTERS).upper())
        return {}
    named = next((name for name in ("r", "rank", "num_virtual_tokens") if keys.raw(name) is not None), "r")
    if keys.raw("target_modules") is None:
        keys.assumed.append("targets q, v: peft's own list of most models where no modules are named")
    usual = 0 if method == "oft" else _KEYS.usual_rank  # blocks of a size say no rank
    fields = _trainer.adapted(keys, method, replace(_KEYS, rank=named, usual_rank=usual))
    if method == "oft":
        side = keys.whole("oft_block_size", least=0) or 0
        fields["oft_block_size"] = 0 if keys.whole(named, least=0) or side == OFT_BLOCK else side
    return fields


def serve(text: str, source: str) -> Launched:
    """Return what a server of an adapter's base is told: its model, and room for an adapter of this rank.

    >>> serve('{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-4B", "r": 16}', "a.json").values
    {'model': 'qwen3-4b', 'adapter_rank': 16, 'adapters': 1}
    """
    case = read(text, source)
    values = {"model": case.model.name if case.model else "", "adapter_rank": case.job.rank, "adapters": 1}
    return Launched(
        system=case.system, version=case.version, source=source, num_devices=1,
        values={key: value for key, value in values.items() if value}, understood=case.understood,
        assumed=(*case.assumed, "one device: an adapter says none"), ignored=case.ignored, silent=case.silent,
        unknown=case.unknown,
    )  # fmt: skip
