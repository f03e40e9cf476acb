"""Steps that engines capture as graphs, and the rows that fill smaller ones up to the next of them."""

from __future__ import annotations

import math
import re
from typing import Any

from shardwise.cost import family_of
from shardwise.ledger.number import X, above, ceil, maximum, minimum
from shardwise.plans import Serving
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import engine_tables, static_row
from shardwise.serving._sizes import ServingSizes, server_ranks, sizes_of


def stated_sequences(job: Serving) -> int:
    """Return the sequences of the largest decode step that a job says is captured, -1 where it says nothing.

    >>> [stated_sequences(Serving(captured_sizes=sizes)) for sizes in ((1, 8, 4), ())]
    [8, -1]
    """
    return max(job.captured_sizes, default=job.captured_sequences)


def captured_sequences(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return the sequences of the largest decode step that SGLang captures, of each group of attention.

    github.com/sgl-project/sglang 0.5.3 and 0.5.23: by the memory of the device and the ranks of a server.
    """
    if (largest := stated_sequences(case.job)) >= 0:
        return 0 * sizes.tp + largest
    if stated := case.engine.host.captured_sequences:
        return 0 * sizes.tp + stated
    few, many = _by_memory(case)
    most: X = above(server_ranks(sizes), 3, 0 * sizes.tp + many, 0 * sizes.tp + few)
    return most


def _by_memory(case: ServingCase) -> tuple[int, int]:
    """Return the sequences of the largest captured step of fewer than four ranks, and of others."""
    device = case.cluster.device
    own = (rest for below, *rest in case.engine.host.captured_below if device.usable_memory_bytes < below * 2**30)
    few, many = next(own, static_row(device)["sequences"])
    return few, many


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
    if (largest := stated_sequences(case.job)) >= 0:
        return zero + largest
    if host.captured_by_memory:
        return captured_sequences(case, sizes)
    most = host.most_captured(family_of(case.cluster.device))
    return (zero + most) / tokens if most else None


def padded_sequences(case: ServingCase, sizes: ServingSizes[X], sequences: X, tokens: X | float) -> X:
    """Return the sequences that a decode step runs with the rows that fill it up to the next captured size.

    vLLM sizes the tokens of a step, others its sequences, up to as many as may run; a job lists sequences. Steps that
    are not replayed have no such rows.
    """
    graphs, host, job = case.engine.graphs, case.engine.host, case.job
    # What launches the kernels of a layer one by one captures none.
    replays = graphs.captured_sizes and not host.layer_seconds and case.cluster.device.vendor in ("NVIDIA", "AMD")
    if not replays or case.efficiencies.ideal or job.disable_cuda_graph_padding:
        return sequences
    filled = _filled(case, sequences, tokens)
    if graphs.captures_most and (job.max_sequences or not (host.captured_by_memory or host.captured_tokens)):
        most_run = job.max_sequences or case.profiled.sequences or sizes.batch
        filled = minimum(filled, maximum(sequences, most_run))
    most = most_captured(case, sizes, tokens)
    return filled if most is None else above(sequences, most, sequences, minimum(filled, maximum(most, sequences)))


def _filled(case: ServingCase, sequences: X, tokens: X | float) -> X:
    """Return the sequences of the least captured size that holds so many, of so many tokens each."""
    graphs, job = case.engine.graphs, case.job
    if job.captured_sizes:
        return _next_size(_listed(job), sequences)
    if not case.engine.host.captured_tokens:
        guesses = job.num_speculative_tokens and graphs.verified_sizes
        return _next_size(guesses or graphs.captured_sizes, sequences)
    if not graphs.whole_sequences:
        return _next_size(graphs.captured_sizes, sequences * tokens) / tokens
    # Sizes are rounded up to whole sequences: the least that holds the first token of the last of them does.
    return maximum(ceil(_next_size(graphs.captured_sizes, (ceil(sequences) - 1) * tokens + 1) / tokens), sequences)


def _listed(job: Serving) -> tuple[tuple[int, int, int], ...]:
    return tuple((size, size, 1) for size in sorted({*job.captured_sizes}))


def launched_steps(case: ServingCase, sizes: ServingSizes[X], sequences: X, tokens: X | float) -> X | None:
    """Return how many sequences run in a decode step that no graph holds, 0 where one does, None where all have one.

    One without padding is held by a graph of its own size alone.
    """
    most, none = most_captured(case, sizes, tokens), 0 * sequences
    if most is None:
        return None
    launched = above(sequences, most, sequences, none)
    if case.job.disable_cuda_graph_padding and case.job.captured_sizes:
        return maximum(launched, above(_next_size(_listed(case.job), sequences), sequences, sequences, none))
    return launched


def decode_rows(case: ServingCase) -> int:
    """Return the sequences that the decode steps of a case's batch run as, whole ones: its own, or a captured size.

    >>> from shardwise import Cluster, Model, Plan, ServingOptions, infer
    >>> asked = Model.load("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), Serving(batch=9)
    >>> decode_rows(infer(*asked, ServingOptions(engine="sglang")).case)
    12
    """
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    rows: float = padded_sequences(case, sizes, case.job.batch, 1 + case.job.num_speculative_tokens)
    return math.ceil(rows)


def captured_notes(case: ServingCase, sizes: ServingSizes[X]) -> tuple[str, ...]:
    """Return as how many the decode steps of a batch are run, nothing where it has a captured size, or is of one."""
    batch: object = sizes.batch
    if not isinstance(batch, (int, float)) or batch == 1 or not case.job.output_tokens or not case.job.use_kv_cache:
        return ()
    each = 1 + case.job.num_speculative_tokens
    rows: Any = padded_sequences(case, sizes, sizes.batch, each)
    if rows == batch:
        return ()
    tokens = each if case.engine.host.captured_tokens else 1
    what = "sequences" if tokens == 1 else "tokens"
    run = f"decode steps of {batch * tokens:g} {what} run as {rows * tokens:g}"
    return (f"{run}: {case.engine.brand} pads them to the next captured graph",)


def padding_notes(case: ServingCase) -> tuple[str, ...]:
    """Return that decode steps of a server are padded, nothing where none of up to 16 sequences is."""
    each, sizes = 1 + case.job.num_speculative_tokens, sizes_of(case.model, case.plan, case.job, case.domains)
    if case.job.output_tokens < 2 or all(padded_sequences(case, sizes, n, each) == n for n in range(1, 17)):
        return ()
    return (f"{case.engine.brand} pads decode steps to the next captured graph",)


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
