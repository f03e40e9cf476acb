"""Runs on which nothing rests: as near, and as often inside the band, as the page says."""

from __future__ import annotations

from accuracy.unseen import runs, shares, table


def test_runs_without_a_part_in_any_constant_are_met() -> None:
    """Half of them within 6 %, nine of ten within 20 %, and three of four inside their band; none is refused."""
    found = runs()
    _, median, most, inside = shares(found)
    assert len(found) > 150 and all(row.status == "predicted" for row in found)
    assert (median < 0.06, most < 0.2, inside > 0.75) == (True, True, True)


def test_the_table_has_a_row_a_source_and_one_of_all() -> None:
    """Sources stand in the order of the file."""
    rows = runs()
    lines = [*table(rows)]
    assert len(lines) == 3 + len({row.source for row in rows}) and lines[-1].startswith(f"| all | {len(rows)} |")
