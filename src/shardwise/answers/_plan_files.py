"""Files that a search is to write, looked at before it starts: a search of minutes must not end in a wrong path."""

from __future__ import annotations

import os

from shardwise.answers import _figures
from shardwise.answers._case import Inputs

KEYS = ("plot", "save_best", "save")


def check_files(inputs: Inputs) -> None:
    """Record a problem for each file that cannot be written or drawn."""
    _figures.check(inputs)
    for key in KEYS:
        path = inputs.get(key)
        if path is None or key in inputs.bad:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            inputs.fail(key, path, f"cannot be written ({folder} is no folder)", "give a file in a folder that exists")
        elif os.path.isdir(path):
            inputs.fail(key, path, "cannot be written (it is a folder)", "give the name of a file")
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
            inputs.fail(key, path, "cannot be written (no permission)", "give a file that you may write")
