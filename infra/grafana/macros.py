"""What Grafana and its ClickHouse data source make of a query before the server sees it. Pure.

Grafana puts in the variables, the data source then the macros. This knows what its documentation names, and refuses everything else:
a macro that is not known would reach the server as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

Value = str | Sequence[str]
"""What is chosen of a variable: one text, or those of one that takes several; ``$__all`` where all are."""

ALL = "$__all"
"""Chosen: everything."""

INTERVAL_MS = 60_000
"""The step that a panel asks for, unless told otherwise."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::(\w+))?\}|\$(\w+)")
_MACRO = re.compile(r"\$__(\w+)")
_CONDITIONAL = "$__conditionalAll("
_FORMATS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "raw": ",".join,
    "csv": ",".join,
    "text": " + ".join,
    "singlequote": lambda values: ",".join("'" + value.replace("'", "\\'") + "'" for value in values),
    "sqlstring": lambda values: ",".join("'" + value.replace("'", "''") + "'" for value in values),
}


class UnknownMacro(ValueError):
    """A query names a macro, variable or format that nobody replaces."""


def expand(sql: str, from_ms: int, to_ms: int, variables: Mapping[str, Value], interval_ms: int = INTERVAL_MS) -> str:
    """``sql`` as the server gets it, for the time range [``from_ms``, ``to_ms``], milliseconds. Raises :class:`UnknownMacro`."""
    known: dict[str, Value] = {
        **variables,
        "__from": str(from_ms),
        "__to": str(to_ms),
        "__interval_ms": str(interval_ms),
        "__interval": f"{max(interval_ms // 1_000, 1)}s",
    }
    text = _VARIABLE.sub(lambda found: _variable(found, known), _conditionals(sql, known))
    return _macros(text, from_ms, to_ms, interval_ms)


def used_variables(sql: str) -> set[str]:
    """Names of the variables that ``sql`` refers to, without Grafana's own."""
    return {name for whole, _, short in _VARIABLE.findall(sql) if not (name := whole or short).startswith("__")}


def _variable(found: re.Match[str], known: Mapping[str, Value]) -> str:
    name, form = found.group(1) or found.group(3), found.group(2)
    if name not in known:
        if found.group(3) and name.startswith("__"):
            return found.group(0)  # a macro of the data source
        raise UnknownMacro(f"no variable is named {name!r}")
    value = known[name]
    if form is None:
        return value if isinstance(value, str) else _FORMATS["singlequote"](value)
    if form not in _FORMATS:
        raise UnknownMacro(f"no format of variables is named {form!r}")
    return _FORMATS[form]([value] if isinstance(value, str) else value)


def _conditionals(sql: str, known: Mapping[str, Value]) -> str:
    """``$__conditionalAll(condition, $variable)``: the condition, or ``1=1`` where everything is chosen."""
    while (start := sql.find(_CONDITIONAL)) >= 0:
        arguments, end = _arguments(sql, start + len(_CONDITIONAL) - 1)
        if len(arguments) != 2 or not (named := re.fullmatch(r"\s*\$\{?(\w+)\}?\s*", arguments[1])):
            raise UnknownMacro("$__conditionalAll takes a condition and a variable")
        value = known.get(named.group(1))
        if value is None:
            raise UnknownMacro(f"no variable is named {named.group(1)!r}")
        everything = value in ("", ALL) or (not isinstance(value, str) and ALL in value)
        sql = sql[:start] + ("1=1" if everything else arguments[0]) + sql[end:]
    return sql


def _macros(sql: str, from_ms: int, to_ms: int, interval_ms: int) -> str:
    seconds = max(interval_ms // 1_000, 1)
    begin, end = f"toDateTime({from_ms // 1_000})", f"toDateTime({to_ms // 1_000})"
    begin_ms, end_ms = f"fromUnixTimestamp64Milli({from_ms})", f"fromUnixTimestamp64Milli({to_ms})"
    constants = {"fromTime": begin, "toTime": end, "fromTime_ms": begin_ms, "toTime_ms": end_ms, "interval_s": str(seconds)}
    calls: dict[str, Callable[[str], str]] = {
        "timeFilter": lambda column: f"{column} >= {begin} AND {column} <= {end}",
        "timeFilter_ms": lambda column: f"{column} >= {begin_ms} AND {column} <= {end_ms}",
        "timeInterval": lambda column: f"toStartOfInterval(toDateTime({column}), INTERVAL {seconds} second)",
        "timeInterval_ms": lambda column: f"toStartOfInterval(toDateTime64({column}, 3), INTERVAL {max(interval_ms, 1)} millisecond)",
    }
    out, at = [], 0
    while found := _MACRO.search(sql, at):
        name = found.group(1)
        out.append(sql[at : found.start()])
        at = found.end()
        if name in constants:
            out.append(constants[name])
        elif name in calls and sql[at : at + 1] == "(":
            arguments, at = _arguments(sql, at)
            if len(arguments) != 1:
                raise UnknownMacro(f"$__{name} takes one column")
            out.append(calls[name](arguments[0].strip()))
        else:
            raise UnknownMacro(f"no macro is named $__{name}")
    return "".join(out) + sql[at:]


def _arguments(sql: str, opening: int) -> tuple[list[str], int]:
    """The arguments behind the bracket at ``opening``, and where the text goes on behind them."""
    depth, begin, found = 0, opening + 1, list[str]()
    for place in range(opening, len(sql)):
        letter = sql[place]
        depth += (letter == "(") - (letter == ")")
        if (letter == "," and depth == 1) or depth == 0:
            found.append(sql[begin:place])
            begin = place + 1
        if depth == 0:
            return found, begin
    raise UnknownMacro("a bracket is not closed")
