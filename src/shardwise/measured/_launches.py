"""What a launch says, by the columns of rows of measurements."""

from __future__ import annotations

from shardwise.serving import find_engine, release_table


def cells_of_engine(engine: str, version: str) -> dict[str, str]:
    """Return an engine of a release by the columns of rows: its word, its release, and what its launch says as notes.

    >>> cells_of_engine("vllm-eager", "0.11.0")
    {'engine': 'vllm', 'engine_version': '0.11.0', 'notes': 'launch=eager'}
    """
    own, facts = find_engine(engine), release_table()["launched"]
    notes = [f"{name}={value}" for name, value in (facts[word] for word in own.launched_with if word in facts)]
    notes += ["async_scheduling=0"] if "synchronous" in own.launched_with else []
    return {"engine": own.launch_of or own.name, "engine_version": version, "notes": "; ".join(notes)}
