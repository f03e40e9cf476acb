"""Copies that live in the host's memory: bytes that they leave on the device, traffic, and seconds over the host link.

Sources: ZeRO-Offload arXiv:2101.06840 (optimizer and gradients), ZeRO-Infinity arXiv:2104.07857 (parameters too),
torch.distributed.fsdp CPUOffloadPolicy (all three), torchtune training/_activation_offloading.py and Unsloth
(activations, or the checkpoints of recompute), Megatron-LM core/optimizer/cpu_offloading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from shardwise.ledger.number import X, above, divide, largest, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.ops.overlap import CostModel
from shardwise.plans import Precision
from shardwise.records import dataclass
from shardwise.training._parts import ModelBlocks, Recipe, categorized, frozen_bytes, owned, trained
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedBytes(Generic[X]):
    """Bytes of a stage's copies on the device, and all that lies on the host for each of its ranks."""

    weights: X
    gradients: X
    optimizer: X
    activations: X
    host: X


def placed(
    recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X], state: tuple[X, X, X], in_flight: X
) -> OffloadedBytes[X]:
    """Return where the copies of a stage lie; `state` are (weights, gradients, optimizer), `in_flight` the activations.

    Gradients pass through the device a layer at a time, activations two layers at a time: the one at work, and the
    one on its way.
    """
    weights, gradients, optimizer = state
    if not recipe.offload:
        zero = 0 * weights
        return OffloadedBytes(
            weights=weights, gradients=gradients, optimizer=optimizer, activations=in_flight, host=zero
        )
    on = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": in_flight}
    if recipe.offloads("parameters"):
        apart = frozen_bytes(parts, stage)[2]
        on["weights"] = categorized("weights", 0 * weights + apart, "scales of weights, which stay on the device")
    if recipe.offloads("optimizer"):
        on["optimizer"] = categorized("optimizer", 0 * optimizer, "optimizer state on the host")
    if recipe.offloads("gradients"):
        layer = largest([above(n + m, 0, _layer_gradients(recipe, sizes, k.elements.dense, k.elements.expert),
                               0 * stage.count)
                         for n, m, k in zip(stage.layers, stage.mirrored, parts.kinds, strict=True)])  # fmt: skip
        on["gradients"] = categorized("gradients", minimum(gradients, layer), "gradients of a layer")
    if recipe.offloads("activations"):
        layer = largest([above(n + m, 0, k.kept_bytes, 0 * stage.count)
                         for n, m, k in zip(stage.layers, stage.mirrored, parts.kinds, strict=True)])  # fmt: skip
        on["activations"] = categorized("activations", minimum(in_flight, 2 * layer), "activations on their way")
    whole = weights + gradients + optimizer + in_flight
    return OffloadedBytes(**on, host=named(whole - total(on.values(), 0 * whole), "on the host"))


def _layer_gradients(recipe: Recipe, sizes: PlanSizes[X], dense: X, expert: X) -> X:
    width = recipe.precision.gradient_bytes
    if not recipe.shards_gradients:
        return width * (dense + expert)
    return width * (divide(dense, sizes.shard_share) + divide(expert, sizes.expert_share))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTraffic(Generic[X]):
    """Bytes that a rank moves over the host link: into the device and out of it, in each pass and once a step."""

    forward_in: X
    forward_out: X
    backward_in: X
    backward_out: X
    step_in: X
    step_out: X


def host_traffic(recipe: Recipe, sizes: PlanSizes[X], parts: ModelBlocks[X], stage: Stages[X]) -> HostTraffic[X]:
    """Return what a micro-batch and an update move over the host link.

    Parameters come in ahead of forward and, unless they stay, of backward, and their gradients go out; so do those of
    offloaded gradients. An optimizer alone on the host takes the gradients, and gives the weights back, once a step.
    """
    zero = 0 * stage.count
    classes = [(own.precision, owned(some, stage)) for own, some in trained(recipe, parts)]
    frozen = frozen_bytes(parts, stage)[:2]

    def rank(width: Callable[[Precision], float], sharded: bool, more: tuple[X, X] = (zero, zero)) -> X:
        dense = more[0] + total(width(p) * (params[0] + params[1]) for p, params in classes)
        expert = more[1] + total(width(p) * (params[2] + params[3]) for p, params in classes)
        return divide(dense, sizes.shard_share) + divide(expert, sizes.expert_share) if sharded else dense + expert

    weights = rank(lambda p: p.weight_bytes, recipe.shards_weights, frozen)
    gradients = rank(lambda p: p.gradient_bytes, recipe.shards_optimizer)
    kept = total((n * k.kept_bytes for n, k in zip(stage.layers, parts.kinds, strict=True)), zero)
    parameters, activations = recipe.offloads("parameters"), recipe.offloads("activations")
    early = recipe.offloads("gradients")
    updates = recipe.offloads("optimizer")
    return HostTraffic(
        forward_in=weights if parameters else zero,
        forward_out=kept if activations else zero,
        backward_in=(weights if parameters and not recipe.keeps_gathered else zero) + (kept if activations else zero),
        backward_out=gradients if early else zero,
        step_in=rank(lambda p: p.weight_bytes, recipe.shards_optimizer) if updates and not parameters else zero,
        step_out=gradients if updates and not early else zero,
    )


def host_update_seconds(costs: CostModel[X], moved: HostTraffic[X], streamed: X) -> X:
    """Return seconds of an update on the host, which streams so many bytes; new weights go back as they are made."""
    if costs.host is None:
        return 0 * streamed
    rate = costs.host.link_bytes_per_second
    update = named(streamed / costs.host.memory_bytes_per_second, "update on the host")
    return named(moved.step_out / rate + maximum(update, moved.step_in / rate), "optimizer step")
