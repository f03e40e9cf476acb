"""What kernels reach on the machine this runs on, timed with PyTorch, and the device of a catalogue they make.

PyTorch (extra `torch`) is imported when something is timed, never before.
"""

from __future__ import annotations

from shardwise.measuring._clock import Case, Clock, Others, Timing, noise_of, ring, values
from shardwise.measuring._device import COPIES, SHAPES, Measurement, constants_name, device_of, measurements_csv, timed
from shardwise.measuring._kernels import WIDTHS, copy_of, product_of, torch_dtype
from shardwise.measuring._machine import Machine, catalogue_key, describe

__all__ = [
    "COPIES",
    "SHAPES",
    "WIDTHS",
    "Case",
    "Clock",
    "Machine",
    "Measurement",
    "Others",
    "Timing",
    "catalogue_key",
    "constants_name",
    "copy_of",
    "describe",
    "device_of",
    "measurements_csv",
    "noise_of",
    "product_of",
    "ring",
    "timed",
    "torch_dtype",
    "values",
]
