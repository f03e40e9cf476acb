"""From what was asked to a complete plan and job.

Replicas, micro-batch, accumulation and batch, every deduction listed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shardwise.cost import WANTED_CHANCE
from shardwise.errors import Problem, Problems
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import (
    AXES,
    LOSSES,
    SCALINGS,
    TUNINGS,
    UNSPLIT_LOSSES,
    Plan,
    Sharding,
    Stack,
    Training,
    Tuning,
    divisors,
    find_optimizer,
    objective_problems,
    one_of,
    with_loss_layers,
    with_stage_layers,
)
from shardwise.plans.laws import (
    batch_problems,
    domain_problems,
    field_problems,
    is_count,
    law_problems,
    node_problems,
)
from shardwise.plans.schedules import find_rules
from shardwise.records import dataclass, replace
from shardwise.training._tuning import fine_tuning_problems, split_problems, target_notes, tuning_notes
from shardwise.units import counted

# Seconds of a step of a plan and a job, None where it is not likely to fit.
Timed = Callable[[Plan, Training], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A training question as it was asked: 0 in `dp`, `micro_batch`.

    `global_batch` or `accumulation` asks to deduce it. `settled` says that another plan of the job was answered, which
    has nothing wrong by itself then.
    """

    model: Model
    cluster: Cluster
    plan: Plan
    job: Training
    stack: Stack
    accumulation: int = 0
    settled: bool = False
    risk: float = WANTED_CHANCE


def fits_with(risk: float) -> str:
    """Return how what is left open was chosen.

    >>> fits_with(0.9), fits_with(0)
    ('fits with a chance of 90%', 'fits')
    """
    return f"fits with a chance of {risk:.0%}" if risk else "fits"


def job_problems(job: Training, model: Model) -> Problems:
    """Return what is wrong with a job by itself."""
    problems = Problems()
    if not is_count(job.seq_len):
        problems.add("seq_len", job.seq_len, "must be a whole number of tokens of at least 1", "for example 4096")
    elif model.positions and job.seq_len > model.positions:
        rule = f"exceeds the {model.positions} learned positions of {model.name}"
        problems.add("seq_len", job.seq_len, rule, f"use at most {model.positions}, or override max_context")
    if not isinstance(job.global_batch, int) or isinstance(job.global_batch, bool) or job.global_batch < 0:
        problems.add("global_batch", job.global_batch, "must be a whole number of sequences", "use 0 to deduce it")
    for name in (
        "token_budget",
        "sample_budget",
        "failures_per_device_hour",
        "restart_seconds",
        "checkpoint_seconds",
        "checkpoint_interval_seconds",
    ):
        value = getattr(job, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
            problems.add(name, value, "must be a number of at least 0", "use 0 to leave it out")
    _budget(job, problems)
    with problems.collect():
        find_optimizer(job.optimizer, job.optimizer_rank)
    _experts(job, problems)
    problems.items += objective_problems(job).items
    if job.tuning not in TUNINGS:
        problems.add("tuning", job.tuning, "is not a way that runs are tuned", one_of(TUNINGS))
    if not 0 < job.attention_density <= 1:
        problems.add(
            "attention_density",
            job.attention_density,
            "is a share of the attention square, above 0 and at most 1",
            "use 1 for unpacked sequences",
        )
    if not job.checkpoint_interval_seconds and (job.failures_per_device_hour or job.checkpoint_seconds):
        why = "failures: each loses half of it" if job.failures_per_device_hour else "the seconds of a checkpoint"
        problems.add("checkpoint_interval", None, f"is needed with {why}", "for example 30min")
    if job.restart_seconds and not job.failures_per_device_hour:
        rule = "has no effect without failures"
        problems.add("restart", job.restart_seconds, rule, "give failures_per_device_hour, or leave it out")
    return problems


def _experts(job: Training, problems: Problems) -> None:
    if not job.expert_imbalance >= 1:
        problems.add(
            "expert_imbalance",
            job.expert_imbalance,
            "is the busiest expert rank's load over the mean, at least 1",
            "use 1 for even routing",
        )
    if not 0 <= job.capacity_factor < float("inf"):
        rule = "is the rows that an expert takes over the mean, above 0"
        problems.add("capacity_factor", job.capacity_factor, rule, "use 0 to drop none")
    if job.pad_to_capacity and not job.capacity_factor:
        rule = "needs a capacity that experts are filled up to"
        problems.add("pad_to_capacity", job.pad_to_capacity, rule, "give capacity_factor, or leave it out")


def _budget(job: Training, problems: Problems) -> None:
    """Record what is wrong between the budget of a run and its epochs."""
    if job.token_budget and job.sample_budget:
        problems.add("samples", job.sample_budget, "gives the budget that tokens give too", "give one of the two")
    if isinstance(job.epochs, bool) or not isinstance(job.epochs, (int, float)) or not 0 < job.epochs < float("inf"):
        problems.add("epochs", job.epochs, "must be a number above 0", "use 1 for one pass over the budget")
    elif job.epochs != 1 and not (job.token_budget or job.sample_budget):
        problems.add("epochs", job.epochs, "are passes over a budget, and there is none", "give tokens or samples")


def _replicas(question: Question, problems: Problems, notes: list[str]) -> Plan:
    plan = question.plan
    used = plan.tp * plan.tp2 * plan.cp * plan.pp
    n = question.cluster.num_devices
    if plan.dp == 0:
        if n % used:
            rule = f"tp x tp2 x cp x pp = {used} must divide the {n} devices"
            # Each axis that could take another value is named with the values that would do.
            axis = max((axis for axis in AXES if axis != "dp"), key=lambda a: getattr(plan, a))
            others = used // getattr(plan, axis)
            problems.add(
                axis,
                getattr(plan, axis),
                rule,
                one_of(divisors(n // others) if n % others == 0 else [])
                if n % others == 0
                else f"use a number of devices that {used} divides",
            )
            return replace(plan, dp=1)
        notes.append(f"dp {n // used}: fills {counted(n, 'device')}")
        return replace(plan, dp=n // used)
    if plan.num_devices != n:
        rule = f"tp x tp2 x cp x pp x dp = {plan.num_devices} must equal the {n} devices"
        fills = " (Plan(dp=0) fills the devices)" if plan.dp == 1 else ""
        remedy = f"use {n // used}{fills}" if n % used == 0 else f"use a cluster of {plan.num_devices} devices"
        problems.add("dp", plan.dp, rule, remedy)
    return plan


def complete(question: Question, seconds: Timed) -> tuple[Plan, Training, tuple[str, ...]]:
    """Return the plan, the job and the deductions made; raises `InputError` with everything that is wrong.

    Any two of global batch, micro-batch and accumulation give the third. With the batch alone the micro-batch is the
    one whose step is the fastest of those that fit; with none it is the largest that fits, at least 1.
    """
    problems, notes = Problems(), list[str]()
    if not question.settled:
        problems = job_problems(question.job, question.model)
        problems.items += question.stack.settings.problems().items
    plan = replace(question.plan, dp=question.plan.dp or 1, micro_batch=question.plan.micro_batch or 1)
    broken = field_problems(plan).items
    problems.items += broken
    if question.accumulation and not is_count(question.accumulation):
        problems.add(
            "accumulation",
            question.accumulation,
            "must be a whole number of micro-batches of at least 1",
            "use 0 to deduce it",
        )
    if broken:
        problems.raise_if_any()
    plan = replace(_replicas(question, problems, notes), micro_batch=question.plan.micro_batch)
    plan = _worded(question, plan, notes)
    if plan.sequence_parallel and (plan.tp == 1 or plan.layout == "summa"):
        plan = replace(plan, sequence_parallel=False)
    plan = with_stage_layers(plan, question.model.num_layers, question.stack.partition)
    if plan.stage_layers != question.plan.stage_layers:
        pieces = counted(plan.pp * plan.vpp, "stage") if plan.vpp == 1 else f"{plan.pp} x {plan.vpp} chunks"
        cut = ",".join(map(str, plan.stage_layers))
        notes.append(
            f"stage_layers {cut}: {question.model.num_layers} layers over {pieces} as {question.stack.name} cuts them"
        )
    problems.items += fine_tuning_problems(question.model, plan, question.job, question.stack).items
    if not problems.items:
        notes += tuning_notes(question.job, question.stack)
        notes += target_notes(question.model, question.job, question.stack, bool(question.plan.sharding_rules.weights))
    _paging_laws(question, plan, problems)
    seq_len = question.job.seq_len if is_count(question.job.seq_len) else 0
    problems.items += law_problems(question.model, replace(plan, micro_batch=plan.micro_batch or 1), seq_len)
    problems.items += domain_problems(plan, question.cluster.tiers[0].size)
    problems.items += node_problems(plan, question.cluster.devices_per_node)
    problems.raise_if_any()
    plan, job = _batch(question, plan, problems, notes, seconds)
    plan = _cut(question.stack, plan, job.global_batch, notes)
    able, runs = question.stack.runs, question.stack.settings.pipeline_runs
    problems.items += batch_problems(plan, job.global_batch, able.rounds, able.splits_batch, runs)
    _loss_laws(question.stack, plan, problems)
    if with_loss_layers(question.stack) is not question.stack:
        notes.append(f"loss fused-linear: {question.stack.name} switches Liger's norms and activations on with it")
    problems.items += update_problems(question.stack, plan, job.global_batch)
    problems.raise_if_any()
    return plan, job, tuple(notes)


def question_problems(question: Question) -> Problems:
    """Return what is wrong with a job, and with its framework's settings, of all plans that offload as a plan does."""
    problems, alone = job_problems(question.job, question.model), Plan(offload=question.plan.offload)
    problems.items += question.stack.settings.problems().items
    problems.items += fine_tuning_problems(question.model, alone, question.job, question.stack).items
    if not problems.items:
        _paging_laws(question, alone, problems)
        _loss_laws(question.stack, alone, problems)
    return problems


def placed_problems(stack: Stack, tuning: Tuning | None, plan: Plan) -> tuple[Problem, ...]:
    """Return what of a job and of settings the split of the layers does not allow."""
    problems = Problems()
    _loss_laws(stack, plan, problems)
    return (*problems.items, *(split_problems(plan, tuning, stack).items if tuning else ()))


def _loss_laws(stack: Stack, plan: Plan, problems: Problems) -> None:
    """Record a loss, or a recipe of 8 bits, that the framework or the plan does not allow.

    Megatron's losses are its own, and those that take the head with them read a whole vocabulary. Transformer Engine
    scales by no rows.
    """
    loss, split = stack.settings.loss, stack.vocabulary == "split" and plan.tp > 1
    own = stack.loss.startswith("vocab-parallel")
    able = [one for one in LOSSES if one.startswith("vocab-parallel") == own and not (split and one in UNSPLIT_LOSSES)]
    if loss and loss not in able:
        where = ", which splits the vocabulary" if split else ""
        problems.add("loss", loss, f"is no cross entropy of {stack.name}{where}", one_of(able))
    if stack.settings.fp8_recipe == "rowwise" and stack.saves_quantised:
        rule = f"is a recipe of torchao, which {stack.name} does not run"
        problems.add("fp8_recipe", "rowwise", rule, one_of([one for one in SCALINGS if one != "rowwise"]))


def update_problems(stack: Stack, plan: Plan, global_batch: int) -> tuple[Problem, ...]:
    """Return what is wrong with an update in backward of gradients that are not whole (torchtune optimizer_in_bwd)."""
    problems, count = Problems(), global_batch // (plan.dp * plan.micro_batch)
    if stack.settings.updates_in_backward and count > 1:
        rule = f"updates with the gradients of one micro-batch, and a step has {count}"
        problems.add(
            "updates_in_backward", True, rule, f"use --accumulation 1 (micro_batch {plan.micro_batch * count})"
        )
    return tuple(problems.items)


def _paging_laws(question: Question, plan: Plan, problems: Problems) -> None:
    """Record optimizers of bitsandbytes that a device has no kernel of or no driver pages, or that the host holds.

    bitsandbytes asks for CUDA's managed memory (csrc/pythonInterface.cpp cget_managed_ptr). For Metal it has products
    with 4-bit weights since 0.50 and no update of 8-bit states (0.50.1 backends/mps/ops.py, default/ops.py).
    """
    name, vendor = question.job.optimizer, question.cluster.device.vendor
    optimizer = find_optimizer(name)
    if vendor == "Apple" and optimizer.eight_bits:
        problems.add("optimizer", name, "has no kernel for Metal in bitsandbytes", "use adam, or adafactor")
        return
    if not optimizer.paged:
        return
    if vendor not in ("NVIDIA", "generic"):
        rule = f"needs CUDA's managed memory, which {question.cluster.device.name} has not"
        problems.add("optimizer", name, rule, f"use {name.removeprefix('paged-')}")
    if "optimizer" in plan.offload:
        rule = "pages states between device and host that offload keeps on the host"
        problems.add("optimizer", name, rule, f"use {name.removeprefix('paged-')}, or leave optimizer out of offload")


def _worded(question: Question, plan: Plan, notes: list[str]) -> Plan:
    """Return the plan with its sharding in the framework's own word."""
    own = question.stack.runs.word(plan.sharding)
    if own != plan.sharding:
        notes.append(f"sharding {own}: what {question.stack.name} calls {plan.sharding}")
    return replace(plan, sharding=cast(Sharding, own))


def _cut(stack: Stack, plan: Plan, batch: int, notes: list[str]) -> Plan:
    """Return a plan with the micro-batches that a framework cuts the batch of a replica into, the last one smaller.

    Source: as many as hold it, all but the last of one size (composer/core/data_spec.py _split_tensor, torch.chunk).
    """
    own, rest = divmod(batch, plan.dp) if is_count(batch) else (0, 1)
    if not stack.runs.splits_batch or plan.pp > 1 or rest or not own % plan.micro_batch:
        return plan
    size = -(-own // -(-own // plan.micro_batch))
    notes.append(
        f"micro_batch {size}: {counted(own, 'sequence')} of a replica in micro-batches of at most {plan.micro_batch}"
    )
    return replace(plan, micro_batch=size)


def _batch(
    question: Question, plan: Plan, problems: Problems, notes: list[str], seconds: Timed
) -> tuple[Plan, Training]:
    job, micro, steps = question.job, plan.micro_batch, question.accumulation
    if job.global_batch and micro and steps:
        if job.global_batch != micro * steps * plan.dp:
            rule = f"must equal micro_batch x accumulation x dp = {micro * steps * plan.dp}"
            problems.add("global_batch", job.global_batch, rule, "give two of the three")
        return plan, job
    if job.global_batch and steps:
        if job.global_batch % (steps * plan.dp):
            problems.add(
                "accumulation",
                steps,
                f"x dp = {steps * plan.dp} must divide the global batch {job.global_batch}",
                one_of(divisors(job.global_batch // plan.dp) if job.global_batch % plan.dp == 0 else []),
            )
            return replace(plan, micro_batch=1), job
        return replace(plan, micro_batch=job.global_batch // (steps * plan.dp)), job
    if micro:
        if not job.global_batch:
            steps = steps or _fewest(question, plan)
            notes.append(
                f"global_batch {micro * steps * plan.dp}: {counted(steps, 'micro-batch')} of {micro} on each of "
                f"{counted(plan.dp, 'replica')}"
            )
            job = replace(job, global_batch=micro * steps * plan.dp)
        return plan, job
    return _best(question, plan, steps, notes, seconds)


def _fewest(question: Question, plan: Plan) -> int:
    """Return the fewest micro-batches a schedule fills its pipeline with, as often as it runs in a step."""
    each = find_rules(plan.schedule).next_count(plan.pp, plan.pp)
    return each * question.stack.settings.pipeline_runs if plan.pp > 1 else 1


def _best(question: Question, plan: Plan, steps: int, notes: list[str], seconds: Timed) -> tuple[Plan, Training]:
    """Return the plan with the micro-batch of the fastest step that fits, the largest where the batch follows it."""
    job = question.job
    if job.global_batch:
        if job.global_batch % plan.dp:
            return replace(plan, micro_batch=1), job
        sizes = divisors(job.global_batch // plan.dp, 1024)
        candidates = [(replace(plan, micro_batch=b), job) for b in sizes]
    else:
        steps = steps or _fewest(question, plan)
        pairs = ((replace(plan, micro_batch=2**i), 2**i * steps * plan.dp) for i in range(11))
        candidates = [(p, replace(job, global_batch=g)) for p, g in pairs]
    rounds, runs = question.stack.runs.rounds, question.stack.settings.pipeline_runs
    legal = [(p, j) for p, j in candidates if not batch_problems(p, j.global_batch, rounds, runs=runs)]
    legal = legal or candidates[:1]
    fitting: list[tuple[float, tuple[Plan, Training]]] = []
    # Memory never falls with a larger micro-batch: the first that does not fit is the last that is asked for.
    for one in legal:
        best_seconds = seconds(*one)
        if best_seconds is None:
            break
        fitting.append((best_seconds, one))
    if not fitting:
        best, why = legal[0], f"the smallest: none {fits_with(question.risk)}"
    elif job.global_batch:
        best, why = min(fitting, key=lambda lookup: lookup[0])[1], f"the fastest that {fits_with(question.risk)}"
    else:
        best, why = fitting[-1][1], f"the largest that {fits_with(question.risk)}"
    notes.append(f"micro_batch {best[0].micro_batch}: {why}")
    if not job.global_batch:
        made = f"{counted(steps, 'micro-batch')} on each of {counted(plan.dp, 'replica')}"
        notes.append(f"global_batch {best[1].global_batch}: {made}")
    return best
