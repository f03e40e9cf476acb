"""What is asked for and changes nothing is said, and so is what an engine would not start with."""

from __future__ import annotations

import pytest

from command_line import run

_DENSE = ("llama-3.1-8b", "--on", "8xh100-sxm-80gb")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("infer --expert-imbalance 2", "expert_imbalance 2: no effect, llama-3.1-8b has no experts"),
        ("infer --same-prompts", "same_prompts: no effect, llama-3.1-8b has no experts"),
        ("infer --language-model-only", "language_model_only: no effect, llama-3.1-8b has no towers"),
        ("serve --rate 2 --expert-imbalance 2", "expert_imbalance 2: no effect, llama-3.1-8b has no experts"),
        ("train --recompute full --modules mlp", "modules mlp: no effect, recompute full runs whole layers again"),
        ("train --schedule zb-h1", "schedule zb-h1: no effect, pp is 1"),
        ("train --cp-kind all-gather", "cp_kind all-gather: no effect, cp is 1"),
        ("train --seq-len 262144 --cp 8", "262144 tokens exceed the trained context of 131072"),
        ("train --tokens 80B", "9.96 tokens a parameter: under the 20 of compute-optimal training"),
        ("infer --kv-cache-memory 100GiB", "are left for it, and vLLM would not start"),
    ],
)
def test_what_changes_nothing_is_said(words: str, says: str) -> None:
    """A flag that has no effect beside the others, or on the model, stands among what is assumed."""
    command, *flags = words.split()
    assumed = run(command, *_DENSE, *flags, "--json").tree["assumptions"]
    assert any(says in note for note in assumed)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("infer mixtral-8x7b --on 4xh100-sxm-80gb --tp 4 --expert-imbalance 2 --same-prompts", "no effect"),
        ("infer llama-3.1-8b --on h100-sxm-80gb --kv-cache-memory 20GiB", "would not start"),
        ("train llama-3.1-8b --on 8xh100-sxm-80gb --recompute selective --modules mlp", "modules"),
        ("train llama-3.1-8b --on 8xh100-sxm-80gb --pp 2 --schedule zb-h1", "schedule zb-h1"),
        ("train llama-3.1-8b --on 8xh100-sxm-80gb --cp 2 --cp-kind all-gather", "cp_kind"),
        ("train llama-3.1-8b --on 8xh100-sxm-80gb --seq-len 131072 --cp 8", "exceed"),
        ("train llama-3.1-8b --on 8xh100-sxm-80gb --tokens 162B", "tokens a parameter"),
        ("train llama-3.1-8b --on 8xh100-sxm-80gb --tokens 80B --adapter lora", "tokens a parameter"),
    ],
)
def test_what_has_an_effect_is_not(words: str, says: str) -> None:
    """The same flags beside what they are of are answered without a word."""
    assert not any(says in note for note in run(*words.split(), "--json").tree["assumptions"])


@pytest.mark.parametrize(("recompute", "says"), [("none", "recompute mlp"), ("selective", "recompute selective")])
def test_modules_that_are_recomputed_stand_in_the_verdict(recompute: str, says: str) -> None:
    """A plan that recomputes modules alone is not shown as one that recomputes nothing."""
    done = run("train", *_DENSE, "--modules", "mlp", "--recompute", recompute)
    assert says in " ".join(done.out.split("\n")[0:3])


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("infer --batch 16 --max-sequences 4", 2),
        ("infer --batch 4 --max-sequences 4", 0),
        ("export vllm --batch 16 --max-sequences 4", 2),
        ("plan infer --batch 8..64 --max-sequences 4", 2),
        ("infer --solve batch --max-sequences 4", 0),
    ],
)
def test_a_batch_runs_at_once(words: str, status: int) -> None:
    """An engine that is told to run fewer sequences at once than a batch has never runs that batch."""
    command, *flags = words.split()
    what = [flags.pop(0)] if not flags[0].startswith("-") else []
    done = run(command, *what, "llama-3.1-8b", "--on", "h100-sxm-80gb", *flags, "--json")
    assert done.status == status
    assert status != 2 or done.fields == ["max_sequences"]


def test_a_search_keeps_to_the_sequences_that_run_at_once() -> None:
    """No plan has a larger batch than --max-sequences, and the largest is tried."""
    best = run("plan", "infer", *_DENSE, "--max-sequences", "48", "--json").tree["best"]
    assert max(one["job"]["batch"] for one in best) == 48
