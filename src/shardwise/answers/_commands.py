"""The commands: what each takes, and who answers it."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.answers import _converters, _flags
from shardwise.answers._flags import OUTPUT, Command, Flag
from shardwise.formats import SERVERS, SYSTEMS

_MODEL = {
    "model": Flag("model", _converters.TEXT, "catalogue name, config.json, folder or hub id", "positional"),
    "part": Flag("part", _converters.choice("text"), "the language model alone of a file with other parts", "model"),
}

SUMMARIES = {
    "train": "one training plan: does it fit, how long is a step, what does it cost",
    "infer": "one serving plan: does it fit, how long to the first and the next token, what does it cost",
    "serve": "a deployment under load: latency percentiles, capacity, cost, and why",
    "count": "parameters, FLOPs by every published convention, operators with their shapes",
    "comm": "communication of a plan: groups, messages, bytes, links, seconds; layers of the model and of a rank",
    "explain": "any number of an answer, opened down to formulas, inputs and sources",
    "plan": "the best plans, the Pareto front, and what rejects the others",
    "sweep": "the best plans of every question of a study, kept in tables; an interrupted run resumes",
    "compare": "two plans side by side, with what differs",
    "roofline": "every operator of a plan on the device's roofline, and what bounds it",
    "import": "another system's launch script or configuration as a case, and how each setting was read",
    "export": "a plan as another system's launch script or configuration",
    "validate": "predicted against measured: your own runs of CSV files",
    "measure": "this machine's GEMMs and memory, timed with PyTorch, as a device of your catalogue",
    "models": "the models that are known by name, or one with its source",
    "devices": "the devices that are known by name, or one with the source of every figure",
    "stacks": "the frameworks of training and engines of serving that are known by name, or what one framework runs",
    "schema": "the JSON schema of case files, for editors and checks",
    "completion": "completion of flags, models and devices for bash, zsh or fish",
    "dtypes": "precisions of training, formats of serving and presets of bits, by name",
}
_PLANS = {
    "train": "the best plans of a training job, their Pareto front, and what rejects the others",
    "infer": "the best ways to serve batches, their Pareto front, and what rejects the others",
    "serve": "how many devices a load needs under its limits, in which layout, and why no fewer",
}
"""What `plan` answers of each kind."""
BOTH = "exit status: 0 both fit, 1 one does not, 2 bad input"
COMMON = "exit status: 0 yes, 1 does not fit, 2 bad input"


def _train() -> Command:
    from shardwise.answers._search_flags import train_limits
    from shardwise.plans import PHASES

    phase = Flag("phase", _converters.choice(*PHASES), "one phase of a step of preferences or rewards alone", "output")
    savers = Flag("savers", _converters.SWITCH, "every memory saver: bytes saved, seconds added, legality", "output")
    flags = {**_MODEL, **_flags.train_flags(), **_flags.risk_flags(), **train_limits()}
    flags |= {"savers": savers, "phase": phase}
    flags |= {**_flags.ENERGY, **_flags.MANY, **_flags.PLOT, **_flags.TIMELINE, **OUTPUT}
    return Command("train", SUMMARIES["train"], ("model",), flags, COMMON, ("model", "on"))


def _infer() -> Command:
    from shardwise.answers._search_flags import serving_limits

    flags = {**_MODEL, **_flags.FROM_SERVER, **_flags.infer_flags(), **_flags.risk_flags(), **serving_limits()}
    flags |= {**_flags.ENERGY, **_flags.MANY, **_flags.PLOT, **OUTPUT}
    return Command("infer", SUMMARIES["infer"], ("model",), flags, COMMON, ("model", "on"))


def _opened_load() -> dict[str, Flag]:
    """Return the flags that open a number of the closed form of a load."""
    names = _converters.choice("utilization", "capacity", "ttft", "tpot", "e2e")
    text = "open a mean of the closed form down to the price of each step, in place of the answer"
    return {"explain": Flag("explain", names, text, "number"), **{k: _flags.EXPLAIN[k] for k in ("path", "depth")}}


def _serve() -> Command:
    from shardwise.answers._search_flags import AGAINST, serve_flags

    exits = "exit status: 0 keeps every limit, 1 does not, does not fit or is not stable, 2 bad input"
    output = {**_flags.PLOT, **AGAINST, **OUTPUT}
    return Command(
        "serve",
        SUMMARIES["serve"],
        ("model",),
        {**_MODEL, **_flags.FROM_SERVER, **serve_flags(), **_opened_load(), **_flags.ENERGY, **_flags.MANY, **output},
        exits,
        ("model", "on"),
    )


def _count() -> Command:
    from shardwise.plans.fields import PLAN, TRAINING, taken_by

    known = {**_flags.plan_flags(), **_flags.job_flags()}
    shape = {key: known[key] for key in taken_by("count", (*PLAN, *TRAINING))}
    batch = {"batch": Flag("batch", _converters.WHOLE, "sequences of a pass", "job")}
    machine = {**_flags.WHERE, **_flags.cluster_flags(), **_flags.efficiency_flags()}
    flags = {**_MODEL, **_flags.FROM, **shape, **batch, **machine, **_flags.model_flags(), **OUTPUT}
    return Command("count", SUMMARIES["count"], ("model",), flags, COMMON, ("model",))


def _comm() -> Command:
    whole = Flag("all", _converters.SWITCH, "list every group with every rank, and every stage", "output")
    flags = {**_MODEL, **_flags.train_flags(), **_flags.PLOT, "all": whole, **OUTPUT}
    return Command("comm", SUMMARIES["comm"], ("model",), flags, COMMON, ("model", "on"))


def _explain() -> Command:
    flags = {**_MODEL, **_flags.infer_flags(), **_flags.train_flags(), **_flags.EXPLAIN, **_flags.PLOT, **OUTPUT}
    return Command("explain", SUMMARIES["explain"], ("model",), flags, COMMON, ("model", "on"))


def _roofline() -> Command:
    help_of_what = "operators of training or of serving; left out, as the other flags say"
    what = {"what": Flag("what", _converters.choice("train", "infer"), help_of_what, "number")}
    flags = {**_MODEL, **_flags.infer_flags(), **_flags.train_flags(), **what, **_flags.PLOT, **OUTPUT}
    exits = "exit status: 0 done, 2 bad input"
    return Command("roofline", SUMMARIES["roofline"], ("model",), flags, exits, ("model", "on"))


def _compare() -> Command:
    files = {
        "first": Flag("first", _converters.TEXT, "a case file, or the model", "positional"),
        "second": Flag("second", _converters.FILE, "the other case file", "positional"),
    }
    cases = {**_MODEL, **_flags.infer_flags(), **_flags.train_flags(), **_flags.SIDES}
    output = {**_flags.PLOT, **{key: OUTPUT[key] for key in ("json", "width", "catalogue", "help")}}
    return Command("compare", SUMMARIES["compare"], ("first", "second"), {**files, **cases, **output}, BOTH, ("first",))


def _plan(kind: str = "") -> Command:
    from shardwise.answers._search_flags import load_search_flags, plan_search_flags, serve_search_flags

    help_of_what = "train, infer or serve; each has flags of its own: shardwise plan serve --help"
    what = Flag("what", _converters.choice("train", "infer", "serve"), help_of_what, "positional")
    own = {"infer": serve_search_flags, "serve": load_search_flags}.get(kind, plan_search_flags)()
    many = {key: _flags.MANY[key] for key in ("vary", "solve", "rows")}
    if kind == "serve":
        exits = "exit status: 0 found, 1 nothing keeps the limits, 2 bad input"
        flags = {"what": what, **_MODEL, **_flags.FROM_SERVER, **own, **_flags.ENERGY, **many, **_flags.PLOT, **OUTPUT}
        return Command("plan", _PLANS[kind], ("what", "model"), flags, exits, ("what", "model", "on"), kind=kind)
    server = _flags.FROM_SERVER if kind == "infer" else {}
    flags = {"what": what, **_MODEL, **server, **own, **many, **_flags.PLOT, **OUTPUT}
    exits = "exit status: 0 found, 1 nothing fits, 2 bad input"
    text = _PLANS.get(kind, SUMMARIES["plan"])
    return Command("plan", text, ("what", "model"), flags, exits, ("what", "model", "on"), kind=kind)


def _sweep() -> Command:
    own = {
        "study": Flag("study", _converters.FILE, "a TOML file: task, fixed values, a grid of values", "positional"),
        "follow": _flags.WHERE["follow"],
        "out": Flag("out", _converters.FILE, "folder of the answers and tables", "output"),
        "workers": Flag("workers", _converters.whole(), "processes, or cores of Ray; left out, all cores", "search"),
        "engine": Flag("engine", _converters.choice("processes", "ray"), "what runs the searches", "search"),
        "address": Flag("address", _converters.TEXT, "a Ray cluster that runs; left out, this machine", "search"),
    }
    output = {**_flags.PLOT, **{key: OUTPUT[key] for key in ("json", "width", "catalogue", "help")}}
    exits = "exit status: 0 found, 1 nothing fits, 2 bad input, 130 interrupted: run it again"
    return Command("sweep", SUMMARIES["sweep"], ("study",), {**own, **output}, exits, ("study", "out"))


def _import() -> Command:
    file = {
        "file": Flag(
            "file",
            _converters.FILE,
            "the launch of a training or of a server, or a trainer's settings (docs/formats.md)",
            "positional",
        )
    }
    allowed = {key: _flags.FROM[key] for key in ("from_args", "set", "skip")}
    output = {key: OUTPUT[key] for key in ("json", "width", "help")}
    flags = {**file, **_flags.WHERE, **allowed, **output}
    return Command("import", SUMMARIES["import"], ("file",), flags, "exit status: 0 understood, 2 bad input")


def _export(kind: str = "") -> Command:
    from shardwise.answers._search_flags import serve_flags

    systems = _converters.choice(*TARGETS)
    target = {"target": Flag("target", systems, "whose files", "positional")}
    write = {"write": Flag("write", _converters.FILE, "write the files into this folder", "output")}
    wrap = {
        "wrap": Flag(
            "wrap", _converters.choice("slurm", "kubernetes"), "write this scheduler's file around the launch", "output"
        )
    }
    served = {**_flags.FROM_SERVER, **serve_flags(), **_flags.infer_flags()}
    case = served if kind in SERVERS else _flags.train_flags()
    flags = {**target, **_MODEL, **case, **wrap, **write, **OUTPUT}
    exits = "exit status: 0 written, 2 bad input, or what the target cannot be told"
    own = ("target", "model")
    return Command("export", SUMMARIES["export"], own, flags, exits, (*own, "on"), kind=kind)


def _validate() -> Command:
    help_of_files = "CSV files of measurements, a row for each"
    files = {"files": Flag("files", _converters.WORDS, help_of_files, "positional")}
    output = {
        **_flags.FROM_EITHER,
        **_flags.VALIDATE,
        **_flags.PLOT,
        **{key: OUTPUT[key] for key in ("json", "width", "catalogue", "help")},
    }
    exits = "exit status: 0 done, 1 no row could be predicted, 2 bad input"
    return Command("validate", SUMMARIES["validate"], ("files",), {**files, **output}, exits, many=True)


def _measure() -> Command:
    own = {
        "out": Flag(
            "out", _converters.FILE, "folder of the catalogue: devices/NAME.toml, and NAME.csv as timed", "output"
        ),
        "name": Flag("name", _converters.TEXT, "name of the device; left out, what the system calls it", "output"),
    }
    output = {key: OUTPUT[key] for key in ("json", "width", "help")}
    return Command(
        "measure", SUMMARIES["measure"], (), {**own, **output}, "exit status: 0 measured, 2 bad input", ("out",)
    )


def _listing(name: str, catalogue: bool = True) -> Command:
    """Return a command that lists what is known by name, of which a user's `catalogue` may have more."""
    flags = {"search": Flag("search", _converters.TEXT, "words that the name holds", "positional")}
    if catalogue:
        written = "write the one found to a file, as the user's catalogue reads it"
        flags["write"] = Flag("write", _converters.FILE, written, "output")
    flags |= {key: OUTPUT[key] for key in ("json", "width", *(["catalogue"] if catalogue else []), "help")}
    return Command(name, SUMMARIES[name], ("search",), flags, "exit status: 0 found, 1 nothing found, 2 bad input")


def _printed(name: str) -> Command:
    shell = {"shell": Flag("shell", _converters.choice("bash", "zsh", "fish"), "which shell", "positional")}
    own = shell if name == "completion" else {}
    output = {key: OUTPUT[key] for key in ("json", "help")}
    return Command(name, SUMMARIES[name], tuple(own), {**own, **output}, "exit status: 0 done, 2 bad input")


_MAKERS: dict[str, Callable[[], Command]] = {
    "train": _train,
    "infer": _infer,
    "serve": _serve,
    "count": _count,
    "comm": _comm,
    "explain": _explain,
    "plan": _plan,
    "sweep": _sweep,
    "compare": _compare,
    "roofline": _roofline,
    "import": _import,
    "export": _export,
    "validate": _validate,
    "measure": _measure,
    "models": lambda: _listing("models"),
    "devices": lambda: _listing("devices"),
    "dtypes": lambda: _listing("dtypes"),
    "stacks": lambda: _listing("stacks", catalogue=False),
    "schema": lambda: _printed("schema"),
    "completion": lambda: _printed("completion"),
}
NAMES = tuple(_MAKERS)
TARGETS = (*SYSTEMS, *SERVERS)
# Commands whose cases are of kinds with flags of their own: the key of the word, and the words.
KINDS = {"plan": ("what", ("train", "infer", "serve")), "export": ("target", TARGETS)}
# Commands that answer one question at many values.
MANY = ("train", "infer", "serve")


def command(name: str, kind: str = "") -> Command:
    """Return a command by name; `plan` takes other flags for each kind of case.

    >>> command("train").positionals
    ('model',)
    """
    makers = {"plan": _plan, "export": _export}
    return makers[name](kind) if name in makers else _MAKERS[name]()


def every() -> dict[str, Command]:
    """Return all commands; only reading a case file needs them all."""
    return {
        **{name: command(name) for name in NAMES},
        "plan infer": command("plan", "infer"),
        "plan serve": command("plan", "serve"),
        "export " + "/".join(SERVERS): command("export", next(iter(SERVERS))),
    }
