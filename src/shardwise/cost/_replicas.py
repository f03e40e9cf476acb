"""What messages between replicas take of the compute they run beside: cores that NCCL holds, GEMMs that wait."""

from __future__ import annotations

from typing import Any

from shardwise.cost._imposed import Efficiencies
from shardwise.cost._network import Network, network_of, with_peers
from shardwise.cost._rates import contention_of
from shardwise.cost._shared import Adapter, ReplicaMessages
from shardwise.cost._tables import constants, family_of, matmul_row
from shardwise.hardware import Cluster, Device
from shardwise.ledger.number import X, above, maximum, minimum
from shardwise.records import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapSlowdown:
    """What a message between replicas takes of a device's compute: NCCL's kernel holds cores."""

    cores: float
    node_cores: float
    """Cores that a message within a node holds."""
    rank_cores: float
    """Cores that a message over the network holds for each rank of its group in a node, up to `most_cores`."""
    most_cores: float
    """Cores that it holds at most in a node of eight; in domains of more, all that a message within one holds."""
    spare_cores: float
    """Cores that may be held before GEMMs take twice as long, which start a block on all the others."""
    waits: float = 0.5
    """What compute then loses of a message as long as alone: its share of GEMMs takes two rounds."""
    longer: float
    """By how much a message takes longer than alone."""
    usual: Network[Any] | None = None
    """The network with as many adapters as the device usually has, where a node has fewer and GEMMs may wait for cores.

    With fewer adapters NCCL has fewer channels. A message lasts longer and leaves more cores: GEMMs that start a block
    on almost every core lose to it what they lose to the same bytes over the usual adapters.
    """

    def lost_share(self, at: tuple[X, ...]) -> X:
        """Return the share of a hidden message's seconds that compute loses; `at` are the group's ranks by tier.

        NCCL runs a block on a core for each channel. A ring takes a channel for each adapter that its ranks of a node
        have, twice (src/graph/search.cc, connect.cc ncclTopoPostset), or fills the links of a node. A domain of more
        than eight devices has more adapters, and with them channels, up to those of its links.

        >>> cores = {"cores": 100.0, "node_cores": 24.0, "rank_cores": 2.0, "most_cores": 16.0, "spare_cores": 20.0}
        >>> slowdown = OverlapSlowdown(**cores, longer=1.0)
        >>> slowdown.lost_share((8, 8)), slowdown.lost_share((8, 64)), slowdown.lost_share((1, 8))
        (0.5, 0.16, 0.02)
        """
        most = maximum(minimum(self.most_cores / 8 * at[0], self.node_cores), self.most_cores)
        across = minimum(self.rank_cores * at[0], most)
        cores = above(at[-1], at[0], across, 0 * across + self.node_cores)
        share = cores / self.cores
        return above(cores, self.spare_cores, maximum(share, self.waits), share) * self.longer


def overlap_slowdown(cluster: Cluster, dtype: str, imposed: Efficiencies) -> OverlapSlowdown | None:
    """Return what messages between replicas take of compute in a data type; None where they take nothing.

    Nothing where every efficiency is one, or where a device is not made of many equal cores.

    >>> round(overlap_slowdown(Cluster.parse("16xa100-sxm-80gb"), "bf16", Efficiencies()).lost_share((8, 16)), 3)
    0.237
    """
    rule, device = constants().rules.replica_messages, cluster.device
    if not contention_of(device, imposed):
        return None
    family = family_of(device)
    adapter = _adapter_cores(rule, device)
    blocks = matmul_row(family, dtype)[0].persistent_blocks
    spare = max(device.num_cores - blocks, 0.0)
    return OverlapSlowdown(
        cores=float(device.num_cores),
        node_cores=rule.node_cores.get(family, rule.node_cores["other"]),
        rank_cores=adapter.each,
        most_cores=adapter.most,
        spare_cores=spare,
        waits=rule.waits if spare else rule.crowded_waits,
        longer=rule.longer,
        usual=_usual_network(cluster, imposed) if blocks and spare else None,
    )


def _usual_network(cluster: Cluster, imposed: Efficiencies) -> Network[Any] | None:
    """Return the network of a cluster with the usual adapters of its device, None where its own has as many.

    A slower network is one of fewer adapters of the usual rate: eight H100 with 800 Gb/s a node have two of 400, whose
    rings are eight channels (`adapters_source` of priors.toml), where eight adapters fill the most.
    """
    device, outer = cluster.device, cluster.tiers[1:]
    if not outer or not device.knows("slow_bytes_per_second"):
        return None
    more = device.slow_bytes_per_second / outer[0].bytes_per_second
    if more <= 1:
        return None
    raised = (replace(tier, bytes_per_second=more * tier.bytes_per_second) for tier in outer)
    return with_peers(network_of(cluster.with_tiers((cluster.tiers[0], *raised)), imposed))


def _adapter_cores(rule: ReplicaMessages, device: Device) -> Adapter:
    """Return how many cores an adapter takes: the last of the rows that the device's usual network reaches.

    Channels follow the adapters that a device is sold with; a network that is faster than those moves the same messages
    in less time and never holds more.
    """
    rate = device.slow_bytes_per_second if device.knows("slow_bytes_per_second") else 0.0
    return [one for one in rule.adapters if rate >= one.bytes_per_second][-1]
