"""Means of a deployment in steady state, and of pools one after the other."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Generic, cast

from shardwise.ledger.number import X, maximum, minimum
from shardwise.ledger.opened import called, number_at
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving.load._moments import LengthMoments


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady(Generic[X]):
    """Means of a replica at so many requests a second; columns where there are many layouts.

    Seconds are infinite where the load is not carried.
    """

    full_seconds: X
    """Seconds for each request where the queue is full."""
    carried_seconds: X
    """Seconds for each request of the most of them that come one by one and are carried."""
    rate: X
    running: X
    ttft_seconds: X
    tpot_seconds: X
    e2e_seconds: X
    waiting_seconds: X
    """Seconds of the TTFT for a place among the sequences or in the cache."""

    @property
    def capacity(self) -> X:
        """Requests a second that are carried at most."""
        return 1 / self.carried_seconds

    @property
    def stable(self) -> bool:
        """Whether a full queue is served at more than the load, which has means; a column of many layouts."""
        return cast(bool, cast(Any, self.rate * self.full_seconds) < 1)

    @property
    def utilisation(self) -> X:
        """Load over capacity."""
        return self.rate * self.carried_seconds

    def row(self: Steady[Any], index: int) -> Steady[float]:
        """Return one layout, as plain numbers; as traced ones where columns open."""
        return Steady(**{f.name: number_at(getattr(self, f.name), index) for f in fields(self)})


def early_first_token(decode: Steady[Any], moments: LengthMoments) -> Steady[Any]:
    """Return a pool that decodes whose first token goes out a step before its sequence joins; answers end as before.

    Where somebody decodes a cache waits for a step and a half without that: an idle pool hands it out at once.
    """
    step = _step(decode)
    return replace(
        decode,
        ttft_seconds=decode.ttft_seconds - step,
        tpot_seconds=decode.tpot_seconds + step * (moments.inverse_steps / moments.made),
    )


def placed_first(prefill: Steady[Any], decode: Steady[Any], share: Any) -> Any:
    """Return seconds that a prompt waits for its place between two steps of the pool that decodes.

    Half a step where somebody decodes, while no other prompt runs. For each group that decodes so many compute prompts.
    """
    return _step(decode) / 2 * maximum(1 - decode.rate / share * prefill.full_seconds, 0.0)


def _step(decode: Steady[Any]) -> Any:
    """Return seconds of a step of who decodes as a cache comes, none where nobody does."""
    return minimum(decode.tpot_seconds, decode.ttft_seconds / 1.5)


def handed_over(
    pools: tuple[Steady[Any], Steady[Any]], sent_seconds: Any, share: Any, policy: Policy, moments: LengthMoments
) -> Steady[Any]:
    """Return a pool of prompts and the one that decodes behind it, as the engine hands a cache over (`in_tandem`).

    `policy` and `moments` are those of the pool that decodes.
    """
    prefill, decode = pools
    if policy.place_first:
        sent_seconds = sent_seconds + called(placed_first(prefill, decode, share), "place for the cache")
    if policy.early_first_token:
        decode = early_first_token(decode, moments)
    return in_tandem(prefill, decode, sent_seconds, share)


def in_tandem(prefill: Steady[Any], decode: Steady[Any], sent_seconds: Any, share: Any) -> Steady[Any]:
    """Return pools one after the other, as of a group that decodes, for each of which so many compute prompts.

    Departures of a pool are taken as Poisson again. A cache that has come waits for the end of a step, and runs one of
    its own where the pool that decodes makes the first token.
    """
    ttft = prefill.ttft_seconds + sent_seconds + decode.ttft_seconds
    return replace(
        decode,
        full_seconds=maximum(prefill.full_seconds / share, decode.full_seconds),
        carried_seconds=maximum(prefill.carried_seconds / share, decode.carried_seconds),
        ttft_seconds=ttft,
        e2e_seconds=ttft + decode.e2e_seconds - decode.ttft_seconds,
        waiting_seconds=prefill.waiting_seconds + decode.waiting_seconds,
    )
