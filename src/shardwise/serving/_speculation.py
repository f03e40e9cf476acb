"""Speculative decoding: a draft guesses k tokens one after another, and a step of the model verifies k + 1 at once.

Of independent guesses that are each accepted with probability a, a step makes (1 - a^(k+1)) / (1 - a) tokens
(arXiv:2211.17192 equation 1). Drafts: a model of its own; heads of the model's width that read its hidden states
through a projection of two streams (EAGLE, arXiv:2401.15077; multi-token prediction, arXiv:2412.19437 section 2.2),
which share embedding and head; or n-grams of the prompt, which take no time on the device. A draft runs on the ranks of
the model (github.com/vllm-project/vllm vllm/v1/spec_decode).
"""

from __future__ import annotations

import math

from shardwise.errors import Problems
from shardwise.models import Block, Model, load_model
from shardwise.plans import Serving
from shardwise.plans.fields import SPECULATION
from shardwise.plans.laws import is_count
from shardwise.records import replace


def tokens_per_step(job: Serving) -> float:
    """Return the mean tokens that a decode step makes for each sequence: 1 without speculation.

    >>> tokens_per_step(Serving(num_speculative_tokens=3, speculative_method="mtp", acceptance_rate=0.5))
    1.875
    """
    k, rate = job.num_speculative_tokens, job.acceptance_rate
    if not job.speculative_method:
        return 1.0
    if job.acceptance_length:
        return job.acceptance_length
    return k + 1.0 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)


def tokens_per_whole_step(job: Serving) -> float:
    """Return the mean tokens of an answer that a decode step of it makes: of the last step some may be too many.

    >>> job = Serving(num_speculative_tokens=3, speculative_method="mtp", acceptance_length=2.5, output_tokens=2)
    >>> [tokens_per_whole_step(replace(job, output_tokens=tokens)) for tokens in (2, 9, 1001)]
    [1.0, 2.0, 2.5]
    """
    made, further = tokens_per_step(job), job.output_tokens - 1
    return further / math.ceil(further / made - 1e-9) if job.speculative_method and further > 0 else made


def speculation_problems(job: Serving, model: Model) -> Problems:
    """Return what is wrong with the speculation of a job, or missing of it."""
    problems = Problems()
    if job.speculative_method:
        _acceptance(job, problems)
        _draft(job, model, problems)
        return problems
    for name in ("num_speculative_tokens", "acceptance_rate", "acceptance_length", "draft_model"):
        if value := getattr(job, name):
            problems.add(name, value, "has no effect: nothing speculates", "add --speculative-method, or leave it out")
    return problems


def _acceptance(job: Serving, problems: Problems) -> None:
    """Record what is wrong with depth and acceptance."""
    depth, rate, length = job.num_speculative_tokens, job.acceptance_rate, job.acceptance_length
    if not is_count(depth):
        rule = "must be a whole number of at least 1 to speculate"
        problems.add("num_speculative_tokens", depth or None, rule, "use for example 3")
        return
    if not rate and not length:
        rule = "is not known: how many guesses are accepted depends on draft, model and text"
        remedy = "measure it, or state --acceptance-rate 0.7 or --acceptance-length 2.5"
        problems.add("acceptance_length", length, rule, remedy)
    if rate and length:
        problems.add("acceptance_length", length, "says again what --acceptance-rate says", "give one of them")
    if not 0 <= rate <= 1:
        problems.add("acceptance_rate", rate, "must lie between 0 and 1", "use for example 0.7")
    if length and not 1 <= length <= depth + 1:
        rule = f"must lie between 1 and {depth + 1}: a step makes one token and accepts up to {depth}"
        problems.add("acceptance_length", length, rule, f"use at most {depth + 1}")


def _draft(job: Serving, model: Model, problems: Problems) -> None:
    """Record what is wrong with what guesses."""
    method, name = job.speculative_method, job.draft_model
    if method not in SPECULATION:
        problems.add("speculative_method", method, "is not known", f"use one of {', '.join(SPECULATION)}")
    if method == "draft_model" and not name:
        problems.add("draft_model", None, "is missing", "name a model, such as llama-3.2-1b")
    if name and method in ("mtp", "ngram"):
        problems.add("draft_model", name, f"has no effect: {method} has none", "leave it out")
    if method == "mtp" and not model.mtp:
        rule = f"needs prediction layers, and {model.name} has none"
        problems.add("speculative_method", "mtp", rule, "use eagle, draft_model or ngram")
    if method == "eagle" and not name and _own_layer(model) is None:
        rule = f"is not known for {model.name}, whose layers have experts"
        problems.add("draft_model", None, rule, "name the configuration of its EAGLE head")


def _own_layer(model: Model) -> Block | None:
    return next((block for block in reversed(model.layers) if block.dense), None)


def draft_of(job: Serving, model: Model) -> Model | None:
    """Return the model that guesses: the one that is named, or a layer of the model itself; None for n-grams."""
    method = job.speculative_method
    if not method or method == "ngram":
        return None
    if job.draft_model:
        return load_model(job.draft_model)
    layer = model.mtp[0] if method == "mtp" else _own_layer(model)
    return replace(model, layers=(layer,), mtp=()) if layer else None
