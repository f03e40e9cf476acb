"""Illegal plans: the field that is named, the rule, and a remedy whose first value is really legal."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laws.helpers import tried
from laws.strategies import Wanted, cases
from shardwise.errors import Problem
from shardwise.models import Model, load_model
from shardwise.plans import Plan, Training
from shardwise.plans._laws import MODULE_NAMES, all_blocks, module_names
from shardwise.plans.laws import batch_problems, divisors, field_problems, one_of, plan_problems
from shardwise.plans.schedules import Rounds
from shardwise.training import TrainingCase

DENSE, SPARSE, LATENT = (load_model(n) for n in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"))
SERIAL = {"sequence_parallel": False}

# A model of 32 layers, 32 query and 8 key-value heads, hidden 4096, ffn 14336; 4096 tokens unless said.
ILLEGAL: list[tuple[Model, dict[str, Any], str]] = [
    (DENSE, {"tp": 0}, "tp"),
    (DENSE, {"tp": 2.0}, "tp"),
    (DENSE, {"pp": True}, "pp"),
    (DENSE, {"micro_batch": -1}, "micro_batch"),
    (DENSE, {"layout": "3d"}, "layout"),
    (DENSE, {"schedule": "fill"}, "schedule"),
    (DENSE, {"sharding": "zero9"}, "sharding"),
    (DENSE, {"recompute": "all"}, "recompute"),
    (DENSE, {"cp_kind": "star"}, "cp_kind"),
    (DENSE, {"modules": ("head",)}, "modules"),
    (DENSE, {"modules": ("moe_act",)}, "modules"),
    (DENSE, {"modules": ("mla_up_proj",)}, "modules"),
    (SPARSE, {"modules": ("mlp",)}, "modules"),
    (DENSE, {"recompute_layers": -1, "recompute": "full"}, "recompute_layers"),
    (DENSE, {"recompute_layers": 2}, "recompute_layers"),
    (DENSE, {"order": ("tp", "pp")}, "order"),
    (DENSE, {"sequence_parallel": 1}, "sequence_parallel"),
    (DENSE, {"tp": 6, **SERIAL}, "tp"),
    (DENSE, {"tp": 64, **SERIAL}, "tp"),
    (DENSE, {"ep": 8}, "ep"),
    (DENSE, {"etp": 2}, "etp"),
    (SPARSE, {"ep": 16, "dp": 16}, "ep"),
    (SPARSE, {"etp": 3, "dp": 3}, "etp"),
    (SPARSE, {"ep": 8, "dp": 4}, "ep"),
    (SPARSE, {"etp": 2, "dp": 1}, "ep"),
    (SPARSE, {"tp": 2, **SERIAL}, "sequence_parallel"),
    (SPARSE, {"sharding": "hsdp", "dp": 12, "shard": 6, "ep": 4}, "shard"),
    (DENSE, {"pp": 3}, "pp"),
    (DENSE, {"pp": 64}, "pp"),
    (LATENT, {"pp": 4}, "pp"),
    (DENSE, {"pp": 3, "vpp": 4, "schedule": "interleaved"}, "pp"),
    (DENSE, {"pp": 8, "vpp": 5, "schedule": "interleaved"}, "pp"),
    (DENSE, {"pp": 2, "stage_layers": (16, 8, 8)}, "stage_layers"),
    (DENSE, {"pp": 2, "stage_layers": (16, 15)}, "stage_layers"),
    (DENSE, {"pp": 2, "stage_layers": (33, -1)}, "stage_layers"),
    (DENSE, {"pp": 2, "stage_layers": (16.0, 16.0)}, "stage_layers"),
    (DENSE, {"vpp": 2, "schedule": "interleaved"}, "vpp"),
    (DENSE, {"pp": 2, "vpp": 2}, "schedule"),
    (DENSE, {"pp": 2, "schedule": "interleaved"}, "schedule"),
    (DENSE, {"schedule": "dualpipe"}, "pp"),
    (DENSE, {"cp": 3}, "cp"),
    (DENSE, {"cp": 4096}, "cp"),
    (DENSE, {"cp": 64, "cp_kind": "all-to-all"}, "cp"),
    (DENSE, {"tp2": 2}, "tp2"),
    (DENSE, {"panels": 2}, "panels"),
    (SPARSE, {"layout": "summa", "tp2": 2, "panels": 2, **SERIAL}, "layout"),
    (DENSE, {"layout": "summa", "tp": 2}, "sequence_parallel"),
    (DENSE, {"layout": "summa", "tp2": 3, **SERIAL}, "tp2"),
    (DENSE, {"layout": "summa", "panels": 3, **SERIAL}, "panels"),
    (DENSE, {"layout": "summa", "tp2": 8192, **SERIAL}, "tp2"),
    (DENSE, {"sharding": "hsdp", "dp": 8}, "shard"),
    (DENSE, {"sharding": "hsdp", "dp": 8, "shard": 3}, "shard"),
    (DENSE, {"shard": 2}, "shard"),
]


@pytest.mark.parametrize(("model", "changes", "field"), ILLEGAL)
def test_an_illegal_plan_names_its_field(model: Model, changes: dict[str, Any], field: str) -> None:
    """Every problem of an illegal plan names the field, its value, the rule it broke and a remedy."""
    found = plan_problems(model, Plan(**changes), 4096)
    assert field in [p.field for p in found]
    for problem in found:
        assert problem.rule
        assert problem.remedy
        assert problem.field in Plan.__dataclass_fields__


@pytest.mark.parametrize(("model", "changes", "field"), ILLEGAL)
def test_the_first_value_of_a_remedy_is_legal(model: Model, changes: dict[str, Any], field: str) -> None:
    """Where a plan has a single problem, doing what its remedy says first leaves none."""
    plan = Plan(**changes)
    found = plan_problems(model, plan, 4096)
    if len(found) == 1:
        assert not plan_problems(model, follow(plan, found[0]), 4096), found[0]


def follow(plan: Plan, problem: Problem) -> Plan:
    """Return the plan after the first of its remedies.

    They read "use [one of] VALUE", "use FIELD VALUE with FIELD VALUE" or "for example LIST".
    """
    if problem.remedy.startswith("leave it out"):
        return replace(plan, **{problem.field: ()})
    listed = re.match(r"for example ([\w,-]+)", problem.remedy)
    if listed:
        return _with(plan, problem.field, listed[1])
    first = re.match(r"use (?:one of )?(.+?)(?:, | to | for | or |$)", problem.remedy)
    assert first, problem.remedy
    for words in first[1].split(" with "):
        name, _, value = words.rpartition(" ")
        plan = _with(plan, name or problem.field, value)
    return plan


def _with(plan: Plan, name: str, text: str) -> Plan:
    kind = type(getattr(Plan(), name))
    value: Any = text
    if kind is tuple:
        value = tuple(int(x) if x.isdigit() else x for x in text.split(","))
    elif kind is bool:
        value = {"true": True, "false": False}[text]
    elif kind is int:
        value = int(text)
    return replace(plan, **{name: value})


_FIELDS = (
    "tp",
    "cp",
    "pp",
    "ep",
    "etp",
    "vpp",
    "dp",
    "shard",
    "panels",
    "tp2",
    "schedule",
    "sharding",
    "modules",
    "layout",
)


@given(cases(Wanted(modules=False)), st.sampled_from(_FIELDS), st.data())
@tried(40)
def test_following_a_remedy_fixes_a_plan(case: TrainingCase, name: str, data: st.DataObject) -> None:
    """A legal plan changed in one field until it has one problem is legal again after its remedy."""
    values: dict[str, Any] = {
        "schedule": ("gpipe", "interleaved", "dualpipe"),
        "sharding": ("none", "hsdp"),
        "modules": tuple((m,) for m in MODULE_NAMES),
        "layout": ("1d", "summa"),
    }
    value = data.draw(st.sampled_from(values.get(name, (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 64))))
    plan = replace(case.plan, **{name: value})
    found = plan_problems(case.model, plan, case.job.seq_len)
    assume(len(found) == 1)
    fixed = follow(plan, found[0])
    left = plan_problems(case.model, fixed, case.job.seq_len)
    # A smaller degree may leave experts without ranks and listed stages without their number; all else is right.
    assert {p.field for p in left} <= {"ep", "stage_layers"}, (found[0], left)
    if case.model.name not in ("moe", "latent") and not plan.stage_layers:
        assert not left, (found[0], left)


@pytest.mark.parametrize(
    ("plan", "batch", "legal"),
    [
        (Plan(dp=4, micro_batch=2), 0, None),
        (Plan(dp=4, micro_batch=2), 12, 16),
        (Plan(dp=4, micro_batch=2), 16, 16),
        (Plan(pp=4, vpp=2, schedule="interleaved"), 6, 8),
        (Plan(pp=4, vpp=2, schedule="interleaved"), 8, 8),
        (Plan(pp=4, schedule="dualpipe"), 9, 10),
        (Plan(pp=4, schedule="dualpipe"), 6, 8),
        (Plan(pp=4, schedule="dualpipe"), 8, 8),
        (Plan(pp=4), 1, 1),
    ],
)
def test_the_batch_must_make_whole_micro_batches(plan: Plan, batch: int, legal: int | None) -> None:
    """A batch is a multiple of replicas times micro-batch, and of what its schedule needs; the remedy says which."""
    found = batch_problems(plan, batch)
    assert bool(found) == (batch != legal)
    if found and legal:
        remedies = re.findall(r"\d+", found[0].remedy)
        assert str(legal) in remedies
        assert not batch_problems(plan, legal)


@pytest.mark.parametrize(("rounds", "legal"), [("whole", [4, 8, 12, 16]), ("equal", [4, 5, 6, 7, 8, 10, 12, 15, 16])])
def test_frameworks_fill_rounds_in_their_ways(rounds: Rounds, legal: list[int]) -> None:
    """Interleaving takes multiples of pp, rounds of one size (torch) or any number from pp on (Megatron-Core 0.9)."""
    plan = Plan(pp=4, vpp=2, schedule="interleaved")
    assert [m for m in range(1, 17) if not batch_problems(plan, m, rounds)] == legal
    assert [m for m in range(1, 17) if not batch_problems(plan, m, "any")] == list(range(4, 17))


def test_all_problems_come_at_once() -> None:
    """A plan with three things wrong names all three."""
    found = plan_problems(DENSE, Plan(tp=3, pp=5, ep=2, shard=2, sequence_parallel=False), 4096)
    assert {p.field for p in found} >= {"tp", "pp", "ep", "shard"}


def test_checks_hold_for_any_head_and_ffn_shape() -> None:
    """Grouped heads and an ffn that is not four times the width are legal wherever the axes divide them."""
    for model in (DENSE, SPARSE, LATENT, load_model("gemma-2-9b"), load_model("gpt2")):
        for tp in (1, 2, 4):
            fits = all(p.field != "tp" for p in plan_problems(model, Plan(tp=tp), 4096))
            assert fits or model.name.startswith("gpt2")


@given(cases())
@tried(40)
def test_legal_cases_are_legal(case: TrainingCase) -> None:
    """What the strategies draw breaks no law, field by field and together."""
    assert not field_problems(case.plan).items
    assert not plan_problems(case.model, case.plan, case.job.seq_len)
    assert not batch_problems(case.plan, case.job.global_batch)


@given(st.integers(1, 5000))
@tried(40)
def test_divisors_are_all_of_them(n: int) -> None:
    """Divisors are exactly the numbers that divide, in order."""
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_remedies_read_as_sentences() -> None:
    """One value, several, and none are told apart; long lists are cut."""
    assert one_of([]) == "no value is legal here"
    assert one_of([3]) == "use 3"
    assert one_of(range(20)).endswith("11, ...")


def test_modules_are_those_that_a_block_has() -> None:
    """Recompute modules follow the model: latent attention, experts and dense layers have their own."""
    assert module_names(tuple(all_blocks(DENSE))) == ("core_attn", "mlp", "mlp_act", "layernorm")
    assert module_names(tuple(all_blocks(LATENT))) == MODULE_NAMES
    assert Training(seq_len=1, global_batch=1).tokens_per_step == 1


@pytest.mark.parametrize("plan", [{"pp": 8, "vpp": 10**9}, {"pp": 10**9}, {"pp": 10**9, "stage_layers": (1, 2)}])
def test_stages_beyond_the_layers_are_refused_without_a_list_of_them(plan: dict[str, Any]) -> None:
    """A thousand million stages are refused within memory: no remedy lists one number for each."""
    found = plan_problems(DENSE, Plan(**plan), 4096)
    assert {"pp", "stage_layers"} & {one.field for one in found}
    assert all(len(str(one)) < 600 for one in found)
