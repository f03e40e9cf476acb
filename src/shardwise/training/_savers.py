"""What may take less memory: single changes of a plan, its job or its framework's settings, and bundles of them.

Each is evaluated, none is assumed to save: what it saves may be negative, and its step may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Protocol, TypeAlias

from shardwise.errors import InputError, Problem
from shardwise.hardware import Device
from shardwise.plans import (
    OFFLOADS,
    WHOLE_LOSSES,
    LossKernel,
    Plan,
    Settings,
    Training,
    find_base,
    find_stack,
    proposed_for,
    usual_recompute,
)
from shardwise.plans.fields import PLAN, SETTINGS, TRAINING, renamed
from shardwise.plans.laws import stack_problems
from shardwise.records import dataclass, replace
from shardwise.training._case import TrainingCase
from shardwise.training._changes import JudgedPlan, stack_beside
from shardwise.training._evaluate import Evaluation
from shardwise.training._parts import StageMemory
from shardwise.units import show_bytes

FieldChanges = dict[str, Any]
_RECORDS = tuple((record, {f.name for f in fields(record)}) for record in (Plan, Training, Settings))
_WORTH_SAYING = 0.01  # of the bytes of a device: what saves or takes less is not told
_FLAGS = {name: key for key, name in renamed((*PLAN, *TRAINING, *SETTINGS)).items()}


class AnsweredPlan(JudgedPlan, Protocol):
    """An answer about a plan, as far as its savers read it."""

    @property
    def evaluation(self) -> Evaluation[float]:
        """Seconds and bytes of its stages."""

    @property
    def memory(self) -> StageMemory[float]:
        """Bytes of the heaviest stage."""

    @property
    def host_bytes(self) -> float:
        """What lies in the host's memory for a device."""

    @property
    def unlaunched(self) -> tuple[Problem, ...]:
        """What of the plan its framework cannot launch."""


Ask: TypeAlias = Callable[[TrainingCase], AnsweredPlan]


def leaner(device: Device) -> dict[str, str]:
    """Return the optimizer and the precision of fewer bytes that a device runs, where no plan of a job fits.

    >>> from shardwise.hardware import find_device
    >>> leaner(find_device("h100").device), leaner(find_device("apple-m3-max-40core").device)
    ({'optimizer': 'adam8bit', 'precision': 'bf16-pure'}, {'optimizer': 'adafactor'})
    """
    fields = {"optimizer": "adafactor" if device.vendor == "Apple" else "adam8bit"}
    return fields | ({"precision": "bf16-pure"} if "bf16" in device.matrix_flops else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySaver:
    """Changes that may save memory and what they do: bytes on device and host, the step, or the rule that they break.

    `saved_bytes` and `added_seconds` are against the plan as it was asked, seconds of as many sequences. Beside stated
    accumulation a step may be of another `global_batch` than the plan's; else 0.
    """

    flags: str
    saved_bytes: float = 0.0
    added_seconds: float = 0.0
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    step_seconds: float = 0.0
    fits: bool = False
    problem: str = ""
    global_batch: int = 0

    @property
    def saves(self) -> bool:
        """Whether it may be done and takes less memory."""
        return not self.problem and self.saved_bytes > 0


def split_changes(changes: FieldChanges) -> tuple[FieldChanges, FieldChanges, FieldChanges]:
    """Return changes by what they are of: (plan, job, settings)."""
    plan, job, settings = ({k: v for k, v in changes.items() if k in names} for _, names in _RECORDS)
    return plan, job, settings


def flags_of(changes: FieldChanges) -> str:
    """Return changes as the flags that make them.

    >>> flags_of({"offload": ("optimizer", "gradients"), "updates_in_backward": True}), flags_of({"offload": ()})
    ('--offload optimizer,gradients --optimizer-in-backward', '--offload none')
    """
    flags = []
    for name, value in changes.items():
        flag = "--" + _FLAGS.get(name, name).replace("_", "-")
        text = (",".join(value) or "none") if isinstance(value, tuple) else str(value)
        flags.append(flag if value is True else f"{flag} {text}")
    return " ".join(flags)


def _whole_loss(report: AnsweredPlan) -> LossKernel:
    """Return the framework's own cross entropy where that holds no logits, else Liger's."""
    own = report.case.stack.loss
    return own if own in WHOLE_LOSSES else "fused-linear"


_DENSE = ("attention",)
"""Layers that a model with experts has once."""


def singles(report: AnsweredPlan) -> Iterator[FieldChanges]:
    """Yield the single savers that differ from what a report has."""
    plan = report.case.plan
    offload = plan.offload
    yield from ({"recompute": mode} for mode in ("selective", "full"))
    policies = report.case.stack.runs.checkpoint_policy
    yield from ({"recompute": "full", "checkpoint_policy": name} for name in policies)
    yield from ({"loss": kernel} for kernel in (_whole_loss(report), "cce", "vocab-parallel-in-place"))
    yield {"tile_mlp": 8}
    if plan.micro_batch > 1:
        yield {"micro_batch": plan.micro_batch // 2}
    yield from ({"optimizer": name} for name in ("adam8bit", "paged-adam8bit", "adam4bit", "adafactor", "apollo"))
    yield {"updates_in_backward": True}
    yield {"precision": "bf16-pure"}
    for words in (("activations",), ("optimizer",), ("optimizer", "gradients")):
        yield {"offload": tuple(dict.fromkeys((*offload, *words)))}
    whole = report.case.stack.runs.word("fsdp")
    if plan.dp > 1 and not plan.sharding_rules.weights:
        yield {"sharding": whole}
    yield {"sharding": whole, "offload": tuple(dict.fromkeys((*offload, "optimizer", "gradients", "parameters")))}
    yield from _adapters(report)


def _wide_experts(report: AnsweredPlan) -> bool:
    """Return whether a model has experts that the format of the frozen weights passes over."""
    tuning = report.case.tuning
    return tuning is not None and tuning.wide_experts and report.case.model.has_experts


def _narrower(report: AnsweredPlan) -> tuple[str, ...]:
    """Return formats of fewer bits for frozen weights: experts that 4 bits pass over and widen are less in 16."""
    if _wide_experts(report):
        return ("bf16",)
    bits = find_base(report.case.job.base or "bf16").bits
    return tuple(name for name in ("bf16", "nf4") if find_base(name).bits < bits)


def _adapters(report: AnsweredPlan) -> Iterator[FieldChanges]:
    """Yield fine-tuning with adapters, and less of those that a job has: none beside each of many experts."""
    job, experts = report.case.job, report.case.model.has_experts
    if not job.adapter:
        yield {"adapter": "lora"}
        yield {"adapter": "lora", "base": "nf4"}
        return
    yield from ({"base": name} for name in _narrower(report))
    yield {"adapter_precision": "bf16"}
    if experts and not job.targets:
        yield {"targets": _DENSE}
    if job.adapter_dropout:
        yield {"adapter_dropout": 0.0}


def bundles(report: AnsweredPlan) -> Iterator[FieldChanges]:
    """Yield savers together, from what leaves a full fine-tune as it is to what trains adapters alone."""
    lean: FieldChanges = {"recompute": "full", "loss": _whole_loss(report)}
    narrow: FieldChanges = {**lean, "precision": "bf16-pure", "optimizer": "adam8bit"}
    early = ({**narrow, "updates_in_backward": True},) if report.evaluation.sizes.num_micro == 1 else ()
    # Frameworks send states away with what is sharded, on one device too.
    away: FieldChanges = {**lean, "precision": "bf16-pure", "sharding": report.case.stack.runs.word("fsdp")}
    away["offload"] = OFFLOADS
    if report.case.job.adapter:
        bases = ({**lean, "base": name} for name in _narrower(report))
        yield from ({"recompute": "full"}, lean, *bases, {**lean, "offload": ("activations",)})
        if report.case.model.has_experts and not report.case.job.targets:
            yield {**lean, "targets": _DENSE}
        states: FieldChanges = {**lean, "sharding": away["sharding"], "offload": away["offload"][:-1]}
        yield from (states, {**states, "base": "nf4"}, {**states, "base": "nf4", "offload": away["offload"]})
        return
    yield from ({"recompute": "full"}, lean, narrow, *early, away)
    small: FieldChanges = {**lean, "adapter": "lora", "base": "nf4"}
    yield from ({**lean, "adapter": "lora"}, small)
    yield {**small, "sharding": away["sharding"], "offload": away["offload"]}


def tried(report: AnsweredPlan, ask: Ask, changes: FieldChanges, stack: str = "") -> MemorySaver:
    """Return what changes of a report do, under its own framework or the one that is named."""
    flags = _flags_beside(report.case, changes, stack)
    try:
        report_with = ask(_changed(report.case, changes, stack))
    except InputError as error:
        return MemorySaver(flags=flags, problem=str(error.problems[0]))
    new = _newly(report, report_with.unlaunched)
    asked, batch = report.case.job.global_batch, report_with.case.job.global_batch
    return MemorySaver(
        flags=flags,
        saved_bytes=report.device_bytes - report_with.device_bytes,
        added_seconds=report_with.step_seconds * (asked / batch) - report.step_seconds,
        device_bytes=report_with.device_bytes,
        host_bytes=report_with.host_bytes,
        step_seconds=report_with.step_seconds,
        fits=report_with.fits,
        problem=str(new[0]) if new else "",
        global_batch=0 if batch == asked else batch,
    )


def _flags_beside(case: TrainingCase, changes: FieldChanges, stack: str) -> str:
    """Return changes as flags beside those of a case, which stays as it is where a framework would do otherwise."""
    then = _changed(case, changes, stack)
    turned = usual_recompute(case.stack, case.job.base) != usual_recompute(then.stack, then.job.base)
    # Checkpoints on the host are asked for without the word for recomputation, too.
    turned |= "activations" in case.plan.offload and "activations" not in then.plan.offload
    kept: dict[str, Any] = {"recompute": case.plan.recompute} if turned and not case.plan.modules else {}
    if then.stack.usual_offload and then.plan.recompute == "full" != case.plan.recompute and not then.plan.offload:
        kept["offload"] = "none"
    kept |= {"offload": case.plan.offload} if case.stack.usual_offload not in ((), then.stack.usual_offload) else {}
    named = stack or stack_beside(case, then)
    if named and case.job.base.startswith("nf4") and find_stack(named).four_bits != case.stack.four_bits:
        kept["base"] = case.job.base
    return flags_of({**kept, **changes, **({"stack": named} if named else {})})


def _changed(case: TrainingCase, changes: FieldChanges, stack: str = "") -> TrainingCase:
    """Return a case with changes, under its own framework or the one that is named."""
    plan, job, settings = split_changes(changes)
    own = replace(find_stack(stack) if stack else case.stack, settings=replace(case.stack.settings, **settings))
    return replace(case, plan=replace(case.plan, **plan), job=replace(case.job, **job), stack=own)


def _newly(report: AnsweredPlan, problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems of fields that the framework does not refuse of the report's plan."""
    refused = {problem.field for problem in report.unlaunched}
    return [problem for problem in problems if problem.field not in refused]


def _launches(report: AnsweredPlan, changes: FieldChanges) -> bool:
    """Return whether the report's framework may run a plan with changes: where not, nobody asks what it takes there."""
    case = _changed(report.case, changes)
    return not _newly(report, stack_problems(case.stack, case.plan, **case.job_words))


def savers_of(report: AnsweredPlan, ask: Ask) -> tuple[MemorySaver, ...]:
    """Return every single saver: what may be done first, what saves most before the others."""
    savers = [tried(report, ask, changes) for changes in singles(report) if _news(report, changes)]
    return tuple(sorted(savers, key=lambda one: (bool(one.problem), -one.saved_bytes)))


def _news(report: AnsweredPlan, changes: FieldChanges) -> FieldChanges:
    """Return those of some changes that ask for something else than the report has."""
    case = report.case
    own = case.job.precision or (case.stack.precision if case.tuning else case.recipe.precision.name)
    has: FieldChanges = {"precision": own, "loss": case.stack.loss_kernel}
    records = (case.plan, case.job, case.stack.settings)
    for record, (_, names) in zip(records, _RECORDS, strict=True):
        has = {**{name: getattr(record, name) for name in names}, **has}
    return {name: value for name, value in changes.items() if has[name] != value}


def _distinct(report: AnsweredPlan, bundles: Iterable[FieldChanges]) -> list[FieldChanges]:
    """Return bundles without what the report has already, each once."""
    distinct: list[FieldChanges] = []
    for changes in bundles:
        news = _news(report, changes)
        if news and news not in distinct:
            distinct.append(news)
    return distinct


def _tried_anywhere(report: AnsweredPlan, ask: Ask, changes: FieldChanges) -> MemorySaver:
    """Return what changes do under the report's framework, or under another one where it does not run them."""
    other = proposed_for("updates_in_backward" if "updates_in_backward" in changes else "savers")
    if report.case.stack.name == other or _launches(report, changes):
        one = tried(report, ask, changes)
        if not one.problem or report.case.stack.name == other:
            return one
    return tried(report, ask, changes, other)


def proposals(report: AnsweredPlan, ask: Ask) -> tuple[MemorySaver, ...]:
    """Return the bundles of savers that fit, the quickest first, each under a framework that runs it.

    What fits no device of several whole has its weights sharded too. Where none fits the one that needs least is
    returned alone.
    """
    plan, proposed = report.case.plan, []
    word = report.case.stack.runs.word("fsdp")
    for changes in _distinct(report, bundles(report)):
        one = _tried_anywhere(report, ask, changes)
        if not one.fits and plan.dp > 1 and not plan.sharding_rules.weights and "sharding" not in changes:
            one = _tried_anywhere(report, ask, {**changes, "sharding": word})
        proposed.append(one)
    if _wide_experts(report) and report.case.stack.runs.quantize_moe_experts:
        proposed.append(tried(report, ask, {"recompute": "full", "quantize_moe_experts": True}))
    elif _wide_experts(report):
        storing = proposed_for("narrow_experts")
        hosted = dict.fromkeys((*plan.offload, *find_stack(storing).usual_offload))
        proposed.append(tried(report, ask, {"recompute": "full", "offload": tuple(hosted)}, storing))
    able = [one for one in proposed if not one.problem]
    fitting = sorted((one for one in able if one.fits), key=lambda one: one.step_seconds)
    return tuple(fitting or sorted(able, key=lambda one: one.device_bytes)[:1])


# A job without its fine-tuning.
_WHOLE: FieldChanges = {
    name: getattr(Training(seq_len=1, global_batch=1), name)
    for name in (
        *("adapter", "rank", "oft_block_size", "targets", "adapter_alpha", "adapter_dropout", "adapter_precision"),
        *("base", "trains"),
    )
}


def surprises_of(report: AnsweredPlan, ask: Ask) -> tuple[str, ...]:
    """Return what takes memory that users of a trainer do not expect, each against the plan without it."""
    adapted = report.case.tuning and report.case.job.adapter
    own = _surprises(report, ask) if adapted else ()
    return (*own, *_whole_gradients(report, ask), *_padded_experts(report, ask))


def _padded_experts(report: AnsweredPlan, ask: Ask) -> Iterator[str]:
    """Yield how often experts are held and sent where the sharding group has more ranks than there are experts."""
    case, ranks = report.case, int(report.evaluation.sizes.expert_share)
    own = case.model.most_experts // case.plan.ep
    if not case.plan.sharding_rules.weights or case.stack.fsdp_padding != "rows" or not 0 < own < ranks:
        return
    flat = replace(case, stack=replace(case.stack, fsdp_padding="flat"))
    more = report.device_bytes - ask(flat).device_bytes
    if more > _WORTH_SAYING * report.device_bytes:
        times = f"{own} experts are padded to the {ranks} ranks that share them, held and sent {ranks / own:.3g} times"
        yield f"{times}, {show_bytes(more)} more: --sharding hsdp --shard {own} pads nothing, nor does torchtitan"


def _whole_gradients(report: AnsweredPlan, ask: Ask) -> Iterator[str]:
    case = report.case
    several = case.job.global_batch > case.plan.dp * case.plan.micro_batch
    if case.stack.whole_gradients and case.plan.sharding_rules.weights and several:
        each = replace(case.stack, settings=replace(case.stack.settings, sync_each_batch=True))
        saved = report.device_bytes - ask(replace(case, stack=each)).device_bytes
        if saved > _WORTH_SAYING * report.device_bytes:
            why = "gradients stay whole until the last micro-batch (no_sync)"
            yield f"{why}: --sync-each-batch saves {show_bytes(saved)}"


def _surprises(report: AnsweredPlan, ask: Ask) -> Iterator[str]:
    case, own = report.case, report.memory.activations
    job, tuning = case.job, case.tuning
    if tuning is None:
        return

    def kept(changes: FieldChanges) -> float:
        """Return the bytes of activations with other words of the job, as many where those do not go together."""
        try:
            return ask(replace(case, job=replace(job, **changes))).memory.activations
        except InputError:
            return own

    def fewer(changes: FieldChanges) -> float:
        """Return the bytes that other words of the job save, 0 for less than a hundredth of all."""
        saved = tried(report, ask, changes).saved_bytes
        return saved if saved > _WORTH_SAYING * report.device_bytes else 0.0

    if (more := own - kept(_WHOLE)) > _WORTH_SAYING * report.device_bytes:
        yield f"keeps {show_bytes(more)} more of activations than full fine-tuning does"
    if tuning.width == 4 and (saved := fewer({"adapter_precision": "bf16"})):
        # Beside weights that are no floats peft makes adapters in fp32 (tuners_utils.py
        # _move_adapter_to_device_of_base_layer); trl casts them. Sharded 4-bit weights are stored as floats.
        stored = tuning.base.narrow and not case.plan.sharding_rules.weights
        how = "a cast of the script's own, as TRL has" if stored else "autocast_adapter_dtype=False"
        words = f"--adapter-precision bf16 ({how})"
        yield f"fp32 adapters copy what enters them: {words} saves {show_bytes(saved)}"
    if tuning.dropout and (saved := fewer({"adapter_dropout": 0.0})):
        share = f"{own / kept({'adapter_dropout': 0.0}) - 1:.0%}"
        yield f"dropout keeps copies and masks, {share} of activations: --adapter-dropout 0 saves {show_bytes(saved)}"
    if job.adapter == "dora" and (saved := fewer({"adapter": "lora"})):
        yield f"DoRA keeps an identity matrix beside each layer: --adapter lora saves {show_bytes(saved)}"
    if tuning.base.narrow and (saved := fewer({"base": "bf16"})):
        rest = "experts are wide beside it" if _wide_experts(report) else "what stands beside it is in fp32"
        yield f"{job.base} saves nothing at this length, {rest}: --base bf16 saves {show_bytes(saved)}"
    if tuning.base.bitsandbytes and case.plan.sharding_rules.weights:
        yield f"{case.plan.sharding} shards {job.base} only where bnb_4bit_quant_storage is the type of the compute"
    if case.model.tied and not {"embedding", "head"}.isdisjoint(job.trains):
        yield "embedding and head share one table, which trains once for both"
