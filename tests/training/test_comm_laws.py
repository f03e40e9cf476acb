"""Laws of the communication report: what is sent arrives, seconds are those of the step, groups partition the ranks."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import report, tried
from laws.strategies import Wanted, cases
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model, MoE, Projection, load_model
from shardwise.plans import CONTEXT_KINDS, Plan, Training, find_stack
from shardwise.plans._placement import GROUPS, named_groups
from shardwise.training import CommReport, TrainingCase, TrainingOptions, comm
from shardwise.training._comm import TITLES
from shardwise.training._step import axis_seconds
from shardwise.training._traffic_map import stage_of_ranks, talking_groups

SMALL = Wanted(max_devices=256)


@given(cases(SMALL))
@tried(40)
def test_what_is_sent_arrives(case: TrainingCase) -> None:
    """All ranks send as many bytes as all receive, and as many as the axes say, on every tier together."""
    found = CommReport(report=report(case))
    axes, traffic_map = found.axes.values(), found.traffic_map
    sent = sum(a.cluster_sent_bytes for a in axes)
    assert sum(traffic_map.sent) == pytest.approx(sent, rel=1e-9)
    assert sum(traffic_map.received) == pytest.approx(sent, rel=1e-9)
    assert sum(traffic_map.between_nodes.bytes) == pytest.approx(sent, rel=1e-9)
    assert sum(sum(a.tiers.values()) for a in axes) == pytest.approx(sent, rel=1e-9)


@given(cases(SMALL))
@tried(40)
def test_every_rank_of_a_group_sends_and_receives_the_same(case: TrainingCase) -> None:
    """Collectives leave each rank with as much as it gave, whatever its group."""
    found = CommReport(report=report(case))
    if case.plan.pp == 1:
        assert found.traffic_map.sent == pytest.approx(found.traffic_map.received, rel=1e-9)


@given(cases(SMALL))
@tried(40)
def test_seconds_are_those_of_the_training_report(case: TrainingCase) -> None:
    """Exposed and hidden seconds of the axes add up to those that the step is made of; so do the messages' own."""
    found = CommReport(report=report(case))
    evaluation = found.report.evaluation
    for seconds, name in zip(axis_seconds(evaluation.step), ("exposed_seconds", "hidden_seconds"), strict=True):
        for parent, wanted in seconds.items():
            ours = sum(getattr(a, name) for a in found.axes.values() if TITLES[a.name][1] == parent)
            assert ours == pytest.approx(wanted, rel=1e-6, abs=1e-9), (parent, name)


@given(cases(SMALL))
@tried(25)
def test_groups_partition_the_ranks(case: TrainingCase) -> None:
    """Every rank is in one group of each axis, but for a shared table's; groups are as the report counts them."""
    found = CommReport(report=report(case))
    for name, axis in found.axes.items():
        groups = found.groups(name)
        ranks = sorted(r for g in groups for r in g)
        alone = case.plan.num_devices - 2 * len(groups) if name == "embedding" else 0
        assert len(set(ranks)) == len(ranks) == case.plan.num_devices - alone
        assert [len(g) for g in groups] == [axis.size] * axis.num_groups
        size = found.report.evaluation.sizes.group_shapes.get(axis.group, (2,))[-1]
        assert axis.size == size


@given(cases(SMALL))
@tried(24)
def test_shapes_are_those_of_the_bytes(case: TrainingCase) -> None:
    """The elements of a message's shape have 4 bits to 4 bytes each, and weights have as many as their shape says."""
    found = CommReport(report=report(case))
    for flows in found.flows:
        for flow in flows:
            if flow.message.shape:
                each = flow.message.size_bytes / prod(flow.message.shape)
                assert min(abs(each - width) for width in (0.5, 1, 2, 4)) < 1e-6, flow.message
    for index in range(len(found.flows)):
        for table in found.layers(index):
            for row in table.rows:
                assert sum(prod(shape) for _, shape in row.weights) == pytest.approx(row.parameters)


def test_a_message_that_is_sent_in_parts_has_the_shape_of_a_part() -> None:
    """What user buffers send beside products, a rank's part at a time, is as many tokens as its bytes hold."""
    plan, job = Plan(tp=8, sequence_parallel=True, micro_batch=1), Training(seq_len=512, global_batch=1)
    buffered = TrainingOptions(stack="megatron-bridge")
    found = comm(load_model("llama-3.1-8b"), Cluster.parse("8xh100"), plan, job, buffered)
    sent = {(f.message.where, f.message.phase): f for f in found.flows[0] if f.message.verb == "all_gather"}
    assert sent["qkv", "forward"].message.shape == (1, 64, 4096)
    assert sent["qkv", "backward"].message.shape == (1, 512, 4096)
    assert all(f.message.size_bytes == 2 * prod(f.message.shape) for f in sent.values())


@given(cases(Wanted(max_devices=256, schedules=("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"))))
@tried(25)
def test_each_boundary_is_crossed_once_each_way(case: TrainingCase) -> None:
    """A micro-batch crosses the boundaries between all chunks once forward and once backward, on every rank's path."""
    plan = case.plan
    found = CommReport(report=report(case))
    sends = [f.per_step * s.count for s, fs in zip(found.report.evaluation.stages, found.flows, strict=True) for f in fs
             if f.message.group == "pp"]  # fmt: skip
    micro = case.job.global_batch // (plan.dp * plan.micro_batch)
    hops = plan.pp * plan.vpp - 1 if plan.pp > 1 else 0
    assert sum(sends) == pytest.approx(2 * hops * micro)


def test_stages_hand_on_every_stream_of_hyper_connections() -> None:
    """Between two stages a model of four residual streams sends four times what one of its width with one does."""

    def sent(streams: int) -> float:
        mixes = Projection(name="hyper_connection", inputs=512 * streams, outputs=24, linear=False, streams=streams)
        core = Attention(heads=8, kv_heads=8, head_dim=64)
        block = Block(mixers=(core,), feed_forward=MLP(ffn=1024), extras=(mixes,))
        model = Model(name="streams", family="random", hidden=512, vocab=32000, layers=(block,) * 4)
        plan, job = Plan(pp=2, sharding="none"), Training(seq_len=2048, global_batch=4)
        found = comm(model, Cluster.parse("2xh100-sxm-80gb"), plan, job, TrainingOptions(stack="megatron"))
        assert all(f.message.size_bytes == 2 * prod(f.message.shape) for f in found.flows[0])
        return found.axes["pp"].cluster_bytes

    assert sent(1) == 2 * 4 * 2048 * 512 * 2
    assert sent(4) == 4 * sent(1)


def _dense(draw: st.DrawFn) -> Model:
    heads = draw(st.sampled_from((8, 16)))
    mixer = Attention(heads=heads, kv_heads=draw(st.sampled_from((heads, 8))), head_dim=64)
    block = Block(mixers=(mixer,), feed_forward=MLP(ffn=1024 * draw(st.integers(1, 4))), norm="rmsnorm")
    return Model(name="dense", family="random", hidden=512 * draw(st.integers(1, 4)), vocab=32000, layers=(block,) * 8)


@st.composite
def dense_cases(draw: st.DrawFn) -> tuple[Model, Plan, Training]:
    """Draw a dense model of eight layers, a plan without recompute, and a job."""
    tp, cp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)))
    plan = Plan(
        tp=tp, cp=cp, pp=pp, dp=dp, micro_batch=draw(st.sampled_from((1, 2))),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        cp_kind=draw(st.sampled_from(("ring", "all-gather"))),
        sharding=draw(st.sampled_from(("none", "distributed-optimizer", "zero1", "zero2", "fsdp"))),
    )  # fmt: skip
    micro = draw(st.sampled_from((4, 8)))
    return _dense(draw), plan, Training(seq_len=2048, global_batch=micro * dp * plan.micro_batch)


@given(dense_cases())
@tried(40)
def test_volumes_are_the_closed_formulas(drawn: tuple[Model, Plan, Training]) -> None:
    """Bytes of each axis in a step are the textbook's: arXiv:1909.08053, 2205.05198, 2310.01889, 1910.02054."""
    model, plan, job = drawn
    # Megatron-Core's operators: one product for q, k and v, tables split over tp.
    from shardwise.training import TrainingOptions

    found = comm(
        model, Cluster.parse(f"{plan.num_devices}xa100-sxm-80gb"), plan, job, TrainingOptions(stack="megatron")
    )
    plan, w, D, L = found.plan, 2, model.hidden, model.num_layers
    m, T = job.global_batch // (plan.dp * plan.micro_batch), plan.micro_batch * job.seq_len // plan.cp
    stage, n = plan.stage_devices, plan.num_devices
    mixer: Any = model.layers[0].mixers[0]
    bytes_of = {name: axis.cluster_bytes for name, axis in found.axes.items()}
    # Tensor parallel: 4 a layer, and 2 more gathers of the saved inputs when the sequence is split too.
    each = 10 if plan.sequence_parallel else 4
    ends = (2 + 3 if plan.sequence_parallel else 2) * T * D * w + 3 * T * 4
    tensor = m * (L * each * T * D * w * n / plan.pp + ends * stage) if plan.tp > 1 else 0
    assert bytes_of.get("tp", 0) == pytest.approx(tensor)
    # Context parallel: keys and values around the ring, or gathered; backward with their gradients.
    kv = 2 * max(mixer.kv_heads // plan.tp, 1) * mixer.head_dim * T * w
    around = 3 * (plan.cp - 1) * kv if plan.cp_kind == "ring" else 3 * plan.cp * kv
    assert bytes_of.get("cp", 0) == pytest.approx(m * L * around * n / plan.pp if plan.cp > 1 else 0)
    # Pipeline: the residual stream over each boundary, both ways.
    stream = T * D * w / (plan.tp if plan.sequence_parallel else 1)
    assert bytes_of.get("pp", 0) == pytest.approx(2 * (plan.pp - 1) * m * stream * stage)
    # Data parallel: gradients of 4 bytes and weights of 2, once a step or, sharded, for each micro-batch.
    parts = found.report.evaluation.parts
    params = sum(s.count * found.parameters(i) for i, s in enumerate(found.report.evaluation.stages))
    root = parts.embedding.elements.dense + parts.head.elements.dense
    times = {
        "none": 4 * params,
        "distributed-optimizer": 6 * params,
        "zero1": 6 * params,
        "zero2": (4 * m + 2) * params,
        "fsdp": m * (4 * params + 2 * (2 * (params - root) + root)),
    }
    copies = plan.dp * plan.cp
    assert bytes_of.get("dp", 0) == pytest.approx(times[plan.sharding] * stage if copies > 1 else 0)


@pytest.mark.parametrize("dispatch", ["megatron", "megatron-deepep"])
def test_expert_volume_is_four_exchanges(dispatch: str) -> None:
    """Dispatch and combine exchange T * k rows forward and backward; DeepEP sends each token once to a node."""
    from shardwise.training import TrainingOptions

    moe = MoE(experts=64, top_k=8, ffn=512)
    block = Block(mixers=(Attention(heads=16, kv_heads=16, head_dim=64),), feed_forward=moe, norm="rmsnorm")
    model = Model(name="moe", family="random", hidden=1024, vocab=32000, layers=(block,) * 4)
    plan = Plan(dp=64, ep=64, micro_batch=1)
    job = Training(seq_len=1024, global_batch=128)
    found = comm(model, Cluster.parse("64xh100"), plan, job, TrainingOptions(stack=dispatch))
    axis = found.axes["ep"]
    assert axis.bytes_per_step == 2 * 4 * 4 * 1024 * 8 * 1024 * 2
    assert axis.sent_bytes_per_step == pytest.approx(axis.bytes_per_step * 63 / 64)
    nvlink, network = axis.tiers.values()
    share = {"megatron": 56 / 64, "megatron-deepep": 8 * (1 - (7 / 8) ** 8) * (7 / 8) / 8}[dispatch]
    assert network == pytest.approx(64 * axis.bytes_per_step * share)
    assert nvlink + network == pytest.approx(axis.cluster_sent_bytes)


@pytest.mark.parametrize(("ep", "top_k"), [(8, 2), (4, 8), (2, 2)])
def test_gathered_tokens_are_four_gathers_whatever_is_chosen(ep: int, top_k: int) -> None:
    """Every rank receives the tokens of all: ep - 1 times its own, where an exchange sends k (ep - 1) / ep times."""
    moe = MoE(experts=16, top_k=top_k, ffn=512)
    block = Block(mixers=(Attention(heads=16, kv_heads=16, head_dim=64),), feed_forward=moe, norm="rmsnorm")
    model = Model(name="moe", family="random", hidden=1024, vocab=32000, layers=(block,) * 4)
    plan, job = Plan(dp=8, ep=ep, micro_batch=1), Training(seq_len=1024, global_batch=16)
    sent = {}
    for dispatch in ("all-to-all", "all-gather"):
        stack = replace(find_stack("megatron"), dispatch=dispatch)
        sent[dispatch] = comm(model, Cluster.parse("8xh100"), plan, job, TrainingOptions(stack=stack)).axes["ep"]
    tokens = 2 * 4 * 1024 * 1024 * 2  # micro-batches, layers, tokens, width, bytes
    assert sent["all-gather"].sent_bytes_per_step == pytest.approx(4 * tokens * (ep - 1))
    assert sent["all-to-all"].sent_bytes_per_step == pytest.approx(4 * tokens * top_k * (ep - 1) / ep)


def test_summa_broadcasts_panel_by_panel() -> None:
    """Each panel of each product is its own broadcast along tp and tp2, and its own reduction backward."""
    block = Block(mixers=(Attention(heads=16, kv_heads=16, head_dim=64),), feed_forward=MLP(ffn=4096), norm="rmsnorm")
    model = Model(name="flat", family="random", hidden=1024, vocab=32000, layers=(block,) * 2)
    plan = Plan(tp=2, tp2=2, layout="summa", panels=4, micro_batch=1, sequence_parallel=False)
    found = comm(model, Cluster.parse("4xh100"), plan, Training(seq_len=1024, global_batch=1))
    up = [f for f in found.flows[0] if f.message.where == "mlp.up"]
    assert {(f.message.group, f.message.verb, f.per_step) for f in up} == {
        ("tp", "broadcast", 8), ("tp", "reduce", 8), ("tp2", "broadcast", 8), ("tp2", "reduce", 8),
    }  # fmt: skip
    left = next(f for f in up if f.message.group == "tp")
    right = next(f for f in up if f.message.group == "tp2")
    assert left.message.shape == (1, 512, 256)
    assert right.message.shape == (256, 4096)


def megatron_groups(sizes: dict[str, int], order: str, wanted: set[str]) -> list[tuple[int, ...]]:
    """Return the groups of Megatron-Core's rank generator: rank = sum of index * stride, first axis fastest.

    github.com/NVIDIA/Megatron-LM megatron/core/parallel_state.py at d98e8a64 (2026-08-22), RankGenerator.
    """
    names = order.split("-")
    shape = [sizes[name] for name in reversed(names)]
    ranks = numpy.arange(prod(shape)).reshape(shape)
    kept = [i for i, name in enumerate(reversed(names)) if name not in wanted]
    moved = [i for i, name in enumerate(reversed(names)) if name in wanted]
    flat = ranks.transpose([*kept, *moved]).reshape(-1, prod(sizes[name] for name in wanted))
    return sorted(tuple(int(r) for r in row) for row in flat)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@given(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)),
       st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2)))  # fmt: skip
@tried(24)
def test_ranks_are_placed_as_megatron_places_them(
    order: str, tp: int, cp: int, pp: int, dp: int, ep: int, etp: int
) -> None:
    """Groups of tp, cp, dp, pp, dp with cp, ep and expert dp have Megatron-Core's members, in both of its orders."""
    stage = tp * cp * dp
    if stage % (ep * etp):
        return
    axes: Any = tuple(a for a in order.replace("tp", "tp-tp2", 1).split("-") if a != "ep")
    plan = Plan(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp, order=axes)
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    experts = {"tp": etp, "cp": 1, "ep": ep, "dp": stage // (ep * etp), "pp": pp}
    if megatron_groups(dense, order, {"pp"}) != megatron_groups(experts, order, {"pp"}):
        return  # Megatron-Core refuses these: both generators must have the same pipelines.
    for name, wanted in {"tp": {"tp"}, "cp": {"cp"}, "dp": {"dp"}, "pp": {"pp"}, "dp_cp": {"dp", "cp"}}.items():
        assert sorted(tuple(sorted(g)) for g in named_groups(plan, name)) == megatron_groups(dense, order, wanted), name
    for name, wanted in {"etp": {"tp"}, "ep": {"ep"}, "edp": {"dp"}}.items():
        ours = sorted(tuple(sorted(g)) for g in named_groups(plan, name))
        assert ours == megatron_groups(experts, order, wanted), name


def test_the_embedding_group_is_the_first_and_the_last_stage() -> None:
    """Megatron-Core adds the gradients of a shared table up over the two ends of each pipeline."""
    plan = Plan(tp=2, pp=4)
    assert [g for g in named_groups(plan, "table") if len(g) > 1] == [(0, 6), (1, 7)]
    assert stage_of_ranks(plan) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert talking_groups(plan, "table") == [(0, 6), (1, 7)]


@given(cases(SMALL))
@tried(24)
def test_every_kind_of_group_partitions_the_ranks(case: TrainingCase) -> None:
    """Whatever a message travels over, each rank is in one group of it."""
    plan = replace(case.plan)
    for name in GROUPS:
        ranks = sorted(r for g in named_groups(plan, name) for r in g)
        assert ranks == list(range(plan.num_devices)), name


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_every_matrix_product_is_told_before_and_after(kind: Any) -> None:
    """Operators that a layout adds, as an exchange of heads, stand for no product: the others are matched by name."""
    plan = Plan(cp=2, dp=4, cp_kind=kind)
    found = comm(load_model("gpt2"), Cluster.parse("8xh100"), plan, Training(seq_len=1024, global_batch=8)).gemms
    assert [p.name for p in found] == ["qkv", "out", "mlp.up", "mlp.down", "head"]
    assert all(p.before[0] == 2 * p.after[0] for p in found)
