"""What a search for a deployment under load rejects: by each law and limit, how many layouts, and what would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwise.plans import Limit
from shardwise.search._empty import empty_rejections, why_empty_serving
from shardwise.search._load_bounds import least
from shardwise.search._load_groups import LoadGroup, LoadSearch
from shardwise.search._result import Rejection
from shardwise.search._serving_grid import FORMATS, LAUNCH, MEMORY, TITLES
from shardwise.units import show_seconds

DEVICES, LOAD, SIMULATED = "devices", "load", "simulated"


def rejected_of(search: LoadSearch, missed: int, answered: bool, wider: tuple[int, int]) -> tuple[Rejection, ...]:
    """Return the laws and limits with the layouts that fell to each, and what would do where nothing was found.

    `wider` are devices of a search that was asked then, 0 of none, and the fewest of them that simulation confirmed.
    """
    if not search.kinds and not search.grid.layouts.rejected:
        return empty_rejections(why_empty_serving(search.grid))
    many = len(search.groups) // max(len(search.grid.setups), 1)
    rows = [
        Rejection(name=law, title=TITLES.get(law, law), count=len(fell) * many * len(search.grid.setups),
                  remedy=str(search.grid.layouts.problem(int(fell[0]))))
        for law, fell in search.grid.layouts.rejected.items()
    ]  # fmt: skip
    rows += [
        Rejection(name=FORMATS, title=TITLES[FORMATS], count=len(search.kinds) * many, remedy=str(why))
        for _, why in search.grid.unusable
    ]
    if others := search.grid.unlaunched():
        count, remedy = sum(count for count, _ in others) * many, str(others[0][1])
        rows.append(Rejection(name=LAUNCH, title=TITLES[LAUNCH], count=count, remedy=remedy))
    short = sum(group.short for group in search.groups)
    if short:
        remedy = "use more devices a replica (--tp), or a narrower --weights or --kv-cache"
        remedy += ", or less --kv-cache-memory" * any(group.job.kv_cache_memory for group in search.groups)
        rows.append(Rejection(name=MEMORY, title="the longest request does not fit", count=short, remedy=remedy))
    return (*rows, *_by_limit(search), *_by_devices(search, missed, answered, wider))


def _floors(search: LoadSearch, group: LoadGroup, limit: Limit) -> Any:
    """Return what a limit is compared with on an empty replica of each layout, for the chance that was asked."""
    return least(group.empty, group.empty, limit) * search.margin(group.case, limit)


def _by_limit(search: LoadSearch) -> Iterator[Rejection]:
    """Yield the limits that even an empty replica misses."""
    for limit in search.options.limits:
        floors = [_floors(search, group, limit) for group in search.groups if group.form]
        every = np.concatenate(floors) if floors else np.zeros(0)
        slow = every[every > limit.seconds]
        if slow.size:
            name, metric = f"{limit.quantile}_{limit.metric}", limit.metric.upper()
            chance = " with the chance that is asked" if search.options.risk else ""
            quickest = show_seconds(float(slow.min())) if np.isfinite(slow.min()) else "more than numbers hold"
            remedy = f"the quickest of these takes {quickest}{chance}"
            if slow.size < every.size:
                remedy += f", of all layouts {show_seconds(float(every.min()))}"
            yield Rejection(name=name, title=f"an empty replica misses {limit.quantile} {metric}",
                            count=int(slow.size), remedy=remedy)  # fmt: skip


def _by_devices(search: LoadSearch, missed: int, answered: bool, wider: tuple[int, int]) -> Iterator[Rejection]:
    """Yield the layouts that need more devices than there are, that no number helps, that simulation refused."""
    have, never, (tried, enough) = search.cluster.num_devices, 0, wider
    limits = bool(search.options.limits)
    less = "fewer users" if search.workload.arrivals.users else "a slower rate"
    later = f"fewer tokens{f', {less} or later limits' if limits else f' or {less}'}"
    forms = [g for g in search.groups if g.form is not None and search.space.pools != "disaggregated"]
    needed = [one for one in search.pairs.values() if np.isfinite(one)]
    never += len(search.pairs) - len(needed)
    beyond = []
    for group in forms:
        few, ever = np.isfinite(search.fewest(group, have)), search.ever(group)
        kept = np.all([_floors(search, group, one) <= one.seconds for one in search.options.limits], axis=0)
        never += int(np.count_nonzero(~ever & kept))
        beyond.append((group, ever & ~few))
    if many := len(needed) + sum(int(np.count_nonzero(more)) for _, more in beyond):
        say = "others need fewer"
        if not answered:
            for group, more in beyond:
                needed += (search.fewest(group, np.inf) * group.devices)[more].tolist()
            say = f"use {enough:,} devices"
            if not enough:
                # The simulation may ask for more than the closed form, and says no where it was asked.
                say = f"use {min(needed):,.0f} devices or more"
                say = f"simulation refuses up to {tried:,}: ask for {later}" if tried else say
        title = f"more than {have:,} devices are needed"
        yield Rejection(name=DEVICES, title=title, count=many, remedy=say)
    if never:
        title = f"no number of replicas {'keeps the limits' if limits else 'carries the load'}"
        yield Rejection(name=LOAD, title=title, count=never, remedy=f"ask for {later}")
    if missed:
        title = f"{'a limit is missed' if limits else 'the queue grows'} in the simulation"
        say = "more replicas were tried in turn" if search.sparing else "they fill the devices: use more devices"
        say += f", {enough:,} do" if enough else f"; it refuses up to {tried:,}: ask for {later}" if tried else ""
        yield Rejection(name=SIMULATED, title=title, count=missed, remedy=say)
