"""Inference: what a served batch takes of memory and time, and what its tokens cost."""

from shardwise.serving._capacity import Capacity
from shardwise.serving._engine import Engine, engine_names, find_engine
from shardwise.serving._formats import WeightFormat, cache_names, checkpoint_format, find_format, format_names
from shardwise.serving._report import InferReport, ServingOptions, infer
