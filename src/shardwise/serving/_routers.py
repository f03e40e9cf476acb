"""Kernels that engines wrote for the routers of single models, where a library's product of few tokens takes longer.

Source: the measurements in [router_kernels] of engines.toml; which engine has which, `operators.router_kernels`.
"""

from __future__ import annotations

import re

from shardwise.ledger.number import X, above, maximum, minimum
from shardwise.ledger.op import Op
from shardwise.models import Model
from shardwise.records import dataclass
from shardwise.serving._engine import EngineOperators, engine_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterKernel:
    """Seconds of a router of up to `rows` tokens: those of one, and more for each that follows."""

    rows: float
    first_seconds: float
    token_seconds: float


def router_kernel(operators: EngineOperators, family: str, model: Model) -> RouterKernel | None:
    """Return the kernel that an engine has for the router of a model on a family of devices, None where it has none.

    >>> from shardwise.models import load_model
    >>> from shardwise.serving import find_engine
    >>> own = find_engine("sglang").operators
    >>> models = "deepseek-v3", "glm-4.6"
    >>> [router_kernel(own, "hopper", load_model(name)) is not None for name in models]
    [True, False]
    """
    words = f"{family} {model.family} {model.most_experts} {model.hidden}"
    name = next((name for pattern, name in operators.router_kernels if re.fullmatch(pattern, words)), "")
    if not name:
        return None
    row = engine_tables()["router_kernels"][name]
    return RouterKernel(rows=row["rows"], first_seconds=row["first_seconds"], token_seconds=row["token_seconds"])


def routed_seconds(kernel: RouterKernel, op: Op[X], ranks: X, library: X) -> X:
    """Return seconds of a router, which takes those of the `library` beyond the tokens of its kernel.

    Ranks that split attention have all tokens, each of which the ledger routes once. A kernel that grows with each
    token is left where the library's is faster, as engines do since they timed both.
    """
    tokens = maximum(op.rows * ranks, 1.0)
    own = minimum(kernel.first_seconds + kernel.token_seconds * (tokens - 1), library)
    return above(tokens, kernel.rows, library, own)
