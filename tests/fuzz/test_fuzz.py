"""A few hundred random inputs end in an answer or a refusal; `scripts/ask_random.py` asks as many as are wanted."""

from __future__ import annotations

import pytest

from fuzz.inputs import KINDS, drawn
from fuzz.judge import judged

SEED, COUNT = 20, 400


@pytest.mark.parametrize("part", range(4))
def test_random_inputs_are_answered_or_refused(part: int) -> None:
    """No input ends in a fault, takes longer than seconds, says more than a page of errors or breaks its JSON."""
    numbers = range(part * COUNT // 4, (part + 1) * COUNT // 4)
    wrong = [(number, kind, given.words, said) for number, kind, given, said in judged(SEED, numbers) if said]
    assert not wrong


def test_an_input_is_the_same_for_ever() -> None:
    """A number under a seed names one input, and every kind is drawn."""
    assert drawn(7, 3) == drawn(7, 3)
    assert {drawn(7, number)[0] for number in range(200)} == KINDS.keys()
