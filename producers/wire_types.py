"""What an engine's payload means: the events and batches that :mod:`producers.wire` decodes into."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from schemas.errors import KvcensusError

INT32 = 2**31 - 1
U64 = 2**64 - 1

BlockHash: TypeAlias = int | bytes
"""An engine's block hash as the wire has it: unsigned 64-bit, or raw bytes."""

HashValue = Annotated[int, msgspec.Meta(ge=0)] | Annotated[bytes, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=INT32)]


class WireError(KvcensusError):
    """A payload that cannot be read; the message says what about it."""


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False, kw_only=True):
    """One run of blocks stored: each block of ``block_hashes`` is the parent of the next one.

    ``parent_block_hash`` None is the root of a prompt; ``token_ids`` None means that the event names no tokens, or something in
    their place that is no list of integers (redacted). ``block_size`` is in tokens, 0 in placeholder events. ``extra_keys`` has
    one entry per block (None, or a list), or is None. ``medium`` and ``group_idx`` are None where the event has none.
    ``cache_salt`` is what the whole run was stored under, in engines that say it so (read by the ``sglang`` profile only).
    Hashes are unsigned 64-bit integers or bytes. ``session_id`` is whatever the engine sends, ``ownership`` its own word.
    """

    block_hashes: list[HashValue]
    block_size: Count
    parent_block_hash: HashValue | None = None
    token_ids: list[int] | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: Count | None = None
    spec_kind: str | None = msgspec.field(default=None, name="kv_cache_spec_kind")
    spec_sliding_window: Count | None = msgspec.field(default=None, name="kv_cache_spec_sliding_window")
    locality: str | None = None
    ownership: str | None = None
    session_id: Any = None
    cache_salt: Any = None
    reused: bool | None = None


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False, kw_only=True):
    """One copy of each of ``block_hashes`` removed from ``medium``."""

    block_hashes: list[HashValue]
    medium: str | None = None
    group_idx: Count | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False, kw_only=True):
    """Everything in scope cleared; a scope field that is None means "all". Also ``TierBlocksCleared``, which names its medium."""

    medium: str | None = None
    group_idx: Count | None = None
    locality: str | None = None


Event: TypeAlias = Stored | Removed | Cleared

E = TypeVar("E")


class Payload(msgspec.Struct, Generic[E], array_like=True, gc=False):
    """A batch as the wire has it, with events of some encoding; what follows the rank is carried past."""

    ts: float
    events: list[E]
    dp_rank: Count | None = None


class WireBatch(msgspec.Struct, gc=False):
    """One engine batch. ``at_us``: engine time, integer microseconds. ``dp_rank`` None where the payload does not say."""

    at_us: int
    events: list[Event]
    dp_rank: int | None = None
    unknown_events: int = 0
