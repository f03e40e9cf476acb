"""What is asked: a training run or a served batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training job; `global_batch` is in sequences of `seq_len` tokens, 0 budgets and rates mean not asked.

    `attention_density` is the share of the causal square that packed documents leave (see `density_of`), 1 without
    packing. `expert_imbalance` is the load of the busiest expert rank over the mean. Failures are per device and
    hour. The budget of a run is in tokens or in samples (sequences, images, fields), either taken `epochs` times.
    `dropout` None is the model's own; those of attention probabilities, of what attention adds to the stream, and of
    the embedding and what the feed-forward adds follow it where they are None.

    >>> Training(seq_len=8192, global_batch=1024).tokens_per_step
    8388608
    """

    seq_len: int
    global_batch: int
    token_budget: float = 0.0
    sample_budget: float = 0.0
    epochs: float = 1.0
    precision: str = ""
    optimizer: str = "adam"
    dropout: bool | None = None
    softmax_dropout: bool | None = None
    attention_dropout: bool | None = None
    hidden_dropout: bool | None = None
    expert_imbalance: float = 1.0
    attention_density: float = 1.0
    failures_per_device_hour: float = 0.0
    restart_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    checkpoint_interval_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens consumed by one optimizer step."""
        return self.seq_len * self.global_batch

    @property
    def run_tokens(self) -> float:
        """Tokens of the whole run, 0 without a budget.

        >>> Training(seq_len=64800, global_batch=4096, sample_budget=350640, epochs=2).run_tokens
        45442944000
        """
        return (self.token_budget or self.sample_budget * self.seq_len) * self.epochs


def density_of(document_lengths: Sequence[float], seq_len: int) -> float:
    """Return the share of a sequence's causal attention that documents packed into it leave.

    A document of l tokens has l * (l + 1) / 2 pairs; the mean over tokens, over the (S + 1) / 2 of one whole sequence.

    >>> density_of([4096], 4096), round(density_of([1024] * 4, 4096), 4)
    (1.0, 0.2502)
    """
    tokens = sum(document_lengths)
    return sum(length * (length + 1) for length in document_lengths) / tokens / (seq_len + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A static batch to be served: `batch` requests on each replica, of `input_tokens`, generating `output_tokens`.

    `weights`, `kv_cache` and `compute` name formats; empty ones follow the checkpoint. `prefix_tokens` of the input
    are in the cache already. `max_batched_tokens` cuts the prefill into steps of so many tokens, `max_sequences` is
    what the engine sets buffers aside for; 0 means the batch. `memory_fraction` 0 is the engine's own. No output tokens
    ask for one pass over the input. Without `use_kv_cache` each output token runs all tokens before it again.
    `shard_weights` splits weights over the replicas and gathers them layer by layer (ZeRO-Inference), `misc_bytes` are
    beside all else on a device. `adapters` of `adapter_rank` (LoRA) have their room on every device.
    With `same_prompts` all requests are copies of one, as in some benchmarks, and route to the same experts.

    >>> Serving(batch=8, input_tokens=512, output_tokens=32).total_tokens
    544
    """

    batch: int = 1
    input_tokens: int = 512
    output_tokens: int = 32
    weights: str = ""
    kv_cache: str = ""
    compute: str = ""
    memory_fraction: float = 0.0
    expert_imbalance: float = 1.0
    prefix_tokens: int = 0
    max_batched_tokens: int = 0
    max_sequences: int = 0
    use_kv_cache: bool = True
    shard_weights: bool = False
    misc_bytes: float = 0.0
    adapter_rank: int = 0
    adapters: int = 1
    same_prompts: bool = False

    @property
    def total_tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.input_tokens + self.output_tokens
