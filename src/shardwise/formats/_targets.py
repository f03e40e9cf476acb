"""What trainers call the linear layers that adapters stand beside: the names of the model's class."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.formats._imported import Imported
from shardwise.ledger.op import Op
from shardwise.models import EXPERT_NAMES, Model, layer_name
from shardwise.ops.adapter_parts import matches, modules_of
from shardwise.ops.count import whole_lines
from shardwise.plans import USUAL_TARGETS, VIRTUAL, Stack, Training, Tuning, tuning_of
from shardwise.records import replace
from shardwise.training import split_targets

_PARENTS = {"gpt2": {"attention": "attn.", "mlp": "mlp."}, "gpt_bigcode": {"attention": "attn.", "mlp": "mlp."}}
"""Types whose attention and feed-forward give a layer one name."""
_MEGATRON = {
    "qkv": "linear_qkv", "q_down": "linear_q_down_proj", "q_up": "linear_q_up_proj", "kv_down": "linear_kv_down_proj",
    "kv_up": "linear_kv_up_proj", "out": "linear_proj", "up": "linear_fc1", "down": "linear_fc2",
}  # fmt: skip
"""What Megatron-Core calls them (core/models/gpt/gpt_layer_specs.py)."""
_TABLES = {"embedding": "embed_tokens", "head": "lm_head"}


def target_names(job: Training, model: Model, stack: Stack) -> tuple[str, ...]:
    """Return the linear layers that a job's adapters stand beside, by the names of the model's class.

    >>> from shardwise.plans import find_stack
    >>> job = Training(seq_len=1, global_batch=1, adapter="lora", targets=("attention",))
    >>> target_names(job, Model.load("gpt2"), find_stack("trl"))
    ('c_attn', 'attn.c_proj')
    """
    targets, tuning = job.targets or USUAL_TARGETS, tuning_of(job, stack, model.family)
    if targets == USUAL_TARGETS or tuning is None or job.adapter in VIRTUAL:
        return targets
    these, every = (
        tuple(dict.fromkeys(name for op, layer in _chosen(model, t) for name in _names(model, t, op, layer)))
        for t in (tuning, replace(tuning, targets=USUAL_TARGETS))
    )
    return USUAL_TARGETS if set(these) == set(every) else these


def reached(job: Training, model: Model, stack: Stack) -> frozenset[tuple[str, str]]:
    """Return the operators that a job's adapters stand beside, and the layers of each.

    >>> from shardwise.plans import find_stack
    >>> job = Training(seq_len=1, global_batch=1, adapter="lora", targets=("o",))
    >>> sorted(reached(job, Model.load("gpt2"), find_stack("trl")))
    [('out', 'o')]
    """
    tuning = tuning_of(job, stack, model.family)
    return frozenset((op.name, layer) for op, layer in _chosen(model, tuning)) if tuning else frozenset()


def with_own_targets(case: Imported) -> Imported:
    """Return a case whose adapters stand beside layers that its model has: peft leaves names that match none.

    Megatron's adapters and torchtune's know the names of their own layers.
    """
    job, model = case.job, case.model
    tuning = tuning_of(job, case.stack, model.family) if model and job.targets else None
    if model is None or tuning is None or tuning.joint or not job.adapter or case.system == "torchtune":
        return case
    kept, lost = split_targets(model, tuning, job.targets)
    if not lost:
        return case
    note = f"targets {', '.join(lost)}: no linear layers of {model.name}, which peft leaves out"
    return replace(case, job=replace(job, targets=kept), assumed=(*case.assumed, note))


def _chosen(model: Model, tuning: Tuning) -> Iterator[tuple[Op[float], str]]:
    """Yield the operators with adapters, and the layers of each that have one."""
    for line in whole_lines(model):
        for op in line.ops if line.part != "mtp" else ():
            if (op.weights and op.kind in ("matmul", "grouped")) or op.role == "embedding":
                yield from ((op, one.short) for one in modules_of(tuning, op) if matches(tuning, op, one.short))


def _names(model: Model, tuning: Tuning, op: Op[float], layer: str) -> tuple[str, ...]:
    if tuning.joint and op.role in _MEGATRON:
        return (_MEGATRON[op.role],)
    if op.kind == "grouped":
        return ("experts",) if "experts" in tuning.targets else EXPERT_NAMES.get((tuning.experts, op.role), (layer,))
    if op.role in _TABLES:
        return (_TABLES[op.role],)
    name, region = layer_name(model.family, op.region, layer), op.region.partition(".")[0]
    return (_PARENTS.get(model.family, {}).get(region, "") + name if name == "c_proj" else name,)
