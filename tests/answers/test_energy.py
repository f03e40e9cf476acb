"""Energy: watts follow how busy a device is, and what is asked for adds up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from accuracy.power import rows, score
from command_line import run
from shardwise.cost import mean_watts
from shardwise.hardware import find_device
from shardwise.plans import Arrivals, Length, Workload
from shardwise.serving.load import ServeReport, serve

SHARE = st.floats(0, 1)


@given(low=SHARE, high=SHARE, other=SHARE)
def test_a_busier_device_draws_more_and_never_above_its_rating(low: float, high: float, other: float) -> None:
    """Watts grow with both shares, stay at or below the rating, and lie inside their band."""
    device = find_device("h100-sxm-80gb").device
    low, high = sorted((low, high))
    for pair in ((low, other), (other, low)):
        more = (high, other) if pair == (low, other) else (other, high)
        watts, least, most = mean_watts(device, *pair)
        assert 0 < least <= watts <= most <= device.power_watts
        assert watts <= mean_watts(device, *more)[0]


@pytest.mark.parametrize(
    ("family", "median", "inside"), [("ampere", 0.08, 0.8), ("hopper", 0.12, 0.75), ("blackwell", 0.1, 0.75)]
)
def test_measured_watts_are_met(family: str, median: float, inside: float) -> None:
    """Mean watts of published serving loads are met within the stated error, and their band holds most of them."""
    off, _, held = score(tuple(row for row in rows() if row.family == family))
    assert off <= median and held >= inside


def test_energy_adds_up() -> None:
    """Joules are watts x devices x seconds x PUE, and tokens, runs and CO2 follow from them."""
    job = sw.Training(seq_len=4096, global_batch=64, token_budget=1e12)
    report = sw.train(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("8xh100"), sw.Plan(tp=8), job)
    found, plain = sw.energy(report, pue=1.25, grid_intensity=400), sw.energy(report)
    assert found.joules == pytest.approx(found.watts_per_device * 8 * report.step_seconds * 1.25)
    assert found.joules == pytest.approx(1.25 * plain.joules)
    assert found.joules_per_token * found.tokens == pytest.approx(found.joules)
    assert found.run_kwh == pytest.approx(found.joules_per_token * 1e12 / 3.6e6)
    assert found.run_kg_co2 == pytest.approx(found.run_kwh * 0.4)
    assert plain.run_kg_co2 is None and found.joules_low < found.joules <= found.joules_high


def test_work_of_a_step_is_that_of_all_stages() -> None:
    """However a model is cut into stages, its devices do the same arithmetic: the last one's head counts once."""
    model, job = sw.load_model("llama-3.1-8b"), sw.Training(seq_len=4096, global_batch=64)
    cluster = sw.Cluster.parse("8xh100")
    shares = []
    for plan in (sw.Plan(dp=8), sw.Plan(pp=4, dp=2), sw.Plan(pp=8), sw.Plan(pp=4, vpp=2, dp=2, schedule="interleaved")):
        report = sw.train(model, cluster, plan, job, sw.TrainingOptions(stack="megatron"))
        shares.append(sw.energy(report).compute_share * report.step_seconds)
    assert shares == pytest.approx(shares[:1] * len(shares), rel=1e-9)


def test_a_run_draws_while_it_saves_and_repeats_lost_work() -> None:
    """The energy of a run is that of its device hours, of which failures and checkpoints take some."""
    lost = {"failures_per_device_hour": 1e-3, "checkpoint_interval_seconds": 3600.0, "checkpoint_seconds": 120.0}
    job = sw.Training(seq_len=4096, global_batch=64, token_budget=1e12, **lost)  # type: ignore[arg-type]
    report = sw.train(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("64xh100"), sw.Plan(dp=64), job)
    found = sw.energy(report, pue=1.2)
    assert report.goodput < 0.95
    assert found.run_kwh == pytest.approx(report.device_hours * found.watts_per_device * 1.2 / 1000)


def test_a_larger_batch_takes_less_energy_a_token() -> None:
    """Sixty-four requests at once draw more watts than one and a fifth of the joules a token or less."""
    one, many = (
        sw.energy(sw.infer(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("1xh100"), sw.Plan(), sw.Serving(batch=n)))
        for n in (1, 64)
    )
    assert many.watts_per_device >= one.watts_per_device
    assert many.joules_per_token < one.joules_per_token / 5


def loaded(cluster: str, *, users: int = 0, rate: float = 0.0, **layout: int) -> ServeReport:
    """Return a load of Llama 3.1 8B: so many users who ask at once again, or requests at a rate."""
    arrivals = Arrivals(kind="closed", users=users) if users else Arrivals(rate=rate)
    sizes = Length(mean=512), Length(mean=128)
    asked = Workload(input_tokens=sizes[0], output_tokens=sizes[1], arrivals=arrivals, count=800)
    return serve(sw.load_model("llama-3.1-8b"), sw.Cluster.parse(cluster), sw.Plan(**layout), asked)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_a_load_that_is_always_there_takes_the_energy_of_its_batch(layout: dict[str, int]) -> None:
    """Users who never pause are a batch, whose joules a token are near; stages are busy with one batch each."""
    alone, copies = {**layout, "dp": 1}, layout.get("dp", 1)
    job = sw.Serving(batch=32 // copies // layout.get("pp", 1), input_tokens=512, output_tokens=128)
    cluster, plan = sw.Cluster.parse(f"{2 // copies}xh100"), sw.Plan(**alone)
    many, one = loaded("2xh100", users=32, **layout), sw.infer(sw.load_model("llama-3.1-8b"), cluster, plan, job)
    found, batch = sw.energy(many), sw.energy(one)
    stages = layout.get("pp", 1)
    assert found.memory_share == pytest.approx(stages * batch.memory_share, rel=0.15)
    assert stages > 1 or found.joules_per_token == pytest.approx(batch.joules_per_token, rel=0.1)
    assert found.waiting_share < 0.1


def test_replicas_that_wait_cost_and_are_known_less_well() -> None:
    """A load of one request in ten seconds takes more a token than one of ten, with a band that reaches lower."""
    few, more = (sw.energy(loaded("1xh100", rate=rate)) for rate in (0.1, 10.0))
    assert few.waiting_share > 0.8 and few.joules_per_token > 10 * more.joules_per_token
    assert few.joules_low / few.joules < 0.3 < more.joules_low / more.joules


def test_a_load_that_nobody_carries_has_no_energy() -> None:
    """The page keeps its verdict, Python is told why."""
    with pytest.raises(sw.InputError, match="not carried"):
        sw.energy(loaded("1xh100", rate=500.0))
    done = run("serve", "llama-3.1-8b", "--on", "1xh100", "--rate", "500", "--energy")
    assert done.status == 1 and "UNSTABLE" in done.out and "ENERGY" not in done.out


def test_pools_and_searches_say_energy() -> None:
    """Prefill workers count with those that decode, and the best of a search comes with its energy."""
    words = ("llama-3.1-8b", "--on", "2xh100", "--rate", "4", "--energy", "--grid-intensity", "400", "--json")
    apart = json.loads(run("serve", *words, "--prefill-workers", "1").out)["energy"]
    assert apart["kg_co2_per_million_tokens"] == pytest.approx(0.4 * apart["kwh_per_million_tokens"])
    found = json.loads(run("plan", "serve", *words, "--top", "1", "--tp", "1..2").out)["best"][0]["energy"]
    assert 0 < found["joules_per_token"] < apart["joules_per_token"]


def test_the_command_says_energy_where_it_is_asked() -> None:
    """--energy, --pue and --grid-intensity add a line and a key; nothing is said without them."""
    asked = run("infer", "llama-3.1-8b", "--on", "1xh100", "--energy", "--grid-intensity", "400")
    assert " J the batch, " in asked.out and " kWh a million tokens" in asked.out
    assert asked.status == 0 and "ENERGY" in asked.out and "kg CO2 a million tokens" in asked.out
    told = json.loads(run("infer", "llama-3.1-8b", "--on", "1xh100", "--pue", "1.2", "--json").out)
    assert told["energy"]["pue"] == 1.2
    assert "energy" not in json.loads(run("infer", "llama-3.1-8b", "--on", "1xh100", "--json").out)


@pytest.mark.parametrize(
    ("words", "field"),
    [(("--pue", "0.5"), "pue"), (("--pue", "nan"), "pue"), (("--grid-intensity", "-1"), "grid_intensity"),
     (("--on", "1xtpu-v5e", "--energy"), "power_watts")],
)  # fmt: skip
def test_energy_of_nothing_known_is_refused(words: tuple[str, ...], field: str) -> None:
    """A PUE below one, a negative grid and a device without rated watts are named with a remedy."""
    done = run("infer", "llama-3.1-8b", *(() if "--on" in words else ("--on", "1xh100")), *words)
    assert done.status == 2 and field in done.err.replace("-", "_")


def test_bad_figures_in_python_are_refused_together() -> None:
    """Both arguments are named at once."""
    report = sw.infer(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("1xh100"), sw.Plan(), sw.Serving())
    with pytest.raises(sw.InputError) as caught:
        sw.energy(report, pue=0.0, grid_intensity=-1.0)
    assert {problem.field for problem in caught.value.problems} == {"pue", "grid_intensity"}


@pytest.mark.parametrize(("method", "passes"), [("dpo", 1 / 3), ("grpo", 2 / 3), ("ppo", 1 + 3 / 3)])
def test_passes_without_gradients_and_critics_are_work(method: str, passes: float) -> None:
    """Of a step's arithmetic a pass without gradients is a third of what trains, and a critic is as much again."""
    model, plan, cluster = sw.load_model("llama-3.1-8b"), sw.Plan(sharding="fsdp", dp=8), sw.Cluster.parse("8xh100")
    options, asked = sw.TrainingOptions(stack="verl"), {"seq_len": 4096, "global_batch": 64}
    jobs = sw.Training(**asked), sw.Training(**asked, method=method, reference="copy")  # type: ignore[arg-type]
    plain, other = (sw.train(model, cluster, plan, job, options) for job in jobs)
    assert other.model_flops_per_token == pytest.approx((1 + passes) * plain.model_flops_per_token, rel=1e-3)
    assert other.mfu <= other.hfu < 1
    work = [sw.energy(one).compute_share * one.step_seconds / one.job.tokens_per_step for one in (plain, other)]
    assert work[1] / work[0] == pytest.approx(1 + passes, rel=0.03)


def test_the_busiest_rank_of_experts_leaves_work_to_no_other() -> None:
    """Uneven routing takes longer for the same arithmetic: devices that wait draw less."""
    model, cluster = sw.load_model("mixtral-8x7b"), sw.Cluster.parse("8xh100")
    plan, loads = sw.Plan(ep=8, dp=8, sharding="zero1"), (1.0, 4.0)
    jobs = [sw.Training(seq_len=2048, global_batch=64, expert_imbalance=x) for x in loads]
    even, uneven = (sw.train(model, cluster, plan, job) for job in jobs)
    shares = [sw.energy(one).compute_share * one.step_seconds for one in (even, uneven)]
    assert uneven.step_seconds > 2 * even.step_seconds and shares[1] == pytest.approx(shares[0], rel=1e-9)
    batches = [sw.Serving(batch=32, expert_imbalance=x) for x in loads]
    served = [sw.infer(model, cluster, sw.Plan(ep=8, dp=8), batch) for batch in batches]
    work = [sw.energy(one).compute_share * one.request_seconds for one in served]
    assert work[1] == pytest.approx(work[0], rel=1e-9)
    # Of Qwen3 a rank of eight has popular experts by chance: its work is the mean rank's all the same.
    model, batch = sw.load_model("qwen3-30b-a3b"), sw.Serving(batch=8, input_tokens=2048, output_tokens=1)
    served = [sw.infer(model, cluster, plan, batch) for plan in (sw.Plan(dp=8), sw.Plan(ep=8, dp=8))]
    work = [sw.energy(one).compute_share * one.request_seconds for one in served]
    assert work[1] == pytest.approx(work[0], rel=0.01)
