"""Seconds: of operators on a device and of collectives over a cluster, with constants that carry their source."""

from shardwise.cost._bands import Band, band_names, band_of
from shardwise.cost._kernels import Chip, ExpertsFit, experts_seconds, fit_from
from shardwise.cost._network import Network, collective_seconds, exchanged_bytes, leaving_share, network_of, sent_bytes
from shardwise.cost._operators import PassSeconds, blend, kernel_seconds, op_seconds
from shardwise.cost._rates import OVERLAP_AXES, Efficiencies, Rates, rates_of
from shardwise.cost._reduce import EngineReduce, reduce_of, reduce_seconds
from shardwise.cost._replicas import Beside, beside_of
from shardwise.cost._tables import constants

__all__ = [
    "OVERLAP_AXES",
    "Band",
    "Beside",
    "Chip",
    "Efficiencies",
    "EngineReduce",
    "ExpertsFit",
    "Network",
    "PassSeconds",
    "Rates",
    "band_names",
    "band_of",
    "beside_of",
    "blend",
    "collective_seconds",
    "constants",
    "exchanged_bytes",
    "experts_seconds",
    "fit_from",
    "kernel_seconds",
    "leaving_share",
    "network_of",
    "op_seconds",
    "rates_of",
    "reduce_of",
    "reduce_seconds",
    "sent_bytes",
]
