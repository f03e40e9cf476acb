"""A KV cache that is stated in bytes is allocated: where a device has not as many left, the engine does not start."""

from __future__ import annotations

import pytest

from command_line import run

_MODEL, _ONE = "llama-3.1-8b", ("llama-3.1-8b", "--on", "h100-sxm-80gb")


@pytest.mark.parametrize("words", [("infer",), ("serve", "--rate", "1")])
def test_a_stated_cache_beyond_the_device_does_not_fit(words: tuple[str, ...]) -> None:
    """The verdict is NO FIT with status 1, short by what is missing, and the cache that would fit is named."""
    command, *flags = words
    done = run(command, *_ONE, *flags, "--kv-cache-memory", "100GiB")
    assert done.status == 1 and done.out.startswith("NO FIT")
    text = " ".join(done.out.split())
    assert "39.15 GiB" in text and "nearest change that fits: --kv-cache-memory 62315MiB" in text
    tree = run(command, *_ONE, *flags, "--kv-cache-memory", "100GiB", "--json").tree
    assert tree["fits"] is False


def test_memory_of_a_stated_cache_adds_up() -> None:
    """What is needed holds the whole cache, so that it exceeds the device by what is said to be missing."""
    tree = run("infer", *_ONE, "--kv-cache-memory", "100GiB", "--json").tree
    memory, (stage,) = tree["memory"], tree["memory"]["stages"]
    assert stage["kv_cache"] == 100 * 2**30
    assert memory["peak_bytes"] - memory["limit_bytes"] == pytest.approx(tree["short_by_bytes"], abs=2)
    assert tree["kv_cache_tokens"] == tree["max_concurrency"] == 0 and tree["chance_to_fit"] < 0.01


def test_the_remedy_fits() -> None:
    """The cache that is named is taken, and what is left of it is asked with the chance that it has."""
    assert run("infer", *_ONE, "--kv-cache-memory", "62315MiB").status == 0
    near, small = (run("infer", *_ONE, "--kv-cache-memory", n, "--json").tree for n in ("62315MiB", "30GiB"))
    assert 0.3 < near["chance_to_fit"] < 0.7 and small["chance_to_fit"] > 0.99


def test_a_stated_cache_is_known_to_the_token() -> None:
    """Its tokens have no band, and no share of the memory is assumed."""
    tree = run("infer", *_ONE, "--kv-cache-memory", "30GiB", "--json").tree
    assert "kv_cache_tokens" not in tree["interval"]
    assert "memory budget: 30.00 GiB of cache as stated, whatever share of the memory that is" in tree["assumptions"]


@pytest.mark.parametrize("words", [("infer", "--on", "2xh100-sxm-80gb"), ("serve", "--on", "h100-sxm-80gb")])
def test_searches_reject_a_stated_cache_beyond_every_device(words: tuple[str, ...]) -> None:
    """No plan is proposed that does not start, nor stands on the Pareto front."""
    what, *flags = words
    flags += ["--rate", "2"] if what == "serve" else []
    tree = run("plan", what, _MODEL, *flags, "--kv-cache-memory", "100GiB", "--json").tree
    assert tree["best"] == [] and tree["front"] == []
    (rejection,) = (one for one in tree["rejected"] if one["name"] == "memory")
    assert rejection["count"] > 0 and (what == "infer" or "less --kv-cache-memory" in rejection["remedy"])


def test_what_a_server_is_short_of_is_named() -> None:
    """Weights that fill the device leave out a request of so many tokens, a stated cache itself."""
    weights = " ".join(run("serve", "llama-3.1-70b", "--on", "h100-sxm-80gb", "--rate", "1").out.split())
    stated = " ".join(run("serve", *_ONE, "--rate", "1", "--kv-cache-memory", "100GiB").out.split())
    assert "62.20 GiB short of memory for one request of 640 tokens" in weights
    assert "39.15 GiB short of memory for that cache" in stated
