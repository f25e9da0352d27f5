"""What a rank lost and is remembered for, bounded in time and number: the oldest losses are forgotten first. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from streams.blocks import AMBIGUOUS, NONE, Block, Blocks

HISTORY_US = 24 * 3_600 * 1_000_000
"""How long a loss is remembered by default, in microseconds of engine time."""

HISTORY_BLOCKS = 1_000_000
"""How many lost blocks of a rank are remembered by default."""

_STALE = 10_000
"""So many entries that no longer count are let be: below that, tidying would cost more than it gives."""


class Past(msgspec.Struct, gc=False, array_like=True):
    """How content was last lost in an earlier life (rule 3: across lives only the content id matches)."""

    stored_at: int
    lost_at: int
    cause: int


Key = tuple[int, bytes]
"""Group and content id."""


class History:
    """Losses of the present life, which the blocks themselves hold, and those carried over from earlier lives.

    A loss is remembered while nothing of the block is open in any tier. ``blocks`` counts those of the present life; the queue of them
    is in order of loss and may hold entries that no longer count.
    """

    def __init__(self, history_us: int = HISTORY_US, history_blocks: int = HISTORY_BLOCKS) -> None:
        self.blocks = 0
        self.carried: dict[Key, Past] = {}
        self._history_us = history_us
        self._most = history_blocks
        self._lost: deque[Block] = deque()
        self._stretches: deque[list[int]] = deque()  # [group, time of loss, entries]: as many of the queue, one stretch after another
        self._order: deque[Key] = deque()

    def __len__(self) -> int:
        return self.blocks + len(self.carried)

    def lost(self, group: int, at_us: int, blocks: list[Block]) -> None:
        """Nothing of ``blocks`` is open any more since ``at_us``; that is to be remembered. Times of loss never go back within a life."""
        self.blocks += len(blocks)
        self._lost += blocks
        stretches = self._stretches
        if stretches and stretches[-1][1] == at_us and stretches[-1][0] == group:
            stretches[-1][2] += len(blocks)
        else:
            stretches.append([group, at_us, len(blocks)])

    def carry(self, group: int, content: bytes, past: Past) -> None:
        """Remember ``content`` beyond the end of the life; :meth:`end_life` must follow."""
        known = self.carried.get((group, content))
        if known is not None and known.cause == AMBIGUOUS:  # that mark stays until the next GPU store, in whichever life
            past.cause = AMBIGUOUS
        self.carried[group, content] = past

    def end_life(self) -> None:
        """Drop what only block ids tell, and put what was carried into the order of loss."""
        self.blocks = 0
        self._lost.clear()
        self._stretches.clear()
        self.carried = dict(sorted(self.carried.items(), key=_time_of))
        self._order = deque(self.carried)

    def forget(self, now_us: int, groups: dict[int, Blocks]) -> dict[int, int]:
        """Forget what is out of bounds at ``now_us``, out of ``groups`` too; how many blocks of each group."""
        stretches = self._stretches
        horizon = now_us - self._history_us
        if not self.carried and self.blocks <= self._most and (not stretches or stretches[0][1] >= horizon):
            if len(self._lost) > 2 * self.blocks + _STALE:
                self._tidy()
            return {}
        forgotten: dict[int, int] = {}
        over = self.blocks + len(self.carried) - self._most
        while over > 0 or (stretches and stretches[0][1] < horizon) or self._oldest_carried() < horizon:
            self._trim()
            carried, own = self._oldest_carried(), stretches[0][1] if stretches else now_us + 1
            if over <= 0 and min(carried, own) >= horizon:
                break
            if carried <= own:
                group = self._order[0][0]
                del self.carried[self._order.popleft()]
            else:
                group, block = self._pop()
                block.cause = NONE  # so that other entries of it count no more
                self.blocks -= 1
                del groups[group][block.id]
            forgotten[group] = forgotten.get(group, 0) + 1
            over -= 1
        if len(self._lost) > 2 * self.blocks + _STALE:
            self._tidy()
        return forgotten

    def _oldest_carried(self) -> int:
        order = self._order
        while order and order[0] not in self.carried:
            order.popleft()
        return self.carried[order[0]].lost_at if order else 2**63

    def _trim(self) -> None:
        """Let go of entries at the head that no longer count."""
        while self._stretches and not _remembered(self._lost[0], self._stretches[0][1]):
            self._pop()

    def _pop(self) -> tuple[int, Block]:
        stretch = self._stretches[0]
        stretch[2] -= 1
        if not stretch[2]:
            self._stretches.popleft()
        return stretch[0], self._lost.popleft()

    def queue(self) -> Iterator[tuple[int, int, Block]]:
        """Group, time of loss and block of what is remembered of the present life, the oldest loss first.

        What was lost, came back and was lost again in one instant is in the queue twice, and counts at its first place.
        """
        entries = iter(self._lost)
        instant, told = -1, set[int]()
        for group, lost_at, count in self._stretches:
            if lost_at != instant:
                instant, told = lost_at, set()
            for block in islice(entries, count):
                if block.lost_at == lost_at and id(block) not in told and _remembered(block, lost_at):
                    told.add(id(block))
                    yield group, lost_at, block

    def _tidy(self) -> None:
        kept = [(group, block) for group, _, block in self.queue()]
        self._lost.clear()
        self._stretches.clear()
        self.restore(kept, self.carried, self.blocks)

    def restore(self, lost: Iterable[tuple[int, Block]], carried: dict[Key, Past], blocks: int) -> None:
        """Take over what :meth:`queue`, ``carried`` and ``blocks`` of another were, in their order."""
        for group, block in lost:
            self.lost(group, block.lost_at, [block])
        self.blocks = blocks  # a block that was lost twice in one instant stands in the queue twice
        self.carried = carried
        self._order = deque(carried)


def _time_of(item: tuple[Key, Past]) -> int:
    return item[1].lost_at


def _remembered(block: Block, lost_at: int) -> bool:
    return block.cause != NONE and block.lost_at == lost_at and not block.gpu and (block.others is None or not block.off_gpu())
