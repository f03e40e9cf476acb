"""Seconds of small kernels that a captured graph or a command buffer starts one after another."""

from __future__ import annotations

from shardwise.cost import constants, family_of
from shardwise.hardware import Device
from shardwise.serving._engine import Engine, engine_tables


def replay_seconds(vendor: str) -> float:
    """Return the seconds that a kernel of a captured graph takes at least on a maker's devices, 0 where not known.

    >>> replay_seconds("AMD"), replay_seconds("NVIDIA")
    (3.9e-06, 0.0)
    """
    return float(engine_tables()["measured"]["replay_seconds"].get(vendor, 0.0))


def replayed_start(engine: Engine, family: str) -> float:
    """Return seconds of a small kernel as measured in replayed graphs, 0 where the engine's own figure stands.

    >>> from shardwise.serving import find_engine
    >>> replayed_start(find_engine("llama.cpp"), "ada"), replayed_start(find_engine("vllm"), "ada")
    (1.5e-06, 0.0)
    """
    return constants().families[family].memory.replayed_start_seconds if engine.graphs.as_measured else 0.0


def beside_seconds(engine: Engine, device: Device) -> float:
    """Return seconds of the kernels of a layer that the ledger does not count."""
    family = family_of(device)
    each = replayed_start(engine, family) or (0.0 if family.startswith("cpu") else replay_seconds(device.vendor))
    return engine.host.layer_kernels * each or engine.host.layer_seconds
