"""The three KV-cache events as vLLM 0.24 and later put them on the wire: maps with ``type`` first, fields in this order.

``extra_keys`` and what follows it are left out when they equal their default; everything else is always there, null or not
(vLLM 0.32, seen in recorded engines).
"""

from __future__ import annotations

import msgspec

BlockHash = int | bytes
"""An engine's block hash: an unsigned 64-bit number, or 32 raw bytes."""

ExtraKeys = list[list[str] | None]
"""Per block: the adapter's name and, on the first block, the cache salt; null where there is neither."""


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True, gc=False):
    """A run of full blocks, each the parent of the next; ``parent_block_hash`` is the parent of the first (null: none)."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True, gc=False):
    """One physical block was taken for other content; vLLM sends one hash per event for the GPU."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
