"""What engines run on a second stream of a captured step: the shared experts of a layer, beside its routed ones.

Both read the same tokens, and their results are added. Neither fills the device in short steps, so that the shorter is
hidden; beyond that they share its memory and its matrix units. Who does so: `operators.shared_beside` of engines.toml,
with the sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardwise.cost import Rates
from shardwise.ledger.number import X, above, maximum, minimum, total
from shardwise.ledger.op import Op, within
from shardwise.models import Model
from shardwise.ops.experts import EXPERTS, SHARED
from shardwise.serving._engine import EngineOperators


def rows_beside(operators: EngineOperators, family: str, model: Model) -> float:
    """Return the tokens of a step up to which shared experts run beside routed ones, 0 where they never do.

    >>> from shardwise.models import load_model
    >>> from shardwise.serving import find_engine
    >>> own, model = find_engine("sglang").operators, load_model("qwen3.5-397b-a17b")
    >>> [rows_beside(own, family, model) for family in ("blackwell", "cdna3")]
    [1024.0, 0.0]
    """
    words = f"{family} {model.family}"
    return float(next((rows for pattern, rows in operators.shared_beside if re.fullmatch(pattern, words)), 0))


def shared_beside_routed(
    timed: Sequence[tuple[Op[X], X]], most: tuple[float, X], rates_of: Callable[[Op[X]], Rates[X]]
) -> Iterator[tuple[Op[X], X]]:
    """Yield operators of a layer with their seconds, where shared experts take what routed ones do not hide of them.

    They run so up to a number of tokens, of which each of so many ranks has all and routes a part in the ledger: both
    are `most`. One more kernel adds both results, which the last of them takes.
    """
    shared = [(op, seconds) for op, seconds in timed if within(op.region, SHARED)]
    routed = [(op, seconds) for op, seconds in timed if op.role == "router" or within(op.region, EXPERTS)]
    if not most[0] or not shared or not routed:
        yield from timed
        return
    (router, _), (last, _), zero = routed[0], shared[-1], 0 * shared[0][1]
    alone, others = (total((seconds for _, seconds in some), zero) for some in (shared, routed))
    together = maximum(maximum(alone, others), _bound((op for op, _ in (*shared, *routed)), rates_of, zero))
    left = minimum(maximum(together - others, zero) / alone, 1.0)
    # Two results of 16 bits are read, their sum is written.
    rates, tokens = rates_of(router), router.rows * most[1]
    added = rates.memory_start + 3 * 2 * tokens * router.inner / rates.memory_bytes
    for op, seconds in timed:
        if within(op.region, SHARED):
            yield op, above(tokens, most[0], seconds, left * seconds) + (added if op is last else zero)
        else:
            yield op, seconds


def _bound(ops: Iterable[Op[X]], rates_of: Callable[[Op[X]], Rates[X]], zero: X) -> X:
    """Return the least seconds that operators take together: of their bytes, or of their FLOPs."""
    moved, worked = zero, zero
    for op in ops:
        rates = rates_of(op)
        moved, worked = moved + op.forward_bytes / rates.memory_bytes, worked + op.flops / rates.matmul_flops
    return maximum(moved, worked)
