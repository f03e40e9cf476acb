"""First tokens of requests that find nobody decoding: nobody at all, the first prompt of a busy time, or more of them.

Prompts that decode steps take along are the work of one server, idle (1 - load) of the time; who has a first token
stays for its steps, as one of M/G/infinity: both find nobody in a share (1 - load) exp(-rate steps d) of all moments,
d being a step. Each such time ends with a prompt that runs alone. Who comes while it does (a moment of a renewal
process, its length seen by that) waits for the rest of it, and runs with all who came so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.arrays import np
from shardwise.ledger.opened import called
from shardwise.serving.load._batch_times import BatchTimes

if TYPE_CHECKING:
    from shardwise.serving.load._steady import Replicas


def first_token_alone(form: Replicas, rate: Any, none: Any, pace: BatchTimes[Any], among: Any) -> Any:
    """Return what those add to the mean first token who find nobody decoding, a share `none` of all: [layout].

    `among` are seconds of those who find somebody, who are among others as they are. No less than those of a queue of
    prompts alone; prompts that are cut, or run in steps of their own, are that.
    """
    p, policy, moments = form.prices, form.policy, form.moments
    queue = called(none * pace.empty[:, 0], "where nobody else is")
    if not (policy.mixed and moments.steps):
        return queue
    alone, decode, every = p.alone[:, 0], pace.decode[:, 0], rate * form.batches.every[:, 0]
    # How often something happens is not opened.
    each, step, load = (np.asarray(one, float) for one in (alone, decode, pace.load[:, 0]))
    idle = np.minimum((1 - load) * np.exp(-every * (moments.steps + 1) * step), none)
    first = np.minimum(idle * every * each, none - idle)
    spread, mates = np.asarray(p.spread[:, 0], float), rate * each * np.asarray(p.spread[:, 0], float)
    behind = alone * (1 + spread / 2) + mates * p.added[0][:, 0] + decode * policy.async_scheduling
    whole = called(idle * alone, "where nobody else is") + called(first * behind, "beside the first prompt")
    whole = whole + called((none - idle - first) * among, "beside more prompts")
    return np.where((p.together[:, 0] >= 1) & (np.asarray(whole) > np.asarray(queue)), whole, queue)
