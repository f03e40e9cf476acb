"""What `validate` tells programs: coverage, errors by group, refusals, runs that fit, and every row as CSV."""

from __future__ import annotations

from typing import Any

from shardwise.measured import Errors, Validation, examples, fits_of, reasons, summary

TABLES = ("metric", "source", "device", "family", "quality", "year")


def errors_record(errors: Errors, by: tuple[str, ...]) -> dict[str, Any]:
    """Return one group of errors as a record."""
    return {
        **dict(zip(by, errors.group, strict=True)),
        "count": errors.count,
        "bias": errors.bias,
        "median_abs_error": errors.median_abs_error,
        "p90_abs_error": errors.p90_abs_error,
        "mean_abs_error": errors.mean_abs_error,
        "largest_abs_error": errors.largest_abs_error,
        "inside": errors.inside,
    }


def validate_tree(found: Validation, by: tuple[str, ...] = ("source", "metric", "device")) -> dict[str, Any]:
    """Return the record that `validate --json` prints; errors are predicted over measured less one."""
    fits, first = fits_of(found.rows), examples(found.rows)

    def table(fields: tuple[str, ...]) -> list[dict[str, Any]]:
        return [errors_record(one, fields) for one in summary(found.rows, fields)]

    return {
        "files": list(found.files),
        "coverage": found.coverage,
        "rows": {
            "total": len(found.rows),
            "predicted": len(found.predicted),
            "refused": len(found.rows) - len(found.predicted),
        },
        "summary": table(by),
        "tables": {name: table(tuple(dict.fromkeys(("metric", name)))) for name in TABLES},
        "refused": [{"reason": r, "count": count, "first": first[r]} for r, count in reasons(found.rows)],
        "unread": [{"file": file, "column": column, "meant": meant} for file, column, meant in found.unread],
        "fits": {
            "ran": fits.ran,
            "ran_called_unfit": fits.ran_called_unfit,
            "failed": fits.failed,
            "failed_called_fit": fits.failed_called_fit,
        },
    }
