"""Moments of the lengths of a workload's requests: what the closed form knows of them."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import islice

from shardwise.plans import Workload
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy

_DRAWN = 20_000
# Of lengths that are drawn and not listed: as many as have one in each equal part of their distribution.
_OF_EACH_PART = 4096
# Prompts by length, each class with as many requests.
_CLASSES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthMoments:
    """Means over requests; `prompts` are (new tokens, cached tokens) of equal shares of them, the shortest first."""

    input_tokens: float
    output_tokens: float
    steps: float
    """Decode steps of a request: output tokens but the first, so many a step as it makes, in whole steps."""
    made: float
    """Tokens that a step makes of a sequence."""
    whole_steps: float
    """Steps of a request over those of as many tokens as it wants, in the mean: the last one may make more."""
    answers: tuple[float, ...]
    """Decode steps of equal shares of the requests, the shortest first, in the harmonic mean."""
    inverse_steps: float
    """Mean of 1 / steps over requests that have any, of the tokens that they want."""
    context: float
    """Mean context of the sequences that decode, who are more often those with long outputs."""
    held_tokens: float
    """Mean tokens of cache that a running request holds or has reserved, but for what others hold too."""
    shared_tokens: float
    """Tokens of the prefixes that requests share: a cache holds them once."""
    held_cv2: float
    freed_tokens: float
    """Mean tokens of cache that a request frees as it ends."""
    freed_cv2: float
    output_cv2: float
    overlap: float
    """Mean of the smaller of two outputs over the mean output: 1 where all are equal."""
    prompts: tuple[tuple[float, float], ...]
    within_classes: float
    """Mean square of the new tokens over that of the means of `prompts`."""

    @property
    def new_tokens(self) -> float:
        """Mean tokens of a prompt that are not cached."""
        return sum(new for new, _ in self.prompts) / len(self.prompts)

    @property
    def new_cv2(self) -> float:
        """Squared coefficient of variation of the new tokens, plus 1."""
        squares = sum(new**2 for new, _ in self.prompts) / len(self.prompts)
        return self.within_classes * squares / self.new_tokens**2 if squares else 1.0


def moments_of(workload: Workload, policy: Policy, stage: str = "both", step_makes: float = 1.0) -> LengthMoments:
    """Return the moments of the requests that a workload draws, with the cache that a policy uses.

    A step makes so many tokens of a sequence. A "prefill" pool makes none, to a "decode" pool prompts come with their
    cache, but for what it computes again.

    >>> from shardwise.hardware import find_device
    >>> from shardwise.plans import Arrivals, Length
    >>> from shardwise.serving._policy import policy_of
    >>> asked = Workload(input_tokens=Length(mean=100), output_tokens=Length(mean=11), arrivals=Arrivals(rate=1))
    >>> moments = moments_of(asked, policy_of("vllm", find_device("h100-sxm-80gb").device, 16, 4096))
    >>> moments.steps, moments.context, moments.overlap, moments.prompts
    (10.0, 105.5, 1.0, ((100.0, 0.0),))
    """
    cache = (
        (policy.block_tokens, policy.found_block),
        policy.prefix_cache, policy.reserved_share, policy.recomputed_tokens,
    )  # fmt: skip
    if not (workload.pairs or workload.finite):
        # However many are simulated, what is carried is of requests without end.
        workload = replace(workload, count=_OF_EACH_PART)
    return _moments(workload, cache, stage, step_makes)


@lru_cache(4)
def _moments(
    workload: Workload, cache: tuple[tuple[int, int], bool, float, int], stage: str, step_makes: float
) -> LengthMoments:
    (block, unit), prefix_cache, reserved_share, recomputed = cache
    prefixes = {name: size // unit * unit for name, size in workload.prefixes} if prefix_cache else {}
    drawn = list(islice(workload.draws(), min(workload.count, _DRAWN)))
    every = [
        (
            tokens,
            1 if stage == "prefill" else made,
            min(cached, tokens - 1) // unit * unit if prefix_cache else 0,
        )
        for tokens, made, cached, *_ in drawn
    ]
    count = len(every)
    made = sorted(out for _, out, _ in every)
    output = sum(made) / count
    lasting = float(sum(made))
    context = sum(out * (tokens + out / 2) for tokens, out, _ in every) / lasting
    shared = sum(row[1] * prefixes.get(-1 - row[4], 0) for row in drawn if row[3]) / sum(row[1] for row in drawn)
    second = sum(out * (tokens**2 + tokens * out + out**2 / 3) for tokens, out, _ in every) / lasting
    after = [1 / (out - 1) for out in made if out > 1]
    whole = [math.ceil((out - 1) / step_makes - 1e-9) for out in made]
    rounded = [steps * step_makes / (out - 1) for steps, out in zip(whole, made, strict=True) if out > 1]
    shares = min(_CLASSES, len(after)) if after and after[0] != after[-1] else 1
    answers = [after[i * len(after) // shares : (i + 1) * len(after) // shares] for i in range(shares)]
    ends = [tokens + out - shared + block // 2 for tokens, out, _ in every]
    freed = sum(ends) / count
    output_cv2 = sum((out - output) ** 2 for out in made) / count / output**2
    order = sorted((tokens - cached, cached) for tokens, _, cached in every)
    classes = min(_CLASSES, count) if order[0][0] != order[-1][0] else 1
    parts = [order[i * count // classes : (i + 1) * count // classes] for i in range(classes)]
    classed = sum((sum(new for new, _ in part) / len(part)) ** 2 for part in parts) / len(parts)
    squares = sum(new**2 for new, _ in order) / count
    return LengthMoments(
        input_tokens=sum(tokens for tokens, _, _ in every) / count,
        output_tokens=output,
        steps=(output - 1) / step_makes * (sum(whole) * step_makes / max(lasting - count, 1.0)),
        made=step_makes,
        whole_steps=sum(rounded) / len(rounded) if rounded else 1.0,
        answers=tuple(len(part) / sum(part) / step_makes if part else 1.0 for part in answers),
        inverse_steps=step_makes * sum(after) / len(after) if after else 0.0,
        context=context,
        held_tokens=context - shared + block / 2 + reserved_share * output * (1 + output_cv2) / 2,
        shared_tokens=float(sum(prefixes.values())),
        held_cv2=max(second / context**2 - 1, 0.0),
        freed_tokens=freed,
        freed_cv2=sum((one - freed) ** 2 for one in ends) / count / freed**2,
        output_cv2=output_cv2,
        overlap=sum(out * (2 * (count - i) - 1) for i, out in enumerate(made)) / count**2 / output,
        prompts=((float(recomputed), sum(tokens for tokens, _, _ in every) / count - recomputed),)
        if stage == "decode"
        else tuple((sum(a for a, _ in part) / len(part), sum(b for _, b in part) / len(part)) for part in parts),
        within_classes=max(squares / classed, 1.0) if classed and stage != "decode" else 1.0,
    )
