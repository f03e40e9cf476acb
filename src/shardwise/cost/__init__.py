"""Seconds: of operators on a device and of collectives over a cluster, with constants that carry their source."""

from shardwise.cost._bands import Band, band_of
from shardwise.cost._network import Network, collective_seconds, leaving_share, network_of, sent_bytes
from shardwise.cost._operators import PassSeconds, blend, kernel_seconds, op_seconds
from shardwise.cost._rates import OVERLAP_AXES, Efficiencies, Rates, rates_of

__all__ = [
    "OVERLAP_AXES",
    "Band",
    "Efficiencies",
    "Network",
    "PassSeconds",
    "Rates",
    "band_of",
    "blend",
    "collective_seconds",
    "kernel_seconds",
    "leaving_share",
    "network_of",
    "op_seconds",
    "rates_of",
    "sent_bytes",
]
