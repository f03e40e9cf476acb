"""What a mixer keeps between tokens, as it says it: caches of tokens, and a state of the whole sequence."""

from __future__ import annotations

from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCache:
    """What a mixer keeps of one token: `elements` of a cache for each of `heads`, for up to `limit` tokens (0: all).

    `heads` 0 is one entry that is the same on every tensor-parallel rank. `bytes8` are elements of 8 bits beside them,
    whatever the format of the cache, `packed8` bytes beside them where engines pack elements of 8 bits with scales and
    leave what is rotated in 16. An indexer's are of `keys` elements, which engines without a type for them keep as they
    keep the cache. One entry stands for `rate` tokens; of a `ring` every engine keeps the last `limit`.
    """

    elements: int
    heads: int = 0
    bytes8: int = 0
    packed8: int = 0
    keys: int = 0
    limit: int = 0
    rate: int = 1
    ring: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a mixer keeps of a sequence whatever its length: of its recurrence (wide), and as wide as activations.

    Of each of `groups`, of which a rank has one at least, it keeps `of_group` elements as wide as activations besides.
    """

    wide: int = 0
    narrow: int = 0
    groups: int = 0
    of_group: int = 0
