"""The attention that users of transformers name: torch's own call, steps, or kernels of flash attention."""

from __future__ import annotations

from typing import Any

from shardwise.errors import Problems
from shardwise.plans._laws import one_of
from shardwise.plans._stack import Stack, find_stack, stack_table
from shardwise.records import replace

_FLASH: dict[str, Any] = {"attention": "flash", "leaves_groups": "", "repeats_kv": False, "calls_sdpa": False}
ATTENTION: dict[str, dict[str, Any]] = {
    "eager": {"attention": "eager"},
    "flash_attention_2": {"attention_kernel": "flash-2", **_FLASH},
    "flash_attention_3": {"attention_kernel": "", **_FLASH},
    "flex_attention": {"attention_kernel": "flash-2", **_FLASH},
}
"""Words of transformers, and of the Hub's kernels, for attention: what they change in a stack. FlashAttention takes
heads that share keys, windows and sinks as they are (transformers 5.24.0 integrations/flash_attention.py), flex
attention skips what a mask leaves out, eager attention keeps whole scores."""
ATTENTION["kernels-community/flash-attn2"] = ATTENTION["flash_attention_2"]
ATTENTION["kernels-community/flash-attn3"] = ATTENTION["flash_attention_3"]
ATTENTION["kernels-community/vllm-flash-attn3"] = ATTENTION["flash_attention_3"]
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Those that a flag takes."""
_OWN_MODELS = ("litgpt", "unsloth")


def with_attention(stack: Stack, word: str) -> Stack:
    """Return a stack with the attention that a word of transformers names; words that are not known leave it.

    >>> [with_attention(find_stack("axolotl"), word).attention_kernel for word in ("", "sdpa", "flash_attention_2")]
    ['flash-2', 'cudnn-9.19', 'flash-2']
    >>> [with_attention(find_stack("transformers-eager"), word).attention for word in ("", "sdpa", "flex_attention")]
    ['eager', 'flash', 'flash']
    """
    if word == "sdpa":
        usual = find_stack("transformers")
        names = ("attention", "attention_kernel", "leaves_groups", "calls_sdpa")
        return replace(stack, **{name: getattr(usual, name) for name in names})
    return replace(stack, **ATTENTION.get(word, {}))


def attention_problems(stack: Stack, word: str) -> Problems:
    """Return what is wrong with naming an attention under a framework: those around transformers' models alone take it.

    >>> [len(attention_problems(find_stack(name), "sdpa").items) for name in ("trl", "accelerate", "megatron")]
    [0, 0, 1]
    """
    problems, table, name = Problems(), stack_table(), stack.name
    if word not in ATTENTIONS:
        problems.add("attn_implementation", word, "is not an attention of transformers", one_of(ATTENTIONS))
    while name and name not in ("transformers", "accelerate", *_OWN_MODELS):
        name = table[name].get("extends", "")
    if name not in ("transformers", "accelerate"):
        rule = f"is chosen around models of transformers, which {stack.name} does not run"
        problems.add("attn_implementation", word, rule, "leave it out, or use --stack trl")
    return problems
