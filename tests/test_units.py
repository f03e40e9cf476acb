"""Numbers that people type: commas part thousands, whatever language the typist counts in."""

from __future__ import annotations

import pytest

from command_line import run
from shardwise.errors import InputError
from shardwise.units import parse_count

SERVE = "serve llama-3.1-8b --on 8xh100 --input-tokens 512 --output-tokens 64".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("text", "number"), [("1,000", 1e3), ("-12,345.5", -12345.5), ("1,000,000k", 1e9), ("1_5", 15)]
)
def test_commas_part_thousands(text: str, number: float) -> None:
    """Groups of three digits may be parted by commas, and digits by underscores as in Python."""
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["8,8", "1,5T", "1,0000", "1000,000", "1,00,000", "1,000,0"])
def test_a_decimal_comma_is_no_thousand(text: str) -> None:
    """8,8 is 8.8 to many and 88 to none: it is refused, not read as ten times what was meant."""
    with pytest.raises(InputError, match="comma that does not part thousands"):
        parse_count(text)


def test_a_rate_with_a_decimal_comma_is_refused() -> None:
    """A load of 8,8/s was answered as one of 88 requests a second."""
    asked = run(*SERVE, "--rate", "8,8/s", "--json")
    assert (asked.status, asked.fields) == (2, ["rate"])
