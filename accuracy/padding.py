"""Models whose heads and widths do not divide by the tensor-parallel ranks, as engines that pad them run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accuracy.files import read
from shardwise.models import MLP, Attention, Block, Model


def padded(model: Model, tp: int) -> Model:
    """Return a model with heads and feed-forward widths filled up with zeros to multiples of so many ranks.

    Source: neuronx-distributed parallel_layers/pad.py (get_number_of_extra_heads, pad_model) and transformers-neuronx.

    >>> model = padded(Model.load("llama-2-13b"), 24)
    >>> model.layers[0].mixers[0].heads, model.layers[0].feed_forward.ffn
    (48, 13824)
    """
    return replace(model, layers=tuple(_block(block, tp) for block in model.layers))


def pads_ranks(word: str) -> bool:
    """Return whether an engine, by its word in files, fills heads and widths up to its tensor-parallel ranks.

    >>> pads_ranks("neuronx"), pads_ranks("vllm")
    (True, False)
    """
    return word in read("engines.toml")["padding"]["words"]


def _up(count: int, ranks: int) -> int:
    return -(-count // ranks) * ranks


def _block(block: Block, tp: int) -> Block:
    feed = block.feed_forward
    wide = replace(feed, ffn=_up(feed.ffn, tp)) if isinstance(feed, MLP) else feed
    return replace(block, mixers=tuple(_mixer(m, tp) for m in block.mixers), feed_forward=wide)


def _mixer(mixer: Any, tp: int) -> Any:
    """Return an attention with heads for every rank; key-value heads that ranks can share stay."""
    if not isinstance(mixer, Attention):
        return mixer
    kv = mixer.kv_heads
    shared = kv % tp == 0 or tp % kv == 0
    return replace(mixer, heads=_up(mixer.heads, tp), kv_heads=kv if shared else _up(kv, tp))
