"""Questions share recorded formulas only where the same formulas would be recorded."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shardwise import plan_training
from shardwise.cost import Efficiencies
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Training, find_stack
from shardwise.records import replace
from shardwise.search import IntRanges, SearchOptions, SearchSpace, TrainingResult, _composition
from shardwise.training import TrainingCase

TWO = IntRanges.parse("1..2")
SOME = SearchSpace(
    **{name: TWO for name in ("tp", "cp", "pp", "micro_batch")},
    **{name: IntRanges.parse("1") for name in ("tp2", "vpp", "ep", "etp")},
    layout=("1d",),
    sequence_parallel=(False,),
    cp_kind=("ring",),
    schedule=("1f1b",),
    sharding=("none",),
    recompute=("none",),
    orders=(("tp", "tp2", "cp", "dp", "pp"),),
)
ASKED: dict[str, Any] = {
    "model": load_model("gpt2"),
    "cluster": Cluster.parse("2x4xh100-sxm-80gb"),
    "job": Training(seq_len=512, global_batch=16),
    "space": SOME,
    "options": SearchOptions(stack=find_stack("megatron"), explore=True),
}


def _options(**changed: Any) -> dict[str, Any]:
    return {"options": replace(ASKED["options"], **changed)}


def _tier(place: int, **changed: Any) -> dict[str, Any]:
    cluster = ASKED["cluster"]
    tiers = (replace(t, **changed) if i == place else t for i, t in enumerate(cluster.tiers))
    return {"cluster": cluster.with_tiers(tiers)}


JOBS: dict[str, Any] = {
    "seq_len": 1024,
    "global_batch": 32,
    "precision": "fp8",
    "optimizer": "sgd",
    "attention_dropout": True,
    "hidden_dropout": True,
    "tuning": "typical",
    "token_budget": 1e9,
    "attention_density": 0.5,
}
SPACES: dict[str, Any] = {
    "sequence_parallel": (True,),
    "cp_kind": ("all-gather",),
    "schedule": ("zb-h1", "interleaved"),
    "vpp": IntRanges.parse("1..3"),
    "sharding": ("distributed-optimizer",),
    "recompute": ("full", "none"),
    "layout": ("summa",),
    "tp2": TWO,
    "tp": IntRanges.parse("2"),
    "cp": IntRanges.parse("1"),
    "pp": IntRanges.parse("2"),
    "dp": IntRanges.parse("2"),
    "micro_batch": IntRanges.parse("2"),
    "orders": (("dp", "tp", "tp2", "cp", "pp"),),
    "ep": TWO,
    "etp": TWO,
    "modules": (("layernorm",),),
    "offload": (("optimizer",),),
    "recompute_layers": (0, 1),
    "stage_layers": ("usual", "last-1"),
    "optimizer": ("sgd",),
    "global_batch": (8,),
}
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": load_model("pythia-160m")},
    "experts": {"model": load_model("qwen1.5-moe-a2.7b")},
    "device": {"cluster": Cluster.parse("2x4xa100-sxm-80gb")},
    "num_devices": {"cluster": Cluster.parse("4x4xh100-sxm-80gb")},
    "devices_per_node": {"cluster": Cluster.parse("1x8xh100-sxm-80gb")},
    "one device": {"cluster": Cluster.parse("1xh100-sxm-80gb")},
    "fast link": _tier(0, bytes_per_second=1e11),
    "network": _tier(1, bytes_per_second=1e10),
    "latency": _tier(1, latency_seconds=1e-3),
    "stack": _options(stack=find_stack("nanotron")),
    "stack's overhead": _options(stack=replace(find_stack("megatron"), step_overhead_seconds=1.0)),
    "efficiencies": _options(efficiencies=Efficiencies(compute=0.5)),
    "overlap": _options(overlap=False),
    **{f"job's {name}": {"job": replace(ASKED["job"], **{name: value})} for name, value in JOBS.items()},
    **{f"space's {name}": {"space": replace(SOME, **{name: value})} for name, value in SPACES.items()},
}


def _found(changed: dict[str, Any]) -> tuple[Any, ...]:
    asked = {**ASKED, **changed}
    found: TrainingResult = plan_training(*(asked[n] for n in ("model", "cluster", "job", "space", "options")))
    return found.counts, found.partial.top.entries, found.partial.front.plans(), found.partial.rejected


@pytest.mark.parametrize("name", CHANGES)
def test_a_recording_is_shared_where_it_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question after others that differ from it in one field or two has the answer that it has alone."""
    _found({})
    after = _found(CHANGES[name])
    monkeypatch.setattr(_composition, "_recorded", _composition._recorded.__wrapped__)
    assert after == _found(CHANGES[name])


def test_a_recording_is_shared_between_numbers_of_devices() -> None:
    """What depends on how many devices or sequences there are is a column: such questions share a recording."""
    _composition._recorded.cache_clear()
    for name in ("num_devices", "job's global_batch", "job's token_budget"):
        _found({})
        _found(CHANGES[name])
    assert _composition._recorded.cache_info().currsize == 1


def test_every_field_that_a_recording_reads_is_known_here() -> None:
    """A field that a case or a space gains needs a place in the key of a recording, and a change above.

    Whether sequence parallelism was asked for, accumulation and batches are read by the changes of a report alone,
    which no recording has.
    """
    assert {f.name for f in fields(TrainingCase)} == {
        "model", "cluster", "job", "stack", "plan", "efficiencies", "overlap", "sequence_parallel",
        "accumulation", "stated_batches",
    }  # fmt: skip
    ranges = {"devices", "panels", "shard", "precision", *(f"fast_{axis}" for axis in AXES)}
    assert {f.name for f in fields(SearchSpace)} == {*SPACES, *ranges}


AXES = ("tp", "tp2", "cp", "dp", "pp")
