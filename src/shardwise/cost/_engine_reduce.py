"""All-reduces of serving engines inside a node, whose kernels are not NCCL's."""

from __future__ import annotations

from shardwise.cost._records import ReduceFit
from shardwise.cost._tables import constants, family_of
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, maximum, minimum, power
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReduce:
    """An engine's all-reduce on a kind of device: its constants, and whether the switch reduces."""

    fit: ReduceFit
    in_network: bool
    source: str


def reduce_of(device: Device, engine: str) -> EngineReduce | None:
    """Return the all-reduce of an engine inside a node, None where that of NCCL stands.

    An engine without a measurement takes vLLM's; a kind of link that was not measured in the family has none.

    >>> from shardwise.hardware import find_device
    >>> reduce_of(find_device("h100-sxm-80gb").device, "vllm").in_network
    True
    >>> reduce_of(find_device("a100-pcie-80gb").device, "vllm") is None
    True
    """
    table = constants().families[family_of(device)].all_reduce
    fit = table.get(engine, table.get("vllm"))
    if fit is None or not device.fast_link.startswith(fit.link):
        return None
    return EngineReduce(fit=fit, in_network=device.fast_in_network, source=fit.source)


def reduce_seconds(reduce: EngineReduce, bytes_per_second: X | float, size: X, n: X) -> X:
    """Return seconds of an all-reduce of `size` bytes over n ranks of one node, over links of a rate.

    The faster of reading (n - 1) tensors at once, and a ring's 2 (n - 1) / n, or 1 + 1/n where the switch reduces.

    >>> from shardwise.hardware import find_device
    >>> vllm = reduce_of(find_device("h100-sxm-80gb").device, "vllm")
    >>> 4e-6 < reduce_seconds(vllm, 450e9, 16384, 8) < 8e-6
    True
    """
    c, others = reduce.fit, n - 1
    direct = c.start_seconds + c.step_seconds * others + others * size / (c.direct * bytes_per_second)
    volume = 2 * others / n * size
    if reduce.in_network:
        volume = minimum(volume, (1 + 1 / n) * size)
    wire = (volume + power(c.half_bytes * volume, 0.5)) / (c.efficiency * bytes_per_second)
    if c.crowding:
        wire = wire * power(maximum(n / 2, 1), c.crowding)
    seconds = minimum(direct, c.ring_start_seconds + c.ring_step_seconds * others + wire)
    return above(n, 1, above(size, 0, seconds, 0 * seconds), 0 * seconds)
