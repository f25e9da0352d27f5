"""Event batches as vLLM puts them on the wire: msgpack ``[ts, events, data_parallel_rank]``.

Three encodings of an event, by engine version: ``map`` (0.24 and later), ``array12`` (0.22.1, 0.23) and ``array8`` (0.16, which
has neither extra keys nor groups). Field order and lengths are those of recorded engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from producers.simulate.events import BlockRemoved, BlockStored, Event

Wire = Literal["map", "array8", "array12"]
WIRES: tuple[Wire, ...] = ("map", "array8", "array12")

_encoder = msgspec.msgpack.Encoder()


def seconds(at_us: int) -> float:
    """Engine time as the wire carries it; ``round(ts * 1_000_000)`` gives ``at_us`` back."""
    return at_us / 1_000_000


def encode_batch(at_us: int, events: Sequence[Event], dp_rank: int | None, wire: Wire = "map") -> bytes:
    """The payload frame of one scheduler step."""
    body: Sequence[Any] = events if wire == "map" else [_as_array(event, wire) for event in events]
    return _encoder.encode((seconds(at_us), body, dp_rank))


def _as_array(event: Event, wire: Wire) -> list[Any]:
    if isinstance(event, BlockStored):
        fields: list[Any] = [
            "BlockStored",
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
        ]
        if wire == "array12":
            # The twelfth is the sliding window, null for full attention.
            fields += [event.extra_keys, event.group_idx, event.kv_cache_spec_kind, None]
        return fields
    if isinstance(event, BlockRemoved):
        removed: list[Any] = ["BlockRemoved", event.block_hashes, event.medium]
        if wire == "array12":
            removed.append(event.group_idx)
        return removed
    return ["AllBlocksCleared"]
