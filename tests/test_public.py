"""The public surface: what `import shardwise` offers, and that it costs next to nothing."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import shardwise as sw

EXPORTED = [
    "Arrivals",
    "Cluster",
    "CommReport",
    "CountReport",
    "Counting",
    "Device",
    "Efficiencies",
    "Energy",
    "Frame",
    "Imported",
    "InferReport",
    "InputError",
    "IntRanges",
    "Length",
    "Limit",
    "LoadOptions",
    "LoadResult",
    "LoadSpace",
    "Model",
    "Plan",
    "Problem",
    "Roofline",
    "SearchOptions",
    "SearchSpace",
    "ServeReport",
    "Serving",
    "ServingOptions",
    "ServingResult",
    "ServingSpace",
    "Settings",
    "Stack",
    "Tier",
    "TrainReport",
    "Training",
    "TrainingOptions",
    "TrainingResult",
    "Workload",
    "__version__",
    "comm",
    "count",
    "device_names",
    "energy",
    "find_device",
    "find_stack",
    "frame",
    "from_megatron_args",
    "import_file",
    "infer",
    "load_device",
    "load_model",
    "model_names",
    "plan_serve",
    "plan_serving",
    "plan_training",
    "plot",
    "plot_timeline",
    "roofline",
    "runners_up",
    "serve",
    "stack_names",
    "strong_scaling",
    "train",
    "use_catalogue",
]


def test_exported_names_are_pinned() -> None:
    """What is public is a decision, so adding to it changes this list."""
    assert sorted(sw.__all__) == EXPORTED
    assert dir(sw) == sorted(sw.__all__)


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_is_there(name: str) -> None:
    """Each name loads, and is the same object every time."""
    assert getattr(sw, name) is getattr(sw, name)


FUNCTIONS = [name for name in EXPORTED if inspect.isfunction(inspect.unwrap(getattr(sw, name)))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_shows_how_it_is_called(name: str) -> None:
    """A function says what it returns, and has an example that the tests run."""
    text = inspect.getdoc(getattr(sw, name)) or ""
    assert re.match(r"(Return|Write|Look)\b", text) and ">>> " in text


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that is not public is refused like any attribute."""
    with pytest.raises(AttributeError, match="trian"):
        _ = sw.trian  # type: ignore[attr-defined]


def test_the_example_of_the_package_runs() -> None:
    """The lines that the docstring shows give a plan that fits."""
    model = sw.Model.load("llama-3.1-70b")
    cluster = sw.Cluster.parse("64xh100-sxm-80gb")
    report = sw.train(model, cluster, sw.Plan(tp=8, pp=4, dp=0), sw.Training(seq_len=8192, global_batch=128))
    assert report.fits
    assert 0 < report.mfu < 1
    assert sw.count(model).parameters == 70553706496
    served = sw.infer(model, sw.Cluster.parse("8xh100"), sw.Plan(tp=8), sw.Serving(batch=8))
    assert served.fits


def test_import_is_lazy() -> None:
    """Importing the package loads none of its parts and no large module."""
    code = """
import sys
before = set(sys.modules)
import shardwise
print(*(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert {name for name in loaded if name.startswith("shardwise")} == {
        "shardwise",
        "shardwise._lazy",
        "shardwise._version",
    }
    assert not {"numpy", "rich", "tomllib", "json", "dataclasses", "ray", "torch", "transformers"} & set(loaded)


def test_names_cover_what_type_checkers_see() -> None:
    """Names for type checkers are those that are public."""
    tree = ast.parse(Path(sw.__file__).read_text(encoding="utf-8"))
    seen = [name.name for node in tree.body if isinstance(node, ast.If) for line in node.body for name in line.names]
    assert sorted((*seen, "__version__")) == EXPORTED


def test_every_table_is_in_the_notice() -> None:
    """Each file of data is named in NOTICE, or its folder is, with whose work it was derived from."""
    notice, tables = _notice(), _tables()
    folders = re.findall(r"(\S+)/[,;.: ]", notice.replace("\n", " "))
    missing = [
        str(path) for path in tables if path.name not in notice and not any(str(path).startswith(f) for f in folders)
    ]
    assert missing == []


def test_every_repository_that_figures_come_from_is_in_the_notice() -> None:
    """No entry of a table cites a repository that NOTICE does not name, be it for a table or for one fact."""
    found = _repositories([*_tables(), *_modules()])
    assert len(found) > 100
    assert {name for name in found if name not in _notice().lower()} == set()


def test_every_repository_that_constants_and_rows_come_from_stands_with_its_licence() -> None:
    """Works behind constants, prices, devices and measured rows are named where NOTICE says licences."""
    licensed, _, _ = _notice().lower().partition("figures that programs print")
    folders = ("src/shardwise/cost", "src/shardwise/hardware", "accuracy/data", "accuracy/power.csv")
    found = _repositories(path for path in _tables() if str(path).startswith(folders))
    assert len(found) > 40
    # A work is named by itself, or beside others of its owner.
    assert {name for name in found if not re.search(rf"\b{re.escape(name.partition('/')[2])}\b", licensed)} == set()


def _repositories(files: Iterable[Path]) -> set[str]:
    """Return the repositories that files cite, in lower case; `OWNER/NAME` stands for any."""
    texts = ((ROOT / path).read_text(encoding="utf-8").lower() for path in files)
    found = {name for text in texts for name in re.findall(r"github(?:\.com/|:)([\w.-]+/[\w.-]*[\w-])", text)}
    return {name.removesuffix(".git") for name in found} - {"owner/name"}


def _modules() -> list[Path]:
    """Return the modules of the wheel and of what measures its accuracy, below the root."""
    return [path.relative_to(ROOT) for folder in ("src", "accuracy") for path in (ROOT / folder).rglob("*.py")]


ROOT = Path(__file__).parent.parent


def _notice() -> str:
    return (ROOT / "NOTICE").read_text(encoding="utf-8")


def _tables() -> list[Path]:
    """Return every file of data of the wheel and of the source distribution, below the root."""
    folders = ("src/shardwise", "accuracy", "benchmarks", "tests/data")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    found = [path.relative_to(ROOT) for path in files if path.suffix in (".toml", ".json", ".csv", ".txt")]
    assert len(found) > 150
    return found


def test_what_measures_accuracy_reads_no_private_module() -> None:
    """Programs beside the package import what its packages export, as anyone's do."""
    private = re.compile(r"^\s*(?:from|import) shardwise[\w.]*\._", re.MULTILINE)
    root = Path(__file__).parent.parent
    programs = [path for folder in ("accuracy", "examples") for path in (root / folder).rglob("*.py")]
    assert not [path.name for path in programs if private.search(path.read_text(encoding="utf-8"))]
