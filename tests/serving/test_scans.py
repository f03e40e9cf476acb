"""Recurrences of prompts: chunks that wait for each other."""

from __future__ import annotations

import pytest

from serving.serving_cases import ask
from shardwise.plans import Plan, Serving
from shardwise.serving._scans import chain_seconds

_LAYERS = 45


def _scan(tp: int, batch: int, tokens: int, device: str = "b200-sxm-180gb") -> float:
    """Return the seconds of the chunked kernels of one gated-delta layer of Qwen3.5-397B."""
    job = Serving(batch=batch, input_tokens=tokens, output_tokens=2, weights="fp8-block")
    found = ask("qwen3.5-397b-a17b", job, Plan(tp=tp, etp=tp), device=device, engine="sglang").evaluation
    return found.prefill.operators["scan"] / _LAYERS


@pytest.mark.parametrize(
    ("batch", "tokens", "measured"),
    [
        (1, 2048, 86e-6),
        (1, 4096, 141e-6),
        (1, 8192, 250e-6),
        (1, 16384, 483e-6),
        (1, 32768, 948e-6),
        (2, 4096, 167e-6),
        (4, 2048, 125e-6),
    ],
)
def test_kernels_of_the_gated_delta_rule_take_what_was_measured(batch: int, tokens: int, measured: float) -> None:
    """Two key and eight value heads on B200: github.com/flashinfer-ai/flashinfer pull 3902, FLA/Triton."""
    assert _scan(8, batch, tokens) == pytest.approx(measured, rel=0.22)


@pytest.mark.parametrize(("tokens", "measured"), [(65536, 2338e-6), (32768, 1123e-6)])
def test_chunks_wait_on_cards_of_blackwell_with_gddr(tokens: int, measured: float) -> None:
    """Two key and eight value heads on RTX PRO 6000: github.com/flashinfer-ai/flashinfer pull 3659, FLA/Triton."""
    assert _scan(8, 1, tokens, "nvidia-rtx-pro-6000-blackwell-server-edition") == pytest.approx(measured, rel=0.03)


def test_chunks_of_a_sequence_wait_for_each_other_whatever_tp_is() -> None:
    """What does not shrink with tp are the chunks of one sequence; two of half as many tokens wait half as long."""
    tokens, each = 16384, chain_seconds("blackwell")
    chain = (tokens / 64 - 1) * each
    halves, whole = (_scan(8, batch, tokens // batch) for batch in (2, 1))
    assert whole - halves == pytest.approx(tokens / 128 * each, rel=0.05)
    assert _scan(8, 1, tokens) - chain < 0.6 * (_scan(4, 1, tokens) - chain)
    assert _scan(8, 1, tokens) > 0.7 * _scan(4, 1, tokens)
