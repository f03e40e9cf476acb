"""What of softmax attention is beyond one causal kernel: limits of what a query sees, sinks, capped scores."""

from __future__ import annotations

from shardwise.models._mixers import Attention
from shardwise.models._model import Model


def attention_limits(model: Model, but_sinks: bool = False) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return, of each kind of attention of a model, the keys that a query sees at most (0: all) and what it has more.

    `but_sinks` leaves those with sinks out.

    >>> attention_limits(Model.load("gpt-oss-20b"))
    ((0, ('sinks',)), (128, ('sinks',)))
    """
    mixers = [mixer for block in model.kinds for mixer in block.mixers if isinstance(mixer, Attention)]
    mixers = [mixer for mixer in mixers if not (but_sinks and mixer.sinks)]
    return tuple(sorted({(m.window or m.chunk, ("sinks",) * m.sinks + ("capped scores",) * m.softcap) for m in mixers}))
