"""Which words of targets name linear layers of a model, and what peft makes of those that name none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.models import Model
from shardwise.ops.adapter_parts import matches, modules_of
from shardwise.ops.count import whole_lines
from shardwise.plans import Tuning
from shardwise.records import replace


def strange_targets(model: Model, tuning: Tuning, words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of targets that name no linear layer of a model."""
    layers = [op for line in whole_lines(model) for op in line.ops if op.weights]

    def has(word: str) -> bool:
        one = replace(tuning, targets=(word,))
        return any(matches(one, op, m.short) for op in layers for m in modules_of(None, op))

    return tuple(word for word in words if not has(word))


def split_targets(model: Model, tuning: Tuning, words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the targets that peft takes for a model, and those that it leaves out since they name none of its layers.

    Where none names one peft fails, and all are taken, which whoever asks is then told.
    Source: github.com/huggingface/peft 0.21.2 tuners/tuners_utils.py inject_adapter.

    >>> from shardwise.plans import Training, find_stack, tuning_of
    >>> words = ("wi_0", "gate_proj", "down_proj")
    >>> job = Training(seq_len=1, global_batch=1, adapter="lora", targets=words)
    >>> model, tuning = Model.load("llama-3.1-8b"), tuning_of(job, find_stack("trl"), "llama")
    >>> split_targets(model, tuning, words)
    (('gate_proj', 'down_proj'), ('wi_0',))
    """
    lost = strange_targets(model, tuning, words)
    if len(lost) == len(words):
        return tuple(words), ()
    return tuple(word for word in words if word not in lost), lost
