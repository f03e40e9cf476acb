"""Names of a package that are loaded when they are first asked for."""

from __future__ import annotations

import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, from its modules and the names that each of them has.

    >>> lazily("shardwise", {"hardware": "Cluster Device"})("Device").__name__
    'Device'
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


_PROVIDED: dict[str, str] = {}


def provide(name: str, module: str) -> None:
    """Let layers below ask for a function of a layer above, which is loaded when it is first asked for.

    Only the top of the package calls this, so that no layer names one that lies above it.
    """
    _PROVIDED[name] = module


def provided(name: str) -> Any:
    """Return a function that a layer above provides.

    >>> provided("values_of").__module__
    'shardwise.answers._values'
    """
    from importlib import import_module

    return getattr(import_module(_PROVIDED[name]), name)
