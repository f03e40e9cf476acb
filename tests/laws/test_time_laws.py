"""Laws of training time: what no plan, link, device or overlap may break."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from laws.helpers import SLACK, evaluated, seconds, tried
from laws.strategies import ANY, Wanted, cases, problems_of, refilled
from shardwise.cost._torus import Torus, torus_of
from shardwise.errors import InputError
from shardwise.hardware import Cluster, device_names, find_device
from shardwise.ledger.op import Collective
from shardwise.models import load_model
from shardwise.ops.overlap import CostModel, messages
from shardwise.plans import Plan, Training, find_stack
from shardwise.records import replace
from shardwise.training import TrainingCase, sizes_of, train
from shardwise.training._step import StageSeconds, StepSeconds

FLAT = Wanted(layouts=("1d",), modules=False)
# What a law of memory says grows less, in the order in which it runs longer.
MODES = ("none", "selective", "attention", "norm-attention-norm", "full")
RATES = ("memory_bytes_per_second", *(f"matrix_flops.{d}" for d in ("bf16", "fp32", "tf32")))


def _slower_link(case: TrainingCase, tier: int, factor: float) -> TrainingCase:
    tiers = [
        replace(t, bytes_per_second=t.bytes_per_second * factor) if i == tier % len(case.cluster.tiers) else t
        for i, t in enumerate(case.cluster.tiers)
    ]
    return replace(case, cluster=replace(case.cluster, tiers=tuple(tiers)))


def _slower_device(case: TrainingCase, rate: str, factor: float) -> TrainingCase:
    device = case.cluster.device
    changed = device.with_values({rate: device.fact(rate).value * factor}, "assumption: a law", "2026")
    return replace(case, cluster=replace(case.cluster, device=changed))


@given(cases(), st.integers(0, 2), st.floats(0.05, 1.0))
@tried(16)
def test_a_slower_link_never_makes_a_plan_faster(case: TrainingCase, tier: int, factor: float) -> None:
    """Taking bandwidth from any tier never shortens a step, whichever axes use it."""
    assert seconds(_slower_link(case, tier, factor)) * SLACK >= seconds(case)


@given(
    st.sampled_from(("megatron", "megatron-bridge")),
    st.sampled_from(("never", "between nodes", "always")),
    st.sampled_from(((1, 1, "1f1b"), (2, 2, "interleaved"), (2, 1, "dualpipe"))),
    st.tuples(st.sampled_from((1, 4)), st.sampled_from((4, 8, 16)), st.sampled_from((1, 2, 4))),
    st.tuples(st.sampled_from((128, 512, 4096)), st.sampled_from(("none", "full"))),
    st.tuples(st.sampled_from(("h100-sxm-80gb", "b200-sxm-180gb")), st.integers(0, 1), st.floats(0.05, 0.9)),
)
@tried(60)
def test_longer_messages_of_experts_never_shorten_what_the_host_launches(
    stack: str,
    overlap: Any,
    pipeline: tuple[int, int, Any],
    degrees: tuple[int, int, int],
    work: tuple[int, Any],
    links: tuple[str, int, float],
) -> None:
    """Beside another micro-batch or not, GEMMs of experts launched one by one, a slower link never shortens a step."""
    (pp, vpp, schedule), (tp, ep, micro_batch), (seq_len, recompute) = pipeline, degrees, work
    plan = Plan(tp=tp, sequence_parallel=tp > 1, ep=ep, pp=pp, vpp=vpp, schedule=schedule, dp=32 // tp // pp)
    case = TrainingCase(
        model=load_model("deepseek-v2-lite"),
        cluster=Cluster.parse(f"32x{links[0]}"),
        job=Training(seq_len=seq_len, global_batch=256, precision="fp8-grads16"),
        stack=replace(find_stack(stack), overlap_experts=overlap),
        plan=replace(plan, micro_batch=micro_batch, sharding="distributed-optimizer", recompute=recompute),
    )
    assume(not problems_of(case))
    assert seconds(_slower_link(case, *links[1:])) * SLACK >= seconds(case)


TRAINERS = tuple(
    name
    for name in device_names()
    if all(find_device(name).device.knows(fact) for fact in ("slow_bytes_per_second", "matrix_flops.bf16"))
)
SPREAD = (
    Plan(sharding="fsdp", dp=32),
    Plan(sharding="zero2", dp=32),
    Plan(sharding="fsdp", dp=32, ep=8),
    Plan(sharding="hsdp", dp=32, shard=8),
    Plan(sharding="distributed-optimizer", dp=16, tp=2),
)
LADDER = (10, 20, 30, 45, 60, 90, 120, 200, 800)


@pytest.mark.parametrize(("index", "device"), list(enumerate(TRAINERS)))
def test_a_faster_network_never_lengthens_a_step(index: int, device: str) -> None:
    """From 10 to 800 GB/s a device, on every device that has a network, more bandwidth never costs time."""
    plan = SPREAD[index % len(SPREAD)]
    model = load_model("qwen3-30b-a3b" if plan.ep > 1 else "llama-3.1-8b")
    job = Training(seq_len=4096, global_batch=64)
    clusters = [Cluster.parse(f"32x{device}", {"slow_bandwidth": f"{rate}GB/s"}) for rate in LADDER]
    times = [train(model, cluster, plan, job).step_seconds for cluster in clusters]
    assert all(a * SLACK >= b for a, b in pairwise(times))


@given(cases(replace(ANY, layouts=("1d",), schedules=("1f1b",), models=("dense",))), st.sampled_from((2, 4)))
@tried(10)
def test_a_slower_pipeline_link_costs_time(case: TrainingCase, pp: int) -> None:
    """The boundary between pipeline stages is charged: a link ten times slower lengthens the step."""
    assume(case.model.num_layers >= pp)
    layers = (case.model.num_layers - pp + 1,) + (1,) * (pp - 1)
    alone = refilled(case, tp=1, cp=1, dp=1, pp=pp, stage_layers=layers, sharding="none", shard=1)
    assert seconds(_slower_link(alone, len(alone.cluster.tiers) - 1, 0.1)) > seconds(alone)


@given(cases())
@tried(40)
def test_twice_the_batch_takes_at_least_as_long_and_at_most_twice(case: TrainingCase) -> None:
    """Twice the sequences never take less time than once, nor more than twice, on any schedule, sharding or stack."""
    twice = replace(case, job=replace(case.job, global_batch=2 * case.job.global_batch))
    once, both = seconds(case), seconds(twice)
    assert once <= both * SLACK
    assert both <= 2 * once * SLACK


def test_a_pipeline_that_keeps_weights_gathered_waits_for_them_once() -> None:
    """Of two micro-batches the second finds the weights of every stage gathered: it adds its compute, and no less."""
    model, cluster = load_model("gpt-oss-20b"), Cluster.parse("128xb200-sxm-180gb")
    plan = Plan(cp=2, tp=8, pp=2, dp=4, ep=4, sharding="zero3", micro_batch=4, schedule="zb-h1")
    one, two = (
        train(model, cluster, plan, Training(seq_len=2048, global_batch=batch, optimizer="lion")) for batch in (16, 32)
    )
    slowest = max(s.busy - s.first - s.last for s in two.evaluation.step.stages)
    assert two.step_seconds >= one.step_seconds + 0.8 * slowest


def _closed(case: TrainingCase) -> bool:
    """Return whether devices are joined in a torus whose axes are rings."""
    torus = torus_of(case.cluster)
    return isinstance(torus, Torus) and torus.axis_links > 1


def _same_links(before: TrainingCase, after: TrainingCase) -> bool:
    """Return whether more ranks of a group bring it no other links, and no fewer cores to what it hides.

    What may take less is no part of the law: ranks that fill domains which were cut, or a mesh, have more links between
    them; axes of a torus, lines in a part of a cube or pod, close to rings in a whole one; a switch that reduces sends
    (1 + 1/n) of a tensor; and NCCL starts fewer channels, each on a core, for a group that has left its node than
    within it.
    """
    first = before.cluster.tiers[0]
    if _closed(before) != _closed(after):
        return False
    fewer, more = (sizes_of(one.plan, one.job.global_batch, one.domains).group_shapes for one in (before, after))
    for name, old in fewer.items():
        new = more[name]
        inside = new[0] == new[-1]
        if old[0] != new[0] if first.mesh or first.in_network else old[:-1] != new[:-1] and not inside:
            return False
        if before.overlap and old[0] == old[-1] > 1 and not inside:
            return False
    return True


def _with_twice_the_replicas(case: TrainingCase, device: str, batch: int) -> tuple[StepSeconds[Any], StepSeconds[Any]]:
    """Return the step of a case on a device and that of twice its replicas at a batch, over the same links.

    FSDP2 pads the rows of experts that three replicas do not divide, and not the columns that six may divide instead.
    """
    assume(case.plan.dp in (2, 4, 8))

    def built(dp: int, sequences: int) -> TrainingCase:
        plan, job = replace(case.plan, dp=dp), replace(case.job, global_batch=sequences, precision="")
        return replace(case, plan=plan, job=job, cluster=Cluster.parse(f"{plan.num_devices}x{device}"))

    try:
        once, twice = built(case.plan.dp, case.job.global_batch), built(2 * case.plan.dp, batch)
        assume(len(once.cluster.tiers) == len(twice.cluster.tiers))
        assume(not problems_of(twice) and _same_links(once, twice))
        return evaluated(once).step, evaluated(twice).step
    except InputError:  # nodes of no such size, or a type without a published rate
        reject()


REPLICATED = cases(replace(ANY, max_devices=256))


@given(REPLICATED, st.sampled_from(TRAINERS))
@tried(16)
def test_twice_the_replicas_at_a_batch_take_at_least_half_the_time(case: TrainingCase, device: str) -> None:
    """At a fixed batch twice the replicas halve the micro-batches of each, and nothing takes less than half."""
    assume(case.job.global_batch // (case.plan.dp * case.plan.micro_batch) % 2 == 0)
    once, twice = _with_twice_the_replicas(case, device, case.job.global_batch)
    assert once.total <= 2 * twice.total * SLACK


@given(REPLICATED, st.sampled_from(TRAINERS))
@tried(16)
def test_twice_the_replicas_at_the_same_work_each_take_no_less(case: TrainingCase, device: str) -> None:
    """With twice the replicas and batch everything but the update, which they share, takes as long or longer."""
    once, twice = _with_twice_the_replicas(case, device, 2 * case.job.global_batch)
    assert once.total - once.optimizer <= (twice.total - twice.optimizer) * SLACK


@given(cases(), st.sampled_from(RATES), st.floats(0.1, 1.0))
@tried(16)
def test_a_slower_device_never_makes_a_plan_faster(case: TrainingCase, rate: str, factor: float) -> None:
    """Taking FLOP/s or memory bandwidth from the device never shortens a step."""
    assert seconds(_slower_device(case, rate, factor)) * SLACK >= seconds(case)


@given(cases(replace(FLAT, recomputes=("none",))))
@tried(12)
def test_more_recompute_never_runs_shorter(case: TrainingCase) -> None:
    """Full recompute takes at least as long as selective, and selective as none."""
    times = [seconds(replace(case, plan=replace(case.plan, recompute=mode))) for mode in MODES]  # type: ignore[arg-type]
    assert all(a <= b * SLACK for a, b in pairwise(times))


@given(cases(replace(FLAT, recomputes=("none",))))
@tried(12)
def test_selective_recompute_costs_at_most_the_attention_core_again(case: TrainingCase) -> None:
    """On every stage selective recompute adds at most the forward seconds of the attention cores it holds.

    On the device: a host that is behind launches them again as well.
    """
    silent = replace(case.stack, module_launch_seconds=0.0, gradient_launch_seconds=0.0, zero3_hook_seconds=0.0)
    case = replace(case, stack=silent)
    selective = replace(case, plan=replace(case.plan, recompute="selective"))
    plain, again = evaluated(case), evaluated(selective)
    assert all(k.replay <= k.forward for k in again.parts.kinds)
    for stage, before, after in zip(plain.stages, plain.step.stages, again.step.stages, strict=True):
        forward = sum(n * k.forward for n, k in zip(stage.layers, plain.parts.kinds, strict=True))
        assert before.recompute == 0
        assert after.recompute <= forward
        # Weights that are gathered hide behind the longer backward pass, so it never adds more than the replay.
        assert after.busy - before.busy <= after.recompute * SLACK


@given(cases())
@tried(16)
def test_exposed_messages_lie_between_nothing_and_all(case: TrainingCase) -> None:
    """What is exposed after overlap is at least zero, and with what is hidden it is what no overlap would expose."""
    overlapped, exposed = (evaluated(replace(case, overlap=on)).step for on in (True, False))
    for some, whole in zip(overlapped.stages, exposed.stages, strict=True):
        for axis, waits in some.exposed.items():
            hidden = some.hidden[axis]
            assert waits >= 0
            assert hidden >= -1e-12
            assert whole.hidden.get(axis, 0) == pytest.approx(0, abs=1e-12)
            assert waits + hidden == pytest.approx(whole.exposed.get(axis, 0), rel=1e-9, abs=1e-15)
    for name in ("gradients", "parameters"):
        shown, hidden = getattr(overlapped, f"{name}_exposed"), getattr(overlapped, f"{name}_hidden")
        assert shown >= 0
        assert hidden >= -1e-12
    assert overlapped.total <= exposed.total * SLACK


@given(cases())
@tried(12)
def test_the_parts_of_a_step_make_the_step(case: TrainingCase) -> None:
    """Pipeline, exposed messages, optimizer and overhead add up to the step; busy, bubble and sends to the pipeline."""
    step = evaluated(case).step
    pipeline = step.pipeline
    whole = pipeline.total + step.gradients_exposed + step.parameters_exposed + step.optimizer + step.overhead
    assert step.total == pytest.approx(whole, rel=1e-12)
    assert pipeline.total == pytest.approx(pipeline.busy + pipeline.bubble + pipeline.exposed_send, rel=1e-9)
    assert min(pipeline.busy, pipeline.bubble, pipeline.exposed_send) >= 0


@given(cases(replace(ANY, schedules=("gpipe", "1f1b", "interleaved"))))
@tried(16)
def test_a_pipeline_has_a_bubble(case: TrainingCase) -> None:
    """A pipeline of p stages runs m micro-batches in at least m + (p - 1) / v of the quickest stage's work."""
    found = evaluated(case)
    quickest = min(s.busy for s in found.step.stages)
    plan, m = case.plan, found.sizes.num_micro
    assert found.step.pipeline.total * SLACK >= (m + (plan.pp - 1) / plan.vpp) * quickest
    slowest = max(s.busy for s in found.step.stages)
    assert found.step.pipeline.busy == pytest.approx(m * slowest, rel=1e-12)


@given(cases())
@tried(12)
def test_the_pipeline_never_beats_its_slowest_device(case: TrainingCase) -> None:
    """No schedule finishes before its busiest device has done its own work."""
    found = evaluated(case)
    stages, m = found.step.stages, found.sizes.num_micro
    mean = sum(run.count * s.busy for run, s in zip(found.stages, stages, strict=True)) / case.plan.pp
    assert found.step.pipeline.total * SLACK >= m * mean


@given(cases(replace(ANY, shardings=("none",))))
@tried(10)
def test_without_sharding_no_weights_are_gathered(case: TrainingCase) -> None:
    """With ZeRO off no parameter all-gather is charged, neither once a step nor for each layer."""
    step = evaluated(case).step
    assert step.parameters_exposed == 0
    assert step.parameters_hidden == 0
    assert all("dp" not in s.exposed for s in step.stages)


@given(cases(replace(ANY, shardings=("none", "zero1", "zero2", "distributed-optimizer"))))
@tried(12)
def test_gradient_reduction_is_charged_from_zero_0_to_2(case: TrainingCase) -> None:
    """Whatever of ZeRO 0 to 2 runs, gradients are reduced over the replicas, and sharded optimizers gather weights."""
    step = evaluated(case).step
    assume(case.plan.dp * case.plan.cp > 1)
    each_micro_batch = sum(s.exposed.get("dp", 0) + s.hidden.get("dp", 0) for s in step.stages)
    assert step.gradients_exposed + step.gradients_hidden + each_micro_batch > 0
    if case.plan.sharding != "none":
        assert step.parameters_exposed + step.parameters_hidden > 0


@given(cases(), cases())
@tried(10)
def test_the_order_of_questions_does_not_matter(case: TrainingCase, other: TrainingCase) -> None:
    """Nothing global changes: the same case evaluated again, after another, gives the same numbers."""
    first = evaluated(case)
    evaluated(other)
    again = evaluated(case)
    assert (again.peak, again.step.total) == (first.peak, first.step.total)


@given(cases())
@tried(12)
def test_more_tokens_never_take_less_time(case: TrainingCase) -> None:
    """A longer sequence or more micro-batches never shorten a step.

    But for 4e-5 of one whose host launches later than its device runs: longer kernels keep it less far ahead.
    """
    base = seconds(case)
    longer = replace(case, job=replace(case.job, seq_len=2 * case.job.seq_len))
    more = replace(case, job=replace(case.job, global_batch=2 * case.job.global_batch))
    assert seconds(longer) * (1 + 1e-4) >= base
    assert seconds(more) * SLACK >= base


def _summa(panels: int, slow: bool) -> Any:
    cluster = Cluster.parse("16xh100-sxm-80gb", {"fast_bandwidth": "1GB/s" if slow else "4500GB/s", "fast_domain": 16})
    plan = Plan(layout="summa", tp=4, tp2=4, panels=panels, sequence_parallel=False)
    job = Training(seq_len=8192, global_batch=4)
    stack = find_stack("megatron")
    return TrainingCase(model=load_model("llama-3.1-8b"), cluster=cluster, job=job, stack=stack, plan=plan)


@pytest.mark.parametrize("slow", [True, False])
def test_the_best_number_of_panels_is_never_slower_than_waiting(slow: bool) -> None:
    """Two-dimensional products with their best panels take at most the sum of messages and compute."""
    whole = seconds(replace(_summa(1, slow), overlap=False))
    assert min(seconds(_summa(n, slow)) for n in (1, 2, 4, 8, 16, 32)) <= whole * SLACK


@pytest.mark.parametrize("panels", [1, 2, 8])
def test_panels_expose_one_set_and_what_compute_does_not_cover(panels: int) -> None:
    """Bound by messages, panels cost all of their sets; bound by compute, they expose one set."""
    found = evaluated(_summa(panels, True))
    machine: Any = CostModel(rates=found.rates, network=found.network, group_shapes=found.sizes.group_shapes)
    pair = tuple(
        Collective(axis=axis, verb="broadcast", size_bytes=1e8 / panels, count=panels, hides="panels", tensor=axis)  # type: ignore[arg-type]
        for axis in ("tp", "tp2")
    )
    one_set = sum(machine.message(c) for c in pair)
    everything = panels * one_set
    for compute in (0.0, everything / 3, everything, 10 * everything):
        found_messages = messages(machine, pair, compute)
        waits = sum(found_messages.exposed.values())
        expected = one_set + (panels - 1) * max(one_set, compute / panels) + compute / panels - compute
        assert waits == pytest.approx(expected, rel=1e-9)
        assert waits + sum(found_messages.hidden.values()) == pytest.approx(everything, rel=1e-9)


@given(cases())
@tried(10)
def test_stage_seconds_are_what_their_operators_say(case: TrainingCase) -> None:
    """Compute of a stage plus its exposed messages is its busy time, DualPipe's pairs included."""
    step = evaluated(case).step
    for stage in step.stages:
        assert isinstance(stage, StageSeconds)
        assert stage.busy == pytest.approx(stage.compute + sum(stage.exposed.values()), rel=1e-9)
