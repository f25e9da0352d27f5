"""Who holds one content over time, and by which steps its extra copies change. Pure, no clocks, no I/O.

Every extra copy is borne by one rank, so that cuts by rank, workload or model add up to the fleet:

* inside an instance each rank but the one that has held the content longest bears one copy (`inside`);
* between instances, each matured instance but the one that has held it longest bears one, on the rank of it that has
  held the content longest (`between`).

Ties go to the smaller instance name, then the smaller data-parallel rank. Beside it, borne by nobody: the pairs of workloads
that have the content at once, each once the younger of the two has had it for the clock skew allowance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from schemas.records import UNKNOWN_PARENT

Rank = tuple[str, int]
Pair = tuple[str, str]
Holder = tuple[Rank, str]
"""A rank, and the workload declared for it when it came to hold something (empty: undeclared)."""

Event = tuple[int, Holder, bool]
"""(time, who, whether it holds the content from now on)."""

MARK_EVENTS = 16
"""So many events lie at least between two states that are kept of one content."""

_INSIDE, _BETWEEN = 0, 1


class Steps:
    """Changes in blocks: of extra copies by (time, rank that bears them), inside and between, and by (time, pair of workloads)."""

    __slots__ = ("pairs", "ranks")

    def __init__(self) -> None:
        self.ranks: dict[tuple[int, Rank], list[int]] = {}
        self.pairs: dict[tuple[int, Pair], int] = {}

    def add(self, at: int, rank: Rank, which: int, change: int) -> None:
        """One copy more or fewer, ``which`` 0 inside an instance, 1 between."""
        step = self.ranks.get((at, rank))
        if step is None:
            step = self.ranks[at, rank] = [0, 0]
        step[which] += change

    def pair(self, at: int, one: str, other: str, change: int) -> None:
        """Two workloads have one content more or fewer in common."""
        key = (at, (one, other) if one < other else (other, one))
        self.pairs[key] = self.pairs.get(key, 0) + change

    def take(self, other: Steps, sign: int) -> None:
        """Add ``sign`` times the other's changes."""
        for (at, rank), (inside, between) in other.ranks.items():
            self.add(at, rank, _INSIDE, sign * inside)
            self.add(at, rank, _BETWEEN, sign * between)
        for key, change in other.pairs.items():
            self.pairs[key] = self.pairs.get(key, 0) + sign * change


class _Instance:
    """One instance that holds a content: since when, whether that has matured, and its ranks with their workloads, longest first.

    ``foretold`` is the rank for which the copy that matures at ``matures_at`` was already announced.
    """

    __slots__ = ("foretold", "matured", "matures_at", "ranks")

    def __init__(self, matures_at: int) -> None:
        self.matures_at = matures_at
        self.matured = False
        self.foretold: Rank | None = None
        self.ranks: dict[Rank, str] = {}

    def copy(self) -> _Instance:
        other = _Instance(self.matures_at)
        other.matured, other.foretold, other.ranks = self.matured, self.foretold, dict(self.ranks)
        return other


class State:
    """Who holds one content after all events so far; ``instances`` in the order in which they came to hold it.

    ``workloads``: since when each workload has it, and on how many ranks.
    """

    __slots__ = ("instances", "workloads")

    def __init__(self) -> None:
        self.instances: dict[str, _Instance] = {}
        self.workloads: dict[str, list[int]] = {}

    def copy(self) -> State:
        """An independent one."""
        other = State()
        other.instances = {name: instance.copy() for name, instance in self.instances.items()}
        other.workloads = {name: list(entry) for name, entry in self.workloads.items()}
        return other

    def holders(self) -> set[Rank]:
        """The ranks that have the content."""
        return {rank for instance in self.instances.values() for rank in instance.ranks}

    def apply(self, at: int, opened: Iterable[Holder], closed: Iterable[Rank], skew_us: int, steps: Steps) -> None:
        """Move to the state after ``at``, later than anything applied; both in the order of ranks, and of each rank one change."""
        pending = self._settle(at, steps)
        for rank, workload in opened:
            self._open(at, rank, workload, skew_us, pending, steps)
        for rank in closed:
            self._close(at, rank, skew_us, pending, steps)
        self._foretell(pending, steps)

    def _settle(self, at: int, steps: Steps) -> dict[str, None]:
        """Instances that matured before ``at`` have; the announcements of the others are taken back."""
        pending: dict[str, None] = {}
        for name, instance in reversed(self.instances.items()):
            if instance.matured:
                break  # they mature in the order in which they opened
            if instance.matures_at < at:
                instance.matured = True
                continue
            pending[name] = None
            if instance.foretold is not None:
                steps.add(instance.matures_at, instance.foretold, _BETWEEN, -1)
                instance.foretold = None
        return pending

    def _foretell(self, pending: dict[str, None], steps: Steps) -> None:
        first = next(iter(self.instances), None)
        for name in pending:
            if name != first:
                instance = self.instances[name]
                instance.foretold = next(iter(instance.ranks))
                steps.add(instance.matures_at, instance.foretold, _BETWEEN, 1)

    def _open(self, at: int, rank: Rank, workload: str, skew_us: int, pending: dict[str, None], steps: Steps) -> None:
        instance = self.instances.get(rank[0])
        if instance is None:
            instance = self.instances[rank[0]] = _Instance(at + skew_us)
            pending[rank[0]] = None
        elif rank in instance.ranks:
            return
        else:
            steps.add(at, rank, _INSIDE, 1)
        instance.ranks[rank] = workload
        entry = self.workloads.get(workload)
        if entry is not None:
            entry[1] += 1
            return
        for other in self.workloads:
            steps.pair(at + skew_us, workload, other, 1)
        self.workloads[workload] = [at, 1]

    def _close(self, at: int, rank: Rank, skew_us: int, pending: dict[str, None], steps: Steps) -> None:
        instance = self.instances.get(rank[0])
        if instance is None or rank not in instance.ranks:
            return
        bears = instance.matured and next(iter(self.instances)) != rank[0]
        was_oldest = next(iter(instance.ranks)) == rank
        self._leave(at, instance.ranks.pop(rank), skew_us, steps)
        if not was_oldest:
            steps.add(at, rank, _INSIDE, -1)
            return
        if bears:
            steps.add(at, rank, _BETWEEN, -1)
        if instance.ranks:  # the next rank of the instance takes its place
            heir = next(iter(instance.ranks))
            steps.add(at, heir, _INSIDE, -1)
            if bears:
                steps.add(at, heir, _BETWEEN, 1)
            return
        was_first = next(iter(self.instances)) == rank[0]
        del self.instances[rank[0]]
        pending.pop(rank[0], None)
        if was_first and self.instances:
            successor = next(iter(self.instances.values()))
            if successor.matured:  # the one that has now held it longest bears nothing
                steps.add(at, next(iter(successor.ranks)), _BETWEEN, -1)

    def _leave(self, at: int, workload: str, skew_us: int, steps: Steps) -> None:
        """One rank fewer of a workload has the content; with its last, what it had in common with others ends, or never came to be."""
        entry = self.workloads[workload]
        entry[1] -= 1
        if entry[1]:
            return
        del self.workloads[workload]
        for other, (since, _) in self.workloads.items():
            steps.pair(max(at, max(since, entry[0]) + skew_us), workload, other, -1)

    def dump(self) -> list[Any]:
        """As plain values for :meth:`restored`."""
        return [
            [[name, each.matures_at, each.matured, each.foretold, list(each.ranks.items())] for name, each in self.instances.items()],
            [[name, *entry] for name, entry in self.workloads.items()],
        ]

    @classmethod
    def restored(cls, data: Sequence[Any]) -> State:
        """The state that was dumped."""
        state = cls()
        for name, matures_at, matured, foretold, ranks in data[0]:
            instance = state.instances[name] = _Instance(matures_at)
            instance.matured = matured
            instance.foretold = None if foretold is None else (foretold[0], foretold[1])
            instance.ranks = {(rank[0], rank[1]): workload for rank, workload in ranks}
        state.workloads = {name: [since, count] for name, since, count in data[1]}
        return state


class Content:
    """One content: its size in tokens, the events kept, in the order of their time, and the states before and after them.

    While a single rank has ever held it nothing is duplicated, and ``tail`` is not kept: most content never needs it.
    ``base`` is the state after all events up to ``base_at``, which were let go. ``first_at`` is when anybody was first seen to hold it.
    ``parent`` is the content before it, told first at ``parent_at``; ``rivals`` all that were told, where they differ.
    ``mark`` is the state after ``base`` and the first ``marked`` events, ``None`` where none is kept.
    """

    __slots__ = ("base", "base_at", "events", "first_at", "last_at", "mark", "marked", "parent", "parent_at", "rivals", "size", "tail")

    def __init__(self, size: int) -> None:
        self.size = size
        self.events: list[Event] = []
        self.tail: State | None = None
        self.last_at = -1
        self.base: State | None = None
        self.base_at = -1
        self.mark: State | None = None
        self.marked = 0
        self.first_at = -1
        self.parent = UNKNOWN_PARENT
        self.parent_at = 0
        self.rivals: dict[bytes, int] | None = None

    def append(self, at: int, holder: Holder, opened: bool, skew_us: int, steps: Steps) -> None:
        """An event later than all others."""
        tail, events = self.tail, self.events
        if tail is None and events and events[0][1][0] != holder[0]:
            tail = self.tail = self.replay(skew_us)[0]  # of one rank alone: no steps so far
        if tail is not None:
            if tail is self.base:
                tail = self.tail = tail.copy()
            tail.apply(at, (holder,) if opened else (), () if opened else (holder[0],), skew_us, steps)
        events.append((at, holder, opened))
        self.last_at = at

    def insert(self, late: Iterable[Event], skew_us: int, steps: Steps) -> None:
        """Put late events where they belong, and add the difference to what was announced before.

        What lies before the first of them says the same before and after, so it takes no part: the work does not grow with the past.
        """
        # Of one rank the last word on an instant holds.
        moments = {(max(at, self.base_at + 1), holder[0]): (holder, opened) for at, holder, opened in late}
        kept = bisect_left(self.events, min(at for at, _ in moments), key=_time_of)
        state, moved = self._after(kept, skew_us), self.events[kept:]
        before, after = Steps(), Steps()
        _apply_all(state.copy(), moved, skew_us, before)
        moved = [event for event in moved if (event[0], event[1][0]) not in moments]
        moved += [(at, holder, opened) for (at, _), (holder, opened) in moments.items()]
        moved.sort(key=_time_of)
        _apply_all(state, moved, skew_us, after)
        self.events[kept:] = moved
        self.last_at = moved[-1][0]
        self.tail = None if self.base is None and self._alone() else state
        steps.take(after, 1)
        steps.take(before, -1)

    def _after(self, count: int, skew_us: int) -> State:
        """A state of its own, after the first ``count`` events kept, no later than the first that changes: see ``mark``."""
        if self.marked > count:
            self.mark, self.marked = None, 0
        known = self.base if self.mark is None else self.mark
        state = State() if known is None else known.copy()
        _apply_all(state, self.events[self.marked : count], skew_us, Steps())
        if count - self.marked >= MARK_EVENTS:
            self.mark, self.marked = state.copy(), count
        return state

    def _alone(self) -> bool:
        """Whether all events kept are of one rank."""
        first = self.events[0][1][0]
        return all(event[1][0] == first for event in self.events)

    def replay(self, skew_us: int) -> tuple[State, Steps]:
        """State and steps of the kept events, from the settled state on."""
        state = State() if self.base is None else self.base.copy()
        steps = Steps()
        _apply_all(state, self.events, skew_us, steps)
        return state, steps

    def settle(self, border: int, skew_us: int) -> None:
        """Let go of the events before ``border``: they can no longer change."""
        kept = bisect_left(self.events, border, key=_time_of)
        if not kept:
            return
        self.base_at, _, opened = self.events[kept - 1]
        if self.tail is None or self.marked <= kept:
            self.mark, self.marked = None, kept
        self.marked -= kept
        if self.tail is None:  # of one rank: its last word says it all
            del self.events[: kept - opened]
            return
        state = State() if self.base is None else self.base
        _apply_all(state, self.events[:kept], skew_us, Steps())
        self.base = state
        del self.events[:kept]
        if not self.events:
            self.tail = state
            self._settle_down(skew_us)

    def _settle_down(self, skew_us: int) -> None:
        """Of content that a single rank holds, and no event since, the rank's opening says it all."""
        assert self.base is not None
        holders = [(instance.matures_at - skew_us, each) for instance in self.base.instances.values() for each in instance.ranks.items()]
        if len(holders) == 1:
            self.events = [(*holders[0], True)]
            self.base = self.tail = None

    def forgotten(self) -> bool:
        """Whether nothing is left to know: no events, and nobody holds it."""
        return not self.events and (self.base is None or not self.base.instances)

    def holders_at(self, at: int) -> set[Rank]:
        """The ranks that have it after all events up to and including ``at`` (of what was let go: at the end of that)."""
        ranks = set() if self.base is None else self.base.holders()
        for time, (rank, _), opened in self.events:
            if time > at:
                break
            (ranks.add if opened else ranks.discard)(rank)
        return ranks

    def behind(self, parent: bytes, at: int) -> int | None:
        """``parent`` is told to lie before it. If that contradicts what was told otherwise: since when it does, if that is news."""
        if parent == UNKNOWN_PARENT:
            return None
        if self.rivals is None:
            if self.parent == UNKNOWN_PARENT:
                self.parent, self.parent_at = parent, at
                return None
            if parent == self.parent:
                self.parent_at = min(self.parent_at, at)
                return None
            self.rivals = {self.parent: self.parent_at, parent: at}
        elif at >= self.rivals.get(parent, at + 1):
            return None
        else:
            self.rivals[parent] = at
        (self.parent_at, self.parent), (since, _) = sorted((told, each) for each, told in self.rivals.items())[:2]
        return since

    def parent_as_of(self, at: int) -> bytes:
        """What was told up to and including ``at`` to lie before it."""
        return self.parent if self.parent_at <= at else UNKNOWN_PARENT

    def restore_tail(self, skew_us: int) -> None:
        """Make the state after all events, which is not kept on disk."""
        if not self.events:
            self.tail = self.base
        elif self.base is not None or not self._alone():
            self.tail, _ = self.replay(skew_us)


def _time_of(event: Event) -> int:
    return event[0]


def _apply_all(state: State, events: list[Event], skew_us: int, steps: Steps) -> None:
    for at, moment in groupby(events, key=_time_of):
        changes = sorted(moment, key=_rank_of)
        opened = [holder for _, holder, is_open in changes if is_open]
        state.apply(at, opened, [holder[0] for _, holder, is_open in changes if not is_open], skew_us, steps)


def _rank_of(event: Event) -> Rank:
    return event[1][0]
