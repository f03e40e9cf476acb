"""Steps of more tokens than an engine runs at a time: llama.cpp cuts a logical batch into physical ones, ubatches.

llama_decode takes up to n_batch tokens and runs them n_ubatch at a time, each a pass over the weights; a sequence
samples when all have run. Ubatches follow one another through the devices of a layer split
(github.com/ggml-org/llama.cpp src/llama-context.cpp decode, memory->init_batch; common/common.h: n_batch 2048).
"""

from __future__ import annotations

from typing import Any

from shardwise.arrays import np
from shardwise.records import dataclass, replace
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._ledger import EngineStep
from shardwise.serving._sizes import ServingSizes
from shardwise.serving._step import step_cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Ubatches:
    """How a step is cut: `tokens` of a ubatch, 0 where a step runs as one; as many `in_flight` as a pipeline has."""

    tokens: int = 0
    in_flight: int = 0
    later: Any = 1.0
    """Share of its own seconds that a ubatch adds behind another in a pipeline, by layout: [layout, 1]."""

    def split(self, tokens: Any) -> tuple[Any, Any, Any]:
        """Return full ubatches of steps, tokens of the last one, and how much of it counts, as seconds add up.

        >>> [one.tolist() for one in Ubatches(tokens=512).split(np.array([512.0, 2048.0, 952.0]))]
        [[1.0, 4.0, 1.0], [0.0, 0.0, 440.0], [0.0, 0.0, 1.0]]
        >>> [float(one) for one in Ubatches(tokens=512, in_flight=4, later=0.5).split(np.array(2060.0))]
        [2.5, 12.0, 1.0]
        """
        tokens = np.asarray(tokens, float)
        whole = np.floor(tokens / self.tokens + 1e-9)
        rest = np.maximum(tokens - whole * self.tokens, 0.0)
        most = self.in_flight or np.maximum(whole, 1.0)
        first = np.ceil(whole / most)
        behind = (whole > 0) & ((whole % most > 0) | (not self.in_flight))
        last = np.where(behind, self.later, 1.0) * np.minimum(rest, 1.0)
        return first + self.later * (whole - first), rest, last

    def extra(self, tokens: Any) -> Any:
        """Return the ubatches of steps beyond the first, as seconds add up."""
        whole, _, last = self.split(tokens)
        return np.maximum(whole + last - 1, 0.0)

    def pieces(self, sizes: Any, pasts: Any) -> tuple[Any, Any]:
        """Return new and past tokens of the full ubatches of pieces of prompts, the middle one for all, and the last.

        >>> new, past = Ubatches(tokens=512).pieces(np.array([1000.0]), np.array([64.0]))
        >>> new.tolist(), past.tolist()
        ([512.0, 488.0], [64.0, 576.0])
        """
        whole = np.floor(sizes / self.tokens + 1e-9)
        rest = np.maximum(sizes - whole * self.tokens, 1.0)
        full = np.minimum(sizes, self.tokens)
        middle = pasts + np.maximum(whole - 1, 0.0) * self.tokens / 2
        return np.concatenate([full, rest]), np.concatenate([middle, pasts + whole * self.tokens])


def ubatches_of(case: ServingCase, sizes: ServingSizes[Any]) -> Ubatches:
    """Return how an engine cuts its steps; `later` is that of a full ubatch of an empty cache."""
    prefill = case.engine.prefill
    if not prefill.chunk_tokens:
        return Ubatches()
    tokens = case.step_tokens
    step: EngineStep[Any] = EngineStep(phase="prefill", sequences=1, tokens=tokens, context=0)
    cost = step_cost(case, sizes, step, replace(engine_cost_model(case, sizes), decoding=False))
    hidden = np.maximum(np.asarray(cost.seconds - cost.slowest_stage, float), 0.0)
    later = 1 - hidden / np.asarray(cost.seconds, float)
    return Ubatches(tokens=tokens, in_flight=prefill.chunks_in_flight, later=np.reshape(later, (-1, 1)))
