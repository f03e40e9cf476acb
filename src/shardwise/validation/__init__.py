"""Predicted against measured, for every row of files of runs and kernels.

A file is a CSV of measurements, published or one's own. Each row becomes the same question that the command line asks
(a training job, a served batch, a kernel), is predicted, and is compared with what was measured. What the row does not
state is taken by published rules and listed; a row that is not modelled is refused with the reason. `summary` gives the
errors by what rows have in common.
"""

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
