"""Flags that take several values: ranges, lists, unions of words, devices of several kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.answers import _converters as k
from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.answers._inputs import Inputs

MOST_ROWS = 10_000
SHAPE = re.compile(r"(\d+)\s*[xX]\s*(?:(\d+)\s*[xX]\s*)?(.*)")
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", re.ASCII)


def sized(text: str, count: int) -> str:
    """Return so many of the devices of a text, in nodes of as many.

    >>> sized("64xh100", 16), sized("8x8xh100", 16), sized("h100", 4), sized("p5.48xlarge", 16)
    ('16xh100', '2x8xh100', '4xh100', '2xp5.48xlarge')
    """
    name, each = instance_of(text)
    if each:
        return f"{-(-count // each)}x{name}"
    shape = SHAPE.fullmatch(text)
    if shape is None:
        return f"{count}x{text}"
    _, nodes_of, name = shape.groups()
    each = int(nodes_of or 0)
    return f"{count // each}x{each}x{name}" if each and count % each == 0 else f"{count}x{name}"


def instance_of(text: str) -> tuple[str, int]:
    """Return the cloud instance that a text counts and its devices, none where it counts devices or is wrong.

    >>> instance_of("2xp5.48xlarge"), instance_of("8xh100")
    (('p5.48xlarge', 8), ('', 0))
    """
    from shardwise.hardware import counted_text, instance_devices

    try:
        name = counted_text(text)[2]
        each = instance_devices(name)
    except InputError:
        return "", 0
    return (name, each) if each else ("", 0)


def on_count(text: str, count: int) -> dict[str, Any]:
    """Return the flags of so many of the devices of a text: of an instance or of a file they may be a part.

    >>> on_count("64xh100", 16), on_count("2xp5.48xlarge", 8), on_count("2xp5.48xlarge", 12)
    ({'on': '16xh100'}, {'on': '1xp5.48xlarge'}, {'on': '2xp5.48xlarge', 'num_devices': 12})
    """
    if text.endswith(".toml") and not text[0].isdigit():
        return {"on": text, "num_devices": count}
    _, each = instance_of(text)
    part = {"num_devices": count} if each and count % each else {}
    return {"on": sized(text, count), **part}


def listed_values(spec: str, field: str) -> list[str]:
    """Return the values of a text: A,B,C as listed, A..B doubling from A to B, A..B:STEP in steps.

    >>> listed_values("4096..20000", "seq_len"), listed_values("1..7:3", "tp"), listed_values("1,2", "tp")
    (['4096', '8192', '16384', '20000'], ['1', '4', '7'], ['1', '2'])
    >>> listed_values("50GB/s..200GB/s", "slow_bandwidth")
    ['50GB/s', '100GB/s', '200GB/s']
    >>> listed_values("0..4:2", "recompute_layers")
    ['0', '2', '4']
    """
    first, dots, rest = spec.partition("..")
    if not dots:
        return [value.strip() for value in spec.split(",") if value.strip()]
    last, colon, step = rest.partition(":")
    ends = [_NUMBER.fullmatch(one) for one in (first, last)]
    steps = _NUMBER.fullmatch(step) if colon else None
    if None in ends or (colon and steps is None):
        raise k.fail(field, spec, "is not a range", "write A..B, A..B:STEP or A,B,C, with units of one kind")
    (low, unit), (high, other) = (one.groups() for one in ends if one is not None)
    low, high, by = float(low), float(high), float(steps[1]) if steps else 0.0
    if low == 0 and not colon:
        raise k.fail(field, spec, "doubles, which 0 does not", f"write {first}..{last}:1, or {first} and others: A,B,C")
    if low > high or low < 0 or unit not in ("", other) or (colon and by <= 0):
        raise k.fail(field, spec, "is not a range from less to more", "write for example 4096..65536")
    return [f"{value:.12g}{other}" for value in _between(low, high, by)]


def _between(low: float, high: float, step: float) -> Iterator[float]:
    if step:
        yield from (low + i * step for i in range(min(MOST_ROWS, int((high - low) / step + 1e-9)) + 1))
        return
    value = low
    while value < high:
        yield value
        value *= 2
    yield high


def several(kind: k.Converter) -> k.Converter:
    """Return the kind of one or more values of a kind: A,B,C as listed, A..B doubling; a single one is no tuple.

    >>> several(k.WHOLE).read("256..1024", "global_batch"), several(k.choice("adam", "sgd")).read("sgd", "optimizer")
    ((256, 512, 1024), 'sgd')
    """

    def read(value: object, field: str) -> object:
        items = listed_values(value, field) if isinstance(value, str) else value
        values = [kind.read(one, field) for one in (items if isinstance(items, (list, tuple)) else [items])]
        if not values:
            raise k.fail(field, value, "names no value", "give one, or leave it out")
        return values[0] if len(values) == 1 else tuple(values)

    types = kind.schema.get("type", "string")
    every = [types] if isinstance(types, str) else list(types)
    return k.Converter(read, f"{kind.word}|A..B|A,B", schema={"type": list(dict.fromkeys([*every, "string", "array"]))})


def _read_unions(value: object, field: str) -> tuple[tuple[str, ...], ...]:
    """Return lists of words to try, those of one joined by + or, in a file, a list of their own; none is the empty one.

    >>> _read_unions("none,optimizer,gradients+optimizer", "offload")
    ((), ('optimizer',), ('gradients', 'optimizer'))
    """
    items = value if isinstance(value, (list, tuple)) and value else k.WORDS.read(value, field)
    return tuple(k.word_list(True).read(item, field) for item in items)


UNIONS = k.Converter(_read_unions, "A,B+C,...", schema=k.WORDS.schema)


def _read_most(value: object, field: str) -> bool | int:
    """Return whether fewer are tried too, or up to how many.

    >>> _read_most(True, "at_most"), _read_most("1024", "at_most")
    (True, 1024)
    """
    known = isinstance(value, bool) or str(value).lower() in (*k.TRUE[:3], *k.FALSE[:3])
    return bool(k.SWITCH.read(value, field)) if known else int(k.whole(1, 1_048_576).read(value, field))


AT_MOST = k.Converter(_read_most, "N", switch=True, schema={"type": ["boolean", "integer"]})


def order_of(order: tuple[str, ...]) -> tuple[str, ...]:
    """Return an order of the axes with the second tensor axis beside the first, where it was left out.

    >>> order_of(("tp", "cp", "dp", "pp"))
    ('tp', 'tp2', 'cp', 'dp', 'pp')
    """
    at = order.index("tp") + 1 if "tp" in order else 0
    return order if "tp2" in order else (*order[:at], "tp2", *order[at:])


def on_devices(inputs: Inputs, device: str, num_devices: int) -> dict[str, Any]:
    """Return the flags of so many of the devices that were asked for, nodes of as many as there."""
    from shardwise.hardware import Cluster, counted_text

    text = str(inputs.values["on"])
    if "," in text:
        text = next(one for one in text.split(",") if Cluster.parse(one.strip()).device.name == device).strip()
    of_file = text.endswith(".toml") and not text[0].isdigit()
    if of_file or instance_of(text)[1]:
        whole = Cluster.load(text, inputs.get("follow", False)) if of_file else Cluster.parse(text)
        return {"on": text} if whole.num_devices == num_devices else on_count(text, num_devices)
    first, second, name = counted_text(text)
    if first is None:
        return {"on": text if num_devices == 1 else f"{num_devices}x{device}"}
    if int(first) * int(second or 1) == num_devices:
        return {"on": text}
    if second is None or num_devices % min(num_devices, int(second)):
        return {"on": f"{num_devices}x{name}"}
    each = min(num_devices, int(second))
    return {"on": f"{num_devices // each}x{each}x{name}"}
