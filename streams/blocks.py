"""One engine block of one cache group, and the causes for which a residency ends. Pure."""

from __future__ import annotations

import msgspec

GPU = "GPU"

NONE, EVICTED, CLEARED, RESTARTED, AMBIGUOUS, CONCURRENT = range(6)
"""Causes of an ended residency or of a recompute, as small integers inside the core."""

CAUSE_NAMES = ("", "evicted", "cleared", "restarted", "ambiguous_reload", "concurrent")
"""The causes as records name them."""

FRESH, CONTINUED, USED = range(3)
"""What the stream showed of a GPU residency: nothing; one block that goes on from it (its own request may have); a use."""


class Block(msgspec.Struct, gc=False):
    """One engine block id of one group in the present life: what is open, and how the last residency ended.

    ``gpu`` counts open copies in the GPU tier by the copy-counting reading; ``gpu_open`` is the reading of the duplicate
    footprint. ``others`` holds the same pair per offload tier, or ``None``. ``parent`` is the id of the block before it, the first
    that a GPU store named. Outside the garbage collector: it must never hold what leads back to it.
    """

    id: bytes
    content: bytes | None
    size: int
    gpu: int = 0
    gpu_open: bool = False
    others: dict[str, tuple[int, bool]] | None = None
    stored_at: int = 0
    lost_at: int = 0
    cause: int = NONE
    parent: bytes | None = None
    use: int = FRESH

    def off_gpu(self) -> bool:
        """Whether any offload tier holds a copy."""
        return self.others is not None and any(copies for copies, _ in self.others.values())


Blocks = dict[bytes, Block]
"""The blocks of one group by id."""


def show_used(blocks: Blocks, block: Block | None) -> None:
    """The stream showed a use of ``block``, so of all blocks before it in its chain too, as far as they are resident.

    Ends at the first that was shown to be used already: each block is marked once in a residency.
    """
    while block is not None and block.gpu and block.use != USED:
        block.use = USED
        block = None if block.parent is None else blocks.get(block.parent)
