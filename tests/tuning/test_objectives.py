"""Preferences and rewards: what they take beside the model that trains, and the phases of a step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from command_line import run
from shardwise import Cluster, Plan, Training, find_stack, load_model, plan_training, train
from shardwise.errors import InputError
from shardwise.ledger.op import Op, Tensor
from shardwise.ledger.saved import Checkpoint, keep
from shardwise.ops.layout import memory_op
from shardwise.plans import OBJECTIVES
from shardwise.records import replace
from shardwise.search import SearchOptions, SerialExecutor, count_generation, finished, searched, work_of
from shardwise.training import Generation, TrainingOptions, TrainReport

MODEL = "llama-3.2-1b"
ADAPTERS = {"adapter": "lora", "rank": 16}


def trained(plan: dict[str, Any] | None = None, stack: str = "transformers", **job: Any) -> TrainReport:
    """One device, one micro-batch of two samples."""
    asked = Training(seq_len=512, global_batch=2, **job)
    where = Cluster.parse("1xh100-sxm-80gb")
    return train(load_model(MODEL), where, Plan(micro_batch=2, **(plan or {})), asked, TrainingOptions(stack=stack))


def test_a_preference_is_two_sequences() -> None:
    """DPO of two samples keeps and computes what four sequences do, and its reference runs once more forward."""
    pair = trained(method="dpo", **ADAPTERS)
    where = Cluster.parse("1xh100-sxm-80gb")
    four = Training(seq_len=512, global_batch=4, **ADAPTERS)  # type: ignore[arg-type]
    plain = train(load_model(MODEL), where, Plan(micro_batch=4), four, TrainingOptions(stack="transformers"))
    assert pair.memory.activations == plain.memory.activations
    assert pair.job.tokens_per_step == plain.job.tokens_per_step
    (scoring, update) = pair.phases
    assert (scoring.name, update.name) == ("reference log-probabilities", "update")
    assert update.seconds == pytest.approx(plain.step_seconds)
    assert scoring.seconds == pytest.approx(plain.evaluation.step.stages[0].forward)


def test_answers_to_others_are_scored_twice() -> None:
    """KTO trains as many sequences as SFT does, and scores mismatched ones on both models beside them."""
    kto, sft = trained(method="kto", **ADAPTERS), trained(**ADAPTERS)
    assert kto.memory.activations == sft.memory.activations and kto.job.tokens_per_step == sft.job.tokens_per_step
    once = sft.evaluation.step.stages[0].forward
    seconds = {one.name: one.seconds for one in kto.phases}
    assert seconds["mismatched log-probabilities"] == pytest.approx(once)
    assert seconds["reference log-probabilities"] == pytest.approx(2 * once)
    assert seconds["update"] == pytest.approx(sft.step_seconds)
    (mismatched, _) = trained(method="kto", reference="none", **ADAPTERS).phases
    assert (mismatched.name, mismatched.seconds) == ("mismatched log-probabilities", pytest.approx(once))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("job", [{}, ADAPTERS], ids=["full", "lora"])
def test_phases_add_up_to_the_step(objective: str, job: dict[str, Any]) -> None:
    """Passes without gradients and updates are the step; next tokens and rewards have no phases."""
    report = trained(method=objective, **job)
    assert bool(report.phases) == OBJECTIVES[objective].reference
    if report.phases:
        assert sum(p.seconds for p in report.phases) == pytest.approx(report.step_seconds)
        assert max(p.peak_bytes for p in report.phases) == pytest.approx(report.memory.peak)


def test_a_reference_is_a_copy_only_where_all_weights_train() -> None:
    """Beside adapters the base itself is the reference; a copy adds all weights, an adapter 4 bytes a parameter."""
    held = {kind: trained(method="dpo", reference=kind, **ADAPTERS) for kind in ("base", "adapter", "copy")}
    weights = held["base"].memory.weights
    own = held["base"].tuning
    assert own is not None
    assert held["adapter"].memory.weights - weights == 4 * own.trainable_parameters
    assert held["copy"].memory.weights == 2 * weights
    said = {kind: [note for note in one.assumptions if "adapters off" in note] for kind, one in held.items()}
    assert {kind: len(notes) for kind, notes in said.items()} == {"base": 0, "adapter": 0, "copy": 1}
    assert trained(method="dpo").memory.weights == 2 * trained().memory.weights
    assert trained(method="dpo", reference="none").memory.weights == trained().memory.weights


def test_a_critic_trains_beside_the_policy() -> None:
    """PPO holds gradients and optimizer state of two models, or of two adapters on one base."""
    one, two = trained(method="grpo"), trained(method="ppo")
    assert two.memory.optimizer == 2 * one.memory.optimizer
    narrow, wide = trained(method="grpo", **ADAPTERS), trained(method="ppo", **ADAPTERS)
    assert wide.memory.optimizer == 2 * narrow.memory.optimizer
    assert wide.memory.weights < 1.1 * narrow.memory.weights


@pytest.mark.parametrize("job", [{}, ADAPTERS])
def test_a_critic_takes_a_pass_of_its_own_to_train(job: dict[str, Any]) -> None:
    """An update of PPO is that of the policy and that of the critic, on one base with adapters too."""
    alone, critic = trained(method="grpo", **job), trained(method="ppo", **job)
    (update,) = (one for one in alone.phases if one.name == "update")
    updates = [one for one in critic.phases if one.name.endswith("update")]
    assert [one.name for one in updates] == ["policy update", "critic update"]
    assert sum(one.seconds for one in updates) == pytest.approx(2 * update.seconds, rel=0.05)
    assert critic.step_seconds > alone.step_seconds + 0.95 * update.seconds


@pytest.mark.parametrize("adapter", ["lora", "dora", "oft"])
def test_adapters_beside_that_of_the_policy_are_whole(adapter: str) -> None:
    """A reference adds what its adapter weighs and nothing that trains; a critic adds all that the policy's takes."""
    job = {"adapter": adapter, "rank": 16}
    held = {kind: trained(method="dpo", reference=kind, **job) for kind in ("base", "adapter")}
    own = held["base"].tuning
    assert own is not None
    assert held["adapter"].memory.weights - held["base"].memory.weights == 4 * own.trainable_parameters
    assert held["adapter"].memory.gradients == held["base"].memory.gradients
    assert held["adapter"].memory.optimizer == held["base"].memory.optimizer
    alone, critic = (trained(method=method, reference="base", **job) for method in ("grpo", "ppo"))
    assert critic.memory.weights - alone.memory.weights == 4 * own.trainable_parameters
    assert critic.memory.gradients == 2 * alone.memory.gradients
    assert critic.memory.optimizer == 2 * alone.memory.optimizer


def test_rewards_have_no_logits() -> None:
    """A head of one value a token keeps less than one of the vocabulary."""
    assert trained(method="reward").memory.logits < 0.1 * trained(method="dpo").memory.logits


def test_an_engine_takes_memory_where_it_is() -> None:
    """Awake it takes what it was given, asleep its context, apart nothing."""
    from dataclasses import replace

    from shardwise.plans import find_stack

    base, held = find_stack("transformers"), {}
    for place in ("apart", "asleep", "awake"):
        settings = replace(base.settings, rollout=place, rollout_bytes=24e9 * (place == "awake"))
        stack = replace(base, settings=settings)
        job = Training(seq_len=512, global_batch=2, method="grpo", **ADAPTERS)  # type: ignore[arg-type]
        where = Cluster.parse("1xh100-sxm-80gb")
        held[place] = train(
            load_model(MODEL), where, Plan(micro_batch=2), job, TrainingOptions(stack=stack)
        ).device_bytes
    assert held["awake"] - held["apart"] == pytest.approx(24e9)
    assert held["asleep"] - held["apart"] == pytest.approx(700 * 2**20)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"method": "bco"}, "method"),
        ({"method": "dpo", "reference": "twin"}, "reference"),
        ({"method": "dpo", "reference": "adapter"}, "reference"),
        ({"reference": "copy"}, "reference"),
    ],
)
def test_what_does_not_go_together_is_said(job: dict[str, Any], field: str) -> None:
    """Objectives and references that are unknown, or that nothing reads, are bad input."""
    with pytest.raises(InputError) as caught:
        trained(**job)
    assert [problem.field for problem in caught.value.problems] == [field]


def test_recompute_makes_again_only_what_gradients_read() -> None:
    """What an operator of a unit reads and keeps for no gradient is gone when the next one has run."""
    from ops.helpers import layout

    y = layout({"B": 1, "S": 8}, "transformers")
    made = Tensor(name="cast", size_bytes=64.0, born="mlp")
    reader: Op[float] = memory_op(y, "narrow", "mlp", (1.0, 1.0), reads=(made,))
    saver: Op[float] = memory_op(y, "product", "mlp", (1.0, 1.0), reads=(made,), saves=(made,))
    unit = (Checkpoint(("",)),)
    assert keep((reader,), unit).dropped == ()
    assert keep((saver,), unit).dropped == (made,)


GRPO = ("train", "llama-3.2-1b", "--on", "4xh100-sxm-80gb", "--sharding", "fsdp", "--stack", "trl", "--method", "grpo",
        "--seq-len", "1024", "--micro-batch", "2", "--global-batch", "64")  # fmt: skip
PROMPT = ("--rollout-prompt-tokens", "256")


def answered(*words: str) -> dict[str, Any]:
    """The JSON of an answer."""
    found: dict[str, Any] = json.loads(run(*words, "--json").out)
    return found


def test_rollouts_are_what_the_engine_takes() -> None:
    """A step apart is the engine's static batch, new weights and training; each place of the engine has its own."""
    apart = answered(*GRPO, *PROMPT, "--rollout", "apart", "--rollout-tp", "2")
    served = answered("infer", "llama-3.2-1b", "--on", "4xh100-sxm-80gb", "--tp", "2", "--batch", "32",
                      "--input-tokens", "256", "--output-tokens", "768", "--engine", "vllm")  # fmt: skip
    found = apart["rollout"]
    assert (found["batch"], found["waves"], found["replicas"], found["resting_bytes"]) == (32, 1, 2, 0)
    assert found["seconds"] == served["request_seconds"]
    whole = found["seconds"] + found["handover_seconds"] + apart["step_seconds"]
    assert apart["whole_step_seconds"] == pytest.approx(whole)
    asleep = answered(*GRPO, *PROMPT, "--rollout", "asleep")["rollout"]
    assert asleep["resting_bytes"] > 0 and asleep["handover_seconds"] > found["handover_seconds"]
    short = answered(*GRPO, *PROMPT, "--rollout", "awake", "--rollout-memory", "3.5GiB")["rollout"]
    assert short["waves"] > 1 and short["seconds"] > asleep["seconds"]


def test_one_phase_is_answered_alone() -> None:
    """A phase has the seconds and the bytes that the whole answer lists, and its own verdict."""
    whole = answered(*GRPO, *PROMPT, "--phase", "update")
    update = next(one for one in whole["phases"] if one["name"] == "update")
    assert {name: whole["phase"][name] for name in update} == update
    assert whole["phase"]["fits"] and whole["phase"]["device_bytes"] > update["peak_bytes"]
    again = answered(*GRPO, *PROMPT, "--phase", "rollout")
    assert again["phase"]["seconds"] == again["rollout"]["seconds"] + again["rollout"]["handover_seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--phase", "values"), "phase = 'values': is no phase of grpo; use one of old-log-probabilities"),
        (("--phase", "rollout"), "is no phase of grpo without rollout_prompt_tokens"),
        (("--rollout-prompt-tokens", "1024"), "at least 1 and below the 1024 of a sequence; use 512"),
        ((*PROMPT, "--rollout-tp", "3"), "must divide the engine's 4 devices"),
        ((*PROMPT, "--rollout-devices", "8"), "are an engine's own; add --rollout apart"),
        ((*PROMPT, "--rollout-samples", "32"), "must be at least the 64 of a step, which train on one rollout; use 64"),
        (("--rollout-memory", "3GiB"), "awake beside the trainer; add --rollout awake, or leave it out"),
    ],
)
def test_rollouts_that_cannot_be_are_refused(words: tuple[str, ...], said: str) -> None:
    """A method without rollouts, prompts as long as sequences, and devices that are not there, by name."""
    done = run(*GRPO, *words)
    assert done.status == 2 and said in done.err


def test_preferences_have_no_rollouts() -> None:
    """DPO trains on answers that are there already, and no engine rests beside it."""
    for asked in (PROMPT, ("--rollout", "asleep")):
        words = (*(word if word != "grpo" else "dpo" for word in GRPO), *asked)
        assert "method = 'dpo': has no rollouts" in run(*words).err


def test_a_run_takes_the_time_and_the_dollars_of_its_rollouts() -> None:
    """Days, hours, dollars, energy and limits are of whole steps; what is not timed is said, and an engine apart paid.

    Tokens over those of a step are the steps.
    """
    run_of = ("--tokens", "65.536M", "--price", "2", "--energy")
    plain, timed = answered(*GRPO, *run_of), answered(*GRPO, *PROMPT, *run_of)
    whole = timed["whole_step_seconds"]
    assert whole > timed["step_seconds"] == plain["step_seconds"]
    assert timed["days"] == pytest.approx(1000 * whole / 86400)
    assert timed["usd"] == pytest.approx(1000 * whole / 3600 * 4 * 2)
    assert timed["energy"]["run_kwh"] == pytest.approx(plain["energy"]["run_kwh"] * whole / plain["step_seconds"])
    assert any(note.startswith("rollouts: left out") for note in plain["assumptions"])
    assert not any(note.startswith("rollouts: left out") for note in timed["assumptions"])
    longest = "where lengths differ a step waits for the longest"
    assert any(longest in note for note in timed["assumptions"]) and longest in " ".join(run(*SEARCH).out.split())
    assert not any(longest in note for note in plain["assumptions"])
    apart = answered(*GRPO, *PROMPT, *run_of, "--rollout", "apart", "--rollout-devices", "2")
    assert apart["device_hours"] == pytest.approx(1000 * apart["whole_step_seconds"] / 3600 * (4 + 2))
    assert run(*GRPO, *PROMPT, "--max-step", f"{(whole + timed['step_seconds']) / 2}").status == 1


def test_rollouts_without_room_are_no_fit() -> None:
    """The verdict, its JSON and the exit status are of the engine too."""
    words = (*GRPO, *PROMPT, "--rollout", "awake", "--rollout-memory", "1GiB")
    done, tree = run(*words), answered(*words)
    assert done.status == 1 and done.out.startswith("NO FIT") and "no room" in done.out
    assert not tree["fits"] and not tree["rollout"]["fits"] and tree["chance_to_fit"] > 0.99


SEARCH = ("plan", "train", "llama-3.2-1b", "--on", "4xh100-sxm-80gb", "--stack", "trl", "--method", "grpo",
          "--seq-len", "1024", "--global-batch", "64", "--tokens", "65.536M", "--price", "2", *PROMPT)  # fmt: skip


WIDE = ("train", "llama-3.1-70b", "--on", "8xh100-sxm-80gb", "--sharding", "fsdp", "--stack", "trl", "--method", "grpo",
        "--seq-len", "1024", "--micro-batch", "1", "--global-batch", "64", "--adapter", "lora")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ((*GRPO, *PROMPT, "--rollout", "awake", "--rollout-memory", "1GiB"), "rollout_memory", "4GiB"),
        ((*WIDE, *PROMPT), "rollout_tp", 4),
        ((*WIDE, *PROMPT, "--rollout", "apart"), "rollout_tp", 2),
    ],
)
def test_what_gives_the_engine_room_is_told_and_does(words: tuple[str, ...], field: str, value: object) -> None:
    """Where only the engine of rollouts lacks room, its least change that gives it room is told, and typed it fits."""
    tree = answered(*words)
    assert not tree["fits"] and tree["memory"]["short_by_bytes"] < 0
    changes = {one["field"]: one for one in tree["changes"]}
    assert changes[field]["value"] == value and all(one["fits"] for one in tree["changes"])
    flag = f"--{field.replace('_', '-')}"
    typed = words[: words.index(flag)] if flag in words else words
    done = run(*typed, flag, str(value), "--json")
    assert done.status == 0 and json.loads(done.out)["device_bytes"] == changes[field]["needed_bytes"]
    assert f"{flag} {value}" in " ".join(run(*words).out.split())


def test_changes_and_savers_are_judged_with_the_engine() -> None:
    """A plan that does not fit is told what fits beside its rollouts, whose engine has no room for the model."""
    words = (*WIDE[:-2], *PROMPT, "--recompute", "full", "--precision", "bf16-pure", "--savers")
    tree = answered(*words)
    assert tree["memory"]["short_by_bytes"] > 0
    assert not any(one["fits"] for one in (*tree["changes"], *tree["savers"], *tree["proposals"]))
    plain = answered(*(word for word in words if word not in PROMPT))
    assert any(one["fits"] for one in (*plain["changes"], *plain["savers"], *plain["proposals"]))


def test_python_judges_a_step_with_its_rollouts_as_the_command_line_does() -> None:
    """What fits without its engine alone does not fit, and a search counts what is generated in days and dollars."""
    stack = find_stack("trl")
    stack = replace(stack, settings=replace(stack.settings, rollout_prompt_tokens=256))
    cluster, options = Cluster.parse("8xh100-sxm-80gb"), TrainingOptions(stack=stack)
    job = Training(seq_len=1024, global_batch=64, method="grpo", adapter="lora")
    tree = answered(*WIDE, *PROMPT)
    plan = Plan(dp=0, micro_batch=1, sharding="fsdp")
    report = train(load_model("llama-3.1-70b"), cluster, plan, job, options)
    assert not report.fits and not tree["fits"]
    assert [one.field for one in report.changes] == [one["field"] for one in tree["changes"]]
    best = answered(*SEARCH)["best"][0]
    run_of = Training(seq_len=1024, global_batch=64, token_budget=65.536e6, method="grpo")
    found = plan_training(load_model("llama-3.2-1b"), Cluster.parse("4xh100-sxm-80gb"), run_of, None,
                          SearchOptions(stack=stack)).best[0]  # fmt: skip
    assert found.training_seconds is not None and found.generation.seconds > 0
    assert found.training_seconds / 86400 == pytest.approx(best["days"], rel=1e-9)


@pytest.mark.parametrize("apart", [(), ("--rollout", "apart", "--rollout-devices", "2")])
def test_a_search_and_its_plan_agree_on_days_and_dollars_with_rollouts(apart: tuple[str, ...]) -> None:
    """The proposed command answers what the search shows of a run; the page says where they count."""
    best = answered(*SEARCH, *apart)["best"][0]
    alone = answered(*best["command"].removeprefix("shardwise ").split())
    assert alone["whole_step_seconds"] > alone["step_seconds"] == best["step_seconds"]
    for name in ("days", "device_hours", "usd", "interval", "fits"):
        assert best[name] == alone[name], name
    assert not any(note.startswith("rollouts: left out") for note in best["assumptions"])
    page = run(*SEARCH, *apart).out
    assert "in days, dollars and limits" in page and "a step, rollouts included" in page


def test_a_search_says_that_its_plan_leaves_the_engine_no_room() -> None:
    """Its page, its JSON and its exit status are those of the plan that it proposes; wrong engines are refused."""
    words = (*SEARCH, "--rollout", "awake", "--rollout-memory", "1GiB")
    done = run(*words)
    assert done.status == 1 and "the engine of rollouts has no room" in done.out
    assert not answered(*words)["best"][0]["fits"]
    assert "must divide the engine's 4 devices" in run(*SEARCH, "--rollout-tp", "3").err


RUN_OF = ("--tokens", "65.536M", "--price", "2")


def test_an_engine_apart_may_have_more_devices_than_its_trainer() -> None:
    """Twice the replicas have half the samples each, and a replica may not be wider than the trainer's cluster."""
    apart = ("--rollout", "apart", "--rollout-tp", "2", "--rollout-devices")
    wide = answered(*GRPO, *PROMPT, *apart, "8")["rollout"]
    served = answered("infer", "llama-3.2-1b", "--on", "4xh100-sxm-80gb", "--tp", "2", "--batch", "16",
                      "--input-tokens", "256", "--output-tokens", "768", "--engine", "vllm")  # fmt: skip
    assert (wide["devices"], wide["replicas"], wide["batch"]) == (8, 4, 16)
    assert wide["seconds"] == served["request_seconds"]
    done = run(*GRPO, *PROMPT, "--rollout", "apart", "--rollout-tp", "8", "--rollout-devices", "8")
    assert done.status == 2 and "is more than the 4 devices of the trainer" in done.err


def test_every_answer_of_a_run_has_its_rollouts() -> None:
    """Rows of values, what is solved for, and both sides of a comparison have the days and dollars of `train`."""
    alone = answered(*GRPO, *PROMPT, *RUN_OF)
    rows = answered(*GRPO, *PROMPT, *RUN_OF, "--vary", "micro-batch=2,4")["rows"]
    assert (rows[0]["days"], rows[0]["usd"]) == (alone["days"], alone["usd"])
    at = GRPO.index("--micro-batch")
    flags = (*GRPO[1:at], *GRPO[at + 2 :], *PROMPT, *RUN_OF)
    sides = answered("compare", *flags, "--a", "--micro-batch 2", "--b", "--micro-batch 4")
    assert (sides["a"]["days"], sides["b"]["usd"]) == (alone["days"], rows[1]["usd"])
    # Training alone would keep the limit on one device.
    limit = ("--max-time", f"{1.02 * alone['days'] * 24}h")
    assert answered(*GRPO, *PROMPT, *RUN_OF, *limit, "--solve", "devices")["solve"]["value"] == 4
    words = (*GRPO, *PROMPT, *RUN_OF, "--rollout", "awake", "--rollout-memory", "1GiB", "--vary", "micro-batch=2,4")
    assert [row["fits"] for row in answered(*words)["rows"]] == [False, False]


def test_limits_of_a_search_are_of_whole_steps() -> None:
    """What trains would keep them; a plan that is proposed keeps them alone too."""
    best = answered(*SEARCH)["best"][0]
    whole = best["days"] * 86400 / 1000
    limits = {"--max-step": whole, "--max-time": 1000 * whole, "--max-cost": best["usd"]}
    for flag, most in limits.items():
        assert whole > 2 * best["step_seconds"] and run(*SEARCH, flag, f"{0.9 * most}").status == 1, flag
        kept = answered(*SEARCH, flag, f"{1.001 * most}")["best"]
        assert kept[0]["days"] == best["days"], flag
        assert all(run(*one["command"].removeprefix("shardwise ").split(), flag, f"{1.001 * most}").status == 0
                   for one in kept[:3])  # fmt: skip


@pytest.mark.parametrize("apart", [(), ("--rollout", "apart", "--rollout-devices", "4")])
def test_a_search_over_devices_ranks_whole_steps(apart: tuple[str, ...]) -> None:
    """The cheapest run and the shortest are those of `train`; the quickest update alone is another plan's."""
    cheap = answered(*SEARCH, *apart, "--at-most", "--objective", "cost")["best"]
    assert cheap[0]["usd"] == min(one["usd"] for one in cheap)
    soon = answered(*SEARCH, *apart, "--at-most", "--objective", "days")["best"]
    assert soon[0]["days"] == min(one["days"] for one in soon) and soon[0]["usd"] >= cheap[0]["usd"]


def test_a_search_leaves_out_devices_that_the_engine_does_not_run_on() -> None:
    """Three devices are no two replicas of two; the trainer's own laws would allow them."""
    words = ("--at-most", "--rollout-tp", "2", "--objective", "devices")
    best = answered(*SEARCH, *words)["best"]
    counts = {one["plan"]["tp"] * one["plan"]["cp"] * one["plan"]["pp"] * one["plan"]["dp"] for one in best}
    assert counts == {2, 4}


def test_plans_that_miss_a_limit_by_their_own_rollouts_are_none_of_the_best() -> None:
    """The least that is generated keeps the limit on their devices, and what they leave the engine makes it more."""
    job = Training(seq_len=1024, global_batch=64, token_budget=1e9)
    work = work_of(load_model("gpt2"), Cluster.parse("4xa100-sxm-80gb"), job, None, SearchOptions(max_run_seconds=1e5))
    count_generation(work, lambda case, n: Generation(seconds=0.1))
    result = searched(work, SerialExecutor())

    def finish(report: TrainReport) -> TrainReport:
        return replace(report, generation=Generation(seconds=1e3 if report.plan.tp > 1 else 0.1))

    done = finished(result, finish)
    assert any(one.plan.tp > 1 for one in result.best) and done.best
    assert all(one.plan.tp == 1 for one in (*done.best, *done.front))
    dropped = done.partial.rejected["max_run_seconds"] - result.partial.rejected["max_run_seconds"]
    assert dropped == result.counts.fitting - done.counts.fitting > 0
    none = finished(result, lambda report: replace(report, generation=Generation(seconds=1e3)))
    assert not none.best and none.nearest is not None
