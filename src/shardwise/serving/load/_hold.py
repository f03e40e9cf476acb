"""Prompts that are held until every group of attention has one, so that their steps are alike.

github.com/NVIDIA/TensorRT-LLM tensorrt_llm/_torch/pyexecutor/py_executor.py _balance_adp_requests, of each batch that
`_schedule` makes: its counter of steps runs on while nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.serving.load._simulate import Scheduler


class PromptHold:
    """Holds prompts for so many steps at most; 0: for none."""

    def __init__(self, steps: int) -> None:
        self.steps, self.unbalanced = steps, 0

    def waits(self, groups: Sequence[Scheduler]) -> bool:
        """Return whether prompts are held in this step, since not every group has one and their time is not over."""
        if all(group.starts for group in groups):
            self.unbalanced = 0
            return False
        self.unbalanced += 1
        if self.unbalanced >= self.steps or not all(group.decoding for group in groups):
            self.unbalanced = 0
            return False
        return any(group.starts for group in groups)

    def go_on(self, steps: int) -> None:
        """Count so many steps of all groups in which nobody waits."""
        if self.steps:
            self.unbalanced = (self.unbalanced + steps) % self.steps
