"""Put four public calculators and shardwise side by side, figure by figure; prints the tables of benchmarks/seeds.md.

Each is asked in its own code, from its package or a checkout, and answers are stored with ours:

    python benchmarks/seeds.py --ask llm-analysis --python VENV/bin/python
    python benchmarks/seeds.py --ask cookbook --python python3 --at COOKBOOK/calc
    python benchmarks/seeds.py --ask estimates --python VENV/bin/python --at TRANSFORMER-PERF-ESTIMATES
    python benchmarks/seeds.py --ask megatron

`--refresh` takes the stored answers of the others and makes ours anew; without arguments the stored tables are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from beside.answers import TOLERANCE, Row, Tool, amounts, name_of

HERE = Path(__file__).parent
STORED = HERE / "data" / "seeds.json"
LAWS = HERE / "beside" / "laws.toml"
TOOLS = {"llm-analysis": "of_llm_analysis", "cookbook": "of_cookbook", "estimates": "of_estimates",
         "megatron": "of_megatron"}  # fmt: skip
DIGITS = 12


def tool_of(key: str) -> Tool:
    """Return one comparison."""
    found: Tool = import_module(f"beside.{TOOLS[key]}").tool()
    return found


def laws() -> dict[str, str]:
    """Return every law with its sentence."""
    groups: dict[str, dict[str, str]] = tomllib.loads(LAWS.read_text(encoding="ascii"))
    return {name: sentence for group in groups.values() for name, sentence in group.items()}


def stored() -> dict[str, Any]:
    """Return the stored answers of every tool."""
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="ascii")) if STORED.exists() else {}
    return found


def asked(key: str, python: str, at: str) -> list[dict[str, Any]]:
    """Return the other tool's answers, made in its own interpreter."""
    tool = tool_of(key)
    if not tool.asks:
        return [import_module(f"beside.{TOOLS[key]}").printed(s) for s in tool.settings]
    command = [python, "-P", str((HERE / "beside" / tool.asks).resolve()), *([str(Path(at).resolve())] if at else [])]
    done = subprocess.run(command, input=json.dumps(list(tool.settings)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def rounded(value: float) -> float:
    """Return a figure to twelve digits."""
    return float(f"{value:.{DIGITS}g}")


def beside(key: str, theirs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what is stored of a tool: by setting and figure the unit, theirs, ours and amounts by law."""
    tool, settings = tool_of(key), {}
    for setting in tool.settings:
        name = name_of(setting)
        if "error" in theirs[name]:
            settings[name] = theirs[name]
            continue
        answers, figures = tool.answers(setting), {figure: rounded(value) for figure, value in theirs[name].items()}
        settings[name] = {
            figure: [answers[figure].unit, value, rounded(answers[figure].value),
                     {law: rounded(amount) for law, amount in amounts(figure, figures, answers).items()}]
            for figure, value in figures.items()
        }  # fmt: skip
    return {"name": tool.name, "version": tool.version, "settings": settings}


def theirs_of(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the other tool's figures of a stored entry."""
    return {
        name: found if "error" in found else {figure: row[1] for figure, row in found.items()}
        for name, found in entry["settings"].items()
    }


def rows_of(entry: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of a stored entry."""
    for name, found in entry["settings"].items():
        if "error" not in found:
            yield from (Row(name, figure, *row) for figure, row in found.items())


def shown(value: float) -> str:
    """Return a difference as text: per cent, or a factor where it is large."""
    return f"{value + 1:.3g} x" if value > 1 else f"{value:+.1%}"


def table(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the table of a tool: by figure how often both agree, how far they differ and by which laws."""
    yield "| figure | cases | within 1 % | theirs against ours | what stands between |"
    yield "|---|---|---|---|---|"
    figures: dict[str, list[Row]] = {}
    for row in rows_of(entry):
        figures.setdefault(row.figure if len(entry["settings"]) > 1 else row.figure.partition(",")[0], []).append(row)
    for figure, rows in figures.items():
        apart = [row for row in rows if abs(row.difference) > TOLERANCE]
        why = Counter(law for row in apart for law in row.laws)
        low, high = min(row.difference for row in rows), max(row.difference for row in rows)
        yield (
            f"| {figure.replace('_', ' ')} | {len(rows)} | {len(rows) - len(apart)} | {shown(low)} to {shown(high)} | "
            f"{'; '.join(f'{law} ({n})' for law, n in why.most_common()) or 'nothing'} |"
        )


def page() -> Iterator[str]:
    """Yield the generated section of benchmarks/seeds.md."""
    every = stored()
    used: set[str] = set()
    for entry in every.values():
        rows = list(rows_of(entry))
        used |= {law for row in rows if abs(row.difference) > TOLERANCE for law in row.laws}
        far = sum(abs(row.difference) > TOLERANCE for row in rows)
        rest = max(abs(row.rest) for row in rows if abs(row.difference) > TOLERANCE)
        yield f"## {entry['name']}\n"
        yield (
            f"{entry['version']}. {len(rows)} figures of {len(entry['settings'])} settings: {len(rows) - far} within "
            f"1 %, {far} apart by named laws that leave at most {rest:.2%} of a figure.\n"
        )
        yield from table(entry)
        errors = [(name, found["error"]) for name, found in entry["settings"].items() if "error" in found]
        yield from (f"\nNot answered: `{name}` ends with {error}." for name, error in errors)
        yield ""
    yield "## What the laws say\n\n| law | ours keeps to |\n|---|---|"
    yield from (f"| {name} | {sentence} |" for name, sentence in laws().items() if name in used)


def write(every: dict[str, Any]) -> None:
    """Store the answers, a setting to a line."""
    text = json.dumps(every, indent=None, separators=(",", ":"), sort_keys=False)
    lines = text.replace('"settings":{', '"settings":{\n').replace('},"', '},\n"').replace("]},\n", "]},\n")
    STORED.write_text(lines + "\n", encoding="ascii")


def main() -> None:
    """Ask, refresh or print."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ask", choices=TOOLS)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--at", default="")
    parser.add_argument("--refresh", action="store_true")
    wish = parser.parse_args()
    every = stored()
    if wish.ask:
        answers = asked(wish.ask, wish.python, wish.at)
        theirs = {name_of(s): a for s, a in zip(tool_of(wish.ask).settings, answers, strict=True)}
        every[wish.ask] = beside(wish.ask, theirs)
        write({key: every[key] for key in TOOLS if key in every})
    elif wish.refresh:
        write({key: beside(key, theirs_of(entry)) for key, entry in every.items()})
    else:
        print("\n".join(page()))


if __name__ == "__main__":
    main()
