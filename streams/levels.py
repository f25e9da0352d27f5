"""Extra copies of one tier over time: the steps by window, and the levels between them. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

Bearer = tuple[str, int] | tuple[str, str]
"""The rank that bears extra copies, or a pair of workloads that have content in common."""

Counts = list[int]
"""Inside blocks, inside tokens, between blocks, between tokens."""


class Level:
    """Extra copies of one scope inside one row: the level now, since when, its integral and maxima so far.

    Counts are inside blocks, inside tokens, between blocks, between tokens, inside bytes, between bytes; maxima of the same, and of both
    together: blocks, tokens, bytes. ``sized``: the bytes are known of every rank that bore a copy.
    """

    __slots__ = ("now", "since", "sized", "sums", "tops")

    def __init__(self, since: int) -> None:
        self.now = [0, 0, 0, 0, 0, 0]
        self.since = since
        self.sums = [0, 0, 0, 0, 0, 0]
        self.tops = [0, 0, 0, 0, 0, 0, 0, 0, 0]
        self.sized = True

    def move(self, at: int, counts: Sequence[int], bytes_per_token: int | None) -> None:
        """At ``at`` the level changes by ``counts`` of a rank whose tokens have that many bytes."""
        if at > self.since:
            self.hold_until(at)
        now = self.now
        inside, between = counts[1], counts[3]
        now[0] += counts[0]
        now[1] += inside
        now[2] += counts[2]
        now[3] += between
        if bytes_per_token is not None:
            now[4] += inside * bytes_per_token
            now[5] += between * bytes_per_token
        elif inside or between:
            self.sized = False

    def hold_until(self, at: int) -> None:
        """The level held from ``since`` to ``at``; only a state of positive duration counts."""
        span = at - self.since
        if span > 0:
            if any(self.now):
                now, sums = self.now, self.sums
                for index in range(6):
                    sums[index] += now[index] * span
                self.top()
            self.since = at

    def top(self) -> None:
        """Take the present state into the maxima."""
        now, tops = self.now, self.tops
        for index, value in enumerate((*now, now[0] + now[2], now[1] + now[3], now[4] + now[5])):
            if value > tops[index]:  # noqa: PLR1730 (a call each would take longer than all the rest)
                tops[index] = value


class Tier:
    """Steps of one tier by window, and the levels at the start of one of them (``base``).

    ``rows`` are the starts of the rows given out so far, ``lengths`` what each of them covered, ``open_rows`` those that were not final,
    ``given`` what of a long row was given out. ``pairs``: the first window with a step of each pair of workloads. ``kept`` counts steps.
    """

    def __init__(self) -> None:
        self.steps: dict[int, dict[int, dict[Bearer, Counts]]] = {}
        self.busy: list[int] = []
        self.rows: list[int] = []
        self.lengths: dict[int, int] = {}
        self.given: dict[int, set[tuple[str, str]]] = {}
        self.open_rows: set[int] = set()
        self.pairs: dict[tuple[str, str], int] = {}
        self.base = 0
        self.levels: dict[Bearer, Counts] = {}
        self.dirty_from: int | None = None
        self.kept = 0

    def add(self, window: int, at: int, bearer: Bearer, counts: Counts) -> None:
        """One more step; what lies before the base is part of the levels there."""
        moments = self.steps.get(window)
        if moments is None:
            moments = self.steps[window] = {}
            insort(self.busy, window)
        bearers = moments.setdefault(at, {})
        if bearer not in bearers:
            self.kept += 1
        add_counts(bearers, bearer, counts, 1)
        if window < self.base:
            add_counts(self.levels, bearer, counts, 1)
        if self.dirty_from is None or window < self.dirty_from:
            self.dirty_from = window

    def move_base(self, window: int) -> None:
        """Make :attr:`levels` the levels at the start of ``window``, by adding or taking back what lies between."""
        if window == self.base:
            return
        sign, low, high = (1, self.base, window) if window > self.base else (-1, window, self.base)
        for each in self.busy[bisect_left(self.busy, low) : bisect_left(self.busy, high)]:
            for moment in self.steps[each].values():
                for bearer, counts in moment.items():
                    add_counts(self.levels, bearer, counts, sign)
        self.base = window

    def row_given(self, start: int, length: int, *, final: bool) -> None:
        """Note that the row [``start``, ``start + length``) was given out."""
        if start not in self.lengths:
            insort(self.rows, start)
        self.lengths[start] = length
        (self.open_rows.discard if final else self.open_rows.add)(start)

    def forget(self, floor: int) -> None:
        """Let go of the windows before ``floor``, which lies not behind the base: they can no longer change."""
        nth = bisect_left(self.busy, floor)
        for each in self.busy[:nth]:
            self.kept -= sum(len(bearers) for bearers in self.steps.pop(each).values())
        del self.busy[:nth]
        nth = bisect_left(self.rows, floor)
        for row in self.rows[:nth]:
            del self.lengths[row]
            self.given.pop(row, None)
            self.open_rows.discard(row)
        del self.rows[:nth]
        self.levels = {bearer: counts for bearer, counts in self.levels.items() if any(counts)}

    def dump(self) -> list[Any]:
        """As plain values for :meth:`restored`."""
        bearers: dict[Bearer, int] = {}
        steps = [
            [
                window,
                [
                    [at - window, [(bearers.setdefault(bearer, len(bearers)), *counts) for bearer, counts in moment.items()]]
                    for at, moment in moments.items()
                ],
            ]
            for window, moments in self.steps.items()
        ]
        levels = [(bearers.setdefault(bearer, len(bearers)), *counts) for bearer, counts in self.levels.items() if any(counts)]
        given = {row: sorted(scopes) for row, scopes in self.given.items()}
        rows = [[row, self.lengths[row], row in self.open_rows] for row in self.rows]
        return [list(bearers), steps, levels, rows, given, [[*pair, since] for pair, since in self.pairs.items()], self.base]

    @classmethod
    def restored(cls, data: Sequence[Any]) -> Tier:
        """The tier that was dumped."""
        tier = cls()
        names, steps, levels, rows, given, pairs, tier.base = data
        bearers: list[Bearer] = [(one, other) for one, other in names]
        for window, moments in steps:
            tier.steps[window] = {window + at: {bearers[index]: counts for index, *counts in moment} for at, moment in moments}
            tier.kept += sum(len(moment) for moment in tier.steps[window].values())
        tier.busy = sorted(tier.steps)
        tier.levels = {bearers[index]: counts for index, *counts in levels}
        for row, length, is_open in rows:
            tier.row_given(row, length, final=not is_open)
        tier.given = {row: {(scope, key) for scope, key in scopes} for row, scopes in given.items()}
        tier.pairs = {(one, other): since for one, other, since in pairs}
        return tier


def add_counts(levels: dict[Bearer, Counts], bearer: Bearer, counts: Counts, sign: int) -> None:
    """Add ``sign`` times ``counts`` to what ``bearer`` has."""
    have = levels.get(bearer)
    if have is None:
        have = levels[bearer] = [0, 0, 0, 0]
    have[0] += sign * counts[0]
    have[1] += sign * counts[1]
    have[2] += sign * counts[2]
    have[3] += sign * counts[3]
