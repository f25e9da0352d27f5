"""Trunks: the longest chains of content that the same ranks hold, and how much of them is extra. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest

from schemas.records import NO_ID, UNKNOWN_PARENT

TRUNKS_TOLD = 100
"""Of each instant the trunks with the most extra mass are told, so many."""

Rank = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Shared:
    """Content that several ranks hold: the content before it, its size in tokens, when it was first seen, and the ranks in order."""

    parent: bytes
    size: int
    first_us: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Trunk:
    """A chain from ``head`` to ``last``; ``tokens`` of all its blocks, ``depth`` from the root to its end (None: not known)."""

    head: bytes
    last: bytes
    parent: bytes
    blocks: int
    tokens: int
    depth: int | None
    first_us: int
    ranks: tuple[Rank, ...]

    @property
    def extra_tokens(self) -> int:
        """Tokens of all copies but one."""
        return self.tokens * (len(self.ranks) - 1)


def trunks(shared: dict[bytes, Shared], limit: int = TRUNKS_TOLD) -> list[Trunk]:
    """The ``limit`` trunks with the most extra tokens, ties by the id of their last block.

    A chain goes on through a child that has the same holders, if it is the only one. Ids that were claimed twice could
    close a ring, which has no head: then the least of its ids is taken for one.
    """
    after: dict[bytes, bytes | None] = {}
    for key, content in shared.items():
        parent = shared.get(content.parent)
        if parent is not None and parent.ranks == content.ranks:
            after[content.parent] = None if content.parent in after else key
    depths: dict[bytes, int | None] = {}
    found: list[Trunk] = []
    walked: set[bytes] = set()

    def walk(head: bytes) -> None:
        content = shared[head]
        last, following, blocks, tokens = head, after.get(head), 1, content.size
        walked.add(head)
        while following is not None and following not in walked:
            last, tokens, blocks = following, tokens + shared[following].size, blocks + 1
            walked.add(last)
            following = after.get(last)
        above = _depth(shared, content.parent, depths)
        depth = None if above is None else above + tokens
        found.append(Trunk(head, last, content.parent, blocks, tokens, depth, shared[last].first_us, content.ranks))

    for key, content in shared.items():
        if after.get(content.parent) != key:
            walk(key)
    for key in sorted(shared.keys() - walked):
        if key not in walked:
            walk(key)
    return nsmallest(limit, found, key=lambda trunk: (-trunk.extra_tokens, trunk.last))


def _depth(shared: dict[bytes, Shared], key: bytes, known: dict[bytes, int | None]) -> int | None:
    """Tokens from the root to the end of ``key``; None if what lies before it is not known all the way."""
    path: list[bytes] = []
    while key != NO_ID and key not in known:
        content = None if key == UNKNOWN_PARENT else shared.get(key)
        known[key] = None  # what comes back to it, or is not known, has no depth
        if content is None:
            break
        path.append(key)
        key = content.parent
    depth = 0 if key == NO_ID else known[key]
    for each in reversed(path):
        depth = known[each] = None if depth is None else depth + shared[each].size
    return depth
