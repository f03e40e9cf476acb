"""What is asked: a training run or a served batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from shardwise.errors import Problems
from shardwise.records import dataclass

Effort: TypeAlias = Literal["record", "typical"]
TUNINGS: tuple[Effort, ...] = get_args(Effort)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Sequences of a sample, whether log-probabilities of a reference are read, and what else trains or is scored.

    `values` says that a head of one value a token stands in for that of the vocabulary, `critic` that a second model
    with such a head trains beside the policy, `rollout` that an engine has generated what is trained on, and
    `mismatched` that policy and reference also score as many prompts with answers to others.
    """

    source: str
    sequences: int = 1
    reference: bool = False
    values: bool = False
    critic: bool = False
    rollout: bool = False
    mismatched: bool = False


OBJECTIVES: dict[str, Objective] = {
    "sft": Objective(source="next tokens"),
    "dpo": Objective(source="arXiv:2305.18290: a chosen and a rejected answer a sample", sequences=2, reference=True),
    "kto": Objective(source="arXiv:2402.01306 section 4.1: one answer a sample", reference=True, mismatched=True),
    "reward": Objective(source="arXiv:2203.02155 section 3.5: two answers a sample", sequences=2, values=True),
    "grpo": Objective(source="arXiv:2402.03300 section 4.1", reference=True, rollout=True),
    "ppo": Objective(source="arXiv:2203.02155 section 3.5", reference=True, critic=True, rollout=True),
}
"""What is optimised, by name."""
_OTHER_NAMES = {
    "ipo": "dpo", "orpo": "dpo", "simpo": "dpo", "cpo": "dpo", "rm": "reward", "gdpo": "grpo", "rloo": "grpo",
}  # fmt: skip
_WITHOUT_REFERENCE = ("orpo", "simpo", "cpo")
PHASES = (
    "rollout", "old-log-probabilities", "mismatched-log-probabilities", "values", "reference-log-probabilities",
    "update", "policy-update", "critic-update",
)  # fmt: skip
"""Phases of a step of preferences or rewards."""
REFERENCES = ("base", "adapter", "copy", "none")
"""The reference: the base with its adapters off, a frozen adapter, a frozen copy of all weights, or no reference."""


def objective_named(word: str, compares: bool = True) -> tuple[str, str] | None:
    """Return method and reference of a trainer's word for what is optimised, None where nobody here knows it.

    `compares` is whether a reference is read where the method has one.

    >>> objective_named("simpo"), objective_named("ppo"), objective_named("gkd")
    (('dpo', 'none'), ('ppo', ''), None)
    """
    method = _OTHER_NAMES.get(word, word)
    if method not in OBJECTIVES:
        return None
    alone = word in _WITHOUT_REFERENCE or not compares
    return method, "none" if alone and OBJECTIVES[method].reference else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training job: how much each step consumes, in which precision, and how long the run is.

    >>> Training(seq_len=8192, global_batch=1024).tokens_per_step
    8388608
    """

    seq_len: int
    """Tokens of a sequence."""
    global_batch: int
    """Sequences of one optimizer step, over all replicas."""
    token_budget: float = 0.0
    """Tokens of the run, or with `sample_budget` samples (sequences, images, fields); 0: not asked."""
    sample_budget: float = 0.0
    epochs: float = 1.0
    """How often the budget is gone through."""
    precision: str = ""
    """A recipe of precisions.toml; empty: that of the stack."""
    optimizer: str = "adam"
    optimizer_rank: int = 0
    """Rank of the projected gradients of GaLore and APOLLO; 0: the optimizer's own."""
    dropout: bool | None = None
    """Whether dropout is on; None is the model's own. The three that follow take this where they are None."""
    softmax_dropout: bool | None = None
    """Dropout of attention probabilities."""
    attention_dropout: bool | None = None
    """Dropout of what attention adds to the stream."""
    hidden_dropout: bool | None = None
    """Dropout of the embedding and of what the feed-forward adds."""
    expert_imbalance: float = 1.0
    """Load of the busiest expert rank over the mean."""
    capacity_factor: float = 0.0
    """Rows that an expert takes of a rank's tokens, over the mean; further ones are dropped. 0: none are."""
    pad_to_capacity: bool = False
    """Whether every expert gets as many rows as its capacity, those that are missing as zeros."""
    attention_density: float = 1.0
    """Share of the causal square that packed documents leave (see `density_of`)."""
    adapter: str = ""
    """The method of fine-tuning beside frozen weights, one of `ADAPTERS`; empty: the weights themselves train."""
    rank: int = 0
    """Rank of the adapters, or virtual tokens of prefix and prompt tuning; 0: 8."""
    oft_block_size: int = 0
    """Features of a block of OFT; 0: as its rank or peft says."""
    targets: tuple[str, ...] = ()
    """Layers with adapters: all-linear, attention, mlp, experts, embedding, head, or names; empty: all-linear."""
    adapter_alpha: float = 0.0
    """The factor of an adapter's result, which changes no byte and no second."""
    adapter_dropout: float = 0.0
    """Share of what enters an adapter that is dropped."""
    adapter_precision: str = ""
    """Type of adapters, fp32 or bf16; empty: that of the stack."""
    base: str = ""
    """Format of the frozen matrices; empty: 16 bits."""
    trains: tuple[str, ...] = ()
    """What trains: all, none, embedding, head, norms, or layers by number; empty: none beside an adapter, else all."""
    method: str = "sft"
    """What is optimised, one of `OBJECTIVES`."""
    reference: str = ""
    """The reference of preferences or rewards, one of `REFERENCES`; empty: the framework's own."""
    tuning: Effort = "record"
    """How well the run is tuned: as runs for a record are, or as the runs that people publish otherwise."""
    failures_per_device_hour: float = 0.0
    restart_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    checkpoint_interval_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens consumed by one optimizer step."""
        return self.seq_len * self.global_batch * self.sequences

    @property
    def sequences(self) -> int:
        """Sequences of a sample: two of a preference."""
        return OBJECTIVES[self.method].sequences if self.method in OBJECTIVES else 1

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
    """A static batch to be served: so many equal requests on each replica, from prompt to last token.

    >>> Serving(batch=8, input_tokens=512, output_tokens=32).total_tokens
    544
    """

    batch: int = 1
    """Requests on each replica."""
    input_tokens: int = 512
    output_tokens: int = 32
    """Tokens that each request generates; 0 asks for one pass over the input."""
    weights: str = ""
    """Format of the weights; empty: that of the checkpoint."""
    kv_cache: str = ""
    """Format of the cache; empty: the type of activations."""
    compute: str = ""
    """Type of the GEMMs of weights in that format; empty: the format's own."""
    memory_fraction: float = 0.0
    """Share of the memory that the engine may use, as it spells it; 0: its own default."""
    expert_imbalance: float = 1.0
    """Load of the busiest expert rank over the mean."""
    prefix_tokens: int = 0
    """Tokens of the input that are in the cache already."""
    max_batched_tokens: int = 0
    """Tokens of a step of the prefill; 0: the whole batch in one step."""
    max_sequences: int = 0
    """Sequences that the engine sets buffers aside for; 0: its own number, or the batch."""
    use_kv_cache: bool = True
    """Without a cache each output token runs all tokens before it again."""
    shard_weights: bool = False
    """Weights are split over the replicas and gathered layer by layer (ZeRO-Inference)."""
    misc_bytes: float = 0.0
    """Bytes beside all else on every device."""
    kv_cache_memory: float = 0.0
    """Bytes of the cache on every device, whatever share of the memory they are; 0: what that share leaves."""
    max_total_tokens: int = 0
    """Most tokens of the cache of a replica; 0: as many as there is room for."""
    captured_sequences: int = -1
    """Sequences of the largest decode step that is replayed from a captured graph, where larger ones are launched
    kernel by kernel; 0 where none is, -1: as the engine does by itself."""
    captured_sizes: tuple[int, ...] = ()
    """Sequences of each decode step that is captured, where a launch lists them; empty: the engine's own list."""
    disable_cuda_graph_padding: bool = False
    """Decode steps are replayed from a graph of just their size, of every size unless they are listed, and no smaller
    one is filled up (SGLang's name)."""
    language_model_only: bool = False
    """Towers of images and sound that the model has are not loaded."""
    adapter_rank: int = 0
    """Rank of the LoRA adapters that every device has room for; 0: none."""
    adapters: int = 1
    speculative_method: str = ""
    """What guesses tokens that a step then verifies: "draft_model", "eagle", "mtp" or "ngram"; empty: nothing."""
    num_speculative_tokens: int = 0
    """Tokens that are guessed for a step."""
    acceptance_rate: float = 0.0
    """Share of guesses that are accepted where all before them were; 0: stated as a length."""
    acceptance_length: float = 0.0
    """Mean tokens that a step makes, its own included; 0: stated as a rate."""
    draft_model: str = ""
    gpu_layers: int = -1
    """Layers that the device holds, the head counted as the first of them; the rest lies on the host, which runs it.
    -1: all, as llama.cpp says it too (llama-model.cpp, n_gpu_layers)."""
    cpu_experts: int = 0
    """First layers whose routed experts lie on the host, which runs them."""
    host: str = ""
    """The host's processor, by its name in the catalogue."""
    same_prompts: bool = False
    """All requests are copies of one, as in some benchmarks, and route to the same experts."""

    @property
    def total_tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.input_tokens + self.output_tokens

    @property
    def splits_with_host(self) -> bool:
        """Whether the host holds and runs a part of the model."""
        return self.gpu_layers >= 0 or self.cpu_experts > 0


def objective_problems(job: Training) -> Problems:
    """Return what is wrong with a job's objective by itself.

    >>> from shardwise.plans import Training
    >>> print(objective_problems(Training(seq_len=1, global_batch=1, reference="copy")).items[0])
    reference = 'copy': is read by dpo, kto, grpo, ppo, and the method is sft; leave it out, or add --method dpo
    """
    problems = Problems()
    if job.method not in OBJECTIVES:
        problems.add("method", job.method, "is not a known method", "use one of " + ", ".join(OBJECTIVES))
    if job.reference and job.reference not in REFERENCES:
        problems.add("reference", job.reference, "is not a known reference", "use one of " + ", ".join(REFERENCES))
    if problems.items:
        return problems
    readers = [name for name, one in OBJECTIVES.items() if one.reference]
    if job.reference and job.method not in readers:
        rule = f"is read by {', '.join(readers)}, and the method is {job.method}"
        problems.add("reference", job.reference, rule, "leave it out, or add --method dpo")
    elif job.reference in ("base", "adapter") and not job.adapter:
        rule = "is the frozen base of adapters, and there are none"
        problems.add("reference", job.reference, rule, "use --reference copy, or add --adapter lora")
    return problems


def reference_of(job: Training, own: str = "") -> str:
    """Return the reference of a job: as stated, else the framework's own, else a copy where all weights train.

    >>> from shardwise.plans import Training
    >>> [reference_of(Training(seq_len=1, global_batch=1, method=name)) for name in ("dpo", "sft")]
    ['copy', 'none']
    """
    # A method that is not known is refused where jobs are checked.
    if job.method not in OBJECTIVES or not OBJECTIVES[job.method].reference:
        return "none"
    return job.reference or ((own or "base") if job.adapter else "copy")
