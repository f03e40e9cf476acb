"""`shardwise devices`: what the catalogue of devices holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer, nothing_found
from shardwise.answers._case import Inputs

if TYPE_CHECKING:
    from shardwise.answers._page import Page


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise devices`."""
    from shardwise.answers import _listing

    inputs.problems.raise_if_any()
    search = inputs.get("search", "")
    names = _listing.search_devices(search)
    if not names:
        from shardwise.hardware import device_names

        return nothing_found("devices", search, device_names())

    if "write" in inputs.values:
        from shardwise.answers._files import one_to_write, write_text
        from shardwise.hardware import device_to_toml, find_device

        path = inputs.values["write"]
        write_text(path, device_to_toml(find_device(one_to_write(path, names, "device")).device))

    def tree() -> dict[str, Any]:
        return {"devices": [_listing.device_record(name) for name in names]}

    def page() -> Page:
        return _listing.devices_page(names, width)

    return Answer(0, tree, page)
