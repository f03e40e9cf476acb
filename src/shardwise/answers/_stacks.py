"""Frameworks of training and engines of serving by name, as `shardwise stacks` lists them; one with what it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shardwise.answers._answer import Answer, nothing_found
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page
from shardwise.errors import InputError, Problem
from shardwise.plans import find_stack, stack_names
from shardwise.records import replace
from shardwise.serving import engine_names, engine_on, find_engine

_HEADS = {"training": "FRAMEWORKS OF TRAINING (--stack)", "serving": "ENGINES OF SERVING (--engine)"}
_RUNS = {
    "split": "degrees",
    "schedule": "schedules",
    "sharding": "sharding",
    "cp_kind": "context parallelism",
    "recompute": "recomputation",
    "offload": "offload",
    "precision": "precision",
    "optimizer": "optimizers",
    "methods": "adapters",
}


def search_stacks(search: str = "") -> list[dict[str, Any]]:
    """Return a record of every framework and engine whose name or title holds the words.

    The name of a framework is alone, that of an engine stands with its releases, and a release is the entry it has.

    >>> [(row["kind"], row["name"]) for row in search_stacks("maxtext")]
    [('training', 'maxtext')]
    >>> [[row["name"] for row in search_stacks(words)] for words in ("mlc", "vllm==0.11.0", "vllm==0.33.0")]
    [['mlc'], ['vllm-0.11'], ['vllm']]
    """
    rows = [{"kind": "training", "name": name, "title": find_stack(name).title} for name in stack_names()]
    rows += [{"kind": "serving", "name": name, "title": find_engine(name).title} for name in engine_names()]
    named = search.strip().lower()
    if named in engine_names():
        return [row for row in rows if f"{row['name']}-".startswith(f"{named}-")]
    with suppress(InputError):
        named = engine_on(named).name if named else named
    if named in (*stack_names(), *engine_names()):
        return [row for row in rows if row["name"] == named]
    words = search.lower().split()
    return [row for row in rows if all(word in f"{row['name']} {row['title']}".lower() for word in words)]


def of_other_kind(problem: Problem) -> Problem:
    """Return the problem of an engine given as a framework, or of the reverse, with the flag that takes it.

    >>> print(of_other_kind(Problem("stack", "vllm", "is not a known framework", "use one of megatron")))
    stack = 'vllm': is an engine of serving, no framework of training; infer and serve take it as --engine vllm
    """
    word, rest = str(problem.value), problem.remedy.removeprefix("use one of ")
    with suppress(InputError):
        if problem.rule == "is not a known framework":
            rule = "is an engine of serving, no framework of training"
            return replace(problem, rule=rule, remedy=f"infer and serve take it as --engine {find_engine(word).name}")
        if problem.rule == "is not a known engine":
            rule, name = "is a framework of training, no engine of serving", find_stack(word).name
            return replace(problem, rule=rule, remedy=f"train takes it as --stack {name}; engines are {rest}")
    return problem


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise stacks`."""
    inputs.problems.raise_if_any()
    search = inputs.get("search", "")
    rows = search_stacks(search)
    if not rows:
        return nothing_found("stacks", search, (*stack_names(), *engine_names()))
    if len(rows) == 1 and rows[0]["kind"] == "training":
        rows[0]["runs"] = runs_of(rows[0]["name"])
    return Answer(0, lambda: {"stacks": rows}, lambda: stacks_page(rows, width))


def runs_of(name: str) -> dict[str, list[str]]:
    """Return the words that a framework runs by what they are of; where it takes any, none are listed.

    >>> runs_of("torchtune")["sharding"]
    ['none', 'shard-grad-op', 'fsdp', 'hsdp']
    """
    runs = find_stack(name).runs
    listed = {title: list(getattr(runs, field)) for field, title in _RUNS.items()}
    return {title: words for title, words in listed.items() if words}


def stacks_page(rows: Sequence[dict[str, Any]], width: int = 80) -> Page:
    """Return frameworks and engines as one table for each kind, or one framework with what it runs."""
    page = Page(width)
    for kind, head in _HEADS.items():
        chosen = [[row["name"], row["title"]] for row in rows if row["kind"] == kind]
        if chosen:
            page.remark(head, "bold")
            page.table([["name", "what it is"], *chosen], header=True, indent=0)
            page.blank()
    if runs := rows[0].get("runs"):
        page.remark("RUNS", "bold")
        page.table([[title, ", ".join(words)] for title, words in runs.items()], indent=0)
    elif len(rows) > 1 and rows[0]["kind"] == "training":
        page.remark("`shardwise stacks NAME` shows what one framework runs")
    return page
