"""Presets of bits: what each of the twelve makes of weights, products and embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.models import load_model
from shardwise.ops import parameters_by_component
from shardwise.plans import DTYPES, find_precision
from shardwise.serving import find_format

NAMES = [f"w{w}a{a}e{e}" for w, a in ((16, 16), (8, 16), (8, 8), (4, 16), (4, 8), (4, 4)) for e in (16, 32)]


def infer(*words: str) -> dict[str, Any]:
    """Return the answer about Llama-2-7B on one device."""
    return run("infer", "llama-2-7b", "--on", "1xa100-sxm-80gb", "--input-tokens", "2048", *words, "--json").tree


def test_there_are_twelve() -> None:
    """Every preset that the users of wXaYeZ know has its name here."""
    assert sorted(DTYPES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_served_weights_have_the_bits_of_the_name(name: str) -> None:
    """Matrices of the layers take X bits and all else Z, to the byte; so do angles of 4,096 positions in 16 bits."""
    w, _, e = DTYPES[name]
    parts = parameters_by_component(load_model("llama-2-7b"))
    layers = parts["attention"] + parts["mlp"]
    rest = sum(parts.values()) - layers
    assert infer("--dtype", name)["weights_bytes_per_gpu"] == layers * w / 8 + rest * e / 8 + 4096 * 128 * 2


@pytest.mark.parametrize(("name", "compute"), [("w16a16e16", "bf16"), ("w8a8e16", "int8"), ("w4a4e32", "int4")])
def test_products_run_in_the_bits_of_the_name(name: str, compute: str) -> None:
    """Y bits of activations choose the units of the product, and fewer never make the first token later."""
    assert infer("--dtype", name)["compute"] == compute
    assert infer("--dtype", name)["ttft_seconds"] <= infer("--dtype", "w16a16e32")["ttft_seconds"]


def test_a_preset_is_the_format_of_the_same_name() -> None:
    """`--dtype` and `--weights` give one answer; both at once are refused where they differ."""
    assert infer("--dtype", "w8a16e16") == infer("--weights", "w8a16e16")
    words = ("infer", "gpt2", "--on", "1xh100", "--dtype", "w8a8e16", "--weights", "fp8", "--json")
    assert run(*words).fields == ["dtype"]
    assert run("infer", "gpt2", "--on", "1xh100", "--dtype", "w3a3e3", "--json").fields == ["dtype"]


@pytest.mark.parametrize("name", [n for n in NAMES if "a4" not in n])
def test_training_takes_the_bits_of_the_name(name: str) -> None:
    """Weights of X bits, saved activations of Y, a table of Z; gradients, master and moments stay in fp32."""
    w, a, e = DTYPES[name]
    stages = [
        run("train", "gpt2", "--on", "1xh100", "--global-batch", "1", "--dtype", n, "--json").tree["memory"]["stages"][
            0
        ]["categories"]
        for n in ("w16a16e16", name)
    ]
    known = find_precision("bf16")
    assert (find_precision(name).weight_bytes, find_precision(name).activation_bytes) == (w / 8, a // 8)
    assert stages[1]["gradients"] == stages[0]["gradients"] == known.gradient_bytes * stages[0]["weights"] / 2
    assert stages[1]["optimizer"] == stages[0]["optimizer"]
    table = 50304 * 768  # GPT-2's vocabulary padded to 128; its learned positions stay with the other weights
    assert stages[1]["weights"] == pytest.approx((stages[0]["weights"] / 2 - table) * w / 8 + table * e / 8, rel=0.01)


@pytest.mark.parametrize("name", ["w4a4e16", "w4a4e32"])
def test_no_training_keeps_four_bits(name: str) -> None:
    """Activations of 4 bits have no backward pass: the problem says what would do."""
    with pytest.raises(InputError, match="w4a8"):
        find_precision(name)


@pytest.mark.parametrize("name", NAMES)
def test_listing_knows_the_presets(name: str) -> None:
    """`dtypes` lists every preset with its bits and whether a training can take it."""
    (row,) = run("dtypes", name, "--json").tree["dtypes"]
    assert (row["weights"], row["activations"], row["embedding"]) == DTYPES[name]
    assert row["trains"] is ("a4" not in name)
    assert find_format(name).bytes == row["weights"] / 8
