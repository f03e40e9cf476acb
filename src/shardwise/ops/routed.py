"""How many tokens and rows the experts of one rank get, and which of them get any.

Letters as in `experts.py`: T tokens a rank routes, E experts, k experts a token, Fe expert ffn.
"""

from __future__ import annotations

import math
from typing import Generic, cast

from shardwise.ledger.number import X, ceil, divide, log2, maximum, minimum, power, raised
from shardwise.models import MoE
from shardwise.ops.layout import Layout
from shardwise.records import dataclass

# Gauss-Legendre points of the interval from 0 to 1 with their weights: counts of experts within 0.3 %.
_POINTS = (
    (0.06943184420297371, 0.17392742256872692), (0.33000947820757187, 0.32607257743127307),
    (0.66999052179242813, 0.32607257743127307), (0.93056815579702629, 0.17392742256872692),
)  # fmt: skip


def distinct_experts(local: X, experts: int, top_k: int, tokens: X, popularity: float = 1.0) -> X:
    """Return the expected number of local experts that get at least one of `tokens` tokens.

    local * (1 - (1 - p)^T) with p = k / E of each expert where all are as popular; at one token exactly k of all E,
    never more than there are. Else logarithms of p are spread evenly, the largest p `popularity` times the least.

    >>> distinct_experts(8, 8, 2, 1), round(distinct_experts(128, 128, 8, 1, popularity=100), 6)
    (2.0, 8.0)
    """
    if popularity == 1:
        miss = 1 - top_k / experts
        return local if miss <= 0 else local * (1 - raised(miss, tokens))
    mean = sum(share * popularity**point for point, share in _POINTS)
    hit = 0 * tokens
    for point, share in _POINTS:
        miss = 1 - top_k / experts * popularity**point / mean
        hit = hit + share * (1 - raised(max(miss, 0.0), tokens))
    return local * hit


def largest_of_normals(count: X) -> X:
    """Return the expected largest of so many standard normal numbers, within 2 % up to 256 of them.

    A curve through the integrals for 2, 32 and 256; H. A. David, Order Statistics (1970), table of expected values.

    >>> [round(largest_of_normals(n), 2) for n in (1, 2, 8, 32, 256)]
    [0.0, 0.56, 1.45, 2.1, 2.83]
    """
    doublings = log2(count)
    return 0.5642 * doublings / (1 + 0.0852 * (doublings - 1))


def busiest_rank(ep: X, experts: int, top_k: int, tokens: X, popularity: float = 1.0) -> tuple[X, X]:
    """Return the experts with tokens and the rows of the rank that has most of them, each beyond those of a mean rank.

    Of tokens routed at random, as many experts on each of `ep` ranks: what a rank has spreads by the variance of
    sampling without replacement, less what ranks take from each other. Where experts are not as popular as each other
    (`distinct_experts`), what its own happen to be adds to both, to rows whatever tokens there are: the variance of
    means of a finite population (Cochran, Sampling Techniques, 1977, theorem 2.2). Drawn steps have the same within
    6 %.

    >>> [round(more, 2) for more in busiest_rank(8, 256, 8, 16)]
    [4.01, 5.7]
    >>> [round(more / 1000, 3) for more in (busiest_rank(8, 128, 8, 1000)[1], busiest_rank(8, 128, 8, 1000, 100)[1])]
    [0.044, 0.397]
    """
    if experts <= top_k:
        return 0 * tokens, 0 * tokens
    missed = raised(1 - top_k / experts, tokens)
    both = raised((experts - top_k) * (experts - top_k - 1) / (experts * (experts - 1)), tokens)
    local, mean = divide(cast(X, experts), ep), tokens * top_k / ep
    hits = maximum(missed - both, 0.0) * local
    rows = mean * (experts - top_k) / (experts - 1)
    if popularity != 1:
        apart = (experts - local) / (experts - 1)
        hits = hits + local * apart * _hit_variance(experts, top_k, tokens, popularity)
        rows = rows + mean * mean * apart / local * _chance_variance(popularity)
    most = largest_of_normals(ep)
    return most * power(hits, 0.5), most * power(rows, 0.5)


def _chance_variance(popularity: float) -> float:
    """Return the variance of how popular experts are, their mean being 1: logarithms spread evenly by a factor.

    The integrals of P^u and P^2u over u from 0 to 1.

    >>> round(_chance_variance(100), 3)
    1.349
    """
    return (popularity + 1) * math.log(popularity) / (2 * (popularity - 1)) - 1


def _hit_variance(experts: int, top_k: int, tokens: X, popularity: float) -> X:
    """Return the variance among experts of the chance to get any of some tokens."""
    mean = sum(share * popularity**point for point, share in _POINTS)
    first = second = 0 * tokens
    for point, share in _POINTS:
        hit = 1 - raised(max(1 - top_k / experts * popularity**point / mean, 0.0), tokens)
        first, second = first + share * hit, second + share * hit * hit
    return maximum(second - first * first, 0.0)


def routed_tokens(y: Layout[X]) -> X:
    """Return the tokens that pass the router on one rank: each tensor-parallel rank has its share of the sequence.

    >>> from shardwise.ops.count import whole_layout
    >>> routed_tokens(whole_layout(2, 8))
    16
    """
    return divide(y.tokens, y.degrees.tp) if y.choices.layout == "1d" else y.tokens


def hands_all(y: Layout[X], moe: MoE) -> bool:
    """Return whether every expert multiplies every token: a class that does so, in training, as transformers runs it.

    transformers 5.24.0 models/llama4/modeling_llama4.py Llama4TextMoe: tokens repeated for each expert, times scores
    that are zero but for the chosen, into one batched product of all experts.
    """
    return moe.all_tokens and y.work.phase == "train" and y.stack.norm == "eager"


def routed_rows(y: Layout[X], moe: MoE) -> X:
    """Return the rows that the busiest rank gets for the T tokens that each rank routes: T * k times its imbalance.

    With a capacity factor f an expert takes ceil(T * k / E * f) rows of a rank's tokens and drops the rest; padded, it
    gets so many in any case. Source: Megatron-LM core/transformer/moe/moe_utils.py, get_capacity.

    >>> from dataclasses import replace
    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> m, y = Model.load("mixtral-8x7b").layers[0].feed_forward, whole_layout(1, 63)
    >>> tight = replace(y.work, capacity_factor=0.5)
    >>> [routed_rows(replace(y, work=one), m) for one in (y.work, tight, replace(tight, pad_to_capacity=True))]
    [126.0, 64, 64]
    """
    if hands_all(y, moe):
        return routed_tokens(y) * y.work.routed_share * moe.experts
    chosen = routed_tokens(y) * y.work.routed_share * moe.top_k
    if not y.work.capacity_factor:
        return chosen * y.work.imbalance
    filled = ceil(chosen * y.work.capacity_factor / moe.experts) * moe.experts
    return filled if y.work.pad_to_capacity else minimum(chosen * y.work.imbalance, filled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(Generic[X]):
    """The routed experts on one rank: how many it has and which get tokens, the rows that arrive, their widths.

    Rows are T * k a rank on average over the expert-parallel group, gathered over the expert-tensor ranks; `rows` are
    those of the busiest rank, `fair` the mean without a capacity. `D` is the width they work on.
    """

    local: X
    hit: X
    rows: X
    fair: X
    D: int
    F: X


def experts_of(y: Layout[X], moe: MoE, D: int) -> Experts[X]:
    """Return the routed experts of one rank; a step that is served waits in each layer for the busiest of them."""
    T, ep, etp = routed_tokens(y) * y.work.routed_share, y.degrees.ep, y.degrees.etp
    local, fair = divide(cast(X, moe.experts), ep), T * moe.top_k * etp
    tokens, rows = T * ep * etp / y.work.copies, routed_rows(y, moe) * etp
    hit = distinct_experts(local, moe.experts, moe.top_k, tokens, y.work.popularity)
    if y.work.phase != "train" and not y.work.mean_rank:
        more_hit, more_rows = busiest_rank(ep, moe.experts, moe.top_k, tokens, y.work.popularity)
        hit, rows = hit + more_hit, rows + more_rows * y.work.copies
    hit = local if y.work.pad_to_capacity else minimum(hit, local)
    return Experts(local=local, hit=hit, rows=rows, fair=fair, D=moe.latent or D,
                   F=divide(cast(X, moe.ffn), etp))  # fmt: skip


def reordered_bytes(y: Layout[X], moe: MoE, values: X) -> X | float:
    """Return the bytes of rows at once where a training step puts those that experts gave back in their order.

    Forward the rows that were picked, those times their weights, and those in order: a function of Python has names
    for all. Backward the gradient in order, that times the weights and times the rows; one product is cast back from
    weights in fp32. None where the experts train: gradients of the layer are counted that are made behind them.
    Source: transformers 5.24.0 integrations/moe.py grouped_mm_experts_forward.
    """
    if y.stack.experts != "reordered" or y.stack.experts_loop or y.work.phase != "train" or y.choices.tuning is None:
        return 0.0
    cast = moe.float_weights and y.a < 4
    return (3 * 4 + y.a if cast else 3 * y.a) * values
