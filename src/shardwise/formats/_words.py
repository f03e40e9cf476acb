"""Lists of words in trainers' files, and patterns that stand for some."""

from __future__ import annotations

import re

from shardwise.formats._imported import Keys

_GROUP = re.compile(r"(?:\((?:\?:)?([a-z0-9_|]{1,200})\)|\[([a-z]{1,26})\])_proj")
_NOT = re.compile(r"\(\?<?!(?:[^()]|\([^()]*\))*\)")
_NAME = re.compile(r"[a-z0-9_]{1,40}_proj(?:_with_mqa)?|(?<![a-z0-9_])fc[12](?![0-9])")


def words_of(keys: Keys, path: str) -> tuple[str, ...]:
    """Return a list of words, or the words of a text with commas."""
    value = keys.raw(path)
    if value is None:
        return ()
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, str) for one in listed):
        keys.fail(path, "must be words", "write for example [q_proj, v_proj]")
        return ()
    return tuple(one.strip() for one in listed if one.strip())


def names_in(pattern: str) -> tuple[str, ...]:
    """Return the linear layers that a regular expression names, without running it.

    >>> names_in(".*layers.(mlp|self_attn).(up|down|q_a)_proj"), names_in(".*.mlp.fc1")
    (('up_proj', 'down_proj', 'q_a_proj'), ('fc1',))
    >>> names_in(".*(?:q|k)_proj"), names_in(".*[vo]_proj$")
    (('q_proj', 'k_proj'), ('v_proj', 'o_proj'))
    >>> names_in("^(?!.*(o_proj|lm_head)).*(q|v)_proj")
    ('q_proj', 'v_proj')
    """
    pattern = _NOT.sub(" ", pattern)
    groups = (words.split("|") if words else letters for words, letters in _GROUP.findall(pattern))
    grouped = [f"{one}_proj" for group in groups for one in group if one]
    return tuple(dict.fromkeys((*grouped, *_NAME.findall(_GROUP.sub(" ", pattern)))))


def layers_of(keys: Keys, path: str) -> tuple[str, ...]:
    """Return the linear layers of a list, of a text with commas, or of a pattern: what it names, in every layer."""
    pattern = keys.raw(path)
    if not isinstance(pattern, str) or not set(pattern) & set("*\\[(+"):
        return words_of(keys, path)
    names = names_in(pattern)
    if not names:
        keys.assumed.append(f"targets all-linear: which layers {pattern} names is not found out")
        return ("all-linear",)
    keys.assumed.append(f"targets {', '.join(names)}: what {pattern} names, taken in every layer")
    return names


def experts_of(keys: Keys, path: str) -> tuple[str, ...]:
    """Return the word for experts where parameters are targets: those of three dimensions, in every layer."""
    if not path or not words_of(keys, path):
        return ()
    keys.assumed.append(f"targets experts: what {path} names, taken in every layer")
    return ("experts",)
