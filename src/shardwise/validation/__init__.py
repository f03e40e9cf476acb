"""Predicted against measured: files of published or own runs, errors by what they have in common, and coverage."""

from __future__ import annotations

from shardwise.validation._row import Row
from shardwise.validation._run import Validation, validate
from shardwise.validation._summary import Errors, Fits, errors_of, reasons, summary

__all__ = ["Errors", "Fits", "Row", "Validation", "errors_of", "reasons", "summary", "validate"]
