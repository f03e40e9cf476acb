"""What runs beside what in a training step: what of each message or copy stays exposed, and what compute loses to it.

| what moves | beside | exposed |
|---|---|---|
| messages of an operator | its own kernels (`ops/overlap.py`) | what exceeds them; a step of a ring, a panel |
| tokens to experts and back | the experts, or what precedes them, of a paired micro-batch | what exceeds it |
| weights and gradients of a unit (ZeRO-2, ZeRO-3, FSDP) | a layer's forward or backward pass | what exceeds it |
| of the ends of a model | nothing; a layer where they are wrapped apart | what exceeds it |
| gradients and new weights once a step | the passes of a micro-batch | the last bucket at least |
| copies on the host | both passes of a micro-batch | the first layer's at least |

Messages hold cores meanwhile, which compute loses; those of copy engines hold none.
"""

from __future__ import annotations

from typing import Generic

from shardwise.ledger.number import X, above, divide, is_plain, maximum, minimum, total
from shardwise.ledger.traced import named
from shardwise.ops.overlap import CostModel, Pairing, bucketed
from shardwise.plans import Schedule, find_rules
from shardwise.records import dataclass, replace
from shardwise.training._blocks import BlockCost
from shardwise.training._fsdp_units import end_units, gathered_elements, scattered_elements, scattered_ends
from shardwise.training._offload import HostTraffic
from shardwise.training._parts import ModelBlocks, Recipe, in_compute
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages
from shardwise.training._state import (
    StateMessage,
    gathers,
    message_seconds,
    reductions,
    scatters,
    state_seconds,
    updates,
)


def paired_blocks(costs: CostModel[X], when: Pairing, parts: ModelBlocks[X]) -> ModelBlocks[X]:
    """Return the blocks as they run where expert messages hide behind a paired micro-batch, whose cores they hold."""
    if when == "never" or not costs.may_overlap("ep") or "ep" not in costs.group_shapes:
        return parts
    span = costs.group_shapes["ep"]
    share = 1.0 if when == "always" else above(span[-1], span[0], 1.0, 0.0)

    def slowed(k: BlockCost[X]) -> BlockCost[X]:
        if "ep" not in k.exposed:
            return k
        pairs = paired(k, share)
        hidden = k.exposed["ep"] - pairs.exposed["ep"]
        lost = named(costs.slowdown_seconds(hidden), "slowed by expert messages")
        slow = replace(pairs, backward_input=pairs.backward_input + lost, compute=pairs.compute + lost)
        early, late = _behind_host(slow)
        return replace(
            slow,
            forward=slow.forward + early,
            backward_input=slow.backward_input + late,
            compute=slow.compute + early + late,
            launch_waits=slow.launch_waits + early + late,
            unpaired=hidden - lost - early - late,
        )

    return replace(parts, kinds=tuple(map(slowed, parts.kinds)), head=slowed(parts.head))


def paired(k: BlockCost[X], share: X | float = 1.0) -> BlockCost[X]:
    """Return a layer whose expert messages, or a share of them, run beside the compute of a paired micro-batch.

    DualPipe overlaps the forward of one micro-batch with the backward of another (arXiv:2412.19437 section 3.2.1,
    figure 4), Megatron-LM likewise (core/models/common/model_chunk_schedule_plan.py, run): gradients come back from
    where outputs went beside the forward pass up to the router, tokens and gradients of experts' outputs travel beside
    the experts, outputs beside the backward pass up to the router; what is over its part stays exposed.
    """
    waits = k.exposed["ep"]
    left = over_windows(k) * share + waits * (1 - share)
    gone = 1 - left / maximum(waits, 1e-30)
    hidden = named(waits - left, "expert messages behind the paired micro-batch")
    ahead = gone * k.forward_exposed.get("ep", 0 * waits)
    return replace(
        k,
        forward=named(k.forward - ahead, "forward, paired"),
        backward_input=named(k.backward_input - (hidden - ahead), "input gradients, paired"),
        exposed={**k.exposed, "ep": left},
        forward_exposed={**k.forward_exposed, "ep": k.forward_exposed.get("ep", 0 * waits) - ahead},
        hidden={**k.hidden, "ep": k.hidden.get("ep", 0 * left) + hidden},
        behind_pair={"ep": 1 - (1 - k.behind_pair.get("ep", 0 * gone)) * (1 - gone)},
    )


def _behind_host(k: BlockCost[X]) -> tuple[X, X]:
    """Return the seconds that each pass of a layer is shorter than the host that launches it."""
    zero = 0 * k.forward
    if k.least is None or k.host_ahead:
        return zero, zero
    waits = [maximum(least - device, 0.0) for least, device in zip(k.least, (k.forward, k.backward), strict=True)]
    return named(waits[0], "launches by Python modules"), named(waits[1], "launches of the backward pass")


def over_windows(k: BlockCost[X]) -> X:
    """Return the seconds of a layer's expert messages that are over the compute which each runs beside.

    Those that recompute sends again stand beside the experts, with their recompute.
    """
    waits, zero = k.exposed["ep"], 0 * k.exposed["ep"]
    ends = {"combine backward": "before forward", "combine forward": "before backward"}
    over = [maximum(k.windows.get(sent, zero) - k.windows.get(of, zero), 0.0) for sent, of in ends.items()]
    middle = waits - total((k.windows.get(sent, zero) for sent in ends), zero)
    return total(over, maximum(middle - k.windows.get("experts", zero) - k.replay, 0.0))


def lost_seconds(costs: CostModel[X], messages: tuple[StateMessage[X], ...], hidden: X) -> X:
    """Return the seconds that compute loses to messages of which so many seconds are hidden beside it, evenly.

    Over fewer adapters than usual a message lasts longer on fewer cores, and takes what it takes over the usual ones.
    """
    whole = lost = zero = 0 * hidden
    if is_plain(hidden, 0):
        return zero
    usual = costs.with_usual_adapters()
    for one in messages:
        seconds = message_seconds(costs, one)
        busy = seconds if usual is costs else minimum(seconds, message_seconds(usual, one))
        whole, lost = whole + seconds, lost + busy * costs.lost_share(one.group)
    return hidden * (lost / maximum(whole, 1e-30))


def _layers(stage: Stages[X]) -> X:
    """Return the layers of a stage, one at least."""
    return maximum(total(stage.layers, 0 * stage.count), 1)


def unit_rounds(sizes: PlanSizes[X], recipe: Recipe) -> tuple[X, X, X]:
    """Return in which share of the micro-batches a unit gathers, whether backward does too, and in which it scatters.

    Every micro-batch gathers ahead of forward and, unless weights are kept, of backward, or, where a pipeline keeps
    weights gathered and gradients whole, one of a step gathers and one scatters (torch.distributed.pipelining,
    FSDPModule). Gradients that are whole until the last micro-batch are scattered once a step (FSDP's no_sync).
    """
    one = 0 * sizes.num_micro + 1
    regathers = 0 * one if recipe.keeps_gathered else one
    reduced = one / sizes.num_micro if recipe.stack.whole_gradients and recipe.shards_weights else one
    if not recipe.stack.pipeline_keeps_gathered:
        return one, regathers, reduced
    once = one / sizes.num_micro
    return above(sizes.pp, 1, once, one), above(sizes.pp, 1, 0 * one, regathers), above(sizes.pp, 1, once, reduced)


def once_a_step(sizes: PlanSizes[X], recipe: Recipe) -> X:
    """Return 1 where a stage waits once a step for what `unit_rounds` spreads over the micro-batches, else 0.

    A pipeline that keeps weights gathered gathers before the first forward pass of a stage, and scatters behind its
    last backward pass: the other micro-batches find weights and gradients there.
    """
    one = 0 * sizes.num_micro + 1
    return above(sizes.pp, 1, one, 0 * one) if recipe.stack.pipeline_keeps_gathered else 0 * one


def hook_waits(recipe: Recipe, k: BlockCost[X]) -> tuple[X, X]:
    """Return seconds that each pass of a layer is shorter than the host that fetches its weights module by module.

    Beside them it launches the kernels of the layer; DeepSpeed's ZeRO-3 alone has such hooks.
    """
    zero = 0 * k.forward
    if k.hooks is None or not recipe.shards_weights:
        return zero, zero
    launched = k.host or (zero, zero)
    waits = [
        maximum(own + more - device, 0.0)
        for own, more, device in zip(launched, k.hooks, (k.forward, k.backward), strict=True)
    ]
    return named(waits[0], "hooks of modules, forward"), named(waits[1], "hooks of modules, backward")


def unit_exposure(costs: CostModel[X], sizes: PlanSizes[X], recipe: Recipe, k: BlockCost[X]) -> tuple[X, X, X, X, X]:
    """Return seconds a layer waits in (forward, backward) for its weights under ZeRO-3 and FSDP, and hidden ones.

    After them seconds that its compute loses (forward, backward): to the cores that messages hold, and to copies.

    Weights are gathered a unit ahead, forward and backward, and gradients reduce-scattered behind the next unit's
    backward, for every micro-batch (torch.distributed.fsdp; arXiv:2304.11277); where matrices of adapters are units,
    the unit ahead is one of those. ZeRO-2 scatters gradients every micro-batch.
    """
    zero = 0 * k.forward
    if not recipe.shards_gradients:
        return zero, zero, zero, zero, zero
    elements, made = gathered_elements(recipe, sizes, k), scattered_elements(recipe, sizes, k)
    scattered, gathered = scatters(sizes, recipe, made), gathers(recipe, *elements) if recipe.shards_weights else ()
    scatter, gather = state_seconds(costs, scattered, zero), state_seconds(costs, gathered, zero)
    hides = costs.may_overlap("dp") and recipe.stack.overlap_gradients
    often, twice, reduced = unit_rounds(sizes, recipe)
    first, last = often * gather, often * twice * gather + reduced * scatter
    late = recipe.stack.fsdp_adapters and recipe.adapters is not None
    hooked, unhooked = hook_waits(recipe, k)
    forward, backward = k.forward + hooked, k.backward + unhooked
    ahead = maximum(first - often * forward, 0.0) if hides and not late else first
    if hides and not late:
        quiet = maximum(twice * gather - backward, 0.0)
        behind = (often - reduced) * quiet + reduced * maximum(twice * gather + scatter - backward, 0.0)
    else:
        behind = often * twice * gather + reduced * maximum(scatter - backward, 0.0) if hides else last
    hidden = first + last - ahead - behind
    copied, returned = copy_seconds(costs, recipe, often * total(elements), reduced * total(made))
    cast = cast_seconds(costs, recipe, k)
    return (
        named(ahead, "exposed weight gathers"),
        named(behind, "exposed weight gathers and gradient scatters"),
        hidden,
        named(lost_seconds(costs, gathered, first - ahead) + copied + cast, "slowed by gathers and their copies")
        + hooked,
        named(
            lost_seconds(costs, (*gathered, *scattered), last - behind) + twice * copied + returned,
            "slowed by messages and their copies",
        )
        + unhooked,
    )


def cast_seconds(costs: CostModel[X], recipe: Recipe, k: BlockCost[X]) -> X:
    """Return seconds to make narrow copies of a layer's gathered weights, forward and backward ones, in a micro-batch.

    TransformerEngine@3f8baf9 pytorch/module/linear.py: cast and turned in one kernel, forward. What torchao makes anew
    in backward is not counted.
    """
    zero = 0 * k.forward
    return zero + recipe.cast_bytes * k.narrow / costs.rates.memory_bytes if costs.rates.cast_traffic else zero


def copy_seconds(costs: CostModel[X], recipe: Recipe, elements: X, made: X) -> tuple[X, X]:
    """Return seconds that the framework copies gathered weights out of, and gradients into, its messages' buffers."""
    stack = recipe.stack
    gathered = stack.gather_copy_bytes * elements if recipe.shards_weights else 0 * elements
    scattered = stack.scatter_copy_bytes * made
    return gathered / costs.rates.memory_bytes, scattered / costs.rates.memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EndMessages(Generic[X]):
    """What a unit at an end of the model sends in a pass: how often a micro-batch, seconds that wait and that hide."""

    unit: str
    backward: bool
    messages: tuple[StateMessage[X], ...]
    count: X
    exposed: X
    hidden: X


def _mean_layer(parts: ModelBlocks[X], stage: Stages[X]) -> tuple[X, X]:
    """Return seconds of (forward, backward) of a stage's layers on the mean."""
    zero, layers = 0 * stage.count, _layers(stage)
    forward = total((n * k.forward for n, k in zip(stage.layers, parts.kinds, strict=True)), zero)
    backward = total((n * k.backward for n, k in zip(stage.layers, parts.kinds, strict=True)), zero)
    return forward / layers, backward / layers


def end_messages(
    costs: CostModel[X], sizes: PlanSizes[X], recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]
) -> tuple[EndMessages[X], ...]:
    """Return the messages of embedding, final norm and head of a stage in one micro-batch.

    A root unit has nothing beside it: it is gathered before the first layer and scattered behind the last. Of ends that
    are wrapped apart so does the embedding; the head's weights come beside the last layer's forward pass, and its
    gradients go, as the embedding is gathered again, beside a layer's backward pass.
    """
    zero = 0 * stage.count
    if not recipe.shards_gradients:
        return ()
    resharded, kept = end_units(recipe, in_compute(recipe, parts), stage)
    often, twice, reduced = unit_rounds(sizes, recipe)
    apart = recipe.stack.fsdp_ends == "apart" and recipe.shards_weights and not parts.shared_table
    names = ("embedding unit", "norm and head unit") if apart else ("", "root unit")
    hides = apart and costs.may_overlap("dp") and recipe.stack.overlap_gradients
    ahead, behind = (one if hides else zero for one in _mean_layer(parts, stage))
    messages: list[EndMessages[X]] = []

    def add(unit: str, backward: bool, sent: tuple[StateMessage[X], ...], count: X, compute: X) -> None:
        seconds = count * state_seconds(costs, sent, zero)
        waits = maximum(seconds - compute, 0.0)
        label = f"{'scattering' if backward else 'gathering'} the {unit}"
        messages.append(
            EndMessages(unit=unit, backward=backward, messages=sent, count=count, exposed=named(waits, label),
                        hidden=seconds - waits)
        )  # fmt: skip

    gathered = [gathers(recipe, one, 0 * one) if recipe.shards_weights else () for one in (resharded, kept)]
    scattered = [scatters(sizes, recipe, (one, 0 * one)) for one in scattered_ends(recipe, parts, stage)]
    if apart:
        add(names[0], False, gathered[0], often, zero)
    add(names[1], False, gathered[1], often, ahead)
    add(names[1], True, scattered[1], reduced, behind)
    if apart:
        add(names[0], True, gathered[0], often * twice, behind)
        add(names[0], True, scattered[0], reduced, zero)
    return tuple(messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingSeconds(Generic[X]):
    """What sharded weights cost a stage and micro-batch: waits ahead and behind, hidden seconds, compute lost."""

    ahead: X
    behind: X
    hidden: X
    lost_ahead: X
    lost_behind: X


def sharding_waits(
    costs: CostModel[X], sizes: PlanSizes[X], recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X]
) -> ShardingSeconds[X]:
    """Return seconds a stage waits in a micro-batch for sharded weights, and what their messages take of compute."""
    zero = 0.0 * stage.count
    if not recipe.shards_gradients:
        return ShardingSeconds(ahead=zero, behind=zero, hidden=zero, lost_ahead=zero, lost_behind=zero)
    waits = [unit_exposure(costs, sizes, recipe, k) for k in parts.kinds]
    sums = [total((n * w[i] for n, w in zip(stage.layers, waits, strict=True)), zero) for i in range(5)]
    ends = end_messages(costs, sizes, recipe, parts, stage)
    first, last = (tuple(one for one in ends if one.backward is back) for back in (False, True))
    lost = [total((lost_seconds(costs, one.messages, one.hidden) for one in some), zero) for some in (first, last)]
    return ShardingSeconds(
        ahead=sums[0] + total((one.exposed for one in first), zero),
        behind=sums[1] + total((one.exposed for one in last), zero),
        hidden=sums[2] + total((one.hidden for one in ends), zero),
        lost_ahead=sums[3] + lost[0],
        lost_behind=sums[4] + lost[1],
    )


def covering_passes(sizes: PlanSizes[X], schedule: Schedule) -> X:
    """Return beside how many passes of a micro-batch through a stage its gradients are reduced, and weights gathered.

    One; interleaved, the last of v chunks waits for its own pass alone, and the p micro-batches of each other chunk
    follow it: (1 + (v - 1) p) / v (Megatron-LM core/pipeline_parallel/schedules.py, grad_sync_func and param_sync_func
    of each chunk).
    """
    one = 0 * sizes.pp + 1
    if not find_rules(schedule).chunked:
        return one
    return divide(1 + (sizes.vpp - 1) * minimum(sizes.pp, sizes.num_micro), sizes.vpp)


def data_parallel_seconds(
    costs: CostModel[X], recipe: Recipe, parts: ModelBlocks[X], stage: Stages[X], passes: tuple[X, X]
) -> tuple[X, X, X, X]:
    """Return (gradients exposed, hidden, parameters exposed, hidden) seconds once a step for a stage.

    Without sharding gradients are all-reduced; with a sharded optimizer they are reduce-scattered and the new weights
    gathered; ZeRO-2 scatters every micro-batch instead (`unit_exposure`). Weights hide behind the first
    micro-batch's forward, gradients behind the last one's backward: seconds of the `passes` beside them
    (docs/formulas.md).
    """
    zero = 0 * passes[0]
    if recipe.shards_weights:
        return zero, zero, zero, zero
    reduced, updated = reductions(recipe, parts, stage), updates(recipe, parts, stage)
    grads = named(state_seconds(costs, reduced, zero), "gradient reduction")
    hides = costs.may_overlap("dp")
    table = stage.with_last_bucket_alone(bool(recipe.narrow_gather_bytes))
    shown = grads
    if hides and recipe.stack.overlap_gradients:
        end = state_seconds(costs, reductions(recipe, parts, table), zero)
        shown = maximum(bucketed(grads, passes[1], _layers(stage)), end)
    hidden = grads - shown
    shown = shown + lost_seconds(costs, reduced, hidden)
    if not recipe.shards_optimizer:
        return shown, hidden, zero, zero
    gather = named(state_seconds(costs, updated, zero), "weight gather")
    waits = gather
    if hides and recipe.stack.overlap_parameters:
        first = state_seconds(costs, updates(recipe, parts, table), zero)
        waits = maximum(bucketed(gather, passes[0], _layers(stage)), first)
    return shown, hidden, waits + lost_seconds(costs, updated, gather - waits), gather - waits


def host_waits(
    costs: CostModel[X], recipe: Recipe, moved: HostTraffic[X], stage: Stages[X], compute: tuple[X, X]
) -> tuple[tuple[X, X], X]:
    """Return the seconds that (forward, backward) of a micro-batch wait for the host link, and the hidden ones.

    Both directions run at once, on streams beside compute, a layer ahead: the first layer's bytes have nothing beside
    them, and the rest waits for what exceeds compute.
    """
    zero = 0 * stage.count
    if not recipe.offload or costs.host is None:
        return (zero, zero), zero
    whole = [
        maximum(into, out) / costs.host.link_bytes_per_second
        for into, out in ((moved.forward_in, moved.forward_out), (moved.backward_in, moved.backward_out))
    ]
    waits = [
        named(bucketed(one, compute_of, _layers(stage)) if costs.may_overlap("host") else one, "host link")
        for one, compute_of in zip(whole, compute, strict=True)
    ]
    return (waits[0], waits[1]), total(whole, zero) - waits[0] - waits[1]
