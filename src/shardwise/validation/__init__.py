"""Predicted against measured: files of published or own runs, errors by what they have in common, and coverage."""

from __future__ import annotations

from shardwise.validation._row import Row
from shardwise.validation._run import Validation, shipped, validate
from shardwise.validation._summary import BY, Errors, Fits, errors_of, fits_of, reasons, summary

__all__ = [
    "BY",
    "Errors",
    "Fits",
    "Row",
    "Validation",
    "errors_of",
    "fits_of",
    "reasons",
    "shipped",
    "summary",
    "validate",
]
