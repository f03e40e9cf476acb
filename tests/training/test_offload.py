"""What lies in the host's memory: bytes that leave the device, traffic over the host link, and its seconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws.strategies import Wanted, cases
from shardwise import plan_training
from shardwise.cost import host_of
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import OFFLOADS, Plan, Recompute, Training, find_stack
from shardwise.plans.laws import stack_problems
from shardwise.search import IntRanges, SearchOptions, SearchSpace
from shardwise.training import TrainingOptions, TrainReport, train
from shardwise.training._evaluate import TrainingCase
from shardwise.training._report import report_of

PARAMETERS = 8030261248


def report(*offload: str, recompute: Recompute = "full", stack: str = "transformers", sharding: str = "none",
           seq_len: int = 2048) -> TrainReport:  # fmt: skip
    """Return Llama-3.1-8B in 16 bits on one RTX 4090."""
    plan = Plan(micro_batch=1, recompute=recompute, offload=offload, sharding=sharding)  # type: ignore[arg-type]
    job = Training(seq_len=seq_len, global_batch=1, precision="bf16-pure")
    return train(
        load_model("llama-3.1-8b"), Cluster.parse("1xrtx-4090"), plan, job, TrainingOptions(stack=find_stack(stack))
    )


def test_an_optimizer_on_the_host_leaves_its_state_there() -> None:
    """ZeRO-Offload: two 16-bit moments leave the device, gradients go out and weights come back once a step."""
    found, whole = report("optimizer"), report()
    assert found.memory.optimizer == 0
    assert found.memory.host == 4 * PARAMETERS
    assert found.memory.gradients == whole.memory.gradients
    link, memory = 0.8 * 3.2e10, 5.0e10
    # Gradient read twice, weight and both moments read and written: 2 x 2 + 2 x 2 + 2 x 4 bytes.
    seconds = 2 * PARAMETERS / link + max(16 * PARAMETERS / memory, 2 * PARAMETERS / link)
    assert found.evaluation.step.optimizer == pytest.approx(seconds)


def test_gradients_pass_through_the_device_a_layer_at_a_time() -> None:
    """Of the gradients those of one layer are left: 218 million parameters of 16 bits."""
    found = report("optimizer", "gradients")
    assert found.memory.gradients == 2 * 218112000
    assert found.memory.host == 6 * PARAMETERS - 2 * 218112000


def test_checkpoints_on_the_host_leave_two_layers() -> None:
    """Unsloth: of 32 checkpoints of 2 T D bytes two stay, and each is copied out and in once."""
    found, whole = report("activations"), report()
    one = 2 * 2048 * 4096
    assert found.memory.activations == 2 * one
    assert whole.memory.activations - found.memory.activations == pytest.approx(30 * one, rel=5e-3)
    stage = found.evaluation.step.stages[0]
    assert stage.exposed["host"] + stage.hidden["host"] == pytest.approx(2 * 32 * one / (0.8 * 3.2e10))


def test_what_compute_covers_is_hidden() -> None:
    """Longer sequences compute more for each byte of a checkpoint: only the first layer's copy is exposed."""
    stage = report("activations", seq_len=8192).evaluation.step.stages[0]
    whole = stage.exposed["host"] + stage.hidden["host"]
    assert stage.exposed["host"] == pytest.approx(whole / 32)


def test_sharded_parameters_on_the_host_come_in_twice() -> None:
    """FSDP's CPUOffload: no weights stay but the gathered units, and each micro-batch copies them in twice."""
    found = report("optimizer", "gradients", "parameters", stack="fsdp2", sharding="fsdp")
    assert found.memory.weights == 0
    stage = found.evaluation.step.stages[0]
    assert stage.exposed["host"] + stage.hidden["host"] == pytest.approx(2 * 2 * PARAMETERS / (0.8 * 3.2e10), rel=0.3)


def test_the_shard_of_a_unit_is_there_before_it_is_gathered() -> None:
    """FSDP copies a unit's shard to the device and gathers from there: half of the head and its norm is the largest."""
    words = ("optimizer", "gradients", "parameters")

    def buffers(*offload: str) -> float:
        plan = Plan(dp=2, micro_batch=1, recompute="full", offload=offload, sharding="fsdp")  # type: ignore[arg-type]
        job = Training(seq_len=2048, global_batch=2, precision="bf16-pure")
        options = TrainingOptions(stack=find_stack("fsdp2"))
        return train(load_model("llama-3.1-8b"), Cluster.parse("2xrtx-4090"), plan, job, options).memory.buffers

    assert buffers(*words) - buffers() == 2 * (128256 * 4096 + 4096) / 2


@settings(max_examples=12, deadline=None)
@given(cases(Wanted(stacks=("transformers", "megatron", "deepspeed"))), st.sampled_from(OFFLOADS[:1] + OFFLOADS[3:]))
def test_offload_never_takes_more_memory_nor_less_time(case: TrainingCase, what: str) -> None:
    """Whatever lies on the host is not on the device, and copies do not make a step shorter but for the update."""
    case = replace(case, cluster=Cluster.parse(f"{case.plan.num_devices}xh100-sxm-80gb"))
    plain, other = report_of(case, ()), report_of(replace(case, plan=replace(case.plan, offload=(what,))), ())
    assert other.device_bytes <= plain.device_bytes * (1 + 1e-12)
    assert other.memory.host >= 0
    if what == "activations":
        assert other.step_seconds >= plain.step_seconds * (1 - 1e-12)


def test_gradients_need_their_optimizer_there() -> None:
    """Gradients without their optimizer, and parameters that are not sharded, are refused with what would do."""
    with pytest.raises(InputError, match="use gradients,optimizer"):
        report("gradients")
    with pytest.raises(InputError, match="offload = 'parameters': brings parameters in unit by unit"):
        report("parameters")


def test_frameworks_say_what_they_offload() -> None:
    """FSDP takes all three at once over several ranks, Megatron a sharded optimizer, and each names what would do."""
    fsdp = Plan(dp=2, sharding="fsdp", offload=("optimizer",))
    assert [p.field for p in stack_problems(find_stack("fsdp2"), fsdp)] == ["offload"]
    every = replace(fsdp, offload=("optimizer", "gradients", "parameters"))
    assert not stack_problems(find_stack("fsdp2"), every)
    assert [p.field for p in stack_problems(find_stack("fsdp2"), replace(every, dp=1))] == ["dp"]
    for offload, field in (("activations", "offload"), ("optimizer", "sharding")):
        megatron = Plan(dp=2, offload=(offload,))
        assert [p.field for p in stack_problems(find_stack("megatron"), megatron)] == [field]
    assert [p.field for p in stack_problems(find_stack("pytorch"), Plan(offload=("optimizer",)))] == ["offload"]


def test_devices_of_a_node_share_its_memory() -> None:
    """Each device has its link, and with its neighbours the memory in which updates run."""
    one, eight = (host_of(Cluster.parse(f"{n}xh100-sxm-80gb")) for n in (1, 8))
    assert one.link_bytes_per_second == eight.link_bytes_per_second
    assert one.memory_bytes_per_second == 8 * eight.memory_bytes_per_second


@pytest.mark.parametrize(
    ("model", "devices", "degrees", "seconds"),
    [
        ("qwen3-30b-a3b", 16, {"tp": 2, "pp": 2, "ep": 4, "dp": 4}, 3.19),
        ("qwen3-0.6b", 1, {}, 0.93),
    ],
)
def test_ranks_of_megatron_update_on_the_host_side_by_side(
    model: str, devices: int, degrees: dict[str, int], seconds: float
) -> None:
    """What a step takes longer with its optimizer on the host, by Megatron-Bridge's card and NeMo RL's pull 3628."""
    plan = Plan(**degrees, sharding="distributed-optimizer", offload=("optimizer",))
    job = Training(seq_len=4096, global_batch=8)
    cluster = Cluster.parse(f"{devices}xh100-sxm-80gb")
    update = train(load_model(model), cluster, plan, job, TrainingOptions(stack="megatron")).evaluation.step.optimizer
    assert update == pytest.approx(seconds, rel=0.1)


def test_more_on_the_host_is_never_more_on_the_device() -> None:
    """Bytes of the device fall with every copy that moves, in any combination."""
    held = {
        words: report(*words, stack="deepspeed", sharding="zero3").device_bytes
        for n in range(len(OFFLOADS) + 1)
        for words in combinations(OFFLOADS, n)
        if "gradients" not in words or "optimizer" in words
    }
    for words, bytes_ in held.items():
        for fewer, most in held.items():
            if set(fewer) < set(words):
                assert bytes_ <= most


@pytest.mark.parametrize(("memory", "fits"), [("64GiB", False), ("2TiB", True)])
def test_a_host_with_too_little_memory_fits_nothing(memory: str, fits: bool) -> None:
    """What eight devices keep on the host of their node has to be there, where its memory is known."""
    asked, plan = (
        Training(seq_len=512, global_batch=8),
        Plan(dp=8, micro_batch=1, sharding="fsdp", offload=("optimizer", "gradients", "parameters")),
    )
    cluster = Cluster.parse("8xh100-sxm-80gb", {"host_memory": memory})
    report = train(load_model("llama-3.1-8b"), cluster, plan, asked)
    verdict = report.verdict
    assert verdict.host_needed_bytes == 8 * report.host_bytes > 64 * 2**30
    assert report.fits is fits and verdict.short_by_bytes < 0
    assert (report.chance_to_fit > 0.9) is fits
    assert verdict.host_short_by_bytes == (0 if fits else verdict.host_needed_bytes - 64 * 2**30)
    assert not any(note.startswith("host_memory") for note in report.assumptions)
    less = [change for change in report.changes if change.host_needed_bytes < verdict.host_needed_bytes]
    assert fits or (less and len(less) == len(report.changes))
    assert all(change.field == "offload" for change in less if change.fits)


@pytest.mark.parametrize("memory", ["64GiB", "120GiB", "2TiB"])
def test_a_search_proposes_what_the_host_can_hold(memory: str) -> None:
    """A plan of a search fits where `train` says that it does, on the device and on the host of a node."""
    space = SearchSpace(offload=(("optimizer", "gradients", "parameters"),), tp=IntRanges.parse("1..2"))
    model, job = load_model("llama-3.1-8b"), Training(seq_len=512, global_batch=8)
    cluster = Cluster.parse("8xh100-sxm-80gb", {"host_memory": memory})
    found = plan_training(model, cluster, job, space, SearchOptions(risk=0.5, stack="deepspeed"))
    rows, fits = found.frame(), 0
    names = ("tp", "cp", "dp", "micro_batch", "sharding", "recompute", "cp_kind", "sequence_parallel")
    said = ("fits", "device_bytes", "host_short_bytes")
    for row in zip(*(np.array(rows[name]).tolist() for name in (*names, *said)), strict=True):
        plan = Plan(**dict(zip(names, row, strict=False)), offload=("optimizer", "gradients", "parameters"))
        report = train(model, cluster, plan, job, TrainingOptions(stack=find_stack("deepspeed")))
        assert report.fits == row[-3]
        assert (report.device_bytes, report.verdict.host_short_by_bytes) == pytest.approx(row[-2:])
        fits += row[-3]
    assert found.counts.fitting == fits


def test_a_host_that_is_not_known_is_said() -> None:
    """Without its memory the bytes that a node needs are listed among what was assumed; instances of clouds have it."""
    asked, plan = (
        Training(seq_len=512, global_batch=8),
        Plan(dp=8, micro_batch=1, sharding="fsdp", offload=("optimizer", "gradients", "parameters")),
    )
    report = train(load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb"), plan, asked)
    assert report.fits and any(note.startswith("host_memory: not known") for note in report.assumptions)
    assert Cluster.parse("p5.48xlarge").host_memory_bytes == 2 * 2**40
    assert Cluster.parse("a3-ultra").host_memory_bytes == 2952 * 2**30
