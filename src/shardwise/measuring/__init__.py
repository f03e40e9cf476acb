"""What kernels reach on the machine this runs on, timed with PyTorch, and the device of a catalogue they make.

PyTorch (extra `torch`) is imported when something is timed, never before.
"""

from __future__ import annotations

from shardwise.measuring._clock import (
    WIDTHS,
    BackgroundLoad,
    Clock,
    TimedCase,
    Timing,
    copy_of,
    noise_of,
    product_of,
    ring,
    torch_dtype,
    values,
)
from shardwise.measuring._device import (
    SHAPES,
    Machine,
    Measurement,
    copies_of,
    describe,
    device_of,
    measurements_csv,
    timed,
)
