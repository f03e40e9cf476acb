"""How many devices so many users need, who ask again when they have thought: a closed loop, found and confirmed."""

from __future__ import annotations

import shlex

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Limit, Plan, Workload
from shardwise.search import IntRanges, LoadSpace, ServingSpace, plan_serve
from shardwise.search._load_bounds import SHARES, stacked, with_users
from shardwise.serving.load import LoadOptions, serve, think_of

SMALL = LoadSpace(layouts=ServingSpace(devices=IntRanges(ranges=((1, 2),))), step_tokens=(0,), max_sequences=(0,))
MODEL = load_model("llama-3.1-8b")


def of_users(users: int, think: float | None, tokens: tuple[int, int] = (1000, 200), cv: float = 0.0) -> Workload:
    """Return a workload of users with prompts and answers of so many tokens."""
    asked, made = Length(mean=tokens[0]), Length(mean=tokens[1], cv=cv)
    arrivals = Arrivals(kind="closed", users=users, think_seconds=think)
    return Workload(input_tokens=asked, output_tokens=made, arrivals=arrivals, count=10 * users + 500)


@pytest.mark.parametrize(
    ("users", "think", "tokens", "cv"),
    [
        (8, None, (1000, 200), 0.0),
        (64, None, (4000, 400), 0.0),
        (256, None, (500, 300), 0.8),
        (64, 5.0, (500, 300), 0.8),
        (256, 10.0, (4000, 400), 0.0),
    ],
)
def test_the_closed_form_of_users_is_near_the_simulation(
    users: int, think: float | None, tokens: tuple[int, int], cv: float
) -> None:
    """Seconds a token and whole requests of a replica's users are within 10 %."""
    asked = of_users(users, think, tokens, cv)
    report = serve(MODEL, Cluster.parse("1xh100"), Plan(), asked)
    form = report.fleet.decode.form
    steady = with_users(stacked([form.at(share * form.capacity) for share in SHARES]), float(users), think_of(asked))
    for metric in ("tpot", "e2e"):
        closed = float(getattr(steady, f"{metric}_seconds")[0])
        assert closed == pytest.approx(report.latencies[metric]["mean"], rel=0.1)


@pytest.mark.parametrize("think", [None, 10.0])
def test_users_get_the_fewest_devices_that_keep_their_limits(think: float | None) -> None:
    """One replica less misses a limit, by simulation; twice as many users need no fewer devices."""
    options = LoadOptions(limits=(Limit(metric="tpot", quantile="p90", seconds=0.02),))
    cluster = Cluster.parse("32xh100")
    one, two = (
        plan_serve(MODEL, cluster, of_users(users, think), None, options, (SMALL, "devices", 1)) for users in (200, 400)
    )
    best = one.best[0]
    assert best.meets and best.devices <= two.best[0].devices
    assert best.replicas == 1 or (one.fewer is not None and not one.fewer.meets)
    again = serve(MODEL, best.base.case.cluster, best.base.case.plan, best.workload, best.base.job, best.options)
    assert again.latencies == best.latencies


def test_more_users_than_a_replica_takes_wait_for_each_other() -> None:
    """Beyond the most that run at once the rate is what is carried, and every turn longer by what they wait."""
    report = serve(MODEL, Cluster.parse("1xh100"), Plan(), of_users(64, None))
    form = report.fleet.decode.form
    shares = stacked([form.at(share * form.capacity) for share in SHARES])
    many, more = (with_users(shares, users, 0.0) for users in (1e5, 2e5))
    assert float(many.rate[0]) == float(more.rate[0]) and many.waiting_seconds[0] > 0
    assert float(more.e2e_seconds[0]) == pytest.approx(2 * float(many.e2e_seconds[0]))


def test_the_command_answers_for_users_and_says_them() -> None:
    """The page names the users, the command under AGAIN serves them with the same latencies."""
    words = ("plan", "serve", "llama-3.1-8b", "--on", "h100", "--users", "64", "--think", "5s", "--tp", "1..2")
    done = run(*words, "--p99-ttft", "1s", "--top", "1")
    assert done.status == 0 and "at 64 users who ask again after 5.00 s" in " ".join(done.out.split())
    again = run(*shlex.split(done.out.split("AGAIN\n")[1].replace("\\\n", " "))[1:], "--json")
    best = run(*words, "--p99-ttft", "1s", "--top", "1", "--json").tree["best"][0]
    assert again.status == 0 and again.tree["ttft"] == best["ttft"]


def test_a_closed_loop_that_ends_or_has_two_pools_is_refused() -> None:
    """A benchmark's few requests, a burst and pools apart are no load of users who ask again and again."""
    with pytest.raises(InputError, match="ask again and again"):
        plan_serve(MODEL, Cluster.parse("8xh100"), Workload(
            input_tokens=Length(mean=9), output_tokens=Length(mean=9), arrivals=Arrivals(kind="burst"),
        ))  # fmt: skip
    words = ("plan", "serve", "llama-3.1-8b", "--on", "8xh100", "--users", "8")
    assert run(*words, "--pools", "both", "--json").fields == ["pools"]
    assert run(*words, "--rate", "2/s", "--json").fields == ["rate"]


def test_a_search_without_a_load_names_what_it_takes() -> None:
    """Traces and stages are of serve alone."""
    wanted = {"plan serve": "give one of --rate 50/s, --users 64", "serve": "--users 64, --trace FILE, --stages"}
    for command, remedy in wanted.items():
        assert run(*command.split(), "llama-3.1-8b", "--on", "h100").err.strip().endswith(remedy)
