"""What one rank tells the fleet: content opened and closed, and how far it was observed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.records import UNKNOWN_PARENT, Declaration, Note, ResidencyChanges, ResidencyStep

Held = dict[bytes, int]
"""Content id -> how many blocks of the rank hold it in one tier."""

Touched = dict[bytes, tuple[bool, int, bytes]]
"""Content id -> whether it was held before this batch, its size in tokens, and the content before it as far as a store told."""


def open_content(held: Held, touched: Touched, content: bytes, size: int, parent: bytes) -> None:
    """One more block of this rank and tier holds ``content``."""
    copies = held.get(content, 0)
    held[content] = copies + 1
    if not copies:
        known = touched.get(content)
        if known is None:
            touched[content] = (False, size, parent)
        elif known[2] == UNKNOWN_PARENT:
            touched[content] = (known[0], known[1], parent)


def close_content(held: Held, touched: Touched, content: bytes, size: int) -> None:
    """One block fewer of this rank and tier holds ``content``."""
    copies = held[content]
    if copies > 1:
        held[content] = copies - 1
        return
    del held[content]
    if content not in touched:
        touched[content] = (True, size, UNKNOWN_PARENT)


@dataclass(frozen=True, slots=True)
class Told:
    """What is declared of the rank in its messages to the fleet; holds since ``since_us``, engine time (0: from the start)."""

    workload: str | None = None
    model: str | None = None
    key_epoch: int = 0
    canary: str = ""
    kv_bytes_per_token: int | None = None
    staleness_ms: int = 0
    since_us: int = 0

    def same(self, other: Told) -> bool:
        """Whether both say the same, whenever."""
        return self._words() == other._words()

    def _words(self) -> tuple[object, ...]:
        return self.workload, self.model, self.key_epoch, self.canary, self.kv_bytes_per_token, self.staleness_ms


def told(declaration: Declaration, groups: Iterable[int], since_us: int) -> Told:
    """What the fleet is told of ``declaration`` of a rank with these cache groups."""
    return Told(
        declaration.workload,
        declaration.model,
        declaration.key_epoch,
        declaration.canary,
        _least_bytes(declaration, list(groups)),
        declaration.staleness_ms,
        since_us,
    )


def group_bytes(declaration: Declaration, group: int, groups: int) -> int | None:
    """Bytes per token of cache group ``group``, of a rank that has ``groups`` of them."""
    of_group = declaration.kv_bytes_by_group.get(str(group))
    if of_group is not None:
        return of_group
    return declaration.kv_bytes_per_token if groups == 1 else None


def _least_bytes(declaration: Declaration, groups: list[int]) -> int | None:
    """The least of the groups the rank has, unknown if one is; before any has shown, as if they were those declared."""
    if not groups:
        return min(declaration.kv_bytes_by_group.values(), default=declaration.kv_bytes_per_token)
    found = [group_bytes(declaration, group, len(groups)) for group in groups]
    known = [each for each in found if each is not None]
    return min(known) if len(known) == len(found) else None


_Part = tuple[list[bytes], list[bytes], list[bytes]]
"""Contents opened, contents closed, and what lies before each of those opened."""


class FleetNews:
    """Gathers what each content shard is to hear, and cuts it into messages that each have one declaration.

    ``held`` and ``touched`` are per tier. ``departed``: the forwarder stopped on purpose; for the fleet, whose clock is engine time,
    the rank is back with its next batch.
    """

    def __init__(self, instance_id: str, dp_rank: int, shards: int) -> None:
        self.held: dict[str, Held] = {}
        self.touched: dict[str, Touched] = {}
        self.told = Told()
        self.departed = False
        self.moved = False
        self.at_once = True  # the next batch is told in a message of its own: the first, and the first after a departure
        self._rank = (instance_id, dp_rank)
        self._shards = shards
        self._steps: list[list[ResidencyStep]] = [[] for _ in range(shards)]
        self._observed: list[int] = []
        self._notes: list[Note] = []
        self._sealed: list[list[ResidencyChanges]] = [[] for _ in range(shards)]

    def of_tier(self, tier: str) -> tuple[Held, Touched]:
        """What is held in ``tier``, and what this batch touched there."""
        held = self.held.get(tier)
        if held is None:
            held = self.held[tier] = {}
            self.touched[tier] = {}
        return held, self.touched[tier]

    def flush(self, offset: int, at: int) -> None:
        """Turn what the batch touched into steps: net of what it undid itself, so a content is opened or closed once."""
        for tier, touched in self.touched.items():
            if not touched:
                continue
            held, shards = self.held[tier], self._shards
            parts: dict[tuple[int, int], _Part] = {}
            part: _Part = ([], [], [])
            part_shard = part_size = -1
            for content, (before, size, parent) in touched.items():
                after = content in held
                if before == after:
                    continue
                shard = int.from_bytes(content[:4], "big") % shards if shards > 1 else 0
                if size != part_size or shard != part_shard:
                    part_shard, part_size = shard, size
                    part = parts.setdefault((shard, size), ([], [], []))
                if after:
                    part[0].append(content)
                    part[2].append(parent)
                else:
                    part[1].append(content)
            touched.clear()
            for (shard, size), (opened, closed, parents) in parts.items():
                self._steps[shard].append(ResidencyStep(offset, at, tier, size, b"".join(opened), b"".join(closed), b"".join(parents)))
        self.moved = True

    def counted(self, offset: int, at: int) -> None:
        """The batch at ``offset`` was counted, and everything it changed was told: nothing else of that offset follows."""
        if self.at_once:
            self.at_once = False
            self.seal(offset, at)

    def observe(self, start_us: int, end_us: int) -> None:
        """The stretch from ``start_us`` to ``end_us`` was observed; stretches come in their order."""
        if self._observed and self._observed[-1] == start_us:
            self._observed[-1] = end_us
        else:
            self._observed += (start_us, end_us)
        self.moved = True

    def note(self, at_us: int, reason: str) -> None:
        """``reason`` newly stands in the row that starts at ``at_us``."""
        self._notes.append(Note(at_us, reason))
        self.moved = True

    def tell(self, now: Told, offset: int, watermark_us: int) -> None:
        """From here on ``now`` is declared. What came before ``offset`` is sealed under what was declared until then."""
        if now.same(self.told):
            return
        self.seal(offset - 1, watermark_us)
        self.told = now
        self.moved = watermark_us > 0  # before its first engine time nobody has heard of the rank

    def depart(self, offset: int, watermark_us: int, departed: bool) -> None:
        """The rank departed at ``offset``, or comes back with the batch there.

        Either is told in a message of its own, so that its engine time is told exactly, wherever messages are cut.
        """
        if departed == self.departed:
            return
        self.seal(offset - 1, watermark_us)
        self.departed = departed
        self.at_once = not departed
        if departed and watermark_us:
            self.moved = True
            self.seal(offset, watermark_us)

    def seal(self, offset: int, watermark_us: int) -> None:
        """Make a message for each shard of what is pending, up to the message at ``offset``; nothing if nothing is."""
        if not self.moved:
            return
        for shard, sealed in enumerate(self._sealed):
            sealed.append(self._message(shard, offset, watermark_us))
        self._steps = [[] for _ in range(self._shards)]
        self._observed, self._notes = [], []
        self.moved = False

    def drain(self, offset: int, watermark_us: int) -> list[list[ResidencyChanges]]:
        """Everything since the last drain, per shard, in its order."""
        self.seal(offset, watermark_us)
        sealed, self._sealed = self._sealed, [[] for _ in range(self._shards)]
        return sealed

    @property
    def pending(self) -> bool:
        """Whether a drain would give anything."""
        return self.moved or bool(self._sealed[0])

    def _message(self, shard: int, offset: int, watermark_us: int) -> ResidencyChanges:
        now = self.told
        return ResidencyChanges(
            *self._rank,
            workload=now.workload,
            model=now.model,
            source_offset=offset,
            watermark_us=watermark_us,
            steps=self._steps[shard],
            declared_at_us=now.since_us,
            key_epoch=now.key_epoch,
            canary=now.canary,
            kv_bytes_per_token=now.kv_bytes_per_token,
            staleness_ms=now.staleness_ms,
            observed=self._observed if shard == 0 else [],
            notes=self._notes if shard == 0 else [],
            departed=self.departed,
        )
