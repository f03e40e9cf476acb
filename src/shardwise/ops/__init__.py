"""The ledgers: what each operator of a model costs on one rank."""

from shardwise.ops.count import (
    CONVENTIONS,
    Convention,
    active_parameters,
    count_flops,
    count_parameters,
    forward_flops,
    parameters_by_component,
    prediction_parameters,
    train_flops,
)
