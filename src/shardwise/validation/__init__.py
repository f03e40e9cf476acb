"""Predicted against measured: files of published or own runs, errors by what they have in common, and coverage."""

from __future__ import annotations

from shardwise.validation._frameworks import Framework, frameworks
from shardwise.validation._row import Row
from shardwise.validation._rules import Rule, rules
from shardwise.validation._run import Validation, shipped, validate
from shardwise.validation._summary import BY, Errors, Fits, assumptions, errors_of, examples, fits_of, reasons, summary

__all__ = [
    "BY",
    "Errors",
    "Fits",
    "Framework",
    "Row",
    "Rule",
    "Validation",
    "assumptions",
    "errors_of",
    "examples",
    "fits_of",
    "frameworks",
    "reasons",
    "rules",
    "shipped",
    "summary",
    "validate",
]
