"""The moments of a workload's requests that the closed form reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from shardwise.plans import Workload
from shardwise.serving.load._policy import Policy

_DRAWN = 20_000
# Prompts by length, each class with as many requests.
_CLASSES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthMoments:
    """Means over requests; `prompts` are (new tokens, cached tokens) of equal shares of them, the shortest first."""

    input_tokens: float
    output_tokens: float
    steps: float
    """Decode steps of a request: output tokens but the first."""
    inverse_steps: float
    """Mean of 1 / steps over requests that have any."""
    context: float
    """Mean context of the sequences that decode, who are more often those with long outputs."""
    held_tokens: float
    """Mean tokens of cache that a running request holds or has reserved."""
    held_cv2: float
    output_cv2: float
    overlap: float
    """Mean of the smaller of two outputs over the mean output: 1 where all are equal."""
    prompts: tuple[tuple[float, float], ...]

    @property
    def new_tokens(self) -> float:
        """Mean tokens of a prompt that are not cached."""
        return sum(new for new, _ in self.prompts) / len(self.prompts)

    @property
    def new_cv2(self) -> float:
        """Squared coefficient of variation of the new tokens, plus 1."""
        return sum(new**2 for new, _ in self.prompts) / len(self.prompts) / self.new_tokens**2


def moments_of(workload: Workload, policy: Policy) -> LengthMoments:
    """Return the moments of the requests that a workload draws, with the cache that a policy uses.

    >>> from shardwise.hardware import find_device
    >>> from shardwise.plans import Arrivals, Length
    >>> from shardwise.serving.load._policy import policy_of
    >>> asked = Workload(input_tokens=Length(mean=100), output_tokens=Length(mean=11), arrivals=Arrivals(rate=1))
    >>> found = moments_of(asked, policy_of("vllm", find_device("h100-sxm-80gb").device, 16, 4096))
    >>> found.steps, found.context, found.overlap, found.prompts
    (10.0, 105.5, 1.0, ((100.0, 0.0),))
    """
    block = policy.block_tokens
    every = [
        (tokens, made, min(cached, tokens - 1) // block * block if policy.prefix_cache else 0)
        for tokens, made, cached in islice(workload.draws(), min(workload.count, _DRAWN))
    ]
    count = len(every)
    made = sorted(out for _, out, _ in every)
    output = sum(made) / count
    lasting = float(sum(made))
    context = sum(out * (tokens + out / 2) for tokens, out, _ in every) / lasting
    second = sum(out * (tokens**2 + tokens * out + out**2 / 3) for tokens, out, _ in every) / lasting
    after = [1 / (out - 1) for out in made if out > 1]
    output_cv2 = sum((out - output) ** 2 for out in made) / count / output**2
    order = sorted((tokens - cached, cached) for tokens, _, cached in every)
    classes = min(_CLASSES, count) if order[0][0] != order[-1][0] else 1
    parts = [order[i * count // classes : (i + 1) * count // classes] for i in range(classes)]
    return LengthMoments(
        input_tokens=sum(tokens for tokens, _, _ in every) / count,
        output_tokens=output,
        steps=output - 1,
        inverse_steps=sum(after) / len(after) if after else 0.0,
        context=context,
        held_tokens=context + block / 2 + policy.reserved_share * output * (1 + output_cv2) / 2,
        held_cv2=max(second / context**2 - 1, 0.0),
        output_cv2=output_cv2,
        overlap=sum(out * (2 * (count - i) - 1) for i, out in enumerate(made)) / count**2 / output,
        prompts=tuple((sum(a for a, _ in part) / len(part), sum(b for _, b in part) / len(part)) for part in parts),
    )
