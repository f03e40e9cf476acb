"""Serving under load: workloads of requests over time, an engine's scheduler, and what users then wait."""

from shardwise.serving._policy import (
    Policy,
    SchedulerLimits,
    client_seconds,
    limits_of,
    policy_of,
)
from shardwise.serving.load._autoscale import SIGNALS, Autoscale
from shardwise.serving.load._bands import HEADLINES, around, band_of_parts, parts_of, with_tail
from shardwise.serving.load._batches import batches_of, groups_of, lanes_of, most_running, workers_of
from shardwise.serving.load._clients import think_of
from shardwise.serving.load._even import even_share
from shardwise.serving.load._explain import OPENED, explain
from shardwise.serving.load._fleet import Transfer
from shardwise.serving.load._means import Steady, early_first_token, handed_over
from shardwise.serving.load._moments import LengthMoments, moments_of
from shardwise.serving.load._options import FULLEST, LoadOptions
from shardwise.serving.load._prefill_report import PrefillReport
from shardwise.serving.load._prices import load_prices
from shardwise.serving.load._replica import Replica
from shardwise.serving.load._report import ServeReport
from shardwise.serving.load._requests import PERCENTILES, Request, Trace, spread_of
from shardwise.serving.load._serve import policy_for, prefill_plan, request_problems, serve
from shardwise.serving.load._state import Stage
from shardwise.serving.load._steady import Replicas
from shardwise.serving.load._steps import StepTable
from shardwise.serving.load._why import (
    BATCH,
    EXPLAINED,
    LOST,
    MATES,
    OTHERS,
    OWN_DECODE,
    OWN_PROMPT,
    PROMPTS,
    SERVER,
    WAITS,
)
