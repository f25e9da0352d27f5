"""Columns as SQL expressions whose values other programs can read from Arrow and Parquet. Pure.

Left to itself the engine hands out some types as what they are stored as: ``DateTime`` as a 32-bit number, ``Int128`` as sixteen bytes, an
``Enum`` without its names, an aggregation state not at all. Here each gets the form that says what it is; times are in UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from sql.statements import quoted

Ids = Literal["hex", "binary"]
"""How ``FixedString`` values leave: as text of lower-case hex digits, or as bytes of fixed length."""

_PARTS = re.compile(r"(?P<name>\w+)\s*(?:\((?P<rest>.*)\))?", re.DOTALL)
_AS_TEXT = frozenset(
    {"Enum8", "Enum16", "UUID", "IPv4", "IPv6", "Int256", "UInt256", "JSON", "Dynamic", "Variant", "Time", "Time64", "Object"}
)


def select_list(columns: Iterable[tuple[str, str]], ids: Ids) -> tuple[str, bool]:
    """The select list for ``columns``, (name, ClickHouse type) each, under their own names; and whether any of them changes its form."""
    parts, changed = [], False
    for name, kind in columns:
        column = quoted(name)
        expression = readable(column, kind, ids)
        changed = changed or expression != column
        parts.append(column if expression == column else f"{expression} AS {column}")
    return ", ".join(parts), changed


def readable(value: str, kind: str, ids: Ids) -> str:
    """The SQL expression ``value``, of the ClickHouse type ``kind``, in its readable form; ``value`` itself where it has it already.

    A 128-bit integer becomes a decimal of 38 digits, and the query fails for one that has more. A tuple loses the names of its elements
    if one of them changes its form.
    """
    return _readable(value, kind, ids, 0)


def _readable(value: str, kind: str, ids: Ids, depth: int) -> str:
    name, parts = _parse(kind)
    inside = (ids, depth)
    if name in ("Nullable", "LowCardinality"):
        return _readable(value, parts[0], *inside)
    if name == "SimpleAggregateFunction":
        plain = parts[1].replace("\\", "\\\\").replace("'", "\\'")
        return _readable(f"CAST({value}, '{plain}')", parts[1], *inside)  # left as it is, a Bool would come out as a number
    if name == "Array":
        return _mapped(value, parts[0], *inside)
    if name == "Map":
        keys, values = (_mapped(f"{of}({value})", part, *inside) for of, part in zip(("mapKeys", "mapValues"), parts, strict=True))
        same = keys == f"mapKeys({value})" and values == f"mapValues({value})"
        return value if same else f"mapFromArrays({keys}, {values})"
    if name in ("Tuple", "Nested"):
        return _tuple(value, parts, ids, depth) if name == "Tuple" else _mapped(value, f"Tuple({', '.join(parts)})", *inside)
    return _scalar(value, name, parts, ids)


def _scalar(value: str, name: str, parts: Sequence[str], ids: Ids) -> str:
    if name == "DateTime":
        return f"toDateTime64({value}, 0, 'UTC')"
    if name == "DateTime64":
        return value if parts[1:] == ["'UTC'"] else f"toTimeZone({value}, 'UTC')"
    if name == "FixedString":
        return f"lower(hex({value}))" if ids == "hex" else value
    if name in ("Int128", "UInt128"):
        return f"toDecimal128({value}, 0)"
    if name == "AggregateFunction":
        return f"finalizeAggregation({value})"
    if name in _AS_TEXT:
        return f"toString({value})"
    return f"toInt64({value})" if name.startswith("Interval") else value


def _mapped(value: str, kind: str, ids: Ids, depth: int) -> str:
    """An array, each element of ``kind`` in its readable form."""
    element = f"each{depth}"
    expression = _readable(element, kind, ids, depth + 1)
    return value if expression == element else f"arrayMap({element} -> {expression}, {value})"


def _tuple(value: str, parts: Sequence[str], ids: Ids, depth: int) -> str:
    elements = [f"tupleElement({value}, {number})" for number in range(1, len(parts) + 1)]
    told = [_readable(element, _unnamed(part), ids, depth) for element, part in zip(elements, parts, strict=True)]
    return value if told == elements else f"tuple({', '.join(told)})"


def _unnamed(part: str) -> str:
    """The type in ``name Type`` or ``Type``: a name is a word, or quoted, before a space outside brackets."""
    match = re.match(r"\s*(?:`(?:[^`\\]|\\.)*`|\w+)\s+(?=\w)", part)
    return part[match.end() :] if match else part


def _parse(kind: str) -> tuple[str, list[str]]:
    match = _PARTS.fullmatch(kind.strip())
    if match is None:
        return kind.strip(), []
    return match["name"], _split(match["rest"]) if match["rest"] is not None else []


def _split(text: str) -> list[str]:
    """``text`` at its commas, but for those in brackets and quotes."""
    parts, depth, start, quote, position = [], 0, 0, "", 0
    while position < len(text):
        at = text[position]
        if quote:
            if at == "\\":
                position += 1
            elif at == quote:
                quote = ""
        elif at in "'`\"":
            quote = at
        elif at in "([{":
            depth += 1
        elif at in ")]}":
            depth -= 1
        elif at == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
        position += 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
