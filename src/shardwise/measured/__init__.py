"""Predicted against measured, for every row of files of people's own runs.

Each row becomes the same question that the command line asks (a training job, a served batch), is predicted by `train`
or `infer`, and is compared with what was measured. What the row does not state is taken by published rules and listed;
a row that is not modelled is refused with the reason. `summary` gives the errors by what rows have in common.
"""

from __future__ import annotations

from shardwise.ledger.number import quantile
from shardwise.measured._comparison import (
    BY,
    Comparison,
    Errors,
    Prediction,
    assumptions,
    errors_of,
    examples,
    fits_of,
    reasons,
    rows_csv,
    summary,
)
from shardwise.measured._context import Context, cluster_of
from shardwise.measured._frameworks import engine_table, framework_of, frameworks, matches
from shardwise.measured._inference import InferenceRows
from shardwise.measured._launches import cells_of_engine
from shardwise.measured._load import engine_as_noted, workload_of
from shardwise.measured._record import Record, read, refuse, rules, words
from shardwise.measured._run import (
    INFERENCE,
    KINDS,
    TRAINING,
    USUAL,
    FileKind,
    MeasurementFile,
    Predictor,
    Validation,
    compared,
    read_table,
    validate,
)
from shardwise.measured._training import Predicted, TrainingRows
