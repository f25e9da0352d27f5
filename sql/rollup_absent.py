"""Who is missing from the windows of 5 minutes: ranks that were expected and have no row of ``rank_windows`` there. Pure.

A rank is expected from its first window until it departs, and again from the window of 5 minutes in which it is heard of next. Where it is
silent it has a row that says so, between a window of its own and the next one; who it is said to be is what was declared before. Nobody is
missing while no rank at all was heard of for longer than :data:`LONGEST_SILENCE`: a clock that runs a year ahead, or records of last year,
would else make a year of absence.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text and whole numbers

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sql.rollup_parts import GRAINS, PART, second

LONGEST_SILENCE = 7 * 86_400
"""Of the whole fleet, in seconds."""

CELL = GRAINS[0].seconds
_DAY = GRAINS[-1].seconds
_PARTS = PART.split(", ")[1:]

Declared = tuple[Any, ...]
"""``semantics_version``, ``workload``, ``model``, ``reuse_reporting``, ``removals``, ``kv_connector``, ``key_epoch``, ``canary``."""

Span = tuple[int, int]
"""(start of a window of 5 minutes in which rows begin, where they end), seconds."""


@dataclass(frozen=True)
class Absence:
    """One window of 5 minutes, by its start in seconds, in which a rank is missing; or no longer is (``declared`` ``None``)."""

    start: int
    instance_id: str
    dp_rank: int
    declared: Declared | None


@dataclass(frozen=True)
class Piece:
    """What is looked at in one go: windows of 5 minutes from ``start`` to ``end`` (seconds), all of one day.

    ``before``: start of the one in which the fleet was heard of last before them, ``None``: never.
    """

    start: int
    end: int
    before: int | None


def pieces(since: int, last_before: int | None, spans: Iterable[Span]) -> list[Piece]:
    """The time in which it may have changed who is missing, where windows from ``since`` on were counted anew.

    ``since`` is the start of a window of 5 minutes. ``spans`` are those that end after it; ``last_before`` is where the last of the others
    ends, in seconds.
    """
    merged: list[list[int]] = []
    for start, end in sorted((start, max(start + CELL, _up(until))) for start, until in spans):
        if merged and start - merged[-1][1] <= LONGEST_SILENCE:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    begins, before = since, None if last_before is None else _up(last_before) - CELL
    if merged and merged[0][0] < since:
        before = since - CELL
    elif merged and before is not None and merged[0][0] - (before + CELL) <= LONGEST_SILENCE:
        # Nobody was heard of in between, and only now is it known that it was not the end.
        begins = merged[0][0] = before + CELL
    found: list[Piece] = []
    for start, end in merged:
        for part, over in _by_days(max(start, begins), end):
            found.append(Piece(part, over, before))
            before = over - CELL
    return found


def _up(at: int) -> int:
    return -(-at // CELL) * CELL


def _by_days(start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        border = min(end, start - start % _DAY + _DAY)
        yield start, border
        start = border


def seen(piece: Piece) -> str:
    """A query of the ranks that may be missing in ``piece``, or are said to be.

    (instance_id, dp_rank, windows with rows as (start, departed, declared), windows without as (start, declared)); what they were in
    ``before`` is among the former.
    """
    declared = ", ".join(_PARTS)
    order = "(last_window, semantics_version, ifNull(last_batch, toDateTime64(0, 6, 'UTC')), part)"
    own = f"window_start >= {second(piece.start)} AND window_start < {second(piece.end)}"
    carried = f"at = {piece.before}" if piece.before is not None else "false"
    also = f"OR window_start = {second(piece.before)}" if piece.before is not None else ""
    return f"""
        SELECT instance_id, dp_rank,
            arraySort(x -> x.1, groupArrayIf((at, gone, d), heard OR {carried})), groupArrayIf((at, d), NOT heard AND NOT {carried})
        FROM
        (
            SELECT instance_id, dp_rank, toUnixTimestamp(window_start) AS at, max(windows) > 0 AS heard,
                argMax(departed, {order}) AS gone, argMax(tuple({declared}), {order}) AS d
            FROM rank_rollups FINAL
            WHERE grain = '{GRAINS[0].name}' AND (({own}) {also})
            GROUP BY instance_id, dp_rank, window_start
        )
        GROUP BY instance_id, dp_rank
        HAVING countIf(heard AND NOT {carried}) < {(piece.end - piece.start) // CELL} OR countIf(NOT heard AND NOT {carried}) > 0
    """


def changes(piece: Piece, rows: Iterable[Sequence[Any]]) -> list[Absence]:
    """What has to change so that exactly those are said to be missing who are; ``rows`` are of :func:`seen`."""
    found: list[Absence] = []
    for instance_id, dp_rank, heard, silent in rows:
        said = {start: tuple(declared) for start, declared in silent}
        for start, declared in _missing(piece, heard):
            if said.pop(start, None) != declared:
                found.append(Absence(start, instance_id, dp_rank, declared))
        found += [Absence(start, instance_id, dp_rank, None) for start in said]
    return found


def _missing(piece: Piece, heard: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Declared]]:
    ends = [*(start for start, _, _ in heard[1:]), piece.end]
    for (start, gone, declared), end in zip(heard, ends, strict=False):
        if gone:
            continue
        for at in range(max(start + CELL, piece.start), end, CELL):
            yield at, tuple(declared)


COLUMNS = (
    *("grain", "window_start", "window_us", "instance_id", "dp_rank", "part", "version", "is_deleted", "life_id", *_PARTS),
    *("windows", "is_final", "expected_us", "expected_until", "observed_us", "first_window", "last_window", "reasons", "register"),
)


def columns(absences: Sequence[Absence], version: int) -> list[list[Any]]:
    """``absences`` as :data:`COLUMNS` of ``rank_rollups``."""
    grain = GRAINS[0]
    nobody: Declared = (0, None, None, "", "", None, 0, "")
    rows = [
        (
            *(grain.name, each.start, grain.us, each.instance_id, each.dp_rank, 0, version, int(each.declared is None), ""),
            *(nobody if each.declared is None else each.declared),
            *(0, True, grain.us, (each.start + CELL) * 1_000_000, 0, each.start * 1_000_000, each.start * 1_000_000),
            *(["absent"], "indeterminate"),
        )
        for each in absences
    ]
    return [list(column) for column in zip(*rows, strict=True)]
