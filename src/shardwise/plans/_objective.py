"""What a job optimises, and the models and passes that this takes beside the one that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import Problems
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.plans._jobs import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Sequences of a sample, whether log-probabilities of a reference are read, and what else trains or is scored.

    `values` says that a head of one value a token stands in for that of the vocabulary, `critic` that a second model
    with such a head trains beside the policy, and `rollout` that an engine has generated what is trained on.
    """

    source: str
    sequences: int = 1
    reference: bool = False
    values: bool = False
    critic: bool = False
    rollout: bool = False


OBJECTIVES: dict[str, Objective] = {
    "sft": Objective(source="next tokens"),
    "dpo": Objective(source="arXiv:2305.18290: a chosen and a rejected answer a sample", sequences=2, reference=True),
    "reward": Objective(source="arXiv:2203.02155 section 3.5: two answers a sample", sequences=2, values=True),
    "grpo": Objective(source="arXiv:2402.03300 section 4.1", reference=True, rollout=True),
    "ppo": Objective(source="arXiv:2203.02155 section 3.5", reference=True, critic=True, rollout=True),
}
"""What is optimised, by name."""
REFERENCES = ("base", "adapter", "copy", "none")
"""The reference: the base with its adapters off, a frozen adapter, a frozen copy of all weights, or no reference."""


def objective_problems(job: Training) -> Problems:
    """Return what is wrong with a job's objective by itself.

    >>> from shardwise.plans import Training
    >>> print(objective_problems(Training(seq_len=1, global_batch=1, reference="copy")).items[0])
    reference = 'copy': is read by dpo, grpo, ppo, and the method is sft; leave it out, or add --method dpo
    """
    found = Problems()
    if job.method not in OBJECTIVES:
        found.add("method", job.method, "is not a known method", "use one of " + ", ".join(OBJECTIVES))
    if job.reference and job.reference not in REFERENCES:
        found.add("reference", job.reference, "is not a known reference", "use one of " + ", ".join(REFERENCES))
    if found.items:
        return found
    readers = [name for name, one in OBJECTIVES.items() if one.reference]
    if job.reference and job.method not in readers:
        rule = f"is read by {', '.join(readers)}, and the method is {job.method}"
        found.add("reference", job.reference, rule, "leave it out, or add --method dpo")
    elif job.reference in ("base", "adapter") and not job.adapter:
        rule = "is the frozen base of adapters, and there are none"
        found.add("reference", job.reference, rule, "use --reference copy, or add --adapter lora")
    return found


def reference_of(job: Training, own: str = "") -> str:
    """Return the reference of a job: as stated, else the framework's own, else a copy where all weights train.

    >>> from shardwise.plans import Training
    >>> [reference_of(Training(seq_len=1, global_batch=1, method=name)) for name in ("dpo", "sft")]
    ['copy', 'none']
    """
    if not OBJECTIVES[job.method].reference:
        return "none"
    return job.reference or ((own or "base") if job.adapter else "copy")
