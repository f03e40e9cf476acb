"""The answer about one plan: what is deduced, what is refused, what it costs, and which change would help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from command_line import run
from shardwise.cost import WANTED_CHANCE, Efficiencies, family_of, typical_slack, typical_waiting
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.ops import train_flops
from shardwise.plans import TUNINGS, Plan, Settings, Training, find_stack
from shardwise.plans.laws import batch_problems, plan_problems
from shardwise.training import TrainingOptions, TrainReport, axis_seconds, slowest_stage, train

LLAMA, GPT2 = load_model("llama-3.1-8b"), load_model("gpt2")
NODE = Cluster.parse("8xh100-sxm-80gb")
FSDP = Plan(dp=0, sharding="fsdp")


def ask(plan: Plan = FSDP, job: Training | None = None, **more: Any) -> TrainReport:
    """Return the report of a plan of Llama 3.1 8B on one node, unless said."""
    model, cluster = more.pop("model", LLAMA), more.pop("cluster", NODE)
    return train(model, cluster, plan, job or Training(seq_len=4096, global_batch=64), TrainingOptions(**more))


def problems(*args: Any, **more: Any) -> list[str]:
    """Return the fields that a question is refused for."""
    with pytest.raises(InputError) as error:
        ask(*args, **more)
    return [p.field for p in error.value.problems]


@pytest.mark.parametrize(
    ("batch", "micro", "accumulation", "expected"),
    [
        (64, 2, 0, (64, 2, 4)),
        (64, 0, 4, (64, 2, 4)),
        (0, 2, 4, (64, 2, 4)),
        (64, 2, 4, (64, 2, 4)),
        (0, 2, 0, (16, 2, 1)),
    ],
)
def test_two_of_batch_micro_batch_and_accumulation_give_the_third(
    batch: int, micro: int, accumulation: int, expected: tuple[int, int, int]
) -> None:
    """Global batch = micro-batch x accumulation x replicas, whichever two are given."""
    plan = replace(FSDP, micro_batch=micro)
    found = ask(plan, Training(seq_len=4096, global_batch=batch), accumulation=accumulation)
    steps = found.job.global_batch // (found.plan.micro_batch * found.plan.dp)
    assert (found.job.global_batch, found.plan.micro_batch, steps) == expected


def test_replicas_fill_the_cluster() -> None:
    """With dp left open the replicas fill the devices, and the deduction is listed."""
    found = ask(Plan(tp=2, dp=0))
    assert found.plan.dp == 4
    assert "dp 4: fills 8 devices" in found.assumptions


@pytest.mark.parametrize(
    ("plan", "devices"),
    [
        (Plan(dp=0, tp=4, pp=2), 16),
        (Plan(dp=0, tp=4, pp=2, sharding="zero1"), 32),
        (Plan(dp=0, tp=8), 16),
        (replace(FSDP, recompute="full"), 8),
    ],
    ids=["pipeline", "pipeline of four replicas", "no pipeline", "sharded"],
)
def test_a_micro_batch_left_open_is_the_fastest_that_fits(plan: Plan, devices: int) -> None:
    """No other micro-batch of the same global batch fits and has a faster step: a pipeline is kept filled."""
    job = Training(seq_len=4096, global_batch=32)
    cluster = Cluster.parse(f"{devices}xh100-sxm-80gb")
    found = ask(replace(plan, micro_batch=0), job, cluster=cluster)
    assert found.fits
    assert f"micro_batch {found.plan.micro_batch}: the fastest that fits with a chance of 90%" in found.assumptions
    sizes = [b for b in (1, 2, 4, 8, 16, 32) if 32 // found.plan.dp % b == 0]
    every = [ask(replace(plan, micro_batch=b), job, cluster=cluster) for b in sizes]
    assert found.step_seconds == min(one.step_seconds for one in every if one.chance_to_fit >= WANTED_CHANCE)


def test_a_micro_batch_that_the_batch_follows_is_the_largest_that_fits() -> None:
    """With neither given the micro-batch found fits, and the next size does not."""
    found = ask(replace(FSDP, micro_batch=0), Training(seq_len=4096, global_batch=0))
    assert found.chance_to_fit >= WANTED_CHANCE
    assert any(note.startswith(f"micro_batch {found.plan.micro_batch}: the largest") for note in found.assumptions)
    larger = ask(replace(FSDP, micro_batch=2 * found.plan.micro_batch), Training(seq_len=4096, global_batch=0))
    assert larger.chance_to_fit < WANTED_CHANCE


def test_a_chance_of_none_asks_for_what_fits_as_predicted() -> None:
    """Without a chance to keep, the micro-batch is the largest whose prediction fits."""
    found = ask(replace(FSDP, micro_batch=0), Training(seq_len=8192, global_batch=0), risk=0.0)
    assert found.fits and found.chance_to_fit < WANTED_CHANCE
    assert f"micro_batch {found.plan.micro_batch}: the largest that fits" in found.assumptions


@pytest.mark.parametrize("seq_len", [2048, 3072, 4096, 6144])
def test_what_is_left_open_is_as_likely_to_fit_as_what_a_search_proposes(seq_len: int) -> None:
    """Training and search take one micro-batch, of the chance that neither was told."""
    words = ("llama-3.1-8b", "--on", "1xa100-sxm-80gb", "--adapter", "lora", "--global-batch", "16", "--json")
    asked = (*words, "--seq-len", str(seq_len), "--recompute", "none")
    found, best = run("train", *asked).tree, run("plan", "train", *asked).tree["best"]
    assert found["chance_to_fit"] >= WANTED_CHANCE or (found["plan"]["micro_batch"] == 1 and not best)
    assert {one["plan"]["micro_batch"] for one in best[:1]} <= {found["plan"]["micro_batch"]}


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 1), ("dualpipe-v", 2)])
def test_a_batch_left_open_fills_the_pipeline_of_its_schedule(schedule: Any, vpp: int) -> None:
    """With no batch given a step has the fewest micro-batches that the schedule runs on, never too few."""
    plan = Plan(tp=4, pp=4, dp=0, schedule=schedule, vpp=vpp)
    report = train(load_model("llama-3-8b"), Cluster.parse("16xh100"), plan, Training(seq_len=2048, global_batch=0))
    count = report.job.global_batch // report.plan.micro_batch
    assert count == (4 if schedule == "1f1b" else 8)


def test_what_never_fits_is_answered_with_the_smallest() -> None:
    """When no micro-batch fits the answer is the smallest, which says by how much it does not."""
    big = load_model("llama-3.1-405b")
    found = ask(replace(FSDP, micro_batch=0), model=big)
    assert not found.fits
    assert found.plan.micro_batch == 1
    assert found.verdict.short_by_bytes > 0
    assert any("the smallest" in note for note in found.assumptions)


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    """One tensor-parallel rank has no sequence parallelism to speak of."""
    assert not ask(Plan(dp=0)).plan.sequence_parallel
    assert ask(Plan(tp=2, dp=0)).plan.sequence_parallel


@pytest.mark.parametrize(
    ("plan", "job", "more", "fields"),
    [
        (Plan(tp=3, dp=0, sequence_parallel=False), {}, {}, {"tp"}),
        (Plan(dp=4), {}, {}, {"dp"}),
        (FSDP, {"global_batch": 12}, {}, {"global_batch"}),
        (FSDP, {"global_batch": -1}, {}, {"global_batch"}),
        (FSDP, {"global_batch": 7}, {"accumulation": 2}, {"global_batch"}),
        (FSDP, {"global_batch": 100}, {"accumulation": 3, "micro": 0}, {"accumulation"}),
        (FSDP, {"seq_len": 0}, {}, {"seq_len"}),
        (FSDP, {"seq_len": 4096}, {"model": GPT2}, {"seq_len"}),
        (FSDP, {"expert_imbalance": 0.5}, {}, {"expert_imbalance"}),
        (FSDP, {"capacity_factor": -1.0}, {}, {"capacity_factor"}),
        (FSDP, {"pad_to_capacity": True}, {}, {"pad_to_capacity"}),
        (FSDP, {"attention_density": 0.0}, {}, {"attention_density"}),
        (FSDP, {"token_budget": float("nan")}, {}, {"token_budget"}),
        (FSDP, {"checkpoint_seconds": 5.0}, {}, {"checkpoint_interval"}),
        (FSDP, {"precision": "bf17"}, {}, {"precision"}),
        (FSDP, {"optimizer": "adamant"}, {}, {"optimizer"}),
        (FSDP, {}, {"stack": "fairseq"}, {"stack"}),
        (FSDP, {}, {"accumulation": -1}, {"accumulation"}),
        (FSDP, {}, {"efficiencies": Efficiencies(compute=1.5)}, {"compute_efficiency"}),
        (Plan(tp=3, dp=0, ep=2, sequence_parallel=False), {"seq_len": 0}, {}, {"tp", "ep", "seq_len"}),
    ],
)
def test_bad_input_names_its_fields(plan: Plan, job: dict[str, Any], more: dict[str, Any], fields: set[str]) -> None:
    """A question that cannot be answered names every field at fault."""
    options = dict(more)
    if "micro" in options:
        plan = replace(plan, micro_batch=options.pop("micro"))
    values = {"seq_len": 1024, "global_batch": 64} | job
    assert fields <= set(problems(plan, Training(**values), **options))


def test_changes_are_legal_and_say_what_asking_says() -> None:
    """Every suggested change differs in one field, is legal, and has the memory and time that asking for it gives."""
    found = ask(Plan(tp=2, dp=0, micro_batch=4))
    assert found.changes
    for change in found.changes:
        plan = replace(found.plan, **{change.field: change.value}, dp=0)
        again = ask(plan, stack=found.case.stack)
        assert (again.device_bytes, again.step_seconds, again.fits) == (
            change.needed_bytes,
            change.step_seconds,
            change.fits,
        )
        assert not plan_problems(LLAMA, again.plan, 4096)
        assert not batch_problems(again.plan, 64)
    order = [change.fits for change in found.changes]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize(
    ("plan", "stack"),
    [
        (Plan(tp=4, dp=0, micro_batch=2, sequence_parallel=False), "megatron"),
        (Plan(tp=1, dp=0, micro_batch=2, sequence_parallel=False), "megatron"),
        (Plan(tp=4, dp=0, micro_batch=2, sequence_parallel=False), "megatron-2021"),
        (Plan(tp=1, dp=0, micro_batch=2), "megatron-2021"),
    ],
)
def test_changes_leave_sequence_parallelism_as_it_was_asked(plan: Plan, stack: str) -> None:
    """A change of one field turns sequence parallelism on neither against the question nor where no stack has it."""
    job = Training(seq_len=32768, global_batch=64)
    found = ask(plan, job, stack=stack)
    assert {change.field for change in found.changes} >= {"recompute", "tp"}
    for change in found.changes:
        named: Any = {"dp": 0, "sequence_parallel": False, change.field: change.value}
        again = ask(replace(plan, **named), job, stack=change.stack or stack)
        assert (again.device_bytes, again.step_seconds) == (change.needed_bytes, change.step_seconds), change


def test_a_token_budget_costs_time_and_money() -> None:
    """Days and dollars follow from the step, the price and what failures take."""
    job = Training(seq_len=4096, global_batch=64, token_budget=1e12)
    calm = ask(job=job)
    assert calm.goodput == 1
    assert calm.training_seconds == pytest.approx(1e12 / job.tokens_per_step * calm.step_seconds)
    assert calm.usd == pytest.approx(calm.training_seconds / 3600 * 8 * 6.88)
    rough = replace(job, failures_per_device_hour=1e-3, restart_seconds=600.0)
    rough = replace(rough, checkpoint_seconds=60.0, checkpoint_interval_seconds=3600.0)
    assert 0 < ask(job=rough).goodput < 1
    assert ask(job=rough).training_seconds > calm.training_seconds
    assert ask(job=replace(job, token_budget=0.0)).training_seconds == 0


def test_without_a_price_there_is_no_cost() -> None:
    """A device without a list price gives no dollars rather than none to pay."""
    priced = replace(NODE, usd_per_device_hour=None)
    assert ask(cluster=priced).usd is None


def test_overlap_and_efficiencies_move_the_step() -> None:
    """Without overlap a step takes longer, with ideal efficiencies less."""
    base = ask().step_seconds
    assert ask(overlap=False).step_seconds > base > ask(efficiencies=Efficiencies(ideal=True)).step_seconds


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.0),
        ({"recompute": "full"}, 1.0),
        ({"recompute": "full", "recompute_layers": 8}, 0.5),
        ({"recompute": "full", "recompute_layers": 99}, 1.0),
    ],
)
def test_hardware_flops_count_what_is_recomputed(changes: dict[str, Any], share: float) -> None:
    """Recompute of some layers of each stage counts those layers' forward passes alone."""
    found = ask(Plan(pp=2, dp=0, **changes))
    whole = train_flops(LLAMA, 4096, "model-full", "full") - train_flops(LLAMA, 4096, "model-full")
    assert found.hardware_flops_per_token == pytest.approx(found.model_flops_per_token + share * whole)


def test_modules_that_run_again_count_as_hardware_flops() -> None:
    """Recompute by module counts the modules' products."""
    plain, again = ask(Plan(tp=2, dp=0)), ask(Plan(tp=2, dp=0, modules=("mlp",)))
    products = 32 * 6 * 4096 * 14336
    assert again.hardware_flops_per_token - plain.hardware_flops_per_token == pytest.approx(products)
    assert again.step_seconds > plain.step_seconds


@pytest.mark.parametrize("what", ["step", "memory", "tokens_per_second_per_gpu", "mfu", "hfu"])
def test_headlines_open(what: str) -> None:
    """Each headline is a number that opens and equals what the report says."""
    found = ask()
    plain = {"step": found.step_seconds, "memory": found.evaluation.peak}.get(what) or getattr(found, what)
    assert float(found.explain(what)) == pytest.approx(plain, rel=1e-12)


def test_an_unknown_headline_is_refused() -> None:
    """Asking to explain something else names the headlines."""
    with pytest.raises(InputError) as error:
        ask().explain("mood")
    assert "mfu" in error.value.problems[0].remedy


@pytest.mark.parametrize("plan", [Plan(dp=8), Plan(tp=4, pp=2), Plan(dp=8, sharding="fsdp")])
@pytest.mark.parametrize("family", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "v100-sxm-32gb"])
def test_a_typical_run_takes_a_share_longer_than_one_for_a_record(family: str, plan: Plan) -> None:
    """Typical runs take a share of the step longer, by the family, and a share of what nothing hides at any stage."""
    model, cluster = load_model("gpt2"), Cluster.parse(f"8x{family}")
    record, typical = (
        train(model, cluster, plan, Training(seq_len=1024, global_batch=64, precision="fp16", tuning=tuning))
        for tuning in TUNINGS
    )
    step = record.evaluation.step
    exposed, _ = axis_seconds(step)
    own, most = (
        sum(step.stages[slowest_stage(step)].exposed.values()),
        max(sum(s.exposed.values()) for s in step.stages),
    )
    waited = sum(exposed.values()) + (most - own) * step.pipeline.busy / step.stages[slowest_stage(step)].busy
    longer = typical_slack(family_of(cluster.device)) * record.step_seconds + typical_waiting() * waited
    assert typical.step_seconds == pytest.approx(record.step_seconds + longer, rel=1e-12)
    assert typical.evaluation.step.overhead - record.evaluation.step.overhead == pytest.approx(longer, rel=1e-9)
    assert typical.interval["step_seconds"][0] > record.interval["step_seconds"][0]


def test_stages_that_differ_say_how_far_a_closed_form_is_off() -> None:
    """The schedules whose closed form is over 5 % off with uneven stages say so, and with equal ones nothing."""
    notes = [
        train(
            load_model("llama-3.1-8b"),
            Cluster.parse("4xh100"),
            Plan(pp=4, vpp=2, micro_batch=1, schedule="v-half", stage_layers=sizes),
            Training(seq_len=2048, global_batch=16),
            TrainingOptions(stack="zero-bubble"),
        ).assumptions
        for sizes in ((), (3, 4, 4, 5, 4, 4, 4, 4))
    ]
    said = "schedule v-half: seconds of stages that differ are within 11% of its order"
    assert [said in found for found in notes] == [False, True]


def test_a_stack_that_cuts_batches_runs_a_smaller_last_micro_batch() -> None:
    """Of 15 sequences of a replica in micro-batches of 4 the last has 3; 10 in ones of up to 8 are 5 and 5."""

    def busy(micro: int, batch: int) -> float:
        job = Training(seq_len=1024, global_batch=batch, precision="bf16")
        return ask(replace(FSDP, micro_batch=micro), job, stack="composer").evaluation.step.pipeline.busy

    assert busy(4, 8 * 15) == pytest.approx(3 * busy(4, 8 * 4) + busy(3, 8 * 3))
    assert busy(8, 8 * 10) == pytest.approx(2 * busy(5, 8 * 5))
    assert busy(4, 8 * 14) < busy(4, 8 * 15) < busy(4, 8 * 16)


@pytest.mark.parametrize(("stack", "sharding"), [("megatron", "none"), ("deepspeed", "zero1"), ("fsdp2", "fsdp")])
def test_other_stacks_refuse_a_smaller_last_micro_batch(stack: str, sharding: Any) -> None:
    """Their own checks want batches of whole micro-batches; composer wants whole sequences of a replica."""
    job = Training(seq_len=1024, global_batch=8 * 15)
    assert problems(replace(FSDP, micro_batch=4, sharding=sharding), job, stack=stack) == ["global_batch"]
    assert problems(replace(FSDP, micro_batch=4), replace(job, global_batch=60), stack="composer") == ["global_batch"]


@pytest.mark.parametrize(
    ("capacity", "said"),
    [
        ({"capacity_factor": 1.0}, "routing is taken as even, so that no row is dropped"),
        ({"capacity_factor": 0.5}, "experts drop 50% of their rows; tokens/s and MFU count every token all the same"),
        ({"capacity_factor": 1.5, "expert_imbalance": 2.0}, "the busiest experts drop 25% of their rows"),
        ({"capacity_factor": 1.5, "expert_imbalance": 1.2}, "routing is taken as stated, so that no row is dropped"),
        ({"capacity_factor": 2.0, "pad_to_capacity": True}, "50% of the rows of experts are zeros that fill them up"),
    ],
)
def test_a_capacity_of_experts_says_what_it_drops(capacity: dict[str, Any], said: str) -> None:
    """Tokens beyond the capacity are dropped, rows below it padded: the answer names either share, or neither."""
    job = Training(seq_len=4096, global_batch=64, **capacity)
    found = ask(Plan(dp=8, ep=8, sharding="zero1"), job, model=load_model("mixtral-8x7b"))
    note = f"capacity_factor {job.capacity_factor:g}: {said}"
    assert any(one.startswith(note) for one in found.assumptions)
    assert any("no effect" in one for one in ask(job=job).assumptions if one.startswith("capacity_factor"))


def test_words_of_a_job_without_effect_are_said() -> None:
    """Packed documents without attention, narrow MLPs without one and checkpoints that cost nothing change nothing."""
    mamba, job = load_model("mamba2-130m"), Training(seq_len=1024, global_batch=64, token_budget=1e9)
    idle = replace(job, attention_density=0.5, checkpoint_interval_seconds=3600.0)
    settings = Settings(mlp_input_bits=8)
    plain = ask(Plan(dp=8), job, model=mamba, stack=find_stack("pytorch"))
    other = ask(Plan(dp=8), idle, model=mamba, stack=replace(find_stack("pytorch"), settings=settings))
    assert (other.device_bytes, other.training_seconds) == (plain.device_bytes, plain.training_seconds)
    words = {one.split(":")[0] for one in other.assumptions if "no effect" in one}
    assert words == {"attention_density 0.5", "checkpoint_interval", "mlp_input_bits"}


def test_what_a_plan_shares_with_its_changes_is_alike() -> None:
    """Autocast keeps no casts of sharded weights: blocks that were priced under ZeRO-1 are not those of FSDP."""
    plan = Plan(dp=8, micro_batch=1, sharding="zero1", recompute="full")
    model, cluster = load_model("gemma-7b"), Cluster.parse("8xrtx-3060")
    job, options = Training(seq_len=4096, global_batch=256), TrainingOptions(stack="fsdp2")
    report = train(model, cluster, plan, job, options)
    change = next(one for one in report.changes if one.value == "fsdp")
    asked = train(model, cluster, replace(plan, sharding="fsdp"), job, options)
    assert (change.needed_bytes, change.step_seconds) == (asked.device_bytes, asked.step_seconds)


@pytest.mark.parametrize(("devices", "stack"), [(8, "fsdp2"), (1, "deepspeed")])
def test_replicas_left_open_choose_the_framework_as_stated_ones_do(devices: int, stack: str) -> None:
    """FSDP2 offloads over several replicas: a plan that fills eight devices is not said to need another framework."""
    offload = ("optimizer", "gradients", "parameters")
    for dp in (0, devices):
        plan = Plan(dp=dp, micro_batch=1, sharding="fsdp", offload=offload)
        job, cluster = Training(seq_len=4096, global_batch=64), Cluster.parse(f"{devices}xh100-sxm-80gb")
        assert train(load_model("llama-3.1-8b"), cluster, plan, job).case.stack.name == stack
    words = ("train", "llama-3.1-8b", "--on", f"{devices}xh100-sxm-80gb", "--sharding", "fsdp", "--offload")
    answers = [run(*words, ",".join(offload), *dp, "--json").tree for dp in ((), ("--dp", str(devices)))]
    assert [one["plan"]["stack"] for one in answers] == [stack, stack]
    assert answers[0]["device_bytes"] == answers[1]["device_bytes"]


@pytest.mark.parametrize(
    ("ep", "job", "said"),
    [(4, {}, True), (1, {}, False), (4, {"expert_imbalance": 1.3}, False), (4, {"capacity_factor": 1.25}, False)],
)
def test_even_routing_is_said_where_nothing_else_is(ep: int, job: dict[str, Any], said: bool) -> None:
    """A split of experts whose loads nobody states is taken as even, which a router does not promise."""
    asked, where = Training(seq_len=512, global_batch=8, **job), Cluster.parse("4xh100-sxm-80gb")
    report = train(load_model("qwen3-30b-a3b"), where, Plan(dp=4, ep=ep), asked)
    assert any(note.startswith("expert_imbalance 1:") for note in report.assumptions) == said


def test_a_plan_of_one_replica_is_told_what_fills_its_devices() -> None:
    """Plan's own dp is 1: who states none is told of dp=0, and who stated another only of what would do."""
    model, job = load_model("gpt2"), Training(seq_len=1024, global_batch=8)
    for plan, fills in ((Plan(), True), (Plan(dp=4), False)):
        with pytest.raises(InputError) as caught:
            train(model, Cluster.parse("2xh100"), plan, job)
        (problem,) = caught.value.problems
        assert (problem.field, problem.remedy.startswith("use 2")) == ("dp", True)
        assert ("Plan(dp=0)" in problem.remedy) is fills
    assert train(model, Cluster.parse("2xh100"), Plan(dp=0), job).plan.dp == 2
