"""What MaxText's remat_policy keeps of a layer, on the device or the host, in words of plans.

Source: github.com/AI-Hypercomputer/maxtext e591f30cbb src/maxtext/layers/decoders.py get_remat_policy and
set_remat_policy, utils/maxtext_utils.py get_save_and_offload_names. Every layer is checkpointed: a policy says
what stays beside its input.
"""

from __future__ import annotations

from typing import Any, Literal

from shardwise.formats._imported import Keys
from shardwise.plans import CheckpointPolicy, Plan, Recompute, Stack

KeptPolicy = CheckpointPolicy | Literal[""]
_QKV = ("query_proj", "key_proj", "value_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwo")
# What a policy of plans keeps, by MaxText's names of tensors, the most first.
_KEPT: dict[KeptPolicy, tuple[str, ...]] = {
    "matmuls-and-attention": (*_QKV, "out_proj", *_MLP, "context"),
    "matmuls": (*_QKV, "out_proj", *_MLP),
    "attention-matmuls": (*_QKV, "out_proj"),
    "qkv-matmuls": _QKV,
    "": (),
}
_WORDS: dict[KeptPolicy, str] = {
    "": "full", "matmuls": "minimal", "matmuls-and-attention": "minimal_with_context",
    "attention-matmuls": "save_dot_except_mlp", "qkv-matmuls": "save_qkv_proj",
}  # fmt: skip
# Other words: what each keeps on the device, and on the host.
_NAMED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{word: (_KEPT[policy], ()) for policy, word in _WORDS.items()},
    "none": ((), ()),
    "minimal_flash": (_KEPT["matmuls-and-attention"], ()),
    "minimal_with_quantization": (_KEPT["matmuls"], ()),
    "minimal_with_context_and_quantization": (_KEPT["matmuls-and-attention"], ()),
    "save_dot_with_context_except_mlp": ((*_KEPT["attention-matmuls"], "context"), ()),
    "save_dot_except_mlpwi": ((*_KEPT["attention-matmuls"], "mlpwo"), ()),
    "save_out_proj": (("out_proj",), ()),
    "qkv_proj_offloaded": ((), _QKV),
    "minimal_offloaded": ((), _KEPT["matmuls"]),
}
_INPUT = "decoder_layer_input"
# One name for what joined matrices, MLA and experts call otherwise.
_ALSO = {
    "qkv_proj": _QKV, "kv_proj": ("key_proj", "value_proj"), "mlpwi": ("mlpwi_0", "mlpwi_1"),
    "moe_mlpwi_0": ("mlpwi_0",), "moe_mlpwi_1": ("mlpwi_1",), "moe_mlpwo": ("mlpwo",), "attention_out": ("context",),
}  # fmt: skip
_OTHERS = ("query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv", "indexer_cutoff_threshold", "engram")
TENSORS = (*_KEPT["matmuls-and-attention"], *_ALSO, *_OTHERS)
"""Tensors that `remat_policy: custom` places."""
_PLACES = ("remat", "device", "offload")


def recomputed(keys: Keys) -> tuple[Recompute, KeptPolicy, tuple[str, ...]]:
    """Return what is recomputed, what stays of it, and what of that lies on the host.

    What no policy of plans keeps alone is left out and said.
    """
    word = keys.word("remat_policy") or "full"
    if word != "custom" and word not in _NAMED:
        keys.fail("remat_policy", "is no policy of MaxText", "use full, minimal or minimal_with_context")
        return "full", "", ()
    stays, leaves, input_leaves = _custom(keys) if word == "custom" else _named(word)
    kept = stays | leaves
    policy = next(name for name, names in _KEPT.items() if kept.issuperset(names))
    beyond = sorted(kept - set(_KEPT[policy]))
    if beyond:
        what = f"{', '.join(beyond)} of remat_policy {word} recomputed with the rest"
        keys.assumed.append(f"{what}: no policy of plans keeps them; memory is understated and time overstated")
    named = set(_KEPT[policy])
    host = bool(named & leaves) if named else input_leaves
    if host and named and not (input_leaves and named <= leaves):
        keys.assumed.append("activations on the host: inputs of layers too, which stay; memory is understated by them")
    elif not host and input_leaves:
        keys.assumed.append(f"{_INPUT} stays on the device beside what is kept there: memory is overstated")
    return "full", policy, ("activations",) if host else ()


def _named(word: str) -> tuple[set[str], set[str], bool]:
    stays, leaves = _NAMED[word]
    return set(stays), set(leaves), False


def _custom(keys: Keys) -> tuple[set[str], set[str], bool]:
    """Return the tensors that stay on the device, those on the host, and whether inputs of layers go there too."""
    places = {name: keys.word(name) or "remat" for name in TENSORS}
    places[_INPUT] = keys.word(_INPUT) or "device"
    for name, place in places.items():
        if place not in _PLACES:
            keys.fail(name, "is no place of a tensor", f"use {', '.join(_PLACES)}")
    moved: dict[str, set[str]] = {"device": set(), "offload": set(), "remat": set()}
    for name, place in places.items():
        if name != _INPUT:
            moved.get(place, set()).update(_ALSO.get(name, (name,)))
    moved["device"] -= moved["offload"]
    return moved["device"], moved["offload"], places[_INPUT] == "offload"


def remat_words(plan: Plan, stack: Stack) -> dict[str, Any]:
    """Return the settings that say what a plan recomputes and what it sends to the host."""
    policy = stack.settings.checkpoint_policy
    if "activations" not in plan.offload:
        return {"remat_policy": _WORDS.get(policy, "full")}
    kept = dict.fromkeys(_KEPT.get(policy, ()), "offload")
    return {"remat_policy": "custom", _INPUT: "offload", **kept}
