"""Steps that SGLang captures as graphs, of decoding and of prompts."""

from __future__ import annotations

import re

from shardwise.cost import family_of
from shardwise.ledger.number import X, above
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import engine_tables, static_row
from shardwise.serving._sizes import ServingSizes, server_ranks


def captured_sequences(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return the sequences of the largest decode step that SGLang captures, of each group of attention.

    github.com/sgl-project/sglang 0.5.3 and 0.5.23: by the memory of the device and the ranks of a server.
    """
    if case.job.captured_sequences >= 0:
        return 0 * sizes.tp + case.job.captured_sequences
    if stated := case.engine.host.captured_sequences:
        return 0 * sizes.tp + stated
    few, many = static_row(case.cluster.device)["sequences"]
    most: X = above(server_ranks(sizes), 3, 0 * sizes.tp + many, 0 * sizes.tp + few)
    return most


def captures_prompts(case: ServingCase) -> bool:
    """Return whether SGLang captures steps with prompts on one stage: not of every model, and on CUDA alone."""
    table, host, device = engine_tables()["static_share"], case.engine.host, case.cluster.device
    if host.eager_decode or not host.captured_prompts or device.vendor != "NVIDIA":
        return False
    family = case.model.family
    if case.tower_parameters and not re.fullmatch(table["captured_with_towers"], family):
        return False
    left_out = [[table["uncaptured_prompts"], ".*"], *table["uncaptured_on"]]
    return not any(re.fullmatch(of, family) and re.fullmatch(on, family_of(device)) for of, on in left_out)
