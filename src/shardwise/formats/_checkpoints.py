"""What trainers do beside whatever shards: checkpoints, reentrant or not, attention, the loss and rollouts.

Reentrant checkpoints of torch.utils.checkpoint run their whole unit again.
"""

from __future__ import annotations

from typing import Any

from shardwise.formats._imported import Imported, Keys
from shardwise.models import Model
from shardwise.plans import ATTENTION, Stack, patched, with_attention
from shardwise.records import replace


def reentrant(keys: Keys, stack: Stack, *paths: str) -> Stack:
    """Return a stack whose checkpoints are reentrant, or are not, as the first of these flags that is given says."""
    flags = [flag for path in paths if (flag := keys.flag(path)) is not None]
    return replace(stack, checkpoint_reenters="always" if flags[0] else "") if flags else stack


def with_prompts(keys: Keys, stack: Stack, prompt: str, tp: str = "", usual_tp: int = 1) -> Stack:
    """Return a stack whose rollouts are timed, where a setting says how long prompts are."""
    tokens = keys.whole(prompt)
    if not tokens:
        return stack
    degree = (keys.whole(tp) if tp else None) or usual_tp
    return replace(stack, settings=replace(stack.settings, rollout_prompt_tokens=tokens, rollout_tp=degree))


def with_samples(stack: Stack, samples: int, batch: int) -> Stack:
    """Return a stack whose rollouts, where they are timed, are of so many samples: several steps train on one.

    verl/trainer/ppo/ray_trainer.py fit: generate_sequences is asked of data.train_batch_size prompts, n times each;
    slime and ROLL by their rollout_batch_size.
    """
    if not stack.settings.times_rollouts or samples <= batch:
        return stack
    return replace(stack, settings=replace(stack.settings, rollout_samples=samples))


def attending(keys: Keys, stack: Stack, path: str) -> Stack:
    """Return a stack with the attention that a key names; words that are not known leave it."""
    return with_attention(stack, keys.word(path))


def liger_patches(keys: Keys, model: Model | None) -> bool:
    """Return whether Liger patches a model's class, as far as the trainer's table has its types; says where not."""
    if model is None or not model.family or model.family in keys.table["liger"]["types"]:
        return True
    keys.assumed.append(f"layers and loss as they are: Liger's kernels are not of {model.family}, which it leaves")
    return False


def attention_words(stack: Stack, usual: Stack) -> dict[str, Any]:
    """Return what tells transformers of an attention that it does not usually have."""
    for word, fields in ATTENTION.items():
        changed = all(getattr(stack, name) == value for name, value in fields.items())
        if changed and any(getattr(usual, name) != value for name, value in fields.items()):
            return {"attn_implementation": word}
    own, of_usual, plain = (
        (one.attention_kernel, one.leaves_groups, one.calls_sdpa)
        for one in (stack, usual, with_attention(usual, "sdpa"))
    )
    of_pytorch = own == plain != of_usual
    return {"attn_implementation": "sdpa"} if of_pytorch else {}


def under_deepspeed(launched: Imported | None, trainer: Stack) -> Stack:
    """Return the stack of a trainer, or DeepSpeed's with what the trainer does to the model."""
    return trainer if launched is None else patched(launched.stack, trainer)


def reentrance_words(stack: Stack, usual: Stack) -> dict[str, Any]:
    """Return what tells Trainer whether checkpoints are reentrant, nothing where they are as it usually has them."""
    if stack.checkpoint_reenters == usual.checkpoint_reenters:
        return {}
    return {"gradient_checkpointing_kwargs": {"use_reentrant": bool(stack.checkpoint_reenters)}}
