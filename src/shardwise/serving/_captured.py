"""Steps that engines capture as graphs, and the rows that fill smaller ones up to the next of them."""

from __future__ import annotations

import re

from shardwise.cost import family_of
from shardwise.ledger.number import X, above, ceil, maximum, minimum
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


def most_captured(case: ServingCase, sizes: ServingSizes[X], tokens: X | float) -> X | None:
    """Return the sequences of the largest decode step that is replayed from a graph, None where it holds all that run.

    A sequence has so many tokens. vLLM counts the tokens of a step (github.com/vllm-project/vllm
    vllm/v1/cudagraph_dispatcher.py, dispatch), SGLang (github.com/sgl-project/sglang srt/model_executor, 0.5.3
    cuda_graph_runner.py can_run, 0.5.23 runner/decode_cuda_graph_runner.py can_run_graph) and TensorRT-LLM, where a
    launch says how many (github.com/NVIDIA/TensorRT-LLM tensorrt_llm/_torch/pyexecutor/cuda_graph_runner.py, 1.0 to
    1.2), its sequences.
    """
    host, zero = case.engine.host, 0 * sizes.tp
    if host.eager_decode:
        return zero
    if case.job.captured_sequences >= 0:
        return zero + case.job.captured_sequences
    if host.captured_by_memory:
        return captured_sequences(case, sizes)
    most = host.most_captured(family_of(case.cluster.device))
    return (zero + most) / tokens if most else None


def padded_sequences(case: ServingCase, sizes: ServingSizes[X], sequences: X, tokens: X | float) -> X:
    """Return the sequences that a decode step runs with the rows that fill it up to the next captured size.

    vLLM sizes the tokens of a step, others its sequences, up to as many as may run. Steps that are not replayed have no
    such rows.
    """
    graphs, host, job = case.engine.graphs, case.engine.host, case.job
    # What launches the kernels of a layer one by one captures none.
    replays = graphs.captured_sizes and not host.layer_seconds and case.cluster.device.vendor in ("NVIDIA", "AMD")
    if not replays or case.efficiencies.ideal or 0 <= job.captured_sequences <= graphs.unpadded_sequences:
        return sequences
    counted: X | float = tokens if host.captured_tokens else 1.0
    filled = _next_size(graphs.captured_sizes, sequences * counted) / counted
    if not host.captured_tokens and (job.max_sequences or not host.captured_by_memory):
        filled = minimum(filled, maximum(sequences, job.max_sequences or sizes.batch))
    most = most_captured(case, sizes, tokens)
    return filled if most is None else above(sequences, most, sequences, minimum(filled, maximum(most, sequences)))


def captured_notes(case: ServingCase, sizes: ServingSizes[X]) -> tuple[str, ...]:
    """Return how many sequences the decode steps of a batch are run as, nothing where it has a captured size."""
    batch: object = sizes.batch
    if not isinstance(batch, (int, float)) or not case.job.output_tokens or not case.job.use_kv_cache:
        return ()
    rows: object = padded_sequences(case, sizes, sizes.batch, 1 + case.job.num_speculative_tokens)
    if rows == batch:
        return ()
    return (f"decode steps run as {rows:.4g} sequences: {case.engine.brand} fills {batch:g} up to a captured size",)


def routed_share(case: ServingCase, sizes: ServingSizes[X], share: X) -> X | float:
    """Return the share of the rows of a padded step that go to experts, of which a `share` are sequences."""
    routes = case.engine.graphs.routes_padding
    if routes == "unspread":
        return above(sizes.ep, 1, share, 0 * share + 1)
    return 1.0 if routes else share


def _next_size(captured: tuple[tuple[int, int, int], ...], rows: X) -> X:
    """Return the least captured size that holds so many rows, these where none does.

    Sizes are (first, last, step), in order.

    >>> [_next_size(((1, 2, 1), (4, 4, 1), (8, 16, 8)), rows) for rows in (2, 3, 9, 17)]
    [2, 4, 16, 17]
    """
    size = rows
    for first, last, step in reversed(captured):
        inside = first + ceil(maximum(rows - first, 0) / step) * step
        size = above(rows, last, size, inside)
    return size
