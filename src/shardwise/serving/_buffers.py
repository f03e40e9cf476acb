"""Buffers of engines that allocate all of them before a forward pass: FasterTransformer.

Sizes are those of its allocateBuffer functions (github.com/NVIDIA/FasterTransformer src/fastertransformer, 2023:
models/multi_gpu_gpt/ParallelGpt.cc and ParallelGptContextDecoder.cc, layers/FfnLayer.cc and
layers/attention_layers/GptContextAttentionLayer.cc). Letters: S input tokens of a sequence, a bytes of an activation.
"""

from __future__ import annotations

from shardwise.ledger.number import X, divide
from shardwise.models import MLP, Attention
from shardwise.serving._case import Case
from shardwise.serving._sizes import Sizes


def static_bytes(case: Case, z: Sizes[X]) -> X:
    """Return bytes of all buffers of a pass on a rank.

    Of every token: the stream six times (in and out of all layers, normed, out of attention, out of a layer, and of
    contexts that sequences share), queries, keys and values twice, those of shared contexts again, the heads' output
    twice, and the widest feed-forward; of every sequence two S x S masks.
    """
    a, S, new = case.activation_bytes, case.job.input_tokens, case.new_input_tokens
    attention = [m for block in case.model.kinds for m in block.mixers if isinstance(m, Attention)]
    forward = [b.feed_forward for b in case.model.kinds if isinstance(b.feed_forward, MLP)]
    heads = max((m.heads * m.head_dim for m in attention), default=0)
    width = max(((1 + f.gated) * f.ffn for f in forward), default=0)
    token = 6 * case.model.hidden + divide(0 * z.tp + 10 * heads + width, z.tp)
    return z.batch * a * (new * token + 2 * S * S)
