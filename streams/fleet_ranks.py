"""What the merger knows of each rank: when it was heard of, what it declared, when it departed, which time was observed. Pure.

From it come the scopes in which a rank counts in a window, and the coverage and the registers of the fleet's figures in it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.reasons import SPOILS_EXACTNESS, SPOILS_FIGURE, UNSETTLED
from schemas.records import DuplicateSteps, Note, Register, rank_key
from streams.shard_ranks import STALE_MS

Rank = tuple[str, int]
Scope = tuple[str, str]
FLEET: Scope = ("fleet", "")

NOT_OF_COPIES = frozenset({"kv_connector", "history_forgotten"})
"""Reasons that lower what was computed again, but say nothing of which rank holds what."""


class Declared:
    """What holds of a rank from ``since_us`` on."""

    __slots__ = ("bytes_per_token", "key", "model", "scopes", "since_us", "workload")

    def __init__(
        self, rank: Rank, since_us: int, workload: str | None, model: str | None, key: tuple[int, str], bytes_per_token: int | None
    ) -> None:
        self.since_us = since_us
        self.workload = workload
        self.model = model
        self.key = key
        self.bytes_per_token = bytes_per_token
        self.scopes: tuple[Scope, ...] = (FLEET, ("rank", rank_key(*rank)), ("workload", workload or ""), ("model", model or ""))

    def same_as(self, other: Declared) -> bool:
        """Whether both declare the same, whenever."""
        return (self.scopes, self.key, self.bytes_per_token, self.model, self.workload) == (
            other.scopes,
            other.key,
            other.bytes_per_token,
            other.model,
            other.workload,
        )


class RankFacts:
    """One rank. Times in microseconds of engine time; ``first_us`` and ``first_held_us`` 0: not yet.

    ``observed`` are stretches (from, to), apart and in order; ``away`` likewise, from a departure to when it was heard of again (0: still
    away).
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.first_us = 0
        self.first_held_us = 0
        self.watermark_us = 0
        self.stale_us = STALE_MS * 1_000
        self.declared: list[Declared] = [Declared(rank, 0, None, None, (0, ""), None)]
        self.declared[0].scopes = self.declared[0].scopes[:2]  # of which workload and model it is, is not known before it is told
        self.told = False
        self.observed: list[tuple[int, int]] = []
        self.away: list[list[int]] = []

    def at(self, at_us: int) -> Declared:
        """What is declared at ``at_us``; the first declaration holds backwards."""
        entries = self.declared
        if len(entries) == 1 or entries[0].since_us > at_us:
            return entries[0]
        return entries[bisect_right(entries, at_us, key=_since) - 1]

    def declare(self, declared: Declared) -> int | None:
        """Take a declaration; from when on it changes what was known, if it does. One from the same instant replaces another."""
        if not self.told:
            self.told = True
            changed = not self.declared[0].same_as(declared)
            self.declared = [declared]
            return 0 if changed else None
        if self.at(declared.since_us).same_as(declared):
            return None
        self.declared = [each for each in self.declared if each.since_us != declared.since_us]
        insort(self.declared, declared, key=_since)
        return 0 if self.declared[0] is declared else declared.since_us

    def expected_in(self, start: int, end: int) -> bool:
        """Whether somebody expects to hear of it in [``start``, ``end``)."""
        if not self.first_us or self.first_us >= end:
            return False
        return not any(left < start and (not back or back >= end) for left, back in self.away)

    def observed_in(self, start: int, end: int) -> int:
        """How much of [``start``, ``end``) was demonstrably observed."""
        total = 0
        for index in range(bisect_right(self.observed, start, key=_until), len(self.observed)):
            since, until = self.observed[index]
            if since >= end:
                break
            total += min(until, end) - max(since, start)
        return total

    def observe(self, since: int, until: int) -> None:
        """[``since``, ``until``) was observed; what touches becomes one stretch."""
        stretches = self.observed
        if stretches and stretches[-1][1] == since:
            stretches[-1] = (stretches[-1][0], until)
            return
        if not stretches or stretches[-1][1] < since:
            stretches.append((since, until))
            return
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*stretches, (since, until)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.observed = merged

    def forget(self, floor: int) -> None:
        """Let go of what concerns only the time before ``floor``."""
        del self.observed[: bisect_right(self.observed, floor, key=_until)]
        del self.declared[: max(0, bisect_right(self.declared, floor, key=_since) - 1)]
        self.away = [each for each in self.away if not each[1] or each[1] >= floor]


def _since(declared: Declared) -> int:
    return declared.since_us


def _until(stretch: tuple[int, int]) -> int:
    return stretch[1]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far the fleet was seen in one window, and how its figures may be read."""

    expected: int
    observed_us: int
    reasons: list[str]
    inside: Register
    between: Register
    register: Register
    key_epoch: int | None


@dataclass(slots=True)
class Heard:
    """What an answer changed: since when windows read otherwise (``dirty``; None: none do), from and to which instant those between do
    (``windows``), and the instants at which something happened (``marks``).
    """

    dirty: int | None = None
    windows: list[tuple[int, int]] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def since(self, at: int) -> None:
        """Everything from ``at`` on reads otherwise."""
        self.dirty = at if self.dirty is None else min(self.dirty, at)


class FleetRanks:
    """All ranks, their notes by window, and what holds of the whole fleet.

    ``scopes``: the first window in which a rank counts in each scope. From then on every window has a row of it, also of zeros: rows that
    another worker gave out before are all replaced.
    """

    def __init__(self, window_us: int) -> None:
        self.known: dict[Rank, RankFacts] = {}
        self.scopes: dict[Scope, int] = {FLEET: 0}
        self.notes: dict[int, set[str]] = {}
        self.floor = 0
        self.missing_since: int | None = None
        self.conflict_since: int | None = None
        self._two_held_since = 0
        self._window_us = window_us

    def get(self, rank: Rank) -> RankFacts:
        """What is known of ``rank``."""
        facts = self.known.get(rank)
        if facts is None:
            facts = self.known[rank] = RankFacts(rank)
        return facts

    def hear(self, message: DuplicateSteps) -> Heard:
        """Take what an answer says of its rank. What is declared, observed and noted is told by shard 0."""
        heard = Heard()
        rank = (message.instance_id, message.dp_rank)
        facts = self.get(rank)
        first = min((each for each in (message.watermark_us, message.first_held_us, *message.observed[:1]) if each), default=0)
        notes = [each for each in message.notes if each.reason != "parent_conflict"]
        first = min((first, *(note.at_us for note in notes if note.at_us and note.reason != "late_data")), default=0) if first else 0
        if first and (not facts.first_us or first < facts.first_us):
            heard.since(first)
            heard.marks.append(first)
            facts.first_us = first
            self._count_in(facts)
        if message.first_held_us and (not facts.first_held_us or message.first_held_us < facts.first_held_us):
            facts.first_held_us = message.first_held_us
            self._count_holders(heard)
        if message.shard == 0:
            self._hear_declared(facts, message, heard)
        facts.watermark_us = max(facts.watermark_us, message.watermark_us)
        for at in range(0, len(message.observed), 2):
            since, until = message.observed[at], message.observed[at + 1]
            if until > max(since, self.floor):
                facts.observe(max(since, self.floor), until)
            heard.marks += [since, until]
            heard.windows.append((since, until))
        for note in notes:
            self.note(note, heard)
        for note in message.notes:
            if note.reason == "parent_conflict" and (self.conflict_since is None or note.at_us < self.conflict_since):
                self.conflict_since = note.at_us
                heard.since(note.at_us)
        return heard

    def note(self, note: Note, heard: Heard) -> None:
        """A reason stands in a window; of one that can no longer change, in the oldest that can."""
        at = max(note.at_us, self.floor)
        reasons = self.notes.setdefault(at - at % self._window_us, set())
        if note.reason not in reasons:
            reasons.add(note.reason)
            heard.windows.append((at, at))  # no mark: a rank's reasons stand in its idle windows too

    def _hear_declared(self, facts: RankFacts, message: DuplicateSteps, heard: Heard) -> None:
        key = (message.key_epoch, message.canary)
        declared = Declared(facts.rank, message.declared_at_us, message.workload, message.model, key, message.kv_bytes_per_token)
        changed = facts.declare(declared)
        if changed is not None:
            heard.since(changed)
            self._count_in(facts)
        facts.stale_us = (message.staleness_ms or STALE_MS) * 1_000
        if facts.away and not facts.away[-1][1] and not message.departed:
            # The batch with which it comes back is told by a message of its own.
            left = facts.away[-1][0]
            facts.away[-1][1] = max(message.watermark_us, left, 1)
            heard.since(left)
        elif message.departed and (not facts.away or facts.away[-1][1]):
            facts.away.append([message.watermark_us, 0])
            heard.since(message.watermark_us)

    def _count_in(self, facts: RankFacts) -> None:
        """The scopes in which a rank counts, from its first engine time on."""
        for number, declared in enumerate(facts.declared if facts.first_us else ()):
            since = max(declared.since_us, facts.first_us) if number else facts.first_us
            window = since - since % self._window_us
            for scope in declared.scopes:
                self.scopes[scope] = min(window, self.scopes.get(scope, window))

    def _count_holders(self, heard: Heard) -> None:
        """Since when two ranks have held content."""
        held = sorted(facts.first_held_us for facts in self.known.values() if facts.first_held_us)[:2]
        if len(held) > 1:
            self.shared_since(held[1], heard)

    def live(self, as_of: int) -> list[RankFacts]:
        """Ranks that windows wait for: not departed, and not further behind than they may be."""
        return [
            facts
            for facts in self.known.values()
            if facts.watermark_us >= max(1, as_of - facts.stale_us) and not (facts.away and not facts.away[-1][1])
        ]

    def heard_by(self, end: int) -> int:
        """How many ranks were heard of before ``end``."""
        return sum(1 for facts in self.known.values() if facts.first_us and facts.first_us < end)

    def shared_since(self, at: int, heard: Heard) -> None:
        """Extra copies at ``at``: two ranks have held content by then, whoever told."""
        if not self._two_held_since or at < self._two_held_since:
            heard.since(at)
            self._two_held_since = at

    def coverage(self, start: int, end: int, as_of: int, *, complete: bool) -> Coverage:
        """Of the window [``start``, ``end``) up to ``as_of``; ``complete``: all shards have reported.

        The rules are those of the figures over a span: what the ranks' windows note lowers what was seen of all of them, since a copy is
        a relation between ranks.
        """
        expected = [facts for facts in self.known.values() if facts.expected_in(start, end)]
        span = as_of - start
        observed = sum(facts.observed_in(start, as_of) for facts in expected)
        reasons = {reason for at in self._windows(start, end) for reason in self.notes.get(at, ())} - NOT_OF_COPIES
        if not expected:
            reasons.add("no_ranks")
        elif not observed:
            reasons.add("not_observed")
        elif observed < len(expected) * span:
            reasons.add("coverage")
        if not complete or (self.missing_since is not None and self.missing_since < end):
            reasons.add("shards_missing")
        if self.conflict_since is not None and self.conflict_since < end:
            reasons.add("parent_conflict")
        single = not self._two_held_since or self._two_held_since >= end
        if single and expected:
            reasons.add("single_holder")
        epochs = {facts.at(start).key[0] if facts.told else None for facts in expected}
        uncomparable, split = _comparable([(facts.rank[0], facts.at(start)) for facts in expected])
        unmeasured = single or bool(reasons & SPOILS_FIGURE)
        best: Register = "lower_bound" if reasons & (SPOILS_EXACTNESS | UNSETTLED) else "exact"
        inside: Register = "indeterminate" if unmeasured or split else best
        between: Register = "indeterminate" if unmeasured or uncomparable else best
        both: Register = "indeterminate" if "indeterminate" in (inside, between) else best
        epoch = epochs.pop() if len(epochs) == 1 else None
        return Coverage(len(expected), observed, sorted(reasons | uncomparable), inside, between, both, epoch)

    def _windows(self, start: int, end: int) -> Iterable[int]:
        if end - start <= self._window_us:
            return (start,)
        return [at for at in self.notes if start <= at < end]

    def forget(self, floor: int) -> None:
        """Windows before ``floor`` can no longer change."""
        self.floor = floor
        self.notes = {at: reasons for at, reasons in self.notes.items() if at >= floor}
        for facts in self.known.values():
            facts.forget(floor)

    def dump(self) -> list[Any]:
        """As plain values for :meth:`load`."""
        ranks = [
            [
                *facts.rank,
                [facts.first_us, facts.first_held_us, facts.watermark_us, facts.stale_us, facts.told],
                [[each.since_us, each.workload, each.model, each.key, each.bytes_per_token] for each in facts.declared],
                facts.observed,
                facts.away,
            ]
            for facts in self.known.values()
        ]
        notes = {at: sorted(reasons) for at, reasons in self.notes.items()}
        scopes = [[*scope, since] for scope, since in self.scopes.items()]
        return [ranks, scopes, notes, self.floor, self.missing_since, self.conflict_since, self._two_held_since]

    def load(self, data: Sequence[Any]) -> None:
        """Take on what was dumped."""
        ranks, scopes, notes, self.floor, self.missing_since, self.conflict_since, self._two_held_since = data
        self.scopes = {(name, key): since for name, key, since in scopes}
        self.notes = {at: set(reasons) for at, reasons in notes.items()}
        for instance_id, dp_rank, numbers, declared, observed, away in ranks:
            facts = self.get((instance_id, dp_rank))
            facts.first_us, facts.first_held_us, facts.watermark_us, facts.stale_us, facts.told = numbers
            facts.observed = [(since, until) for since, until in observed]
            facts.away = [list(each) for each in away]
            if facts.told:
                facts.declared = [
                    Declared(facts.rank, since, workload, model, (key[0], key[1]), size) for since, workload, model, key, size in declared
                ]


def _comparable(expected: list[tuple[str, Declared]]) -> tuple[set[str], bool]:
    """Why copies between these ranks' instances cannot be told, and whether those inside one cannot."""
    keys: dict[str, set[tuple[int, str]]] = {}
    unnamed = False
    for instance, declared in expected:
        keys.setdefault(instance, set()).add(declared.key)
        unnamed = unnamed or declared.model is None
    uncomparable = set()
    if unnamed and len(keys) > 1:
        uncomparable.add("model_undeclared")
    if len({key for of_instance in keys.values() for key in of_instance}) > 1:
        uncomparable.add("key_change")
    return uncomparable, any(len(of_instance) > 1 for of_instance in keys.values())
