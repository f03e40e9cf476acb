"""How an engine schedules, by its name and release: policies.toml as records."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

from shardwise.files import own_table
from shardwise.hardware import Device
from shardwise.records import dataclass, replace
from shardwise.serving._engine import static_row


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """What an engine runs at once unless it is told otherwise: sequences, and tokens of a step (0: whole prompts).

    Prompts of up to `whole_prompts` tokens run in a step of their own, longer ones are cut. Memory is set aside for the
    sampling of `set_aside` sequences.
    """

    sequences: int
    set_aside: int
    step_tokens: int = 0
    whole_prompts: int = 0
    of_stage: bool = False
    """A pipeline runs so many sequences in each of the batches that it has at once, one a stage."""

    def at_once(self, stages: int) -> int:
        """Return the sequences that a pipeline of so many stages runs at once.

        >>> [SchedulerLimits(sequences=256, set_aside=256, of_stage=each).at_once(4) for each in (False, True)]
        [256, 1024]
        """
        return self.sequences * stages if self.of_stage else self.sequences

    @property
    def text(self) -> str:
        """The step in words."""
        return f"{self.step_tokens:,} tokens and {self.sequences:,} sequences at once"

    def tokens(self, length: int) -> int:
        """Return the tokens of the largest step over contexts of a length, 0 where prompts are never cut.

        >>> SchedulerLimits(sequences=256, set_aside=256, step_tokens=2048, whole_prompts=32768).tokens(4096)
        4096
        """
        return max(length, self.step_tokens) if length <= self.whole_prompts else self.step_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The scheduler of an engine. Each field but the sizes is a key of policies.toml."""

    mixed: bool
    """Pieces of prompts and decode tokens share a step; else prompts run in steps of their own, first."""
    chunked: bool
    """A prompt may be cut to fill a step."""
    prefix_cache: bool
    whole_prompts: bool
    """A request is admitted only where its whole prompt has room in the cache."""
    async_scheduling: bool
    """A step is scheduled while the one before it runs: who arrives in between waits for both."""
    reserved_share: float
    """Share of its output that must have room in the cache when a request is admitted."""
    step_tokens: int
    max_sequences: int
    block_tokens: int
    source: str
    caches_states: bool = True
    """The prefix cache holds recurrent states too, at the ends of blocks."""
    prefix_block: int = 0
    """Tokens of such a block, 0 where they are those of the cache."""
    recomputed_tokens: int = 0
    """Tokens that a decode pool runs again of a prompt whose cache it was sent: 1 where the first token is its own."""
    early_first_token: bool = False
    """A decode pool hands out the token that came with a cache a step before its sequence joins those that decode."""
    overshoots: bool = False
    """A step more runs where all have had their last token, scheduled before that was read. Engines, in the file."""
    place_first: bool = False
    """A prompt runs once the decode pool has set aside a place for its cache, which it does between two steps."""
    balance_steps: int = 0
    """Steps that prompts wait until every group of attention that shares the experts has one; 0: they do not wait."""
    balances: Literal["turns", "loads", "queues"] = "turns"
    """Which group of attention of a replica takes a request: the next, that with the fewest, or with the least of
    requests that run and four times those that wait."""
    receive_steps: int = 1
    """Decode steps after which the scheduler looks for new requests; it looks after every step of prompts, too."""
    batch_wait: tuple[int, float] = (0, 0.0)
    """Decode steps that prompts wait at most, beside sequences that decode, until they fill this share of a step."""
    shared_waiting: bool = False
    """The batches of a pipeline take from one waiting list and have one cache; else each has a part of its own."""
    shared_places: bool = False
    """The sequences at once are those of all its batches together; else each takes its part of them."""
    batches_ahead: int = 0
    """Batches that are made before one of those in the stages has ended."""
    read_together: int = 0
    """Prompts that the API server has its tokenizer read at a time, of requests that come together, all of which it
    takes before it hands on the first; 0: it hands on each as it is read."""
    transfer: Literal["prompt", "chunk"] = "prompt"
    """What of a prompt is sent to the decode pool after it was computed: all of it, or its last chunk."""

    ubatch_tokens: int = 0
    """Tokens of a step that run at a time, one batch at a time (llama.cpp's n_ubatch of n_batch); 0: all at once."""
    raised_from: int = 0
    """Tokens of a step as they were stated, where no prompt fits into so many and none is cut."""

    @property
    def pass_tokens(self) -> int:
        """Most tokens that run at once: those of a step, or of a ubatch."""
        return self.ubatch_tokens or self.step_tokens

    @property
    def one_batch(self) -> bool:
        """Whether stages of a pipeline run ubatches of one batch: its next step waits until all of them have ended."""
        return self.ubatch_tokens > 0

    @property
    def found_block(self) -> int:
        """Tokens of a block that the prefix cache finds again."""
        return self.prefix_block or self.block_tokens

    @property
    def text(self) -> str:
        """The step in words."""
        cut = f", in ubatches of {self.ubatch_tokens:,} tokens" if self.ubatch_tokens else ""
        raised = f" (prompts are not cut and do not fit into {self.raised_from:,})" if self.raised_from else ""
        return f"{self.step_tokens:,} tokens{raised} and {self.max_sequences:,} sequences a step{cut}"

    def of_ubatches(self, tokens: int) -> Policy:
        """How it schedules where so many tokens run at a time: a step has as many at least."""
        return replace(self, step_tokens=max(self.step_tokens, tokens), ubatch_tokens=tokens)

    def of_states(self, block: int) -> Policy:
        """How it schedules a model with recurrent layers, whose states end with blocks of so many tokens."""
        return replace(self, prefix_cache=self.prefix_cache and self.caches_states, prefix_block=block)

    def of_answers(self, steps: float) -> Policy:
        """How it schedules answers of so many decode steps: where nobody decodes, prompts run in steps of their own."""
        return self if steps else replace(self, mixed=False)

    def of_prompts(self, own: SchedulerLimits) -> Policy:
        """How a pool schedules that computes prompts alone: no decode step runs beside them, no answer needs room.

        A limit on sequences is that of the pool that decodes: prompts run as the engine's own limit lets them.
        """
        most = max(self.max_sequences, own.sequences)
        return replace(self, mixed=False, reserved_share=0.0, max_sequences=most)

    def of_prompts_set_aside(self, own: SchedulerLimits) -> int:
        """Return the sequences for which a pool that computes prompts alone sets memory aside.

        They are the engine's own limit, or the lower one of the pool that decodes.
        """
        return min(self.max_sequences, own.sequences)

    def sent_tokens(self, prompt: float) -> float:
        """Return the tokens of a prompt whose cache is still to be sent when it has been computed."""
        return (prompt - 1) % self.step_tokens + 1 if self.transfer == "chunk" else prompt


@cache
def _table() -> dict[str, Any]:
    return own_table(__file__, "policies.toml")


def client_seconds(tokens: float) -> float:
    """Return what a client and the tokenizer take before a prompt of so many tokens is in the engine.

    >>> round(client_seconds(1000), 4)
    0.0101
    """
    return float(_table()["client"]["seconds"]) + reading_seconds(tokens)


def reading_seconds(tokens: float) -> float:
    """Return what a tokenizer takes to read a prompt of so many tokens.

    >>> round(reading_seconds(1000), 4)
    0.0036
    """
    return float(_table()["client"]["token_seconds"] * tokens)


def rush_seconds(requests: int, tokens: float, together: int) -> float:
    """Return what requests that come together wait for each other, with prompts of so many tokens, in an API server.

    It takes all before it hands on the first, and its tokenizer reads so many prompts at a time.

    >>> [round(rush_seconds(64, 1000, together), 4) for together in (0, 1, 32)]
    [0.0, 0.063, 0.1746]
    """
    if not together:
        return 0.0
    before_others = float(_table()["client"]["request_seconds"]) * (requests - 1)
    return before_others + reading_seconds(tokens) * (min(requests, together) - 1)


def limits_of(engine: str, device: Device, offline: bool = False) -> SchedulerLimits:
    """Return what an engine runs at once on a device unless it is told otherwise, as a server or offline.

    >>> from shardwise.hardware import find_device
    >>> devices = [find_device(name).device for name in ("b200-sxm-180gb", "h100-sxm-80gb", "a100-sxm-80gb")]
    >>> [limits_of("vllm", device).step_tokens for device in devices], limits_of("vllm", devices[2], True).step_tokens
    ([16384, 8192, 2048], 8192)
    """
    row = next(one for one in _table()["limits"] if re.fullmatch(one["engines"], engine))
    for large in row.get("by_memory", ()):
        if device.memory_bytes >= large["memory_bytes"] and not re.fullmatch(large["except"], device.chip):
            row = row | large
            break
    stated = {name: row[name] for name in ("sequences", "step_tokens", "whole_prompts", "of_stage") if name in row}
    if offline and "offline_tokens" in row:
        stated["step_tokens"] = row["offline_tokens"]
    profiled = row["sequences"] if "step_tokens" in row else _table()["set_aside"]["sequences"]
    return SchedulerLimits(set_aside=profiled, **stated)


def profile_of(engine: str, device: Device, sequences: int, step_tokens: int) -> SchedulerLimits:
    """Return the step that an engine runs at start-up to see what memory it takes, of no tokens where it runs none.

    vLLM runs `max_num_batched_tokens` tokens and samples for `max_num_seqs` sequences before it sizes its cache,
    whatever requests come later (vllm/v1/worker/gpu_model_runner.py profile_run, 2026-01).
    """
    own = limits_of(engine, device)
    if not own.step_tokens or not step_tokens:
        return SchedulerLimits(sequences=sequences, set_aside=0)
    return replace(own, sequences=sequences or own.sequences, step_tokens=step_tokens)


_BY_DEVICE = ("engines", "chunk_by_memory", "chunks", "speculating")
"""Keys of a row that are no fields of a policy: which engines it is of, and what devices and models decide."""


@cache
def _policy_row(engine: str) -> dict[str, Any]:
    return next(one for one in _table()["policy"] if re.fullmatch(one["engines"], engine))


def cuts_prompts(engine: str) -> bool:
    """Return whether an engine cuts a prompt to fill a step.

    >>> [cuts_prompts(name) for name in ("vllm", "sglang", "tensorrt-llm")]
    [True, True, False]
    """
    return bool(_policy_row(engine)["chunked"])


def _chunk(engine: str, device: Device) -> int:
    row = _policy_row(engine)
    own = next((rows for one, rows in row.get("chunks", {}).items() if re.fullmatch(one, engine)), ())
    if own:
        return int(next(tokens for below, tokens in own if device.usable_memory_bytes < below * 2**30))
    return int(static_row(device)["chunk"] if row.get("chunk_by_memory") else row.get("step_tokens", 0))


def step_tokens_of(engine: str, device: Device, context: int) -> int:
    """Return the tokens of a step that an engine has for prompts of up to a context, 0 where nothing bounds them.

    >>> from shardwise.hardware import find_device
    >>> step_tokens_of("vllm", find_device("h100-sxm-80gb").device, 600 * 4096)
    8192
    """
    row = _policy_row(engine)
    tokens = _chunk(engine, device) or limits_of(engine, device).tokens(context)
    return tokens if row["chunked"] or not tokens else max(tokens, context)


def policy_of(engine: str, device: Device, block_tokens: int, context: int) -> Policy:
    """Return how an engine schedules on a device by default, for contexts of up to so many tokens.

    >>> from shardwise.hardware import find_device
    >>> policy = policy_of("vllm", find_device("h100-sxm-80gb").device, 16, 8192)
    >>> policy.mixed, policy.step_tokens, policy.max_sequences
    (True, 8192, 1024)
    """
    row, limits = _policy_row(engine), limits_of(engine, device)
    words = {name: value for name, value in row.items() if name not in _BY_DEVICE}
    words["overshoots"] = re.fullmatch(row.get("overshoots", ""), engine) is not None
    tokens = _chunk(engine, device) or limits.tokens(context) or context
    return Policy(**words | {"step_tokens": tokens, "max_sequences": limits.sequences, "block_tokens": block_tokens})


def most_speculating(engine: str, family: str) -> int:
    """Return the sequences that an engine runs at once where it guesses tokens of a family of models, 0 for as ever.

    >>> [most_speculating("sglang", family) for family in ("llama", "deepseek_v4")], most_speculating("vllm", "llama")
    ([48, 256], 0)
    """
    rows: dict[str, int] = _policy_row(engine).get("speculating", {})
    return next((most for one, most in rows.items() if re.fullmatch(one, family)), 0)
