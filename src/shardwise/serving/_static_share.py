"""The share of a device's memory that an engine takes for weights and cache where nobody says one."""

from __future__ import annotations

from shardwise.ledger.number import X, above, ceil, divide, maximum, minimum, total
from shardwise.ledger.traced import leaf, named
from shardwise.serving._captured import captured_sequences, captures_prompts
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import engine_tables, static_row
from shardwise.serving._sizes import ServingSizes, server_ranks


def memory_share(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return the share of the memory that an engine may use, as it spells it: what the job says, or its default.

    SGLang's is arithmetic ([static_share] of engines.toml): what is not set aside for chunks of prompts and graphs.
    """
    stated = case.job.memory_fraction or case.engine.memory.fraction
    if stated:
        return leaf("memory fraction", stated, case.engine.name) + 0 * sizes.tp
    table, memory = engine_tables()["static_share"], case.cluster.device.usable_memory_bytes / 2**20
    row = static_row(case.cluster.device)
    ranks = server_ranks(sizes)
    if case.engine.memory.static_below:
        return _share_by_memory(case, sizes, memory)
    groups = above(ranks, sizes.tp, divide(ranks, sizes.tp), 0 * sizes.tp)
    # A chunk that a launch states is of all groups together, of which each has a part (arg_groups/parallel_hook.py). A
    # step as long as the engine's own says no other than that, which each group is taken to have to itself.
    own, asked = row["chunk"], case.job.max_batched_tokens
    chunk = asked * maximum(groups, 1) if asked and asked != own else 0 * groups + own
    captured = captured_sequences(case, sizes) * (not case.engine.host.eager_decode)
    if case.job.max_sequences:
        captured = minimum(captured, case.job.max_sequences * maximum(groups, 1))
    runs = (ceil((minimum(chunk, high) + 1 - low) / step) for low, high, step in table["sizes"])
    each = total((maximum(one, 0) for one in runs), 0 * chunk)
    latent = any(m.latent for block in case.model.kinds for m in block.mixers)
    prompts = table["latent_prompts"] if latent else table["captured_prompt"] * each
    if not captures_prompts(case):
        prompts = 0.0
    kept = table["base"] + table["chunk_token"] * maximum(chunk, table["least_chunk"])
    kept = kept + above(sizes.pp, 1, 0 * sizes.tp, 0 * sizes.tp + prompts) + table["rank"] * ranks * sizes.pp
    of_groups = table["group_sequence"] + above(captured, table["many"], table["many_more"] + 0 * groups, 0 * groups)
    kept = kept + captured * (table["sequence"] + of_groups * groups)
    if memory > table["large"]:
        kept = maximum(kept, table["least"])
    # Rounded to a thousandth (srt/server_args.py, _handle_gpu_memory_settings).
    rounded = ceil(1000 * maximum(1 - kept / memory, 0.0) - 0.5) / 1000
    share: X = named(rounded, "memory fraction", table["source"])
    return share


def _share_by_memory(case: ServingCase, sizes: ServingSizes[X], memory: float) -> X:
    """Return the share of an engine that sets aside so much by the memory of the device, of so many MiB, and ranks."""
    # github.com/sgl-project/sglang 0.5.2 python/sglang/srt/server_args.py, __post_init__: tp_size is all groups' ranks.
    own, ranks = case.engine.memory, server_ranks(sizes)
    _, kept, each = next(row for row in own.static_below if memory < row[0] * 1024)
    guessing = own.static_guessing * (case.job.num_speculative_tokens > 0)
    grouped = above(ranks, sizes.tp, 0 * sizes.tp + own.static_grouped, 0 * sizes.tp)
    gib = kept + guessing + grouped + each * ranks * sizes.pp
    rounded = ceil(1000 * maximum(1 - gib * 1024 / memory, 0.0) - 0.5) / 1000
    share: X = named(rounded, "memory fraction", f"set aside for chunks of prompts and graphs by {case.engine.name}")
    return share
