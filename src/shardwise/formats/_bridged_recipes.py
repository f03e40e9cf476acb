"""What recipes of Megatron-Bridge have: the model of their name, and whether the host launches what graphs do not."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from shardwise.formats._exported import ExportCase
from shardwise.formats._imported import Keys
from shardwise.models import Model, catalogue, find_model, load_model


def of_recipe(keys: Keys) -> Model | None:
    """Return the model of a recipe's name, or of the class or the hub id that a file names."""
    for path in ("recipe", "factory", "model.hf_model_id", "model.config._target_", "model._target_"):
        named = str(keys.raw(path) or "").rpartition("." if "_target_" in path else "/")[2].lower()
        words = re.findall(r"[a-z0-9.-]+", named.replace("config", ""))
        for end in range(len(words), 0, -1):
            known = find_model("_".join(words[:end])) or _squeezed().get("".join(words[:end]))
            if known:
                keys.assumed.append(f"model {known}: of {path} {keys.raw(path)}")
                return load_model(known)
    return None


@cache
def _squeezed() -> dict[str, str]:
    """Return the names of the catalogue by their letters and digits alone, as recipes have them."""
    return {re.sub(r"[^a-z0-9]", "", name): name for name in catalogue()}


def graphs_of(keys: Keys) -> dict[str, Any]:
    """Return that a named recipe captures no graphs, which those of performance do, whose names have their devices.

    217 of 226 settings of cuda_graph_impl in src/megatron/bridge/recipes are none, 137 of 163 in perf_recipes others.
    """
    recipe = str(keys.raw("recipe") or "")
    return {"cuda_graph_impl": "none"} if recipe and not re.search(r"_\d{1,6}gpu", recipe) else {}


def captured(case: ExportCase) -> dict[str, dict[str, Any]]:
    """Return the settings, by section, that capture graphs where the framework of a case has the host launch nothing.

    src/megatron/bridge/perf_recipes: attention, and routers with what prepares the experts' tokens. Megatron-LM
    core/transformer/transformer_config.py takes recomputation of whole layers beside graphs of the iteration alone,
    which docs/training/cuda-graphs.md has without checks for NaN, and no router in a graph where moe is recomputed.
    """
    if case.stack.module_launch_seconds:
        return {"model": {"cuda_graph_impl": "none"}}
    whole = case.plan.recompute == "full"
    router = ["moe_router", "moe_preprocess"] if case.model.has_experts and "moe" not in case.plan.modules else []
    scope = ["full_iteration"] if whole else ["attn", *router]
    graph = {"cuda_graph_impl": "local" if whole else "transformer_engine", "cuda_graph_scope": scope}
    sections: dict[str, dict[str, Any]] = {
        "model": {**graph, "use_te_rng_tracker": True}, "rng": {"te_rng_tracker": True},
    }  # fmt: skip
    unchecked = {"rerun_state_machine": {"check_for_nan_in_loss": False}, "ddp": {"check_for_nan_in_grad": False}}
    return sections | (unchecked if whole else {})
