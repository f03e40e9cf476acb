"""Expert all-to-all behind the compute of another micro-batch: what stays exposed, and what compute loses to it."""

from __future__ import annotations

from dataclasses import replace

from shardwise.ledger.number import X, above, maximum
from shardwise.ledger.traced import named
from shardwise.ops.fold import CostModel
from shardwise.plans import Schedule, Stack
from shardwise.training._blocks import BlockCost
from shardwise.training._memory import ModelBlocks
from shardwise.training.schedules import find_schedule


def paired(k: BlockCost[X], share: X | float = 1.0) -> BlockCost[X]:
    """Return a layer whose expert messages, or a share of them, run beside the compute of a paired micro-batch.

    DualPipe overlaps the forward of one micro-batch with the backward of another, so that the all-to-all of both
    hides behind the compute of both (arXiv:2412.19437 section 3.2.1): what is over the compute stays exposed.
    """
    if "ep" not in k.exposed:
        return k
    waits = k.exposed["ep"]
    left = maximum(waits - k.compute, 0.0) * share + waits * (1 - share)
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


def beside_experts(m: CostModel[X], stack: Stack, schedule: Schedule, parts: ModelBlocks[X]) -> ModelBlocks[X]:
    """Return the blocks as a stack runs them that sends to experts beside the compute of another micro-batch.

    Megatron-Core, --overlap-moe-expert-parallel-comm: forward and backward of two micro-batches interleave by layer.
    The kernels of the messages hold cores meanwhile.
    """
    when = stack.overlap_experts if m.hides("ep") and "ep" in m.spans else "never"
    if when == "never" or (when == "between nodes" and not find_schedule(schedule).chunked):
        return parts
    span = m.spans["ep"]
    share = 1.0 if when == "always" else above(span[-1], span[0], 1.0, 0.0)

    def beside(k: BlockCost[X]) -> BlockCost[X]:
        return slowed(m, k, paired(k, share))

    return replace(parts, kinds=tuple(map(beside, parts.kinds)), head=beside(parts.head))


def slowed(m: CostModel[X], alone: BlockCost[X], beside: BlockCost[X]) -> BlockCost[X]:
    """Return a layer with what its compute loses to the cores of expert messages that run beside it."""
    if "ep" not in alone.exposed:
        return beside
    lost = named(m.slowed(alone.exposed["ep"] - beside.exposed["ep"]), "slowed by expert messages")
    return replace(beside, backward_input=beside.backward_input + lost, compute=beside.compute + lost)
