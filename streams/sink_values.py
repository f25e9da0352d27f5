"""Values that do not fit their columns, found without asking the store: one pass instead of an insert per half. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

Misfit = Callable[[Any], str | None]
"""What is wrong with a value; ``None`` if nothing that can be told from here."""

_WHOLE = re.compile(r"(U?)Int(8|16|32|64)")
_SHOWN = 60


def misfits(names: Sequence[str], columns: Sequence[Sequence[Any]], kinds: Mapping[str, str]) -> dict[int, str]:
    """Row to what is wrong with it, for the rows that hold a value which its column cannot. ``kinds``: column to ClickHouse type."""
    found: dict[int, str] = {}
    for name, column in zip(names, columns, strict=True):
        misfit = _misfit(kinds.get(name, ""))
        if misfit is None:
            continue
        for row, value in enumerate(column):
            wrong = misfit(value)
            if wrong is not None:
                found.setdefault(row, f"{name}: {wrong}")
    return found


@lru_cache(maxsize=512)
def _misfit(kind: str) -> Misfit | None:
    """How a value of the ClickHouse type ``kind`` is looked at; ``None`` for types of which every value fits, or nobody here can tell."""
    outer, _, rest = kind.partition("(")
    inner = rest[:-1]
    if outer == "LowCardinality":
        return _misfit(inner)
    if outer == "Nullable":
        plain = _misfit(inner)
        return None if plain is None else lambda value: None if value is None else plain(value)
    if outer == "Array":
        each = _misfit(inner)
        return None if each is None else lambda values: _first(each, values)
    if outer == "FixedString":
        return lambda value: _bytes_misfit(value, int(inner))
    if outer == "DateTime64":
        return _whole_misfit(-(2**63), 2**63 - 1)
    whole = _WHOLE.fullmatch(kind)
    if whole is None:
        return None
    bits = int(whole[2])
    return _whole_misfit(0, 2**bits - 1) if whole[1] else _whole_misfit(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _first(misfit: Misfit, values: Any) -> str | None:
    if not isinstance(values, list | tuple):
        return f"{_shown(values)} is no list"
    return next((wrong for value in values if (wrong := misfit(value)) is not None), None)


def _whole_misfit(least: int, most: int) -> Misfit:
    def misfit(value: Any) -> str | None:
        if not isinstance(value, int):
            return f"{_shown(value)} is no whole number"
        return None if least <= value <= most else f"{value} lies outside {least} to {most}"

    return misfit


def _bytes_misfit(value: Any, length: int) -> str | None:
    if not isinstance(value, bytes | str):
        return f"{_shown(value)} is no bytes"
    return None if len(value) <= length else f"{len(value)} bytes where {length} fit"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
