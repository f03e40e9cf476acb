"""What engines keep of a sequence of every model of the catalogue, counted again from files and engines' formulas."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving import ServingQuestion, complete, find_engine
from shardwise.serving._memory import caches_of
from shardwise.serving._sizes import sizes_of

GOLDENS = json.loads((Path(__file__).parent.parent / "data" / "models" / "cache_bytes.json").read_text("ascii"))


def kept(name: str, engine: str) -> dict[str, float]:
    """Return bytes of a token by what a layer keeps of its window, and of states and rings, of all layers."""
    weights = "bf16" if engine == "llama.cpp" else ""
    job = Serving(batch=1, weights=weights, kv_cache="bf16")
    asked = ServingQuestion(
        model=load_model(name), cluster=Cluster.parse("1xh100"), plan=Plan(), job=job, engine=engine
    )
    case = complete(asked)[0]
    found: Counter[str] = Counter()
    caches = caches_of(case, sizes_of(case.model, case.plan, case.job, case.domains))
    for own, count in zip(caches, case.model.kinds.values(), strict=True):
        for one in own:
            found["states"] += count * one.states * one.constant_bytes
            found["rings" if one.ring else str(one.limit)] += count * one.token_bytes * (one.limit if one.ring else 1)
    return {what: size for what, size in found.items() if size}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "tensorrt-llm"])
def test_caches_of_the_catalogue(engine: str) -> None:
    """Windows have what an engine keeps behind them; nothing else differs from tests/oracles/make_cache_goldens.py."""
    memory = find_engine(engine).memory
    wrong = {}
    for name, rows in GOLDENS.items():
        if engine not in rows:
            continue
        wanted, family = Counter(), load_model(name).family
        for what, size in rows[engine].items():
            window = int(what) if what.isdigit() else 0
            assert not window or memory.keeps_windows(family), (engine, name)
            wanted[str(memory.kept_window(window, family, 512)) if window else what] += size
        found = kept(name, engine)
        if found != pytest.approx(dict(wanted)):
            wrong[name] = (found, dict(wanted))
    assert not wrong
