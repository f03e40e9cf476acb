"""Seconds of operators on a device and of collectives over a cluster.

A time is a form (a function of this package) with constants of the device, its family or an engine; every constant
carries its source: those that were fitted in constants.toml and cpu.toml, those of single sources in priors.toml. What
other packages use is listed here.
"""

from shardwise.cost._bands import (
    WANTED_CHANCE,
    Band,
    Conditions,
    Paired,
    Spread,
    band_of,
    joined,
    lineage,
    memory_band,
    memory_conditions,
    spreads,
    tie_factor,
    typical_slack,
    typical_waiting,
)
from shardwise.cost._casts import Casts
from shardwise.cost._copies import Copies, exchanged_bytes, leaving_share
from shardwise.cost._engine_reduce import EngineReduce, reduce_of, reduce_seconds
from shardwise.cost._imposed import OVERLAP_AXES, Efficiencies
from shardwise.cost._kernels import (
    PARTS,
    PARTS_IN_SECONDS,
    TILE_KEYS,
    TILE_ROWS,
    Datasheet,
    DecodeAttention,
    KernelCosts,
    PrefillAttention,
    PrefillTiles,
    Tiles,
    costed_seconds,
    decode_parts,
    experts_seconds,
    heads_together,
    kernel_costs,
    mapped_seconds,
    nearest_costs,
    others_seconds,
    part_costs,
    prompt_parts,
    routed_tiles,
    seen_pairs,
    tile_rows,
    tiled_parts,
)
from shardwise.cost._network import (
    HostRates,
    Network,
    NetworkLink,
    collective_rates_of,
    collective_seconds,
    host_of,
    network_of,
    sent_bytes,
    unlinked,
    with_peers,
)
from shardwise.cost._operators import (
    PassSeconds,
    blend,
    cached_share,
    gemm_seconds,
    inside_share,
    kernel_seconds,
    op_seconds,
)
from shardwise.cost._power import mean_watts, power_model
from shardwise.cost._rates import (
    WIDE_DTYPES,
    GemmRates,
    Rates,
    attention_dtype,
    gemm_rates,
    rates_of,
)
from shardwise.cost._records import DECODE_PARTS, Burst, CollectiveFit, ExpertsFit, Gemm, Quantise, ReduceFit
from shardwise.cost._replicas import OverlapSlowdown, overlap_slowdown
from shardwise.cost._tables import (
    bandwidth_of,
    changes,
    completed,
    constants,
    family_of,
    family_with,
    last_cache_bytes,
    matmul_row,
    record,
    stored,
)
from shardwise.cost._tiles import ELEMENT_BYTES, MEASURED_KERNELS, AttentionBlocks, blocked_flops, one_query_seconds
from shardwise.ledger.op import Verb
