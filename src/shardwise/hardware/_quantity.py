"""Quantities of hardware as people write them: one reader for command lines, TOML files and Python values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

from shardwise.errors import InputError, Problem, plain
from shardwise.records import dataclass
from shardwise.units import parse_bandwidth, parse_bytes, parse_count, parse_flops, parse_seconds, parsed_as

MOST = 1e30
# The data types a device may compute GEMMs in; a type that is absent from a device is unsupported.
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4", "fp4")


@dataclass(frozen=True, slots=True)
class Quantity:
    """How one kind of number is read from text, and the smallest value it may take.

    What people write outside `likely` has lost its unit: no device has 80 bytes, no link a latency of 5 seconds.
    """

    parse: Callable[[str, str], float]
    remedy: str
    at_least: float = 0.0
    may_equal: bool = False
    whole: bool = False
    likely: tuple[float, float] = (0.0, math.inf)


BYTES = Quantity(parse_bytes, 'write bytes such as "80GiB" or 85899345920', whole=True, likely=(1e6, math.inf))
RATE = Quantity(
    parse_bandwidth, 'write one direction with its unit, such as "450GB/s" or "400Gb/s"', likely=(1e6, math.inf)
)
FLOPS = Quantity(parse_flops, 'write the dense rate, such as "989T" or 9.89e14', likely=(1e9, math.inf))
SECONDS = Quantity(parse_seconds, 'write a time such as "5us" or 5e-6', may_equal=True, likely=(0.0, 1.0))
COUNT = Quantity(parse_count, "use a whole number such as 8", whole=True)
RATIO = Quantity(parse_count, "use 1 for a full network, 2 for a 2:1 network", at_least=1.0, may_equal=True)
WATTS = Quantity(parse_count, "write watts, such as 700")
USD = Quantity(parse_count, "write US dollars per device and hour, such as 2.5")


def fail(field: str, value: object, rule: str, remedy: str) -> NoReturn:
    """Raise `InputError` with one problem."""
    raise InputError([Problem(field, plain(value), rule, remedy)])


def read_quantity(quantity: Quantity, value: object, field: str) -> float:
    """Return the value in SI units, an `int` where only whole numbers make sense; bad values raise `InputError`.

    >>> read_quantity(RATE, "400Gb/s", "nic_bandwidth"), read_quantity(COUNT, "8", "num_devices")
    (50000000000.0, 8)
    """
    number = _number(quantity, value, field)
    low, high = quantity.likely
    if number and not low <= number <= high:
        word = "at least" if number < low else "at most"
        limit = low if number < low else high
        fail(field, value, f"must be {word} {limit:g} in SI units: a unit may be missing", quantity.remedy)
    return number


def _number(quantity: Quantity, value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        fail(field, value, "must be a number, or text with a unit", quantity.remedy)
    number = parsed_as(quantity.parse, value, field, quantity.remedy) if isinstance(value, str) else value
    try:
        finite = math.isfinite(number)
    except OverflowError:
        finite = False
    if not finite:
        fail(field, value, "must be finite", quantity.remedy)
    if number > MOST:
        fail(field, value, f"must be at most {MOST:g}", quantity.remedy)
    if number < quantity.at_least or (number == quantity.at_least and not quantity.may_equal):
        word = "at least" if quantity.may_equal else "greater than"
        fail(field, value, f"must be {word} {quantity.at_least:g}", quantity.remedy)
    if not quantity.whole:
        return float(number)
    if number != int(number):
        fail(field, value, "must be a whole number", quantity.remedy)
    return int(number)


def check_number(quantity: Quantity, value: object, field: str) -> None:
    """Raise `InputError` where the value is not a number that the quantity allows; text is refused.

    >>> check_number(COUNT, 8, "num_devices")
    """
    if isinstance(value, str):
        fail(field, value, "must be a number", quantity.remedy)
    _number(quantity, value, field)
