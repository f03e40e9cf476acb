"""The program that times the search of serving asks what the search answers today."""

from __future__ import annotations

import serving_speed


def test_the_layouts_whose_search_is_timed_are_answered() -> None:
    """Hundreds of layouts of DeepSeek-V3 under a load, with candidates, front and what fell, are what it counts."""
    assert serving_speed.searched() > 500
