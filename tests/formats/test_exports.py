"""Whole files of every export: each word that a system is given, and none besides.

What a change writes on purpose is stored anew: `PYTHONPATH=tests python tests/formats/test_exports.py`.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from command_line import run

STORED = Path(__file__).with_name("exports.toml")
FILES: dict[str, dict[str, str]] = tomllib.loads(STORED.read_text(encoding="utf-8"))


def written(command: str) -> dict[str, str]:
    """Return the words of an export's files and notes, without lines of what is predicted or assumed."""
    done = run("export", *command.split(), "--json")
    assert done.status in (0, 1), done.err
    texts = {**done.tree["files"], "notes": "\n".join(done.tree["notes"])}
    ours = re.compile(r"# (assumed: |this plan does not fit)")
    lines = {name: [line for line in text.splitlines() if not ours.match(line)] for name, text in texts.items()}
    return {name: " ".join(" ".join(found).split()) for name, found in lines.items()}


@pytest.mark.parametrize("command", FILES)
def test_an_export_writes_these_words(command: str) -> None:
    """Every file of an export has the words that it had, among them those that no reader of ours takes back."""
    assert written(command) == FILES[command]


def main() -> None:
    """Store every export anew."""
    parts = []
    for command in FILES:
        rows = [f"{json.dumps(name)} = {json.dumps(text)}" for name, text in written(command).items()]
        parts.append("\n".join([f"[{json.dumps(command)}]", *rows]))
    STORED.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
