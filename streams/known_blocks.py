"""The blocks a rank knows in its present life, and how their content becomes known. Pure."""

from __future__ import annotations

from schemas.records import ID_BYTES, NO_ID, UNKNOWN_PARENT, Op
from streams.blocks import GPU, Block, Blocks
from streams.fleet_news import FleetNews, open_content
from streams.history import History


class KnownBlocks:
    """Blocks by group and block id. ``resident`` is, by group, blocks, tokens and physical copies in the GPU tier."""

    def __init__(self, fleet: FleetNews, history: History) -> None:
        self.fleet = fleet
        self.history = history
        self.groups: dict[int, Blocks] = {}
        self.resident: dict[int, list[int]] = {}

    def learn(self, op: Op) -> None:
        """Take the identities a run carries for blocks already known, and nothing else."""
        group = op.group_idx or 0
        blocks = self.groups.get(group, {})
        linked, before = first_parent(op)
        for start in range(0, len(op.content_ids), ID_BYTES):
            content = op.content_ids[start : start + ID_BYTES]
            if content == NO_ID:
                before = UNKNOWN_PARENT
                continue
            block_id = op.block_ids[start : start + ID_BYTES]
            block = blocks.get(block_id)
            if block is not None and block.content is None and block.size in (0, op.block_size):
                self._take_size(group, block, op.block_size)
                self._become_known(group, block, content, before)
            self._tell_other_groups(group, block_id, content, op.block_size, before)
            if linked:
                before = content

    def _become_known(self, group: int, block: Block, content: bytes, before: bytes) -> None:
        """The block's content becomes known: from this instant on it counts as held, not before (rule 2)."""
        block.content = content
        if block.gpu:  # what an earlier life knew of this content is overtaken by what is open now
            self.history.carried.pop((group, content), None)
        if block.gpu_open:
            open_content(*self.fleet.of_tier(GPU), content, block.size, before)
        for tier, (_, is_open) in (block.others or {}).items():
            if is_open:
                open_content(*self.fleet.of_tier(tier), content, block.size, before)

    def _tell_other_groups(self, group: int, block_id: bytes, content: bytes, size: int, before: bytes) -> None:
        """The engine's hash covers content, not the group: what one group's store resolves holds for the others."""
        for other, blocks in self.groups.items():
            if other == group:
                continue
            block = blocks.get(block_id)
            if block is not None and block.content is None and block.size in (0, size):
                self._take_size(other, block, size)
                self._become_known(other, block, content, before)

    def _take_size(self, group: int, block: Block, size: int) -> None:
        """A placeholder gave no size; one that is open on the GPU is resident with what is now known."""
        if block.size == 0 and size:
            block.size = size
            if block.gpu:
                self.resident[group][1] += size


def is_remote(op: Op) -> bool:
    """Whether ``op`` speaks of blocks that are reachable, but not held (rule 0)."""
    return op.locality is not None and op.locality.upper() == "REMOTE"


def first_parent(op: Op) -> tuple[bool, bytes]:
    """Whether the blocks of a run follow each other in content, and the content before its first."""
    if op.parent_state == "ROOT":
        return True, NO_ID
    if op.parent_state == "CONTENT":
        return True, op.parent_content_id or UNKNOWN_PARENT
    return False, UNKNOWN_PARENT
