"""How many requests are simulated: what is too much or too few is told in the words that were typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run

SERVE = ("serve", "llama-3.1-8b", "--on", "h100")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--users 1000000000", "users = 1000000000: ask 10 times each"),
        ("--users 200000", "users = 200000: ask 10 times each"),
        ("--users 2000000 --requests 1000000", "users = 2000000: ask at least once each"),
    ],
)
def test_too_many_users_are_told_by_their_flag(words: str, line: str) -> None:
    """Requests that follow from users are not what somebody typed."""
    done = run(*SERVE, *words.split())
    assert done.status == 2 and done.err.startswith(f"error: {line}")
    assert done.err.count("error: ") == 1


@pytest.mark.parametrize("more", [(), ("--requests", "100000")])
def test_a_class_that_is_too_rare_for_its_limit_is_named(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Whoever is once among a billion cannot have a p99; the class and its limit are told, and the least share."""
    lengths = 'input_tokens = "500"\noutput_tokens = "100"\n'
    rows = f'[[class]]\nname = "chat"\nshare = 0.999999999\n{lengths}[[class]]\nname = "rare"\nshare = 1e-9\n{lengths}'
    (tmp_path / "classes.toml").write_text(f'{rows}p99_ttft = "2s"\n')
    done = run(*SERVE, "--rate", "1", "--classes", str(tmp_path / "classes.toml"), *more)
    assert done.status == 2 and done.err.startswith("error: rare.share = 1e-09: is too rare for p99 ttft")
    assert "use a share of at least 0.001" in done.err and done.err.count("error: ") == 1


def test_few_requests_are_noted_beside_their_percentiles() -> None:
    """A p99 of one request is that request; just these requests of a benchmark are taken as they are."""
    few, enough = (run(*SERVE, "--rate", "1", "--requests", n, "--json").tree["assumptions"] for n in ("1", "1000"))
    assert "requests 1: too few for a p99, which needs 1,000, 10 beyond it" in few
    assert not any("too few" in note for note in enough)
    finite = run(*SERVE, "--rate", "1", "--requests", "10", "--finite", "--json").tree["assumptions"]
    assert not any("too few" in note for note in finite)


def test_more_requests_than_a_trace_has_are_noted(tmp_path: Path) -> None:
    """The trace is asked as it is, and the answer says so."""
    rows = ({"timestamp": 100 * at, "input_length": 100, "output_length": 20, "hash_ids": [at]} for at in range(50))
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = run(*SERVE, "--trace", str(tmp_path / "trace.jsonl"), "--requests", "500", "--json").tree
    assert "requests 50: all that the trace has, of the 500 that were asked" in tree["assumptions"]
    assert not any("all that" in note for note in run(*SERVE, "--rate", "1", "--json").tree["assumptions"])


def test_so_many_requests_as_have_ten_beyond_a_percentile_are_enough() -> None:
    """What the note calls enough for a p99 is taken for a limit on it, and one less is refused."""
    enough, few = (run(*SERVE, "--rate", "1", "--p99-ttft", "1s", "--requests", n) for n in ("1000", "999"))
    assert enough.status == 0
    assert few.status == 2 and "too few for a p99: 1000 are needed" in few.err
