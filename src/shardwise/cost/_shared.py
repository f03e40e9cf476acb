"""Records of the stored constants that hold for every family of devices."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightGradientRate:
    """Products of weight gradients over the others."""

    rate: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerConstants:
    """Power of the share of watts with which rates fall."""

    exponent: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageCores:
    """Cores that a kernel of messages holds."""

    count: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Cores that a message holds for each rank of a node over adapters of at least a rate, and at most."""

    bytes_per_second: float
    each: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMessages:
    """What messages between replicas take of compute."""

    longer: float
    waits: float
    """What compute loses of a message whose cores persistent products wait for, where these leave some free."""
    crowded_waits: float
    """The same of products on every core, which wait for any message."""
    node_cores: Mapping[str, float]
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAccess:
    """The most that ranks on one host bridge slow each other, as a power of their number."""

    crowding: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInSteps:
    """Accesses of an optimizer whose steps run one by one, over those of one kernel; FLOPs of a coded moment."""

    accesses: float
    coded_flops: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastLevelCache:
    """Sizes of the last cache walked through since after which all bytes are still there, and none."""

    every: float
    nothing: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The share of a host link that large pinned copies reach, and what an update streams in a node's memory."""

    link_share: float
    memory_bytes_per_second: float
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandInFamily:
    """The family whose kernels of engines stand in."""

    family: str
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedMemory:
    """Memory that keeps its check bits among the data: the share that is left, and whose it is."""

    share: float
    families: tuple[str, ...]
    devices: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedConstants:
    """What holds for every family."""

    power: PowerConstants
    message_cores: MessageCores
    replica_messages: ReplicaMessages
    weight_gradient: WeightGradientRate
    peer_access: PeerAccess
    update_in_steps: UpdateInSteps
    last_cache: LastLevelCache
    host: HostMemory
    stand_in: StandInFamily
    checked_memory: CheckedMemory
