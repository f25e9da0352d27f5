"""The KV block pool of one simulated engine rank, with the prefix cache and the events vLLM's pool publishes.

What is modelled, as recorded engines show it:

- Blocks are taken from the head of a least-recently-used free queue. A cached block keeps its content while it is free; it is
  evicted only when it is taken again, with one ``BlockRemoved`` of one hash per physical block.
- Content is not de-duplicated: publishing content that another block already holds makes a second physical copy, with its own
  store and, later, its own removal. A lookup finds the oldest copy.
- Nothing is published at a cache hit or when a request ends.
- Freed blocks go to the tail of the queue, the last block of a request first, so that the ends of prompts are evicted before
  their beginnings.
- A reset needs an idle pool, and publishes ``AllBlocksCleared`` (also for an empty cache).

Pure: no clock, no sockets, no randomness.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from producers.simulate.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event, ExtraKeys

MEDIUM = "GPU"
GROUP = 0
SPEC_KIND = "full_attention"


class BlockPool:
    """``blocks`` physical blocks (usable ones: vLLM's null block is not counted) of ``block_size`` tokens."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {blocks} of {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._refs = [0] * blocks
        self._hash: list[BlockHash | None] = [None] * blocks
        self._cached: dict[BlockHash, list[int]] = {}
        self._events: list[Event] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds; cached content in them counts as free."""
        return len(self._free)

    @property
    def idle(self) -> bool:
        """Whether no request holds a block."""
        return len(self._free) == self.blocks

    def cached_copies(self) -> Counter[BlockHash]:
        """Physical copies of each cached hash, at this moment."""
        return Counter({key: len(copies) for key, copies in self._cached.items()})

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks that hold the longest cached prefix of ``hashes``, at most ``len(hashes)`` of them. Changes nothing."""
        found: list[int] = []
        for key in hashes:
            copies = self._cached.get(key)
            if copies is None:
                break
            found.append(copies[0])
        return found

    def allocate(self, hits: Sequence[int], new: int) -> list[int] | None:
        """Take a reference on each block of ``hits`` and ``new`` blocks from the free queue.

        Returns the new blocks' numbers, or ``None`` with nothing changed when there aren't enough free blocks. Whatever the taken
        blocks still held is evicted, each with its own event, in the order of the queue.
        """
        waking = sum(1 for block in hits if self._refs[block] == 0)
        if len(self._free) - waking < new:
            return None
        for block in hits:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1
        taken: list[int] = []
        for _ in range(new):
            block, _nothing = self._free.popitem(last=False)
            held = self._hash[block]
            if held is not None:
                self._forget(block, held)
                self._events.append(BlockRemoved([held], MEDIUM, GROUP))
            self._refs[block] = 1
            taken.append(block)
        return taken

    def publish(
        self,
        blocks: Sequence[int],
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: list[int],
        extra_keys: ExtraKeys,
        lora_id: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Cache ``blocks``, full and in use, under ``hashes`` and queue one store for the run.

        ``token_ids`` has ``len(blocks) * block_size`` entries, ``extra_keys`` one per block.
        """
        if len(token_ids) != len(blocks) * self.block_size or len(hashes) != len(blocks) or len(extra_keys) != len(blocks):
            raise ValueError("a run has one hash and one extra key per block, and block_size tokens for each")
        for block, key in zip(blocks, hashes, strict=True):
            if self._hash[block] is not None or self._refs[block] == 0:
                raise ValueError(f"block {block} is already published or in nobody's hands")
            self._hash[block] = key
            self._cached.setdefault(key, []).append(block)
        self._events.append(
            BlockStored(list(hashes), parent, token_ids, self.block_size, lora_id, MEDIUM, lora_name, extra_keys, GROUP, SPEC_KIND)
        )

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference on each of a request's ``blocks`` (in the request's order)."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
            elif self._refs[block] < 0:
                raise ValueError(f"block {block} was freed more often than taken")

    def reset(self) -> bool:
        """Forget all cached content; ``False``, with nothing changed, while any request holds a block."""
        if not self.idle:
            return False
        self._hash = [None] * self.blocks
        self._cached.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _forget(self, block: int, held: BlockHash) -> None:
        copies = self._cached[held]
        copies.remove(block)
        if not copies:
            del self._cached[held]
        self._hash[block] = None
