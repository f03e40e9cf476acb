"""Seconds of operators on a device and of collectives over a cluster.

A time is a form (a function of this package) with constants of the device, its family or an engine; every constant
carries its source: those that were fitted in constants.toml and cpu.toml, those of single sources in priors.toml. What
other packages use is listed here.
"""

from shardwise.cost._attention import (
    PARTS_IN_SECONDS,
    TILE_KEYS,
    Cached,
    KernelCosts,
    Prompt,
    Tiled,
    costed_seconds,
    decode_parts,
    heads_together,
    kernel_costs,
    nearest_costs,
    prompt_parts,
    seen_pairs,
    tiled_parts,
)
from shardwise.cost._bands import (
    Band,
    Conditions,
    Spread,
    band_of,
    memory_band,
    memory_conditions,
    spreads,
    typical_slack,
)
from shardwise.cost._host import HostRates, host_of
from shardwise.cost._kernels import (
    TILE_ROWS,
    UNKNOWN_CORES,
    Chip,
    experts_seconds,
    others_seconds,
)
from shardwise.cost._kinds import MEASURED_KERNELS, blocked_flops, one_query_seconds
from shardwise.cost._load import record
from shardwise.cost._network import (
    Network,
    collective_seconds,
    exchanged_bytes,
    leaving_share,
    network_of,
    sent_bytes,
    with_peers,
)
from shardwise.cost._operators import PassSeconds, blend, inside_share, kernel_seconds, op_seconds, product_seconds
from shardwise.cost._rates import (
    OVERLAP_AXES,
    WIDE_DTYPES,
    Efficiencies,
    ProductRates,
    Rates,
    attention_dtype,
    product_rates,
    rates_of,
)
from shardwise.cost._records import (
    DECODE_PARTS,
    CollectiveFit,
    ExpertsFit,
    Gemm,
    Quantise,
    ReduceFit,
)
from shardwise.cost._reduce import EngineReduce, reduce_of, reduce_seconds
from shardwise.cost._replicas import Beside, beside_of
from shardwise.cost._tables import bandwidth_of, constants, family_of, family_with, last_cache_bytes, matmul_row, stored
from shardwise.cost._tiles import ELEMENT_BYTES

__all__ = [
    "DECODE_PARTS",
    "ELEMENT_BYTES",
    "MEASURED_KERNELS",
    "OVERLAP_AXES",
    "PARTS_IN_SECONDS",
    "TILE_KEYS",
    "TILE_ROWS",
    "UNKNOWN_CORES",
    "WIDE_DTYPES",
    "Band",
    "Beside",
    "Cached",
    "Chip",
    "CollectiveFit",
    "Conditions",
    "Efficiencies",
    "EngineReduce",
    "ExpertsFit",
    "Gemm",
    "HostRates",
    "KernelCosts",
    "Network",
    "PassSeconds",
    "ProductRates",
    "Prompt",
    "Quantise",
    "Rates",
    "ReduceFit",
    "Spread",
    "Tiled",
    "attention_dtype",
    "band_of",
    "bandwidth_of",
    "beside_of",
    "blend",
    "blocked_flops",
    "collective_seconds",
    "constants",
    "costed_seconds",
    "decode_parts",
    "exchanged_bytes",
    "experts_seconds",
    "family_of",
    "family_with",
    "heads_together",
    "host_of",
    "inside_share",
    "kernel_costs",
    "kernel_seconds",
    "last_cache_bytes",
    "leaving_share",
    "matmul_row",
    "memory_band",
    "memory_conditions",
    "nearest_costs",
    "network_of",
    "one_query_seconds",
    "op_seconds",
    "others_seconds",
    "product_rates",
    "product_seconds",
    "prompt_parts",
    "rates_of",
    "record",
    "reduce_of",
    "reduce_seconds",
    "seen_pairs",
    "sent_bytes",
    "spreads",
    "stored",
    "tiled_parts",
    "typical_slack",
    "with_peers",
]
