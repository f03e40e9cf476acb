"""What the report of a plan says beside memory and seconds: FLOPs by convention, bands, phases of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from shardwise.cost import Band, Conditions, Efficiencies, band_of, lineage
from shardwise.ledger.flow import gradient_passes
from shardwise.models import Model
from shardwise.ops import blocks as ledgers
from shardwise.ops import train_flops
from shardwise.ops.count import whole_layout
from shardwise.plans import OBJECTIVES, Plan, Training
from shardwise.records import dataclass, replace
from shardwise.training._blocks import BlockCost
from shardwise.training._case import TrainingCase, stages_of
from shardwise.training._evaluate import Evaluation, PricedBlocks, step_of
from shardwise.training._ledger import ledger_of, units_of
from shardwise.training._overlap import hook_waits
from shardwise.training._step import scoring_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a plan fits: bytes of the device, of the plan, and what dominates; the same of the host of a node.

    `required_bytes` are those of the plan that may not leave the device: free blocks of the allocator and pages of the
    optimizer may. A `host_limit_bytes` of 0 is not known, and taken to be enough.
    """

    fits: bool
    limit_bytes: float
    needed_bytes: float
    required_bytes: float
    dominant: str
    host_limit_bytes: float = 0.0
    host_needed_bytes: float = 0.0

    @property
    def short_by_bytes(self) -> float:
        """Bytes that are missing; negative when there is room."""
        return self.needed_bytes - self.limit_bytes

    def chance(self, band: Band) -> float:
        """Return the chance that the device has what is required, as runs were off; 0 where the host lacks some."""
        return 0.0 if self.host_short_by_bytes else band.chance(self.limit_bytes / self.required_bytes)

    @property
    def host_short_by_bytes(self) -> float:
        """Bytes that the host of a node lacks; 0 where it has them, or its memory is not known."""
        return max(0.0, self.host_needed_bytes - self.host_limit_bytes) if self.host_limit_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of a step: what runs, for how long, and the bytes of tensors at its fullest."""

    name: str
    seconds: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What an engine generates for a step before it trains: seconds, new weights too, and devices of the engine alone.

    `fits` says whether the engine has room; its seconds are 0 where it has none.
    """

    seconds: float = 0.0
    devices: int = 0
    fits: bool = True


def goodput_of(job: Training, devices: int) -> float:
    """Return the share of time that trains: checkpoints and the work lost to failures taken off.

    A failure loses half a checkpoint interval and a restart (Daly 2006, first order).
    """
    rate, interval = job.failures_per_device_hour / 3600 * devices, job.checkpoint_interval_seconds
    saving = job.checkpoint_seconds / (interval + job.checkpoint_seconds) if interval else 0.0
    lost = rate * (job.restart_seconds + interval / 2)
    return (1 - saving) / (1 + lost)


def launch_notes(case: TrainingCase, whole: Evaluation[float]) -> tuple[str, ...]:
    """Return what is assumed where a tenth of a layer's seconds or more wait for a host that launches its kernels."""
    hooks = [sum(map(float, hook_waits(case.recipe, k))) for k in whole.parts.kinds]
    waits = [float(k.launch_waits) + more for k, more in zip(whole.parts.kinds, hooks, strict=True)]
    layers = [float(k.forward + k.backward) + more for k, more in zip(whole.parts.kinds, hooks, strict=True)]
    shares = [wait / max(layer, 1e-30) for wait, layer in zip(waits, layers, strict=True)]
    most = max(shares, default=0.0)
    if most < 0.1:
        return ()
    why = "whose Python launches its kernels one by one; larger micro-batches or CUDA graphs hide that"
    if any(hooks):
        why = "whose Python fetches the weights of each module under ZeRO-3; larger micro-batches hide that"
    fast, slow = case.stack.launch_hosts
    band = f"; the band allows for hosts that take {fast:g} to {slow:g} times as long" if fast < slow else ""
    return (f"launches: {most:.0%} of a layer's seconds wait for the host, {why}{band}",)


def seconds_elsewhere(case: TrainingCase, whole: Evaluation[float], priced: PricedBlocks | None) -> float:
    """Return the seconds of the step of a plan on a machine of other rates, or beside another host."""
    known = priced.elsewhere() if priced else None
    return step_of(case, whole.sizes, whole.stages, known=known).total


def _may_wait(k: BlockCost[float], slow: float) -> bool:
    """Return whether a layer would wait for a host whose launches take so many times as long, or waits for this one."""
    if slow == 1.0 or k.host is None:
        return False
    if k.host_ahead:
        return slow * sum(k.host) > k.forward + k.backward - k.launch_waits
    return any(slow * host > device for host, device in zip(k.host, (k.forward, k.backward), strict=True))


def host_range(case: TrainingCase, whole: Evaluation[float], priced: PricedBlocks | None) -> tuple[float, float]:
    """Return what a step takes beside the fastest and the slowest hosts that are known, over what it takes here."""
    if not any(_may_wait(k, case.stack.launch_hosts[1]) for k in whole.parts.kinds):
        return 1.0, 1.0

    def ratio(factor: float) -> float:
        launched = {
            name: getattr(case.stack, name) * factor for name in ("module_launch_seconds", "gradient_launch_seconds")
        }
        other = replace(case, stack=replace(case.stack, **launched))
        return seconds_elsewhere(other, whole, priced) / whole.step.total

    fast, slow = map(ratio, case.stack.launch_hosts)
    return min(fast, 1.0), max(slow, 1.0)


def with_values(model: Model, job: Training) -> Model:
    """Return the model that a job trains: one value a token in place of the vocabulary where rewards are learned.

    The GEMM of that one value is within that of a neighbour.
    """
    values = job.method in OBJECTIVES and OBJECTIVES[job.method].values
    return replace(model, head=False, tied=False) if values else model


def phases_of(case: TrainingCase, evaluation: Evaluation[float]) -> tuple[Phase, ...]:
    """Return the phases of a step in their order, rollouts left out; none where next tokens are trained on.

    Log-probabilities of the policy that generated, of mismatched answers and of the reference, and values of the
    critic, are forward passes over the batch (arXiv:2402.03300 algorithm 1); what is left of the step trains, the
    critic behind the policy.
    """
    recipe, objective = case.recipe, case.objective
    if not recipe.scorings and not objective.critic:
        return ()
    scoring = float(scoring_seconds(evaluation.sizes, evaluation.step.stages))
    peak = max(float(m.moments.get("scoring", 0.0)) for m in evaluation.memory)
    passes = {
        "old log-probabilities": int(case.scores_rollouts),
        "mismatched log-probabilities": int(objective.mismatched),
        "values": int(objective.critic),
    }
    passes["reference log-probabilities"] = recipe.scorings - sum(passes.values())
    rest = evaluation.step.total - recipe.scorings * scoring
    update = max(value for m in evaluation.memory for name, value in m.moments.items() if name != "scoring")
    models = ["policy update", "critic update"] if objective.critic else ["update"]
    return (
        *(Phase(name=name, seconds=n * scoring, peak_bytes=peak) for name, n in passes.items() if n),
        *(Phase(name=name, seconds=rest / len(models), peak_bytes=float(update)) for name in models),
    )


def model_flops_per_token(case: TrainingCase, coverage: Literal["full", "masked"] = "full") -> float:
    """Return model FLOPs a token: attention over the full square (PaLM appendix B), or over what masks leave.

    Of fine-tuning they are those of the gradients that there are; of preferences and rewards those of all models and
    of the passes without gradients too, which their step cannot do without.
    """
    return _of_all_models(case, *_trained_and_forward_flops(case, coverage))


def _of_all_models(case: TrainingCase, trained: float, forward: float) -> float:
    """Return what a step takes of which a model that trains takes so much, and a pass without gradients."""
    recipe = case.recipe
    return (1 + recipe.critics + recipe.critic_adapters) * trained + recipe.scorings * forward


def _trained_and_forward_flops(case: TrainingCase, coverage: Literal["full", "masked"]) -> tuple[float, float]:
    """Return the model FLOPs a token of a model that trains, and those of its forward pass."""
    if case.tuning is not None:
        return tuned_flops_per_token(case, coverage)
    trained = train_flops(case.model, case.job.seq_len, "model-full" if coverage == "full" else "model-causal")
    return trained, trained / 3


def recomputed_flops_per_token(case: TrainingCase) -> float:
    """Return the model FLOPs a token of the forward passes that backward runs again, attention over the whole square.

    Regions, modules and the layers of each stage count as they are recomputed, of a critic too; multi-token predictions
    do not.
    """
    y = whole_layout(1, case.job.seq_len, "full")
    flops = 0.0
    for i, kind in enumerate(case.kinds):
        units = units_of(case.stack, case.plan, kind)
        layers = sum(s.count * s.layers[i] for s in stages_of(case)) if units else 0
        ops = ledgers.block_ops(y, kind.block, case.model.hidden) if layers else ()
        flops += layers * sum(op.model_flops for op in ops if any(u.holds(op.region) for u in units))
    return _of_all_models(case, flops / case.job.seq_len, 0.0)


def tuned_flops_per_token(case: TrainingCase, coverage: Literal["full", "masked"]) -> tuple[float, float]:
    """Return the model FLOPs a token of fine-tuning: forward and of each GEMM the gradients it has, and forward."""
    y = whole_layout(1, case.job.seq_len, coverage, case.stack.name, case.tuning)
    once = replace(case, plan=Plan())
    written = ledger_of(case.model, once.plan, once.kinds, y)
    counts = Counter(once.order.layers)
    times = [*(counts[i] for i in range(len(once.order.blocks))), 1, 1, 1]
    parts = (*written.kinds, written.embedding, written.head, written.loss)
    forward, trained = 0.0, 0.0
    for n, part in zip(times, parts, strict=True):
        forward += n * sum(op.model_flops for op in part.ops)
        trained += n * sum((1 + gradient_passes(op)) * op.model_flops for op in part.ops)
    return trained / case.job.seq_len, forward / case.job.seq_len


IDEAL = Efficiencies(ideal=True)
# What tells comparable published runs apart.
_MANY_RANKS, _MANY_NODES, _LONG, _MANY_EXPERTS = 8, 8, 16384, 8
_NARROW = ("fp8", "fp4", "int8")
# Headlines that grow with the seconds of a step, and those that shrink.
GROWING = ("step_seconds", "training_seconds", "device_hours", "usd")
SHRINKING = ("tokens_per_second_per_gpu", "mfu", "hfu", "model_flops_per_second_per_gpu")
BYTES = ("memory.peak_bytes", "device_bytes")


def conditions(case: TrainingCase, family: str, hosts: tuple[float, float]) -> Conditions:
    """Return what decides how far published runs like a case were off; `hosts` is what `host_range` says."""
    cluster = case.cluster
    nodes = cluster.num_devices / cluster.devices_per_node
    conditions_of = {
        "experts": case.model.has_experts,
        "experts on Hopper": case.model.has_experts and family == "hopper",
        "experts on many ranks": case.plan.ep > _MANY_RANKS,
        "nodes": nodes > 1,
        "many nodes": nodes > _MANY_NODES,
        "narrow types": case.recipe.precision.compute in _NARROW,
        "long sequences": case.job.seq_len > _LONG,
        "many experts a token": most_chosen(case.model) > _MANY_EXPERTS,
        "fine-tuning": bool(case.tuning),
    }
    words = tuple(word for word, holds in conditions_of.items() if holds)
    device = cluster.device.chip
    return Conditions(stack=lineage(case.stack.measured_as), family=family, words=words, device=device, hosts=hosts)


def most_chosen(model: Model) -> int:
    """Return the most experts that a token goes to in a layer."""
    return max((block.experts.top_k for block in model.kinds if block.experts), default=0)


def intervals(
    headlines: Mapping[str, float | None], known: Conditions, case: TrainingCase, floor_seconds: float
) -> dict[str, tuple[float, float, float]]:
    """Return 10 %, median and 90 % of every headline of a plan; no step is shorter than the floor.

    A device shows no more than its limit, unless more of `required_bytes` than that are off as much.
    """
    memory, limit = case.memory_band, case.cluster.device.usable_memory_bytes
    seconds, band = headlines["step_seconds"] or 0.0, band_of("step_seconds", known)
    least = min(floor_seconds, seconds)
    low, typical, high = (max(seconds * factor, least) / seconds for factor in (band.low, band.typical, band.high))
    intervals_of: dict[str, tuple[float, float, float]] = {}
    for name in GROWING:
        if value := headlines[name]:
            intervals_of[name] = value * low, value * typical, value * high
    for name in SHRINKING:
        value = headlines[name] or 0.0
        intervals_of[name] = value / high, value / typical, value / low
    for name in BYTES:
        value = headlines[name] or 0.0
        intervals_of[name] = value * memory.low, value * memory.typical, value * memory.high
    required = headlines["required_bytes"] or 0.0
    most = (max(required * factor, limit) for factor in (memory.low, memory.typical, memory.high))
    low, typical, high = map(min, intervals_of["device_bytes"], most)
    return intervals_of | {"device_bytes": (low, typical, high)}
