"""Seconds of one engine step in which the device waits for its host: work of its own, and kernels it launches late."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from shardwise.cost import family_of
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, maximum, total
from shardwise.ledger.op import Op, OpRole, within
from shardwise.ledger.traced import leaf, named
from shardwise.ops.experts import EXPERTS
from shardwise.serving._cache import keeps_states
from shardwise.serving._captured import captures_prompts, launched_steps
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import engine_tables
from shardwise.serving._experts import called_seconds
from shardwise.serving._ledger import EngineStep, StepLedger
from shardwise.serving._rates import type_of
from shardwise.serving._replayed import beside_seconds
from shardwise.serving._sizes import ServingSizes, server_ranks

_BETWEEN_GRAPHS: tuple[OpRole, ...] = ("attention", "scores", "softmax", "context", "cache_write", "indexer", "state")
"""Roles of what SGLang runs between the segments of a captured prompt (github.com/sgl-project/sglang 0.5.23 srt/layers,
`eager_on_graph` of radix_attention.py, radix_linear_attention.py and attention/dsa/dsa_prefill_cuda_graph.py)."""


def host_seconds(case: ServingCase, sizes: ServingSizes[X], step: EngineStep[X]) -> X:
    """Return seconds that the host adds to one step: of its own, each sequence and block, workers, and launches."""
    host, one = case.engine, 0 * sizes.tp + 1
    blocks = step.context / host.memory.block_tokens if step.phase == "decode" else 0.0
    doublings = total((above(sizes.tp, n, one, 0 * one) for n in (1, 2, 4)), 0 * one)
    layers, split = case.model.num_layers, above(sizes.tp, 1, sizes.tp, 0 * one)
    launches = layers * (beside_seconds(host, case.cluster.device) + host.host.row_split_seconds * split)
    between = host.host.between_seconds if host.host.schedules_between(case.job.speculative_method) else 0.0
    steps = leaf("host work of every step", host.host.step_seconds + between + _serial_seconds(case), host.name, "s")
    own = steps + launches + host.host.worker_doubling_seconds * doublings
    each = host.host.sequence_seconds + host.host.block_seconds * blocks
    return own + named(leaf("for a sequence", each, host.name, "s") * step.sequences, "host work for each sequence")


def schedules_serially(case: ServingCase) -> bool:
    """Return whether an engine schedules the steps of a model one after another, for what it caches of its states."""
    engine, model = case.engine, case.model
    waits = engine.memory.caches_prefixes and keeps_states(model.kinds)
    return waits and re.fullmatch(engine.host.serial_families, model.family) is not None


def _serial_seconds(case: ServingCase) -> float:
    """Return seconds in which the device waits for the next step to be scheduled, 0 where that is done meanwhile."""
    return case.engine.host.serial_seconds * host_slowness(case.cluster.device) if schedules_serially(case) else 0.0


def launches(case: ServingCase, ledger: StepLedger[X], roles: Iterable[OpRole] = ()) -> float:
    """Return the kernels that a step launches, those that quantise the inputs of narrow GEMMs among them.

    With `roles` those of operators of these alone.
    """
    narrow = {type_of(case, form) for form in case.format.narrow} - {case.dtype}
    if case.engine.host.compiled_prompts:
        narrow &= set(case.engine.quantisation.unfused_types)

    def counted(op: Op[X]) -> bool:
        return not _fused(case, op) and (not roles or op.role in roles)

    counts = (
        sum(op.launches + (op.dtype in narrow and bool(op.weights)) for op in ops if counted(op))
        for _, ops in ledger.lines
    )
    return sum(times * count for times, count in zip((*case.model.kinds.values(), 1, 1), counts, strict=True))


def _messages(case: ServingCase, sizes: ServingSizes[X], ledger: StepLedger[X]) -> X:
    """Return the collectives of tensor-parallel ranks that a step starts, each a call from Python as a kernel is."""
    counts = (sum(message.axis == "tp" for op in ops for message in op.forward) for _, ops in ledger.lines)
    count = sum(times * count for times, count in zip((*case.model.kinds.values(), 1, 1), counts, strict=True))
    return above(sizes.tp, 1, count + 0 * sizes.tp, 0 * sizes.tp)


def _calls(case: ServingCase, ledger: StepLedger[X]) -> float:
    """Return seconds of Python in the calls of experts beyond those of their kernels, of all layers of a step."""
    family = family_of(case.cluster.device)
    each = called_seconds(case.format.kind, family, case.engine, case.model.family)
    layers = zip(case.model.kinds.values(), ledger.lines, strict=False)
    return each * sum(times for times, (_, ops) in layers if any(within(op.region, EXPERTS) for op in ops))


def _fused(case: ServingCase, op: Op[X]) -> bool:
    return op.role in case.engine.operators.fused


def host_slowness(device: Device) -> float:
    """Return how much longer the processor beside a device takes for a call from Python than those measured.

    >>> from shardwise.hardware import find_device
    >>> [host_slowness(find_device(name).device) for name in ("b200-sxm-180gb", "gb200")]
    [1.0, 2.3]
    """
    hosts: list[dict[str, Any]] = engine_tables()["hosts"]["processors"]
    return next((float(row["slowness"]) for row in hosts if re.fullmatch(row["devices"], device.chip)), 1.0)


def replayed_tokens(case: ServingCase) -> int:
    """Return the tokens up to which steps with prompts are replayed from captured graphs, 0 where none is."""
    host, most = case.engine.host, case.engine.host.most_captured(family_of(case.cluster.device))
    decoded = case.profiled.sequences * (1 + case.job.num_speculative_tokens)
    return min(host.captured_per_sequence * decoded or most, most)


def _eager(case: ServingCase, sizes: ServingSizes[X], step: EngineStep[X], late: X) -> X:
    """Return seconds by which the host is behind where a step is launched kernel by kernel, 0 where it is replayed."""
    none = 0 * late
    if step.phase == "decode":
        launched = launched_steps(case, sizes, step.sequences, step.tokens)
        return none if launched is None else above(launched, 0, late, none)
    replayed = replayed_tokens(case)
    return above(step.sequences * step.tokens, replayed, late, none) if replayed else late


def late_seconds(case: ServingCase, sizes: ServingSizes[X], ledger: StepLedger[X], device: X) -> X:
    """Return seconds by which the host is behind the device in a step that Python launches kernel by kernel."""
    slowness = host_slowness(case.cluster.device)
    each = case.engine.host.module_launch_seconds * slowness
    # XLA, which TPUs need, compiles whole steps.
    if not each or case.efficiencies.ideal or case.cluster.device.vendor == "Google":
        return 0 * device
    count = 0 * sizes.pp + launches(case, ledger) + _messages(case, sizes, ledger)
    called = each * count + slowness * _calls(case, ledger)
    if ledger.step.phase == "prefill" and captures_prompts(case):
        # Graphs break at attention, which runs between their segments, each a launch of its own. Stages have none
        # unless they are told to, and of groups that share experts all replay or none does, which one without a
        # prompt prevents (0.5.23 srt/model_executor/runner/prefill_cuda_graph_runner.py, can_run_graph).
        few = 0 * sizes.pp + launches(case, ledger, _BETWEEN_GRAPHS) + case.model.num_layers + 1
        called = above(server_ranks(sizes) * sizes.pp, sizes.tp, called, each * few)
    late = named(maximum(called - device, 0.0), "launches by Python modules")
    return _eager(case, sizes, ledger.step, late)
