"""Content that several ranks hold, as the shards tell of it, and its trunks at each instant. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.records import ID_BYTES, NO_ID, UNKNOWN_PARENT, DuplicateSteps, SharedPrefix
from streams.fleet_ranks import Coverage, FleetRanks
from streams.prefixes import Rank, Shared, Trunk, trunks
from streams.residency import SEMANTICS_VERSION

REPEATS = 60
"""So many instants after the last change the trunks are told again and again; then not before something changes."""

_Change = tuple[bytes, Shared | None]


class SharedContents:
    """What every shard told of shared content. ``step_us``: the time between two instants; all shards must have told one."""

    def __init__(self, shards: int, step_us: int) -> None:
        self._shards = shards
        self._step_us = step_us
        self._now: dict[bytes, Shared] = {}
        self._pending: dict[int, list[_Change]] = {}
        self._told: dict[int, int] = {}
        self._late: dict[int, int] = {}
        self._late_since: int | None = None
        self._done_us = 0
        self._changed_us = 0
        self._trunks: list[Trunk] = []

    def take(self, message: DuplicateSteps) -> None:
        """Take what an answer tells."""
        shard = message.shard
        ranks: list[Rank] = []
        for name in message.holder_names:
            instance_id, _, dp_rank = name.rpartition("/")
            ranks.append((instance_id, int(dp_rank)))
        for each in message.shared:
            holders = tuple(sorted(ranks[index] for index in each.holders))
            content = Shared(each.parent_id, each.block_size, each.first_at_us, holders) if len(holders) > 1 else None
            at = max(each.as_of_us or message.shared_as_of_us, self._done_us + self._step_us)
            self._pending.setdefault(at, []).append((each.content_id, content))
        self._told[shard] = max(self._told.get(shard, 0), message.shared_as_of_us)
        if message.shared_late > self._late.get(shard, 0):
            self._late[shard] = message.shared_late
            self._late_since = self._done_us if self._late_since is None else self._late_since

    @property
    def ready(self) -> bool:
        """Whether all shards have told of an instant that was not given out."""
        return len(self._told) == self._shards and min(self._told.values()) > self._done_us

    def drain(self, fleet: FleetRanks, window_us: int, version: int) -> list[SharedPrefix]:
        """Rows of the instants of which all shards have told since the last drain."""
        if not self.ready:
            return []
        until = min(self._told.values())
        rows: list[SharedPrefix] = []
        for at in self._instants(until):
            changes = self._pending.pop(at, [])
            for key, content in changes:
                if content is None:
                    self._now.pop(key, None)
                else:
                    self._now[key] = content
            if changes:
                self._trunks = trunks(self._now)
                self._changed_us = at
            if self._trunks:
                coverage = fleet.coverage(at - window_us, at, at, complete=True)
                rows += [self._row(at, place, trunk, fleet, coverage, window_us, version) for place, trunk in enumerate(self._trunks, 1)]
        self._done_us = until
        return rows

    def _instants(self, until: int) -> list[int]:
        """Instants up to ``until`` that are due: with every change, and for a while after it."""
        due = sorted(at for at in self._pending if at <= until)
        out: list[int] = []
        since, at = self._changed_us, self._done_us
        for change in [*due, until + self._step_us]:
            last = min(change - self._step_us, since + REPEATS * self._step_us)
            out += range(at + self._step_us, last + 1, self._step_us)
            if change <= until:
                out.append(change)
                since = at = change
        return out

    def _row(self, at: int, place: int, trunk: Trunk, fleet: FleetRanks, coverage: Coverage, window_us: int, version: int) -> SharedPrefix:
        declared = [fleet.get(rank).at(at - window_us) for rank in trunk.ranks]
        sizes = [each.bytes_per_token for each in declared]
        known = [size for size in sizes if size is not None]
        late = ["late_data"] if self._late_since is not None and at > self._late_since else []
        return SharedPrefix(
            as_of_us=at,
            semantics_version=SEMANTICS_VERSION,
            version=version,
            place=place,
            content_id=trunk.last,
            head_content_id=trunk.head,
            parent_content_id=None if trunk.parent in (NO_ID, UNKNOWN_PARENT) else trunk.parent,
            blocks=trunk.blocks,
            tokens=trunk.tokens,
            depth_tokens=trunk.depth,
            copies=len(trunk.ranks),
            instances=len({rank[0] for rank in trunk.ranks}),
            extra_blocks=trunk.blocks * (len(trunk.ranks) - 1),
            extra_tokens=trunk.extra_tokens,
            # The copy that is no extra one is taken to be the largest.
            extra_bytes=trunk.tokens * (sum(known) - max(known)) if len(known) == len(sizes) else None,
            ranks=sorted(f"{instance_id}/{dp_rank}" for instance_id, dp_rank in trunk.ranks),
            workloads=sorted({each.workload or "" for each in declared}),
            models=sorted({each.model or "" for each in declared}),
            first_seen_us=trunk.first_us,
            coverage=coverage.observed_us / (coverage.expected * window_us) if coverage.expected else 0.0,
            register="lower_bound" if late and coverage.register == "exact" else coverage.register,
            reasons=sorted({*coverage.reasons, *late}),
        )

    def dump(self) -> list[Any]:
        """As plain values for :meth:`load`."""
        ranks: dict[Rank, int] = {}

        def plain(content: Shared | None) -> Any:
            if content is None:
                return None
            return content.parent, content.size, content.first_us, [ranks.setdefault(rank, len(ranks)) for rank in content.ranks]

        now = [b"".join(self._now), [plain(content) for content in self._now.values()]]
        pending = {at: [(key, plain(content)) for key, content in changes] for at, changes in self._pending.items()}
        return [now, pending, list(ranks), self._told, self._late, self._late_since, self._done_us, self._changed_us]

    def load(self, data: Sequence[Any]) -> None:
        """Take on what was dumped."""
        (keys, contents), pending, names, self._told, self._late, self._late_since, self._done_us, self._changed_us = data
        ranks: list[Rank] = [(instance_id, dp_rank) for instance_id, dp_rank in names]

        def restored(plain: Any) -> Shared | None:
            if plain is None:
                return None
            parent, size, first_us, held = plain
            return Shared(parent, size, first_us, tuple(ranks[index] for index in held))

        self._now = {}
        for number, plain in enumerate(contents):
            content = restored(plain)
            if content is not None:
                self._now[keys[number * ID_BYTES : (number + 1) * ID_BYTES]] = content
        self._pending = {at: [(key, restored(plain)) for key, plain in changes] for at, changes in pending.items()}
        self._trunks = trunks(self._now)
