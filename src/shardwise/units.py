"""Words for quantities at the border: parsing what people type, printing what people read; inside, SI units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from shardwise.errors import InputError, Problem
from shardwise.records import replace

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "pi": 2.0**50}
_QUANTITY = re.compile(r"([-+]?(?:\d[\d_,]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)(?:\s*([a-z/]+))?", re.IGNORECASE | re.ASCII)
# Commas part thousands: elsewhere one is a decimal point in many languages, and 8,8 would be read as 88.
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(?![\d_,])", re.ASCII)
_MOST_DIGITS = 400  # a float of 64 bits written out in full has fewer
_NO_NUMBER, _ENDLESS = "is not a number with a unit", "must be finite"
SECONDS_A_DAY = 86400.0
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": SECONDS_A_DAY, "": 1.0}


def _fail(field: str, text: str, rule: str, remedy: str) -> InputError:
    return InputError([Problem(field, text, rule, remedy)])


def _split(text: str, field: str, remedy: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _MOST_DIGITS else None
    if match is None:
        raise _fail(field, text, _NO_NUMBER, remedy)
    if "," in match[1] and not _THOUSANDS.match(match[1]):
        raise _fail(field, text, "has a comma that does not part thousands", "write 1.5 with a point, or 1,500")
    value = float(match[1].replace("_", "").replace(",", ""))
    if not math.isfinite(value):
        raise _fail(field, text, _ENDLESS, remedy)
    return value, match[2] or ""


def parse_count(text: str, field: str = "count") -> float:
    """Return a plain number from text with an optional decimal suffix (k, M, B or G, T).

    >>> parse_count("1.5T"), parse_count("300B"), parse_count("8192")
    (1500000000000.0, 300000000000.0, 8192.0)
    """
    value, unit = _split(text, field, 'write a number such as 8192, "300B" or "15T"')
    if unit.lower() not in _DECIMAL:
        raise _fail(field, text, f"has the unknown suffix {unit!r}", "use k, M, B, G or T")
    return value * _DECIMAL[unit.lower()]


def parsed_as(parse: Callable[[str, str], float], text: str, field: str, remedy: str) -> float:
    """Return what a text says; what is no number at all is refused with the remedy of its own field.

    >>> parsed_as(parse_count, "2.5", "price", "write dollars")
    2.5
    """
    try:
        return parse(text, field)
    except InputError as error:
        none = error.problems[0].rule in (_NO_NUMBER, _ENDLESS)
        problems = [replace(one, value=text, remedy=remedy) for one in error.problems]
        raise InputError(problems if none else error.problems) from None


def parse_share(text: str, field: str = "share") -> float:
    """Return a share from text, which may be in percent.

    >>> parse_share("0.9"), parse_share("90%")
    (0.9, 0.9)
    """
    number, percent, rest = text.strip().partition("%")
    return parse_count(number if percent and not rest else text, field) / (100 if percent else 1)


def in_digits(text: str) -> tuple[int, str]:
    """Return the whole number that a text may mean and its digits, of k and M both that they may mean; -1 for none.

    >>> in_digits("1e6"), in_digits("32k"), in_digits("1.5")
    ((1000000, '1000000'), (32000, '32000, or 32768 for 32 * 1024'), (-1, ''))
    """
    try:
        number = parse_count(text)
    except (InputError, OverflowError):
        return -1, ""
    if number != int(number):
        return -1, ""
    match = re.fullmatch(r"(\d{1,9})([km])", text.strip().lower(), re.ASCII)
    factor = {"k": 1024, "m": 1024**2}[match[2]] if match else 0
    return int(number), f"{int(number)}" + (f", or {int(match[1]) * factor} for {match[1]} * {factor}" if match else "")


def parse_bytes(text: str, field: str = "bytes") -> float:
    """Return bytes from text such as "80GiB", "80GB", "512 MiB"; a bare number is bytes.

    >>> parse_bytes("80GiB"), parse_bytes("80GB")
    (85899345920.0, 80000000000.0)
    >>> [math.log2(parse_bytes(f"1{unit}")) for unit in ("KiB", "MiB", "GiB", "TiB", "PiB")]
    [10.0, 20.0, 30.0, 40.0, 50.0]
    """
    value, unit = _split(text, field, 'write bytes with a unit, such as "80GiB" or "80GB"')
    word = unit.lower().removesuffix("b")
    scale = _BINARY.get(word, _DECIMAL.get(word))
    if scale is None:
        raise _fail(field, text, f"has the unknown unit {unit!r}", "use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return value * scale


def parse_bandwidth(text: str, field: str = "bandwidth") -> float:
    """Return bytes per second; a small b means bits, a capital B bytes, so "200Gb/s" is 25e9 and "25GB/s" too.

    >>> parse_bandwidth("200Gb/s"), parse_bandwidth("25GB/s"), parse_bandwidth("3.35TB/s")
    (25000000000.0, 25000000000.0, 3350000000000.0)
    """
    value, unit = _split(text, field, 'write a rate with its unit, such as "400Gb/s" or "50GB/s"')
    word = unit.removesuffix("/s").removesuffix("ps")
    if unit == "" or word in ("B", "b"):
        return value / (8.0 if word == "b" else 1.0)
    bits = 8.0 if word.endswith(("b", "bit")) else 1.0
    stem = word.removesuffix("bit").rstrip("bB").lower()
    scale = _BINARY.get(stem, _DECIMAL.get(stem))
    if scale is None:
        raise _fail(
            field, text, f"has the unknown unit {unit!r}", 'use for example "400Gb/s" (bits) or "50GB/s" (bytes)'
        )
    return value * scale / bits


def parse_flops(text: str, field: str = "flops") -> float:
    """Return FLOP/s from text such as "989TFLOP/s", "312T" or a bare number.

    >>> parse_flops("989TFLOP/s"), parse_flops("1.98P")
    (989000000000000.0, 1980000000000000.0)
    """
    value, unit = _split(text, field, 'write FLOP/s such as "989T" or "1.98PFLOP/s"')
    word = unit.lower().removesuffix("/s").removesuffix("ps").removesuffix("s").removesuffix("flop").removesuffix("flo")
    if word not in _DECIMAL:
        raise _fail(field, text, f"has the unknown unit {unit!r}", 'use for example "989T" or "989TFLOP/s"')
    return value * _DECIMAL[word]


def parse_seconds(text: str, field: str = "seconds") -> float:
    """Return seconds from text such as "50ms", "3us", "2h"; a bare number is seconds.

    >>> parse_seconds("50ms"), parse_seconds("2h")
    (0.05, 7200.0)
    """
    value, unit = _split(text, field, 'write a time such as "50ms", "3us" or "2h"')
    if unit.lower() not in _TIMES:
        raise _fail(field, text, f"has the unknown unit {unit!r}", "use ns, us, ms, s, min, h or d")
    return value * _TIMES[unit.lower()]


def show_bytes(value: float) -> str:
    """Return bytes in binary units, as memory is sold and reported.

    >>> show_bytes(85899345920), show_bytes(-1536)
    ('80.00 GiB', '-1.50 KiB')
    >>> [show_bytes(2.0**power) for power in (40, 30, 20, 10, 0)]
    ['1.00 TiB', '1.00 GiB', '1.00 MiB', '1.00 KiB', '1 B']
    """
    size = abs(value)
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if size >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def show_seconds(value: float) -> str:
    """Return a time in the unit a reader would use.

    >>> show_seconds(0.0123), show_seconds(7200), show_seconds(4e-6)
    ('12.30 ms', '2.00 h', '4.00 us')
    """
    size = abs(value)
    for unit, scale in (("d", SECONDS_A_DAY), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= scale * (2 if unit in ("d", "h", "min") else 1):
            return f"{value / scale:.2f} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.2f} ns"


def show_count(value: float, unit: str = "") -> str:
    """Return a number with a decimal prefix and its unit.

    >>> show_count(70553706496), show_count(989e12, "FLOP/s"), show_count(12, "layers"), show_count(1000.5, "tokens")
    ('70.55 B', '989.00 TFLOP/s', '12 layers', '1000.5 tokens')
    """
    size = abs(value)
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G" if unit else "B", 1e9), ("M", 1e6), ("k", 1e4)):
        if size >= scale:
            return f"{value / (1e3 if prefix == 'k' else scale):.2f} {prefix}{unit}"
    text = f"{value:.0f}" if value == int(value) else f"{value:.3g}"
    return f"{f'{value:.1f}' if 'e+' in text else text} {unit}".rstrip()


def show_field(field: str, value: float) -> str:
    """Return a value in the unit that the name of its field ends in.

    >>> show_field("usable_memory_bytes", 85018877624), show_field("slow_bytes_per_second", 5e10)
    ('79.18 GiB', '50.00 GB/s')
    >>> show_field("matrix_flops.bf16", 989e12), show_field("devices_per_node", 8.0), show_field("year", 2022)
    ('989.00 TFLOP/s', '8', '2022')
    """
    if field == "year":
        return f"{value:.0f}"
    if field.endswith("bytes_per_second"):
        return show_count(value, "B/s")
    if field.endswith("bytes"):
        return show_bytes(value)
    return show_count(value, "FLOP/s") if "flops" in field else significant(value, 6)


def significant(value: float, digits: int = 3) -> str:
    """Return a number of so many digits, all digits before the point where those are more.

    >>> significant(0.1234), significant(999.6), significant(1234567.8, 4), significant(2.5)
    ('0.123', '1,000', '1,234,568', '2.5')
    """
    text = f"{value:,.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def show_usd(value: float) -> str:
    """Return dollars: cents up to a thousand, and of less than a dime two digits.

    >>> show_usd(4222016.3), show_usd(12.345), show_usd(0.00123), show_usd(0)
    ('$4,222,016', '$12.35', '$0.0012', '$0')
    """
    return f"${_fixed(value, 2)}"


def show_hours(value: float) -> str:
    """Return a number of hours, of which a short run has a part.

    >>> show_hours(613665.2), show_hours(12.34), show_hours(0.00456), show_hours(0)
    ('613,665', '12.3', '0.0046', '0')
    """
    return _fixed(value, 1)


def _fixed(value: float, decimals: int) -> str:
    """Return a number without exponent: whole from a thousand, two digits where they follow zeros, else decimals."""
    if value == 0 or abs(value) >= 1e3:
        return f"{value:,.0f}"
    leading = math.floor(math.log10(abs(value)))
    return f"{value:.{decimals if leading >= -1 else min(1 - leading, 9)}f}"


def counted(number: float, noun: str, digits: int = 15) -> str:
    """Return a number with a noun, in the plural where it is not one; `digits` are the most of a mean.

    >>> counted(1, "micro-batch"), counted(4, "micro-batch"), counted(161.26984, "request", 5)
    ('1 micro-batch', '4 micro-batches', '161.27 requests')
    """
    many = f"{noun}es" if noun.endswith(("ch", "sh", "s", "x")) else f"{noun}s"
    text = f"{number:.{digits}g}"
    text = f"{number:.0f}" if "e+" in text else text
    return f"{text} {noun if text == '1' else many}"


def percent(value: float, signed: bool = False) -> str:
    """Return a share as a percentage; beyond tenfold as a factor.

    >>> percent(0.0512), percent(-0.0512, True), percent(-0.0001, True), percent(23.4)
    ('5.1%', '-5.1%', '+0.0%', 'x24')
    """
    if value > 10:
        return f"x{value + 1:.0f}"
    return f"{value:+z.1%}" if signed else f"{value:z.1%}"
