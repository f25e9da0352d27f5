"""What has to be known of a whole run of another producer before its first record is told. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import cast

from producers.segments.contract import CACHE_KINDS, Row

REMEMBERED = 200_000
"""Numbers of a rank that are looked at to tell whether ranks of an instance number their messages together, or apart."""


@dataclass
class Survey:
    """Of one run. Fed with all its records, in order."""

    ranks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    unnumbered: set[str] = field(default_factory=set)
    """Instances with a cache record that has no number."""
    rankless: set[str] = field(default_factory=set)
    """Instances with a clear that does not say of which rank."""
    lossy: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Stretches, by the count of heartbeats before them, in which messages of these instances were dropped."""
    canary: str = ""
    reuse_reporting: str | None = None
    _numbers: dict[str, dict[int, set[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    _apart: set[str] = field(default_factory=set)
    _dropped: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _dropped_at_all: int = 0
    _beats: int = 0

    def add(self, row: Row) -> None:
        """Take note of one record."""
        if row.kind in ("heartbeat", "agent_stop", "agent_start"):
            self._lifecycle(row)
        elif row.kind in (*CACHE_KINDS, "holder_reset", "identity_refused"):
            instance = cast(str, row.instance_id)
            if row.dp_rank is not None or row.kind in ("store", "evict"):
                self.ranks[instance].add(row.dp_rank or 0)
            else:
                self.ranks[instance] |= set()
                if row.kind == "clear":
                    self.rankless.add(instance)
            if row.kind == "holder_reset":
                self._numbers.pop(instance, None)
            elif row.kind in CACHE_KINDS:
                self._number(instance, row)

    def end(self) -> None:
        """All records were seen."""
        for ranks in self.ranks.values():
            if not ranks:
                ranks.add(0)

    def numbered(self, instance: str) -> bool:
        """Whether the instance's own numbers can name its batches."""
        return instance not in self.unnumbered and not (instance in self.rankless and len(self.ranks[instance]) > 1)

    def shared(self, instance: str) -> bool:
        """Whether the ranks of the instance draw their numbers from one sequence: no two of them ever had the same."""
        return len(self.ranks[instance]) > 1 and instance not in self._apart

    def _number(self, instance: str, row: Row) -> None:
        if row.seq is None:
            self.unnumbered.add(instance)
            return
        if instance in self._apart or row.dp_rank is None:
            return
        by_rank = self._numbers[instance]
        if len(by_rank[row.dp_rank]) < REMEMBERED:
            by_rank[row.dp_rank].add(row.seq)
        if any(row.seq in numbers for rank, numbers in by_rank.items() if rank != row.dp_rank):
            self._apart.add(instance)

    def _lifecycle(self, row: Row) -> None:
        self.canary = self.canary or row.canary or ""
        self.reuse_reporting = self.reuse_reporting or row.reuse_reporting
        if row.kind == "agent_start":
            return
        told = 0
        for index, endpoint in enumerate(row.endpoints or ()):
            if not self.ranks[endpoint.source]:
                self.ranks[endpoint.source].add(0)
            key = endpoint.source, endpoint.endpoint, index
            more = endpoint.dropped - self._dropped.get(key, 0)
            self._dropped[key] = endpoint.dropped
            if more > 0:
                told += more
                self.lossy[self._beats].add(endpoint.source)
        dropped = row.dropped or 0
        if dropped - self._dropped_at_all > told:
            self.lossy[self._beats].add("")  # of whom, it does not say: then of all
        self._dropped_at_all = dropped
        self._beats += 1
