"""Every flag of the command line, once: its key (which is the key of a case file), its kind and its help."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from shardwise.answers import _converters as k
from shardwise.answers._converters import Converter
from shardwise.records import dataclass, replace

if TYPE_CHECKING:
    from shardwise.models import ConfigField
    from shardwise.plans.fields import Field as PlanField


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: `key` is the field in files and in problems, and with dashes the flag."""

    key: str
    kind: Converter
    help: str
    group: str
    short: str = ""

    @property
    def option(self) -> str:
        """The flag as it is typed."""
        return "--" + self.key.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it does, what it takes by position (`many`: the last as often as wanted), its flags by key."""

    name: str
    help: str
    positionals: tuple[str, ...]
    flags: dict[str, Flag]
    exits: str = ""
    required: tuple[str, ...] = ()
    many: bool = False
    kind: str = ""
    """The word that stands behind its name where each kind has flags of its own, as in `plan serve`."""

    @property
    def words(self) -> str:
        """The command as it is typed."""
        return f"{self.name} {self.kind}".strip()


_LORA = {"adapter": "lora"}
FOUR_BITS = "nf4"
"""What "4 bits" mean where the framework has no other format for them."""
# Flags as fine-tuning programs have them -> the flag that takes the value ("": none), and what else they say.
ALIASES: dict[str, tuple[str, dict[str, str]]] = {
    "lora": ("", _LORA),
    "peft": ("", _LORA),
    "use_peft": ("", _LORA),
    "qlora": ("", {**_LORA, "base": FOUR_BITS}),
    "use_dora": ("", {"adapter": "dora"}),
    "use_rslora": ("", {"adapter": "rslora"}),
    "load_in_4bit": ("", {"base": FOUR_BITS}),
    "load_in_8bit": ("", {"base": "int8"}),
    "lora_rank": ("rank", _LORA),
    "lora_r": ("rank", _LORA),
    "lora_alpha": ("adapter_alpha", _LORA),
    "lora_dropout": ("adapter_dropout", _LORA),
    "lora_target": ("targets", _LORA),
    "lora_target_modules": ("targets", _LORA),
}


# One or two letters for the sizes that people type most, as the calculators that they come from have them.
SHORT = {
    "num_layers": "-l",
    "hidden_size": "-hs",
    "num_attention_heads": "-a",
    "vocab_size": "-v",
    "num_experts": "-e",
    "experts_per_token": "-t",
    "expert_interval": "-ei",
    "kv_ratio": "-kv",
    "ffn_ratio": "-ff",
    "seq_len": "-s",
    "output_tokens": "-o",
    "tp": "-tp",
    "pp": "-pp",
    "ep": "-ep",
    "gpu_layers": "-ngl",
    "cpu_experts": "-ncmoe",
}


def flag_table(group: str, *rows: tuple[str, Converter, str]) -> dict[str, Flag]:
    """Return flags of a group by their keys: the reader of its value and the help of each.

    >>> flag_table("sizes", ("num_layers", k.WHOLE, "layers"))["num_layers"].short
    '-l'
    """
    return {key: Flag(key, kind, text, group, SHORT.get(key, "")) for key, kind, text in rows}


OUTPUT = flag_table(
    "output",
    ("json", k.SWITCH, "print the answer as JSON"),
    ("width", k.whole(60, 1000), "columns of the page"),
    ("config", k.FILE, "read a case from a TOML or JSON file; flags override it"),
    ("save", k.FILE, "write the case to a TOML or JSON file"),
    ("catalogue", k.FILE, "a folder of your own models, devices and precisions"),
    ("help", k.SWITCH, "show this help"),
)
PLOT = flag_table(
    "output",
    ("plot", k.file_of(*k.FIGURES), "draw the answer to an .svg, .png, .pdf or .html file"),
    ("size", k.choice("page", "column", "slide"), "how wide to draw: a page's text, a column of two, a slide of 16:9"),
    ("dark", k.SWITCH, "draw on a dark background"),
)
_TIMELINE = "write one step: .json for Perfetto, .pickle for pytorch.org/memory_viz, .svg, .png, .pdf or .html drawn"
TIMELINE = flag_table("output", ("timeline", k.file_of(".json", ".pickle", *k.FIGURES), _TIMELINE))
VALIDATE = flag_table(
    "output",
    ("by", k.WORDS, "fields to group errors by, such as source,metric,device"),
    ("rows", k.FILE, "write every row with its prediction to a CSV file"),
    ("html", k.FILE, "write a report with tables and plots to an HTML file"),
)
WHERE = flag_table(
    "where",
    ("on", k.TEXT, "devices, such as 64xh100, 8x8xh100 or a cluster's TOML file"),
    ("follow", k.SWITCH, "follow paths in a file anywhere, not only below its folder"),
)

FROM = flag_table(
    "where",
    (
        "from",
        k.FILE,
        "another system's file: a launch script, or the settings of a trainer (docs/formats.md)",
    ),
    ("from_args", k.ARGUMENTS, "a training command, or arguments beside the file's; behind -- at the end of the line"),
    ("set", k.WORDS, "environment variables of the script, as NAME=VALUE"),
    ("skip", k.WORDS, "unknown arguments of the file to ignore, with * for any letters"),
)
FROM_SERVER = {
    "from": replace(
        FROM["from"],
        help="launch of a server: vllm serve, sglang, trtllm-serve, llama-server, or Kubernetes YAML of them",
    ),
    "set": FROM["set"],
}

FROM_EITHER = {key: FROM[key] for key in ("set", "skip")} | {
    "from": replace(FROM["from"], help="the launch of a training or of a server, which says what rows leave blank"),
    "follow": WHERE["follow"],
}

SIDES = flag_table(
    "sides",
    ("a", k.FLAGS, 'what the first case has of its own, such as "--tp 8"; left out or "", nothing'),
    ("b", k.FLAGS, 'what the second case has of its own, such as "--tp 4 --pp 2"'),
)
ENERGY = flag_table(
    "output",
    ("energy", k.SWITCH, "watts, joules a token and kWh of the devices, with their band"),
    ("pue", k.RATIO, "power of the building over that of the devices, such as 1.2; asks for the energy"),
    ("grid_intensity", k.GRAMS, "grams of CO2 a kWh of the grid, such as 400; asks for the energy"),
)
MANY = flag_table(
    "many",
    (
        "vary",
        k.VARIED,
        "a row for each value: FIELD=A..B doubles from A to B, A..B:STEP counts, A,B,C lists; repeatable",
    ),
    ("solve", k.TEXT, "the largest (of rates and degrees the smallest) value of a field that keeps verdict and limits"),
    ("sensitivity", k.SWITCH, "what moves the answer most: each constant over its band, each choice to its next value"),
    ("rows", k.file_of(".csv", ".parquet"), "write the rows to a .csv or .parquet file"),
)
# Headlines of training and of serving; "memory" is of what the other flags describe.
_NUMBERS = ("step", "memory", "tokens_per_second_per_gpu", "mfu", "hfu", "ttft", "tpot", "request", "kv_cache")
EXPLAIN = flag_table(
    "number",
    ("what", k.choice(*_NUMBERS), "the number to open; left out, step, or request beside flags of serving"),
    ("path", k.TEXT, "names, or places from 1, that lead further in, such as pipeline/1"),
    ("depth", k.whole(1, 12), "levels to open"),
)


_CLUSTER = {
    "devices_per_node": "devices of a node",
    "fast_domain": "devices that the fastest links join (an NVLink domain)",
    "fast_bandwidth": "rate of the fastest links (NVLink) of a device, in one direction, such as 450GB/s",
    "fast_latency": "latency of a message over them, such as 2us",
    "slow_bandwidth": "rate of the network of a device, in one direction, such as 400Gb/s",
    "slow_latency": "latency of a message over the network, such as 5us",
    "nics_per_node": "network cards of a node, in place of --slow-bandwidth",
    "nic_bandwidth": "rate of a network card, in one direction, such as 400Gb/s",
    "rails": "networks (rails) that the cards of a node are spread over, a divisor of --nics-per-node",
    "oversubscription": "full bandwidth of the network over what it has between switches, such as 2",
    "price": "dollars of a device-hour, such as 2.5, or a provider's offer, such as nebius:spot",
    "host_memory": "memory of the host of a node, such as 2TiB",
    "memory": "memory of a device, all of it usable, such as 80GiB",
    "memory_bandwidth": "peak memory bandwidth, such as 3.35TB/s",
    "peak_flops": "dense peak of bf16, such as 989T",
}


@cache
def cluster_flags() -> dict[str, Flag]:
    """Return the flags that override numbers of the cluster and its device."""
    from shardwise.hardware import OVERRIDES

    def text(name: str) -> str:
        return _CLUSTER.get(name) or f"dense peak of {name.partition('.')[2]}"

    part = ("num_devices", k.WHOLE, "so many of the devices of --on, of an instance or of a file that has more")
    others = (name for name in OVERRIDES if name != "num_devices")
    return flag_table("cluster", part, *((name, k.RAW, text(name)) for name in others))


@cache
def model_flags() -> dict[str, Flag]:
    """Return the flags that override fields of the model, and those of a model from its sizes alone."""
    from shardwise.models import FIELDS, MOST_LAYERS, SIZE_FIELDS

    def kind(f: ConfigField) -> Converter:
        most = MOST_LAYERS if f.name == "num_layers" else k.MOST_WHOLE
        if f.kind is bool:
            return k.SWITCH
        return k.SHARE_OF if f.kind is float else k.whole(0, most)

    def rows(table: dict[str, ConfigField]) -> list[tuple[str, Converter, str]]:
        return [(f.name, kind(f), f.help) for f in table.values()]

    return flag_table("model", *rows(FIELDS)) | flag_table("sizes", *rows(SIZE_FIELDS))


@cache
def efficiency_flags() -> dict[str, Flag]:
    """Return the flags that impose efficiencies and overlap."""
    return flag_table(
        "efficiency",
        ("compute_efficiency", k.FRACTION, "share of peak FLOP/s that GEMMs reach"),
        ("memory_efficiency", k.FRACTION, "share of peak memory bandwidth"),
        ("fast_efficiency", k.FRACTION, "share of the fast links' rate"),
        ("slow_efficiency", k.FRACTION, "share of the network's rate"),
        ("matmul_flops", k.FLOPS, "achieved FLOP/s of GEMMs"),
        ("memory_bandwidth_achieved", k.BANDWIDTH, "achieved memory bandwidth"),
        ("fast_bandwidth_achieved", k.BANDWIDTH, "achieved rate of the fast links, per device and direction"),
        ("slow_bandwidth_achieved", k.BANDWIDTH, "achieved rate of the network, per device and direction"),
        ("ideal", k.SWITCH, "all efficiencies 1, no launch overhead"),
        ("overlap", k.SWITCH, "overlap communication with compute where the framework does; --no-overlap exposes all"),
        ("overlap_tp", k.SWITCH, "overlap tensor-parallel communication; --no-overlap-tp exposes it"),
        ("overlap_cp", k.SWITCH, "overlap context-parallel communication"),
        ("overlap_ep", k.SWITCH, "overlap expert-parallel communication"),
        ("overlap_dp", k.SWITCH, "overlap data-parallel communication"),
        ("overlap_pp", k.SWITCH, "overlap sends between pipeline stages"),
    )


def _read_from(group: str, table: Iterable[PlanField]) -> dict[str, Flag]:
    """Return the flags of a table of fields."""
    return {f.key: Flag(f.key, k.converter_of(f), f.help, group, SHORT.get(f.key, "")) for f in table}


@cache
def plan_flags() -> dict[str, Flag]:
    """Return the flags of a training plan."""
    from shardwise.plans.fields import PLAN

    return _read_from("plan", PLAN)


@cache
def job_flags() -> dict[str, Flag]:
    """Return the flags of a training job."""
    from shardwise.plans.fields import TRAINING

    return _read_from("job", TRAINING)


@cache
def settings_flags() -> dict[str, Flag]:
    """Return the flags of framework settings."""
    from shardwise.plans.fields import SETTINGS

    return _read_from("settings", SETTINGS)


@cache
def train_flags() -> dict[str, Flag]:
    """Return every flag that describes a training case."""
    machine = {**settings_flags(), **efficiency_flags(), **cluster_flags()}
    case = {**plan_flags(), **job_flags(), **machine, **model_flags()}
    return {**WHERE, **FROM, **case}


@cache
def risk_flags() -> dict[str, Flag]:
    """Return the flag that asks for a chance to fit."""
    text = "chance to fit that a plan must have by published peaks, such as 90%"
    return flag_table("search", ("risk", k.CHANCE, text))


@cache
def infer_flags() -> dict[str, Flag]:
    """Return every flag that describes a serving case."""
    from shardwise.plans.fields import PLAN, SERVING, taken_by

    plan = plan_flags()
    serving = _read_from("job", SERVING)
    machine = {key: flag for key, flag in efficiency_flags().items() if not key.startswith("overlap")}
    return {
        **WHERE,
        **{key: plan[key] for key in taken_by("infer", PLAN)},
        **serving,
        **machine,
        **cluster_flags(),
        **model_flags(),
    }
