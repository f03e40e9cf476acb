"""What devices reach of their host: its link, and the update of an optimizer in its memory."""

from __future__ import annotations

from shardwise.cost._tables import constants
from shardwise.hardware import Cluster
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """What a device reaches of its host: the link in one direction, and its share of the memory for updates."""

    link_bytes_per_second: float
    memory_bytes_per_second: float


def host_of(cluster: Cluster) -> HostRates:
    """Return what each device of a cluster reaches of its host; raises `InputError` where its link is not known.

    >>> host_of(Cluster.parse("1xrtx-4090")).link_bytes_per_second
    25600000000.0
    """
    host = constants().rules.host
    devices = min(cluster.devices_per_node, cluster.num_devices)
    return HostRates(
        link_bytes_per_second=host.link_share * cluster.device.host_bytes_per_second,
        memory_bytes_per_second=host.memory_bytes_per_second / devices,
    )
