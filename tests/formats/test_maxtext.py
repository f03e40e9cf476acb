"""MaxText's settings, in and out: what its meshes, batches and remat policies mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.formats import ExportCase, ImportContext, import_file, maxtext
from shardwise.formats._exported import canonical, canonical_plan
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Training, find_stack
from shardwise.training import TrainingOptions, train

FEW = st.sampled_from((1, 2, 4))
SOME = settings(max_examples=60, deadline=None)
# The words of configs/gpu/a3/llama_3.1_405b/128vm.sh, in another order.
SCRIPT = """
export RUN_NAME="llama-$(date +%Y)"
export EXECUTABLE="train"
python3 -m maxtext.trainers.pre_train.$EXECUTABLE "${CONFIGS:-$PWD/src/maxtext/configs}"/base.yml \
  run_name=$RUN_NAME hardware=gpu steps=10 model_name=llama3.1-405b attention=cudnn_flash_te remat_policy=full \
  per_device_batch_size=1.0 max_target_length=8192 dcn_fsdp_parallelism=128 ici_fsdp_parallelism=8 profiler=xplane
"""


@SOME
@given(data=st.data())
def test_a_plan_that_maxtext_runs_comes_back(data: st.DataObject) -> None:
    """Degrees within slices and across them, batches, policies, types and offload are read back as they were."""
    model = load_model(data.draw(st.sampled_from(("llama-3.1-8b", "mistral-7b-v0.1", "mixtral-8x7b", "llama-3.2-1b"))))
    tp, pp, dp = data.draw(FEW), data.draw(FEW), data.draw(st.sampled_from((2, 4, 8)))
    ep = data.draw(FEW) if model.has_experts else 1
    vpp = data.draw(st.sampled_from((1, 2))) if pp > 1 else 1
    usual = "looped-bfs" if vpp > 1 else "gpipe"
    sharding: Any = data.draw(st.sampled_from(("fsdp", "hsdp") if ep > 1 else ("none", "zero1", "fsdp", "hsdp")))
    plan = Plan(
        tp=tp, pp=pp, vpp=vpp, dp=dp * ep, ep=ep, etp=tp if model.has_experts else 1, sequence_parallel=tp > 1,
        schedule=usual if pp > 1 else "1f1b", sharding=sharding, shard=2 * ep if sharding == "hsdp" else 1,
        recompute="full", micro_batch=data.draw(FEW), offload=data.draw(st.sampled_from(((), ("activations",)))),
    )  # fmt: skip
    times = data.draw(FEW)
    batch = plan.dp * plan.micro_batch * times * (pp if pp > 1 else 1)
    precision = data.draw(st.sampled_from(("amp-bf16", "bf16-pure", "fp32", "tf32")))
    job = Training(seq_len=512, global_batch=batch, precision=precision, token_budget=512.0 * batch * 7)
    stack = find_stack("maxtext")
    policy = data.draw(st.sampled_from(("", *stack.runs.checkpoint_policy)))
    runs = times if pp > 1 and data.draw(st.booleans()) else 1
    stack = replace(stack, settings=replace(stack.settings, checkpoint_policy=policy, pipeline_runs=runs))
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    case = ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=stack)
    (text,) = maxtext.export(case).files.values()
    back = maxtext.read(text)
    assert canonical_plan(back.plan) == canonical_plan(plan) and back.job == replace(job, dropout=False)
    assert back.model is not None and canonical(back.model) == canonical(model)
    assert back.num_devices == plan.num_devices and not back.unknown
    assert back.stack.settings == stack.settings


def test_a_launch_on_gpus_is_read(tmp_path: Path) -> None:
    """Axes within a slice and across slices multiply; the file of MaxText's own defaults need not be here."""
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    case = import_file(script)
    assert case.model is not None and case.model.name == "llama-3.1-405b"
    assert (case.num_devices, case.plan.dp, case.plan.sharding) == (1024, 1024, "fsdp")
    assert (case.job.global_batch, case.job.seq_len, case.job.token_budget) == (1024, 8192, 10.0 * 1024 * 8192)


def test_sizes_of_base_yml_are_no_words_against_a_named_model(tmp_path: Path) -> None:
    """A whole base.yml beside the launch has sizes of its own, over which the named model goes."""
    (tmp_path / "base.yml").write_text("model_name: default\nbase_emb_dim: 2048\nper_device_batch_size: 12.0\n")
    script = tmp_path / "run.sh"
    script.write_text("python3 MaxText/train.py base.yml run_name=a model_name=llama2-7b per_device_batch_size=3\n")
    case = import_file(script, around=ImportContext(num_devices=8))
    assert case.model is not None and case.model.name == "llama-2-7b" and case.job.global_batch == 24


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"sequence_parallel": False, "tp": 2, "dp": 4}, "sequence_parallel"),
        ({"recompute": "none"}, "recompute"),
        ({"pp": 2, "dp": 4, "schedule": "1f1b"}, "schedule"),
        ({"sharding": "zero3", "offload": ("gradients",)}, "offload"),
    ],
)
def test_what_maxtext_does_not_run_is_refused(changed: dict[str, Any], field: str) -> None:
    """A stream that is not split, no recomputation, and 1F1B have no setting; each is refused by name."""
    plan = Plan(**{"dp": 8, "recompute": "full", "sharding": "fsdp", "sequence_parallel": True} | changed)
    job = Training(seq_len=512, global_batch=64)
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    with pytest.raises(InputError) as caught:
        maxtext.export(ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=find_stack("maxtext")))
    assert field in {problem.field for problem in caught.value.problems}


def test_states_of_maxtext_are_sixteen_bytes_a_parameter() -> None:
    """configs/base.yml: weights, gradients and both moments of 4 bytes, and no 16-bit copy that stays."""
    case = maxtext.read("base_config: base.yml\nmodel_name: qwen3-0.6b\nper_device_batch_size: 1\n", "a.yml")
    cluster, plan = Cluster.parse("8xh100-sxm-80gb"), replace(case.plan, dp=8, sharding="none", micro_batch=1)
    assert case.model is not None
    job = replace(case.job, global_batch=8)
    memory = train(case.model, cluster, plan, job, TrainingOptions(stack=case.stack)).memory
    assert memory.weights == memory.gradients == memory.optimizer / 2 == 4 * 596_049_920
