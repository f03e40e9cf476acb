"""The ledgers: what each operator of a model costs on one rank."""

from shardwise.ops.count import count_parameters

__all__ = ["count_parameters"]
