"""Why the hub gives no file of a model, in words that say what to do."""

from __future__ import annotations

# By class of huggingface_hub 2.4.0 (errors.py; file_download.py, _raise_on_head_call_error).
_WHY = {
    "GatedRepoError": "is gated on the hub: accept its licence on its page, then `hf auth login` or set HF_TOKEN",
    "RepositoryNotFoundError": "is no model of the hub, or a private one: check its spelling, or `hf auth login`",
    "LocalEntryNotFoundError": "cannot be fetched: the hub is not reached, and no copy was kept",
    "EntryNotFoundError": "has no config.json on the hub",
}


def why_unfetched(error: Exception) -> str:
    """Return what an error of the hub's client says of a model.

    >>> why_unfetched(type("RemoteEntryNotFoundError", (type("EntryNotFoundError", (Exception,), {}),), {})())
    'has no config.json on the hub'
    >>> why_unfetched(TimeoutError())
    'cannot be fetched from the hub (TimeoutError)'
    """
    names = [base.__name__ for base in type(error).__mro__]
    known = (_WHY[name] for name in names if name in _WHY)
    return next(known, f"cannot be fetched from the hub ({names[0]})")
