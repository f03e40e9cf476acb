"""Libraries that are imported where something needs them: whether one is there, and what to do where it is not."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import TracebackType

from shardwise.errors import Problem

HOW = {
    "numpy": "numpy",
    "yaml": "pyyaml",
    "tomli_w": "tomli-w",
    "matplotlib": "'shardwise[plots]'",
    "polars": "'shardwise[sweep]'",
    "ray": "'shardwise[ray]'",
    "torch": "'shardwise[torch]'",
    "huggingface_hub": "'shardwise[hub]'",
}
"""What pip installs a library by, by the name that Python imports it under."""


def is_installed(library: str) -> bool:
    """Return whether Python finds a library, without importing it.

    >>> is_installed("numpy"), is_installed("no_such_library")
    (True, False)
    """
    try:
        return find_spec(library) is not None
    except (ImportError, ValueError):
        # What stands in the place of the library has no loader.
        return False


def how_to_install(library: str) -> str:
    """Return what to do for a library: the command that installs it, but for those that come with Python.

    >>> how_to_install("matplotlib"), how_to_install("yaml"), how_to_install("ctypes")
    ("pip install 'shardwise[plots]'", 'pip install pyyaml', 'use a Python that was built with it')
    """
    if library in sys.stdlib_module_names:
        return "use a Python that was built with it"
    return f"pip install {HOW.get(library, library)}"


def missing(error: ImportError, command: str) -> Problem | None:
    """Return what is wrong where a command imported a library that is not there or broken; None for a fault of ours.

    >>> print(missing(ModuleNotFoundError("No module named 'numpy'", name="numpy"), "plan"))
    command = 'plan': needs numpy, which Python cannot import (No module named 'numpy'); pip install numpy
    """
    library = (error.name or _importing(error.__traceback__)).partition(".")[0]
    if library in ("", "shardwise"):
        return None
    text = " ".join(str(error).split())
    return Problem("command", command, f"needs {library}, which Python cannot import ({text})", how_to_install(library))


def _importing(at: TracebackType | None) -> str:
    """Return the module that failed while it was imported, "" where it is none but ours."""
    name = ""
    while at is not None:
        module = str(at.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("importlib", "_frozen_importlib", "shardwise", "__main__"):
            name = module
        at = at.tb_next
    return name
