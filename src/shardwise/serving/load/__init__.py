"""Serving under load: workloads of requests over time, an engine's scheduler, and what users then wait."""

from shardwise.serving.load._policy import Limits, Policy, limits_of, policy_of
from shardwise.serving.load._report import PERCENTILES, LoadOptions, ServeReport
from shardwise.serving.load._requests import LengthMoments, moments_of
from shardwise.serving.load._serve import serve
from shardwise.serving.load._simulate import Replica, Request
from shardwise.serving.load._steady import Replicas, Steady
from shardwise.serving.load._steps import StepTable

__all__ = [
    "PERCENTILES",
    "LengthMoments",
    "Limits",
    "LoadOptions",
    "Policy",
    "Replica",
    "Replicas",
    "Request",
    "ServeReport",
    "Steady",
    "StepTable",
    "limits_of",
    "moments_of",
    "policy_of",
    "serve",
]
