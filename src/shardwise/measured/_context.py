"""What the rows of a file are read with: models and devices beside it, then the catalogue; frameworks and engines."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, Known, Problem
from shardwise.files import read_csv_text, read_json
from shardwise.hardware import Cluster, Device, Fact, Lookup, build_cluster, device_names, find_device
from shardwise.measured._frameworks import engine_table
from shardwise.measured._record import MOST, Record, network_words, read
from shardwise.models import Model, find_model, load_model, model_from_config, namesake, unwrap
from shardwise.records import replace

# Columns of a table of devices -> fields of a device, in the two spellings that are in use.
COLUMNS = {
    "memory_bytes": "memory_bytes",
    "hbm_bandwidth_bytes_per_second": "memory_bytes_per_second",
    "memory_bandwidth_bytes_per_second": "memory_bytes_per_second",
    "peak_flops_fp32": "matrix_flops.fp32",
    "peak_flops_tf32": "matrix_flops.tf32",
    "peak_flops_fp16": "matrix_flops.fp16",
    "peak_flops_bf16": "matrix_flops.bf16",
    "bf16_dense_flops": "matrix_flops.bf16",
    "peak_flops_fp8": "matrix_flops.fp8",
    "fp8_dense_flops": "matrix_flops.fp8",
    "peak_flops_fp4": "matrix_flops.fp4",
    "fp4_dense_flops": "matrix_flops.fp4",
    "peak_ops_int8": "matrix_flops.int8",
    "int8_dense_ops": "matrix_flops.int8",
    "devices_per_node": "devices_per_node",
    "gpus_per_node": "devices_per_node",
    "intra_node_bandwidth_bytes_per_second": "fast_bytes_per_second",
    "inter_node_bandwidth_bytes_per_second": "slow_bytes_per_second",
    "pcie_bandwidth_bytes_per_second": "host_bytes_per_second",
    "power_watts": "power_watts",
    "num_cores": "num_cores",
    "year": "year",
}
_USABLE = 0.98
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
# What tells how near two devices are; the memory too, so that boards of one size and rate stand together.
_NEAR = ("matrix_flops.bf16", "matrix_flops.fp16", "memory_bytes_per_second", "memory_bytes")


class Context:
    """What the rows of a file are read with, each read once: models and devices beside it, frameworks and engines.

    `frameworks` and `engines` are tables of what words of files mean (frameworks.toml, engines.toml).
    """

    frameworks: Mapping[str, Any] = read("frameworks.toml")
    engines: Mapping[str, Any] = engine_table()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries = _model_entries(folder)
        self._rows = _device_rows(folder)
        self._requests: dict[str, list[tuple[float, int, int]]] | None = None
        self._models = Known[Model]()
        self._devices = Known[tuple[Device, tuple[str, ...]]]()
        self.given: dict[str, Model] = {}
        """Models that stand in no file beside the rows, by the name that rows are given for them."""

    def model(self, key: str) -> Model:
        """Return the model of a key; raises `InputError` where none is known or its configuration is not readable."""
        return self._models.of(key, lambda: self._find_model(key))

    def model_of(self, record: Record) -> Model:
        """Return the model of a row: of one that has other parts the language model alone, which is then assumed.

        Notes may say of how many passes of one layer its predictions of further tokens are, none among them.
        """
        key = record.text("model")
        model = self.model(key)
        for note in unwrap(self._entries[key]["config"]).notes if key in self._entries else ():
            record.assume(note)
        if model.name != key and key not in self.given and key not in self._entries:
            record.assume(f"model {model.name}: {key} is named after it")
        passes = int(record.noted("mtp_passes"))
        if "mtp_passes" not in record.notes or not model.mtp:
            return model
        if not passes:
            return replace(model, mtp=())
        first, *rest = (replace(one, shared_weights="mtp") for one in (model.mtp[0], *model.mtp[0].also))
        return replace(model, mtp=(replace(first, also=tuple(rest)),) * passes)

    def _find_model(self, key: str) -> Model:
        if not key:
            raise _missing("model", key, "is not stated")
        if key in self.given:
            return self.given[key]
        if key in self._entries:
            return model_from_config(self._entries[key]["config"], name=key, part="text")
        from shardwise.models import model_names

        name = find_model(key) or (namesake(key) or "" if _HUB.fullmatch(key) else key)
        if not re.fullmatch(r"[\w.-]+", name) or name not in model_names():
            raise _missing("model", key, "is in no models*.json beside the file and not in the catalogue")
        return load_model(name)

    def requests(self, run: str) -> Sequence[tuple[float, int, int]]:
        """Return arrival in seconds, input and output tokens of each request of a run, empty where none are known.

        A run is named by its source and its name in files *requests*.csv beside the rows.
        """
        if self._requests is None:
            self._requests = _requests_of(self.folder)
        return self._requests.get(run, ())

    def device(self, key: str) -> tuple[Device, tuple[str, ...]]:
        """Return the device of a key and what was assumed: the catalogue's, or one made from its datasheet row."""
        return self._devices.of(key, lambda: self._find_device(key))

    def _find_device(self, key: str) -> tuple[Device, tuple[str, ...]]:
        try:
            lookup = find_device(key)
        except InputError:
            if key not in self._rows:
                raise _missing(
                    "device", key, "is in no devices*.csv beside the file and not in the catalogue"
                ) from None
            return device_from_row(key, self._rows[key])
        return lookup.device, lookup.assumptions


def _missing(field: str, key: str, rule: str) -> InputError:
    return InputError([Problem(field, key, rule, f"add it to a file beside this one, or use a known {field}")])


def _model_entries(folder: Path) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for path in sorted(folder.glob("models*.json")):
        try:
            table = read_json(path)
        except InputError:
            continue
        if isinstance(table, dict):
            entries |= {key: row for key, row in table.items() if isinstance(row, dict) and "config" in row}
    return entries


def _device_rows(folder: Path) -> dict[str, dict[str, str]]:
    rows_of: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("devices*.csv")):
        try:
            lines = io.StringIO(read_csv_text(str(path)), newline="")
            rows = [row for row in csv.DictReader(lines) if row.get("device")]
        except (InputError, csv.Error):
            continue
        for row in rows:
            stated = {k: v for k, v in row.items() if k and isinstance(v, str) and v.strip()}
            rows_of[row["device"]] = {**rows_of.get(row["device"], {}), **stated}
    return rows_of


def _requests_of(folder: Path) -> dict[str, list[tuple[float, int, int]]]:
    requests: dict[str, list[tuple[float, int, int]]] = {}
    for path in sorted(folder.glob("*requests*.csv")):
        try:
            rows = [*csv.DictReader(io.StringIO(read_csv_text(str(path)), newline=""))]
            each = [(_run_of(row), float(row["arrival_seconds"]), *_lengths_of(row)) for row in rows]
        except (InputError, csv.Error, KeyError, TypeError, ValueError):
            continue
        for run, arrival, asked, made in each:
            if math.isfinite(arrival) and arrival >= 0 and asked >= 1:
                requests.setdefault(run, []).append((arrival, asked, max(made, 1)))
    return {run: sorted(each) for run, each in requests.items()}


def _run_of(row: Mapping[str, str]) -> str:
    return f"{row['source'].strip()} {row['run'].strip()}"


def _lengths_of(row: Mapping[str, str]) -> tuple[int, int]:
    return int(row["input_tokens"]), int(row["output_tokens"])


def device_from_row(key: str, row: Mapping[str, str]) -> tuple[Device, tuple[str, ...]]:
    """Return the device of a row of datasheet facts; what it leaves blank comes from its nearest known relative.

    The relative is the named stand-in, else the device of the same generation and maker (a word of the key is the first
    of its name) with the nearest rates and memory, else the nearest of all. A stand-in with other memory keeps its own
    name and constants.
    """
    values = _figures(row)
    stand_in = row.get("stand_in", "").strip()
    base = _relative(key, row, values) if not stand_in else find_device(stand_in).device
    if "memory_bytes" in values:
        values["usable_memory_bytes"] = math.floor(_USABLE * values["memory_bytes"])
    if values.get("slow_bytes_per_second", 0) >= values.get("fast_bytes_per_second", math.inf):
        del values["slow_bytes_per_second"]  # the same fabric: not a network between domains
    source = row.get("source", "").strip() or "devices file"
    note = f"{key}: figures that its row leaves blank are those of {base.name}"
    if stand_in:
        return base.with_values(values, source, "undated"), (note,)
    facts = [Fact(field=name, value=value, source=source, date="undated") for name, value in values.items()]
    facts += [fact for fact in base.sources if fact.field not in values and not _is_rate(fact.field)]
    if not any(name.startswith("matrix_flops.") for name in values):
        facts += [fact for fact in base.sources if _is_rate(fact.field)]
    made = Device(
        name=key,
        full_name=row.get("full_name", "").strip() or key,
        vendor=row.get("vendor", "").strip() or row.get("full_name", key).split()[0],
        fast_link=base.fast_link,
        sources=tuple(facts),
    )
    return made, (note,)


def _is_rate(field: str) -> bool:
    return field.startswith("matrix_flops.")


def _figures(row: Mapping[str, str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for column, field in COLUMNS.items():
        try:
            value = float(row.get(column, "") or "nan")
        except ValueError:
            continue
        if 0 < value < MOST:
            values[field] = value
    for one, other in (("matrix_flops.bf16", "matrix_flops.fp16"),):
        if one in values and other not in values and "tpu" not in row.get("device", ""):
            values[other] = values[one]
    return {
        k: int(v) if k in ("memory_bytes", "devices_per_node", "num_cores", "year") else v for k, v in values.items()
    }


def _relative(key: str, row: Mapping[str, str], values: Mapping[str, float]) -> Device:
    """Return the device of the catalogue that is nearest in generation (a word of its key), maker, rates and memory."""
    vendor = (row.get("vendor", "") or row.get("full_name", "")).strip().split(" ")[0].lower()
    words = re.split(r"[-_ ]", key.lower())

    def distance(name: str) -> tuple[bool, bool, float, str]:
        device = find_device(name).device
        gaps = [
            abs(math.log(values[f] / float(device.fact(f).value))) for f in _NEAR if f in values and device.knows(f)
        ]
        far = sum(gaps) / len(gaps) if gaps else 10.0
        generation = name.split("-")[0] in words or name.startswith(words[0][:4] + "-")
        return not generation, device.vendor.lower() != vendor, far, name

    usable = [name for name in device_names() if find_device(name).device.matrix_flops]
    return find_device(min(usable, key=distance)).device


_GBPS = 1e9 / 8


def network_bytes_per_second(word: str, devices_per_node: int) -> float:
    """Return bytes a second and device of a named network between nodes, 0 where the name states no rate.

    "ib_hdr_8x200gbps" is eight adapters a node, "roce_1600gbps_per_node" all of a node's, "ib_edr_100gbps" one a node.

    >>> network_bytes_per_second("ib_hdr_8x200gbps", 8), network_bytes_per_second("rdma_400gbps_per_gpu", 8)
    (25000000000.0, 50000000000.0)
    """
    if word in network_words():
        return network_words()[word] / devices_per_node
    match = re.search(r"(?:(\d+)x)?(\d+)gbps(_per_gpu)?", word)
    if not match:
        return 0.0
    rate = int(match[1] or 1) * int(match[2]) * _GBPS
    return rate if match[3] else rate / devices_per_node


def used_domain(size: int, node: int, count: int) -> int:
    """Return the devices of a fast domain that a job takes: whole nodes, and as many in each domain.

    Schedulers place jobs in equal segments, so that 256 devices take 64 of each rack of 72 (Slurm, --segment).

    >>> used_domain(72, 4, 256), used_domain(72, 4, 64), used_domain(72, 4, 144)
    (64, 72, 72)
    """
    if count <= size:
        return size - size % node
    even = [d for d in range(node, size + 1, node) if count % d == 0]
    return max(even, default=node)


def with_rates(device: Device) -> tuple[Device, str]:
    """Return a device that states no rates with those of an A100, and what is then assumed: what fits needs none.

    >>> with_rates(find_device("generic-80gb").device)[1]
    'rates of a100-sxm-80gb: generic-80gb states none, and what it holds depends on none'
    """
    like = find_device("a100-sxm-80gb").device
    lacking = (fact for fact in like.sources if not device.knows(fact.field))
    note = f"rates of {like.name}: {device.name} states none, and what it holds depends on none"
    return replace(device, sources=(*device.sources, *lacking)), note


def cluster_of(record: Record, device: Device, notes: tuple[str, ...]) -> Cluster:
    """Return the cluster that a training row describes."""
    count = record.whole("num_gpus")
    word = record.text("inter_node").lower()
    given: dict[str, float] = {"num_devices": max(count, 1)}
    node = record.whole("gpus_per_node")
    if node:
        given["devices_per_node"] = node
    domain = re.fullmatch(r"nvlink_domain_(\d+)", word)
    slices = re.fullmatch(r"dcn_(\d+)_slices", word)
    if domain and node:
        given["fast_domain"] = used_domain(int(domain[1]), node, count)
    elif slices and int(slices[1]) and not count % int(slices[1]):
        given["fast_domain"] = max(count // int(slices[1]), 1)
    elif word:
        rate = network_bytes_per_second(
            word, node or (device.devices_per_node if device.knows("devices_per_node") else 8)
        )
        if rate:
            given["slow_bandwidth"] = rate
        elif count > (node or 8):
            record.assume(f"inter_node: {word} names no rate: the usual network of the device's servers")
    elif count > (node or 8):
        record.rule_value("inter_node")
    name = f"{count}x{device.name}"
    lookup = Lookup(device=device, assumptions=notes)
    try:
        return build_cluster(name, lookup, given)
    except InputError:
        if "fast_domain" not in given:
            raise
        del given["fast_domain"]
        return build_cluster(name, lookup, given)
