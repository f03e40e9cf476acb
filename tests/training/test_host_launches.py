"""Kernels that the host launches one by one: experts of a rank, and modules of Python."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Sharding, Training, find_stack
from shardwise.training import TrainingOptions, TrainReport, train


def seconds(precision: str, stack: str = "megatron-bridge", micro_batch: int = 1, each: float | None = None) -> float:
    """Return seconds of a step of Qwen3-30B on eight B200, 16 experts a rank, with so many for a launch."""
    plan = Plan(ep=8, dp=0, micro_batch=micro_batch, sharding="distributed-optimizer")
    job = Training(seq_len=4096, global_batch=64, precision=precision)
    chosen = find_stack(stack)
    if each is not None:
        chosen = replace(chosen, narrow_expert_seconds=each)
    report = train(
        load_model("qwen3-30b-a3b"), Cluster.parse("8xb200-sxm-180gb"), plan, job, TrainingOptions(stack=chosen)
    )
    return report.step_seconds


def test_few_bits_gain_little_where_the_host_launches_each_expert() -> None:
    """With one sequence a micro-batch the host decides, and one graph of the whole step is much faster."""
    wide, launched, graph = seconds("bf16-grads16"), seconds("fp8-grads16"), seconds("fp8-grads16", each=0.0)
    assert graph < 0.8 * launched
    assert launched > 0.8 * wide


def test_long_kernels_hide_the_host() -> None:
    """Four sequences a micro-batch keep the device as long as the host needs: less is lost to launches."""
    lost = [seconds("fp8-grads16", micro_batch=n) - seconds("fp8-grads16", micro_batch=n, each=0.0) for n in (1, 4)]
    assert 0 <= lost[1] < 0.25 * lost[0]


@pytest.mark.parametrize("precision", ["bf16-grads16", "fp8-grads16"])
def test_a_slower_host_never_makes_a_step_shorter(precision: str) -> None:
    """Steps grow with the seconds of a launch in fewer than 16 bits, and do not know them in 16."""
    times = [seconds(precision, each=each) for each in (0.0, 2e-5, 1e-4)]
    assert times == sorted(times)
    assert (times[-1] > times[0]) is (precision == "fp8-grads16")


@pytest.mark.parametrize(("tokens", "bound"), [(64, True), (16384, False)])
def test_few_tokens_wait_for_the_modules_of_python(tokens: int, bound: bool) -> None:
    """A step of few tokens takes as long as the host needs to launch it; a long one hides the host."""
    job = Training(seq_len=tokens, global_batch=1, adapter="lora")
    model, cluster = load_model("llama-3.2-1b"), Cluster.parse("1xh100-sxm-80gb")
    stack = find_stack("transformers")
    slow, none = (
        train(
            model,
            cluster,
            Plan(dp=0, micro_batch=1),
            job,
            TrainingOptions(stack=replace(stack, module_launch_seconds=each)),
        )
        for each in (stack.module_launch_seconds, 0.0)
    )
    assert (slow.step_seconds > 1.2 * none.step_seconds) is bound
    assert bound or slow.step_seconds == pytest.approx(none.step_seconds, rel=0.01)


def eager(model: str, cluster: str, plan: Plan, stack: str = "megatron", silent: bool = False) -> float:
    """Return seconds of a step of 32 sequences of 4,096 tokens, or those of a host that takes no time."""
    chosen = find_stack(stack)
    if silent:
        chosen = replace(chosen, module_launch_seconds=0.0, gradient_launch_seconds=0.0)
    job = Training(seq_len=4096, global_batch=32)
    return train(load_model(model), Cluster.parse(cluster), plan, job, TrainingOptions(stack=chosen)).step_seconds


def mixture(micro_batch: int) -> Plan:
    """Return a plan of two nodes of experts behind eight ranks of tensor parallelism."""
    return Plan(tp=8, ep=16, dp=0, micro_batch=micro_batch, sequence_parallel=True, sharding="distributed-optimizer")


def test_eager_mixtures_wait_for_the_host_in_both_passes() -> None:
    """512 tokens a rank: 16 micro-batches of 48 layers, 22 launches forward and 30 backward, 0.2 ms each."""
    step = eager("qwen3-30b-a3b", "16xh100-sxm-80gb", mixture(1))
    assert step == pytest.approx(16 * 48 * 52 * 2e-4, rel=0.05)
    assert step > 2 * eager("qwen3-30b-a3b", "16xh100-sxm-80gb", mixture(1), silent=True)


def test_larger_micro_batches_hide_the_host() -> None:
    """Eight sequences a micro-batch keep the device as long as the host needs."""
    small, large = (eager("qwen3-30b-a3b", "16xh100-sxm-80gb", mixture(n)) for n in (1, 8))
    assert large < 0.6 * small


def test_layers_without_routing_let_the_host_run_ahead() -> None:
    """No pass of a dense layer that is long on the device waits: neither its short ones nor head and loss."""
    plan = Plan(tp=8, dp=0, micro_batch=1, sequence_parallel=True)
    charged, silent = (eager("llama-3.1-70b", "8xh100-sxm-80gb", plan, silent=one) for one in (False, True))
    assert charged == silent


def test_graphs_and_recipes_have_no_such_host() -> None:
    """Recipes that capture graphs and bind their hosts are charged nothing."""
    plan = mixture(1)
    assert eager("qwen3-30b-a3b", "16xh100-sxm-80gb", plan, "megatron-bridge") == eager(
        "qwen3-30b-a3b", "16xh100-sxm-80gb", plan, "megatron-bridge", silent=True
    )


def test_messages_beside_another_micro_batch_do_not_outrun_the_host() -> None:
    """Where the host decides, hiding messages of experts gains nothing."""
    plan = replace(mixture(1), pp=2, vpp=2, schedule="interleaved")
    cluster, job = Cluster.parse("32xh100-sxm-80gb"), Training(seq_len=4096, global_batch=32)
    never, always = (
        train(
            load_model("qwen3-30b-a3b"),
            cluster,
            plan,
            job,
            TrainingOptions(stack=replace(find_stack("megatron"), overlap_experts=when)),
        ).step_seconds
        for when in ("never", "always")
    )
    assert always == pytest.approx(never, rel=1e-9)


def test_modules_and_gemms_of_experts_are_launched_by_one_host() -> None:
    """Qwen3-30B in 8 bits: 52 launches of modules a layer, and of 16 experts two GEMMs forward and four backward.

    What hides of messages beside another micro-batch shortens neither.
    """
    plan = Plan(ep=8, dp=0, micro_batch=1, sharding="distributed-optimizer")
    job = Training(seq_len=512, global_batch=64, precision="fp8-grads16")
    for when in ("never", "always"):
        stack = replace(find_stack("megatron"), overlap_experts=when)
        step = train(
            load_model("qwen3-30b-a3b"), Cluster.parse("8xb200-sxm-180gb"), plan, job, TrainingOptions(stack=stack)
        ).step_seconds
        assert step == pytest.approx(8 * 48 * (52 * 2e-4 + 6 * 16 * stack.narrow_expert_seconds), rel=0.03)


def test_experts_that_a_loop_launches_take_as_long_as_the_host() -> None:
    """Below 5, transformers runs 128 experts in turn, 13 kernels each: 70 ms a layer forward and again in backward."""
    plan, job = Plan(dp=0, micro_batch=1, sharding="fsdp", recompute="full"), Training(seq_len=4096, global_batch=8)
    loop, grouped = (
        train(
            load_model("qwen3-30b-a3b"),
            Cluster.parse("8xh200-sxm-141gb"),
            plan,
            job,
            TrainingOptions(stack=replace(find_stack("transformers-2025"), experts_loop=loops)),
        ).step_seconds
        for loops in (True, False)
    )
    assert loop > 2 * 48 * 128 * 13 * find_stack("transformers-2025").module_launch_seconds
    assert loop > 5 * grouped
    assert not find_stack("transformers").experts_loop


@pytest.mark.parametrize(("micro_batch", "told"), [(1, True), (8, False)])
def test_waiting_for_the_host_is_told(micro_batch: int, told: bool) -> None:
    """An answer says how much of a layer waits for launches, and what hides them."""
    report = train(
        load_model("qwen3-30b-a3b"),
        Cluster.parse("16xh100-sxm-80gb"),
        mixture(micro_batch),
        Training(seq_len=4096, global_batch=32),
        TrainingOptions(stack="megatron"),
    )
    assert any("wait for the host" in line and "micro-batches" in line for line in report.assumptions) is told


@pytest.mark.parametrize(("tokens", "bound"), [(1024, True), (32768, False)])
def test_bands_hold_what_hosts_differ_by(tokens: int, bound: bool) -> None:
    """A step that waits for launches lies in its band on a fast host and on a slow one; others have that of any host.

    Megatron-LM's own toy steps on H100 take 0.6 of the price in their newest container, AWS's EPYC hosts 1.65 times.
    """
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    job = Training(seq_len=tokens, global_batch=16, precision="bf16")
    plan = Plan(tp=8, dp=0, micro_batch=1)
    stack = find_stack("megatron")
    report = train(model, cluster, plan, job, TrainingOptions(stack=stack))
    others = [
        replace(stack, module_launch_seconds=2e-4 * factor, gradient_launch_seconds=2e-4 * factor)
        for factor in stack.launch_hosts
    ]
    fast, slow = (train(model, cluster, plan, job, TrainingOptions(stack=one)).step_seconds for one in others)
    low, high = report.interval["step_seconds"]
    assert (0.99 * low < fast < 0.9 * report.step_seconds and high > slow > 1.1 * report.step_seconds) is bound
    usual = train(model, cluster, plan, job, TrainingOptions(stack=replace(stack, launch_hosts=(1.0, 1.0))))
    assert (usual.interval["step_seconds"] == report.interval["step_seconds"]) is not bound


def hooked(seq_len: int, sharding: Sharding = "zero3", each: float | None = None) -> TrainReport:
    """Return a step of whole fine-tuning of Qwen-1.8B on one A100 under DeepSpeed, with so many seconds for a hook."""
    stack = find_stack("deepspeed-2023")
    if each is not None:
        stack = replace(stack, zero3_hook_seconds=each)
    job = Training(seq_len=seq_len, global_batch=8)
    plan = Plan(dp=0, micro_batch=1, recompute="full", sharding=sharding)
    return train(load_model("qwen-1.8b"), Cluster.parse("1xa100-sxm-80gb"), plan, job, TrainingOptions(stack=stack))


def test_hooks_of_zero3_pace_short_sequences() -> None:
    """Each module with weights is fetched in three passes: 7 of a layer, 24 layers and 8 micro-batches at 256 tokens.

    The host launches ahead of a device that computes longer, so that long sequences take as long without hooks.
    """
    short, free = hooked(256), hooked(256, each=0.0)
    each = find_stack("deepspeed").zero3_hook_seconds
    assert short.step_seconds - free.step_seconds == pytest.approx(8 * 24 * 7 * 3 * each, rel=0.05)
    assert any("each module under ZeRO-3" in note for note in short.assumptions)
    assert hooked(8192).step_seconds < 1.05 * hooked(8192, each=0.0).step_seconds
    assert hooked(256, "zero2").step_seconds == hooked(256, "zero2", each=0.0).step_seconds


def test_experts_in_a_loop_are_fetched_one_by_one() -> None:
    """ZeRO-3 has hooks on each of the linear layers that models before transformers 5 have for every expert."""
    job = Training(seq_len=8192, global_batch=16)
    plan = Plan(dp=0, micro_batch=1, recompute="full", sharding="zero3")
    loop = find_stack("deepspeed-2023")
    slow, free = (
        train(
            load_model("qwen3-30b-a3b"),
            Cluster.parse("16xa800-sxm-80gb"),
            plan,
            job,
            TrainingOptions(stack=replace(loop, zero3_hook_seconds=each)),
        ).step_seconds
        for each in (loop.zero3_hook_seconds, 0.0)
    )
    assert slow - free > 0.8 * 48 * 128 * 3 * 3 * loop.zero3_hook_seconds
