"""The pace of one batch at a number of sequences, in formulas of plain or traced numbers and columns."""

from __future__ import annotations

import math
from typing import Any, Generic

from shardwise.arrays import np
from shardwise.ledger.number import X, above, log2, maximum, minimum, raised
from shardwise.ledger.opened import called
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving.load._bunches import exponential
from shardwise.serving.load._moments import LengthMoments

# Loads of prompts beyond this are taken as this: every mean below has 1 - load beneath it.
FULL = 0.97


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoad(Generic[X]):
    """A replica while a number of sequences decode, at a rate of requests: seconds unless said otherwise."""

    rate: X
    decode: X
    """A decode step without prompts."""
    prompt: X
    """What a prompt adds, where as many share a step as arrive in one."""
    first_prompt: X
    """The same in the first step after a decode step, where prompts run in steps of their own."""
    spread: X
    """Mean square of what a prompt adds over the square of its mean."""
    pieces: X
    behind: X
    """Steps that pieces of a prompt fill before those who come in them: n (n - 1) / 2 of n, and n times a last part."""
    together: X
    """Prompts that a step has room for."""
    filled: X
    """Share of the last step of a prompt that is cut which prompts behind it fill."""

    @property
    def load(self) -> X:
        """Share of the time that prompts take."""
        return minimum(self.rate * self.prompt, FULL)


def prompt_seconds(batch: BatchLoad[X], policy: Policy) -> X:
    """Return seconds of a decode step's prompts: of those who arrive in it, and of those who arrive in theirs."""
    return batch.decode * (batch.load if policy.mixed else batch.rate * batch.first_prompt) / (1 - batch.load)


def _batch_seconds(batch: BatchLoad[X]) -> X:
    """Return the mean seconds of a step of prompts alone, as who arrives in one sees it."""
    return batch.prompt * (1 + batch.rate * batch.decode * (1 - batch.load)) / (1 - batch.load * batch.load)


def _backlogged(batch: BatchLoad[X]) -> X:
    """Return seconds a prompt where every step is full of them."""
    return batch.decode / batch.together + batch.prompt


def _own_batch(batch: BatchLoad[X]) -> X:
    """Return the prompts that share a step of prompts alone, as one of them sees it."""
    arrived = batch.rate * ((1 - batch.load) * batch.decode + batch.load * _batch_seconds(batch))
    return minimum(maximum(batch.together, 1.0), 1 + arrived)


def run_ends(short: Any, unfilled: Any, busy: Any) -> tuple[Any, Any]:
    """Return what the ends of runs add to each prompt, and the share of its last step that prompts behind it fill.

    Who finds a prompt under way fills its last step. Runs of an M/D/1 queue are so long as Borel 1942 has it, of
    1 / (1 - busy) prompts in the mean. Both are given of runs, and of prompts in them, by how many they are.

    >>> one, other = run_ends(np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.array(0.5))  # a run of one: exp(-0.5)
    >>> float(one.round(3)), float(other.round(3))
    (0.303, 0.296)
    """
    busy, mean, filled, more = np.minimum(busy, FULL), 0.0, 0.0, 1.0
    behind = 1 / (1 - busy) - 1
    for k, (each, some) in enumerate(zip(short, unfilled, strict=True), 1):
        chance = np.exp(-k * busy) * (k * busy) ** (k - 1) / math.factorial(k)
        more = np.maximum(more - chance, 0.0)
        mean, filled, behind = mean + chance * each, filled + more * some, behind - more
    longer = np.maximum(behind, 0.0) * sum(unfilled) / len(unfilled)
    return (1 - busy) * (mean + more * short[-1]), (1 - busy) * (filled + longer)


def _of_answers(some: list[X], moments: LengthMoments) -> tuple[X, X]:
    """Return the mean over answers of what each has, and of that over its steps."""
    each = [one / steps for one, steps in zip(some, moments.answers, strict=True)]
    return sum(some[1:], some[0]) / len(some), sum(each[1:], each[0]) / len(each)


def _over_before(moments: LengthMoments, while_left: X, busy: X) -> tuple[X, X, X]:
    """Return how much of a queue is over when a sequence ends, that over its steps, and in the mean of its steps.

    It would be over in so many steps as fast as it begins to. Later it is the slower the more of them are busy: what is
    left falls with the steps where few are, and with their root, as a random walk returns, where all are. All are
    means over answers.
    """
    slower = 2 * maximum(busy, 0.05)
    # What is left, 1 / (1 + slower x)^(1 / slower), is integrated over x; where all are half busy to a logarithm.
    power = 1 - 1 / slower + 1e-9
    grown = [log2(1 + slower * steps / while_left) for steps in moments.answers]
    ends = [1 - raised(2.0, one / slower * -1) for one in grown]
    within = [
        minimum(1 - (raised(2.0, one * power) - 1) / power * while_left / (slower * steps), end)
        for one, end, steps in zip(grown, ends, moments.answers, strict=True)
    ]
    return (*_of_answers(ends, moments), sum(within[1:], within[0]) / len(within))


def followed(keeps: X, moments: LengthMoments, policy: Policy, cycles: Any = 1.0) -> tuple[X, X]:
    """Return how much of what follows on a prompt does so within an answer, and that over its steps, in the mean.

    What came in a step runs in the next, so that what follows falls from step to step (an autoregression), of which
    one of an answer is so many. Where a step is scheduled as the one before begins it runs two steps later.
    """
    ended, logs = [], log2(maximum(keeps, 1e-12))
    for steps in moments.answers:
        many = steps * cycles
        if policy.async_scheduling:  # 0 of 1, 1 of 2 and 3: a line from odd to even ones
            many = many / 2 // 1 + maximum(many - many / 2 // 1 * 2 - 1, 0.0)
        ended.append(1 - raised(2.0, logs * many))
    return _of_answers(ended, moments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lingering(Generic[X]):
    """What prompts delay a request beyond their mean share of its steps."""

    seconds: X
    per_step: X
    """Seconds over the steps of each request, in the mean."""
    over: X
    """How much of the queue that a request began beside is over, in the mean of its steps."""


def _begun(batch: BatchLoad[X], moments: LengthMoments) -> tuple[X, X]:
    """Return how much of what prompts in steps of their own leave behind delays an answer, and that over its steps.

    Where steps are scheduled ahead who comes in the step of a prompt runs two steps later, which is after a step that
    decodes, and so on from each of these to the next. All of them run before the first where others do between: where
    the step before was of prompts, too, as the one in which the prompt came, and somebody came in it. Means of answers.
    """
    before = batch.load * batch.load * (1 - exponential(-1 * batch.rate * _batch_seconds(batch)))
    logs = log2(maximum(batch.load, 1e-12))
    shares: list[Any] = [1 - (1 - before) * raised(2.0, logs * max(steps - 1, 0.0)) for steps in moments.answers]
    return _of_answers(shares, moments)


def lingering_of(batch: BatchLoad[X], moments: LengthMoments, policy: Policy) -> Lingering[X]:
    """Return what prompts delay a request beyond their mean share of its steps.

    Who has just got a first token came with others, whose prompts are still to run: the prompts left then, less those
    that are left at the end of a decode step.
    """
    if not policy.mixed:
        behind = batch.rate * batch.prompt * batch.prompt * batch.spread / (2 * (1 - batch.load)) + batch.decode / 2
        own = _own_batch(batch)
        arrived = 1 + batch.rate * ((1 - batch.load) * batch.decode + batch.load * _batch_seconds(batch))
        left = batch.load * (own * batch.prompt + (1 - own / arrived) * behind)
        delay = maximum((left - batch.load * batch.decode) / (1 - batch.load), -0.9 * moments.steps * batch.decode)
        whole, each = _begun(batch, moments) if policy.async_scheduling else (1.0, moments.inverse_steps)
        return Lingering(seconds=delay * whole, per_step=delay * each, over=0.0 * delay + 1)
    joint = batch.prompt * batch.load / ((1 - batch.load) * (1 - batch.load) * (1 + batch.load))
    each = _backlogged(batch)
    busy = minimum(batch.rate * each, FULL)
    queue = busy * each * batch.spread / (2 * (1 - busy))
    # Ends of steps see less than a moment in time does: steps with prompts are longer, and of one in m pieces so many
    # m-ths are left at the ends of these, a half of (m - 1) / m in the mean.
    steps, unfinished = busy / each / batch.together, maximum(1 - batch.together, 0.0)
    seen = (batch.rate * batch.prompt * queue + busy * batch.prompt * batch.spread / 2 * unfinished) * steps / busy
    # The first of a run is there at the end of the step that it came in, and of the one scheduled behind it.
    seen = seen + batch.rate * (1 - busy) * batch.prompt * (2 if policy.async_scheduling else 1)
    seen = seen / (steps + (1 - busy) / batch.decode)
    # In their order prompts leave behind whoever came meanwhile, less what of these ran in the last step.
    came = batch.rate * first_token(batch, moments, policy).seconds - batch.filled * batch.together
    left = maximum(batch.prompt * came - seen, 0.0)
    # At first a step takes so much off them: what it runs of one, less what comes in it.
    gone = (1 - busy) * batch.rate * batch.prompt * batch.prompt * batch.together
    share, per_step, within = _over_before(moments, maximum(left, 1e-12) / maximum(gone, 1e-12), busy)
    left = left / (1 - batch.load)
    arriving = maximum(
        batch.rate * (batch.decode / (1 - batch.load) + batch.prompt * batch.load / (1 - batch.load * batch.load)), 0.1
    )
    single = exponential((1 - maximum(batch.together, 1.0)) / arriving)
    left, joint = single * left, (1 - single) * joint
    whole, each_step = followed(batch.load, moments, policy)
    # Where more come than a step has room for beside so many sequences the queue has no mean.
    over = above(busy, 0.999 * FULL, 1.0, single * within + 1 - single)
    return Lingering(
        seconds=left * share + joint * whole, per_step=left * per_step + joint * each_step, over=over
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstToken(Generic[X]):
    """Mean seconds from arrival to the first token where a sequence has a place at once, by cause."""

    rest: X
    """The rest of the step that runs, and the one scheduled behind it."""
    own: X
    """The prompt in its steps."""
    others: X
    """Prompts before it, and those of its steps."""

    @property
    def seconds(self) -> X:
        """All of them."""
        return self.rest + self.own + self.others


def first_token(batch: BatchLoad[X], moments: LengthMoments, policy: Policy) -> FirstToken[X]:
    """Return what the first token of a sequence with a place waits for."""
    if not policy.mixed:
        # M/G/1 with vacations (Doshi 1986): the decode step, those ahead, and those of the same step.
        ahead = batch.rate * batch.prompt * batch.prompt * batch.spread / (2 * (1 - batch.load))
        rest = batch.decode * policy.receive_steps / 2
        # Who comes while a step runs, of prompts too, waits for the next: vacations are gated (Takagi 1991).
        rest = rest + batch.decode / (1 - batch.load) if policy.async_scheduling and moments.steps else rest
        return FirstToken(rest=rest, own=batch.prompt, others=ahead + batch.prompt * (_own_batch(batch) - 1) / 2)
    usual, each = batch.decode + prompt_seconds(batch, policy), _backlogged(batch)
    busy, many = minimum(batch.rate * each, FULL), maximum(batch.together, 1.0)
    prompts = batch.prompt * many
    share = minimum(batch.rate * usual / many, 0.99)
    gated = batch.rate * usual * batch.prompt * batch.prompt * batch.spread / (1 - batch.load * batch.load)
    variance = minimum(gated, prompts * prompts * share * (1 - share))
    present = usual + variance / usual
    mates = batch.prompt * minimum(batch.rate * present, many - 1)
    # Requests left over by full steps: M/D/m (Sakasegawa 1977), half of M/M/m, wider with the spread of lengths.
    left = raised(2.0, raised(2.0, log2(2 * (many + 1)) / 2) * log2(busy)) / (1 - busy) * moments.new_cv2 / 2
    # Without a token of its own a prompt runs no step: its cache joins those that decode.
    own = batch.decode * batch.pieces + batch.prompt if moments.new_tokens else 0.0 * batch.decode
    # Who comes while a prompt is cut runs when its last piece does not fill a step.
    full = each * many
    left_over = batch.rate * batch.behind * full * full / (1 - busy)
    # A prompt that is cut, and all behind it, waits for the decode step that runs: a vacation (Doshi 1986).
    rest = above(batch.together, 1, present / 2, batch.decode / 2)
    after = above(batch.together, 1, usual, batch.decode)
    queue = busy * each * batch.spread / (2 * (1 - busy)) + batch.filled * each * batch.together
    return FirstToken(
        rest=rest + after if policy.async_scheduling else rest,
        own=above(batch.together, 1, own, batch.decode * batch.pieces + batch.prompt),
        others=above(batch.together, 1, mates + left * each + left_over, queue),
    )


def served_cv2(load: X, by_cache: X, moments: LengthMoments) -> X:
    """Return the squared cv of the seconds in which a full batch serves a request, of which prompts take such a share.

    Its decode steps differ as answers do, and its prompt as prompts do. What holds more of a full cache takes as much
    more of it (`by_cache` 1).
    """
    steps = (1 + moments.output_cv2) * (1 + by_cache * moments.held_cv2) - 1
    return (1 - load) * (1 - load) * steps + load * load * (moments.new_cv2 - 1)


def slot_factor(busy: X, slots: X, cv2: X) -> X:
    """Return the wait for one of m servers over that of M/M/m, for service times of a squared cv.

    Cosmetatos 1975 for constant times, Bjorklund and Elldin 1964 between.
    """
    slots_4 = raised(2.0, log2(4 + 5 * slots) / 2) - 2
    constant = 0.5 * (1 + maximum(1 - busy, 0.0) * (slots - 1) * slots_4 / (16 * busy * slots))
    share = minimum(cv2, 1.0)
    return share * maximum(cv2, 1.0) + (1 - share) * constant


def mean_of(values: Any, chance: Any, past: Any, name: str) -> Any:
    """Return the mean of what takes so long at each number of sequences, the last for all beyond, under a name."""
    return called((chance * values).sum(axis=-1) + past * values[:, -1], name)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTimes(Generic[X]):
    """The pace of a batch at a number of sequences: seconds but for the load."""

    decode: X
    """A step of a sequence's token without prompts."""
    prompts: X
    """The prompts in it."""
    lingering: X
    """What prompts delay a request beyond their mean share of its steps."""
    lingering_per_step: X
    """The same over the steps of each request, in the mean."""
    over: X
    """How much of the prompts that a request began beside are over, in the mean of its steps."""
    load: X
    """Share of the time that prompts take."""
    rest: X
    own: X
    others: X
    """From arrival to the first token, as `FirstToken` has them."""
    empty: X
    """The same where nobody else is there."""
    placed: X
    """A prompt that runs holds a place."""

    @property
    def step(self) -> X:
        """A token of a sequence."""
        return self.decode + self.prompts

    @property
    def first(self) -> X:
        """From arrival to the first token, where a sequence has a place at once."""
        return self.rest + self.own + self.others


def as_many_as_end(pace: BatchTimes[Any], seconds: Any, room: Any, steps: float) -> BatchTimes[Any]:
    """Return the pace where no prompt starts unless there is room, until a sequence ends.

    At so many seconds a token as many end as come: prompts make no step of as many sequences as fit longer than that,
    however much longer they make one of fewer.
    """
    if not steps:
        return pace
    at_most = np.where(room, np.inf, np.maximum(seconds - pace.decode, 0.0))
    prompts = np.minimum(pace.prompts, at_most)
    lingering = np.minimum(pace.lingering, (at_most - prompts) * steps)
    less = np.where(pace.lingering > 0, lingering / np.maximum(pace.lingering, 1e-30), 1.0)
    return replace(
        pace, prompts=prompts, lingering=lingering, lingering_per_step=pace.lingering_per_step * less
    )  # fmt: skip
