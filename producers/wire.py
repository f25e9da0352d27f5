"""An engine's event payload (msgpack) into typed events. Pure: bytes in, :class:`WireBatch` out, or :class:`WireError`.

A payload is an array ``[ts, events, data_parallel_rank, ...]``; whatever follows the third element is carried past. An event
is a map with its ``type``, or in older engines an array with the tag first. Unknown fields are carried past, unknown
event types are counted and skipped, and a known event that cannot be read refuses the whole payload: half a batch would
be a wrong history, not a shorter one.

Two ways through: a typed decode of the whole payload, and only where that fails a second, event by event, which
also reads what the first is too strict for (signed hashes, unknown types) and says what is wrong with the rest.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import msgspec

from producers import wire_sglang
from producers.wire_types import (
    U64,
    BlockHash,
    Cleared,
    Count,
    Event,
    HashValue,
    Payload,
    Removed,
    Stored,
    WireBatch,
    WireError,
)
from schemas.records import EngineProfile

__all__ = ["BlockHash", "Cleared", "Event", "Removed", "Stored", "WireBatch", "WireError", "decode", "dp_rank", "micros", "timestamp"]

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
"""Largest payload that is read at all, in bytes: some hundred times the largest batch seen."""

MAX_TS_SECONDS = 2**33
"""Engine times from the epoch up to here (the year 2242) are believed."""


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[HashValue]
    parent_block_hash: HashValue | None
    token_ids: list[int] | None
    block_size: Count
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: Count | None = None
    spec_kind: str | None = None
    spec_sliding_window: Count | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[HashValue]
    medium: str | None = None
    group_idx: Count | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_EventArray: TypeAlias = _StoredArray | _RemovedArray | _ClearedArray


_maps = msgspec.msgpack.Decoder(Payload[Event])
_arrays = msgspec.msgpack.Decoder(Payload[_EventArray])
_sglang_maps = msgspec.msgpack.Decoder(wire_sglang.MapPayload)
_sglang_arrays = msgspec.msgpack.Decoder(wire_sglang.ArrayPayload)
_raw = msgspec.msgpack.Decoder(Payload[msgspec.Raw])
_any = msgspec.msgpack.Decoder()

_MAP_TYPES: dict[str, type[Event]] = {
    "BlockStored": Stored,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
    "TierBlocksCleared": Cleared,
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
    "TierBlocksCleared": ("medium",),  # without it a clear of one tier would read as one of all
}
_ARRAY_TYPES: dict[str, type[_EventArray]] = {
    "BlockStored": _StoredArray,
    "BlockRemoved": _RemovedArray,
    "AllBlocksCleared": _ClearedArray,
}
_SGLANG_MAP_TYPES: dict[str, type[wire_sglang.AnyEvent]] = {
    "BlockStored": wire_sglang.StoredMap,
    "BlockRemoved": wire_sglang.RemovedMap,
    "AllBlocksCleared": Cleared,
    "TierBlocksCleared": Cleared,
}
_SGLANG_ARRAY_TYPES: dict[str, type[wire_sglang.AnyEvent]] = {
    "BlockStored": wire_sglang.StoredArray,
    "BlockRemoved": wire_sglang.RemovedArray,
    "AllBlocksCleared": wire_sglang.ClearedArray,
}


def decode(payload: bytes, max_bytes: int = MAX_PAYLOAD_BYTES, profile: EngineProfile = "vllm") -> WireBatch:
    """The batch in ``payload``, which is no larger than ``max_bytes``, as an engine of this ``profile`` means it.

    Raises :class:`WireError`, and nothing else, for whatever cannot be read.
    """
    if len(payload) > max_bytes:
        raise WireError(f"payload of {len(payload)} bytes is larger than the {max_bytes} that are read")
    try:
        if profile == "sglang":
            batch = (_sglang_arrays if _holds_arrays(payload) else _sglang_maps).decode(payload)
            return WireBatch(micros(batch.ts), [wire_sglang.event_of(event) for event in batch.events], batch.dp_rank)
        if _holds_arrays(payload):
            arrays = _arrays.decode(payload)
            return WireBatch(micros(arrays.ts), [_from_array(event) for event in arrays.events], arrays.dp_rank)
        maps = _maps.decode(payload)
        return WireBatch(micros(maps.ts), maps.events, maps.dp_rank)
    except WireError:
        raise
    except Exception:
        # Not only msgspec's errors: deep nesting is a RecursionError, a forged length may be a MemoryError.
        return _decode_slowly(payload, profile)


def timestamp(payload: bytes) -> float:
    """The engine time of ``payload`` in seconds, without reading its events. Raises :class:`WireError`."""
    return _envelope(payload).ts


def dp_rank(payload: bytes) -> int | None:
    """The data-parallel rank that ``payload`` names itself, without reading its events. Raises :class:`WireError`."""
    return _envelope(payload).dp_rank


def micros(ts: float) -> int:
    """Engine seconds as integer microseconds. Raises :class:`WireError` for a time nobody's clock shows."""
    if not 0 <= ts < MAX_TS_SECONDS:  # also false for NaN
        raise WireError(f"ts {ts!r} is not a time between 1970 and 2242")
    return round(ts * 1_000_000)


def _holds_arrays(payload: bytes) -> bool:
    """Whether the first event looks like an array. A guess that only chooses the decoder to try: payload[10] opens the events."""
    if len(payload) < 16:
        return False
    opener = payload[10]
    first = payload[11] if opener < 0xDC else payload[13] if opener == 0xDC else payload[15]
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _from_array(event: _EventArray) -> Event:
    if isinstance(event, _StoredArray):
        return Stored(
            block_hashes=event.block_hashes,
            block_size=event.block_size,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=event.lora_name,
            extra_keys=event.extra_keys,
            group_idx=event.group_idx,
            spec_kind=event.spec_kind,
            spec_sliding_window=event.spec_sliding_window,
        )
    if isinstance(event, _RemovedArray):
        return Removed(block_hashes=event.block_hashes, medium=event.medium, group_idx=event.group_idx)
    return Cleared()


def _decode_slowly(payload: bytes, profile: EngineProfile) -> WireBatch:
    envelope = _envelope(payload)
    at_us = micros(envelope.ts)
    events: list[Event] = []
    unknown = 0
    for index, raw in enumerate(envelope.events):
        try:
            event = _known_event(_any.decode(raw), profile)
        except WireError as error:
            raise WireError(f"event {index}: {error}") from None
        except Exception as error:
            raise WireError(f"event {index}: {_reason(error)}") from None
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return WireBatch(at_us, events, envelope.dp_rank, unknown)


def _envelope(payload: bytes) -> Payload[msgspec.Raw]:
    try:
        return _raw.decode(payload)
    except Exception as error:
        _refuse_envelope(payload, error)


def _refuse_envelope(payload: bytes, error: Exception) -> NoReturn:
    """Say in the words of the wire what is wrong with the outer array."""
    try:
        outer = _any.decode(payload)
    except Exception as undecodable:
        raise WireError(f"not msgpack: {_reason(undecodable)}") from None
    if not isinstance(outer, list):
        raise WireError(f"batch is not an array but {type(outer).__name__}")
    if not outer or isinstance(outer[0], bool) or not isinstance(outer[0], int | float):
        raise WireError("ts missing: element 0 of the batch is not a number")
    if len(outer) < 2 or not isinstance(outer[1], list):
        raise WireError("events missing: element 1 of the batch is not an array")
    raise WireError(f"batch: {_reason(error)}")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _known_event(event: Any, profile: EngineProfile) -> Event | None:
    """``event`` typed, None for a type this version does not know. Raises WireError or msgspec's errors."""
    if isinstance(event, dict):
        tag = event.get("type")
        if not isinstance(tag, str):
            raise WireError("no type")
        kind = (_MAP_TYPES if profile == "vllm" else _SGLANG_MAP_TYPES).get(tag)
        if kind is None:
            return None
        for name in _REQUIRED[tag]:
            if event.get(name) in (None, ""):
                raise WireError(f"{tag} without {name}")
        _unsign(event, "block_hashes", "parent_block_hash")
        if tag == "BlockStored" and not _are_tokens(event.get("token_ids")):
            event["token_ids"] = None
        event["type"] = kind.__struct_config__.tag
        return _event_of(msgspec.convert(event, kind))
    if isinstance(event, list):
        tag = event[0] if event else None
        if not isinstance(tag, str):
            raise WireError("no type")
        array_kind = (_ARRAY_TYPES if profile == "vllm" else _SGLANG_ARRAY_TYPES).get(tag)
        if array_kind is None:
            return None
        _unsign(event, 1, 2 if tag == "BlockStored" else None)
        if tag == "BlockStored" and len(event) > 3 and not _are_tokens(event[3]):
            event[3] = None
        return _event_of(msgspec.convert(event, array_kind))
    raise WireError(f"event is neither a map nor an array but {type(event).__name__}")


def _event_of(raw: Event | _EventArray | wire_sglang.AnyEvent) -> Event:
    if isinstance(raw, _StoredArray | _RemovedArray | _ClearedArray):
        return _from_array(raw)
    if isinstance(raw, wire_sglang.OwnEvent):
        return wire_sglang.event_of(raw)
    return raw


def _are_tokens(value: Any) -> bool:
    """Whether ``value`` is a list of integers. Anything else is no refusal: an operator may have had the token ids redacted."""
    return isinstance(value, list) and all(type(token) is int for token in value)


def _unsign(event: Any, hashes_at: Any, parent_at: Any) -> None:
    """Signed hashes to the unsigned number of the same 64 bits, in place."""
    if isinstance(event, list):
        present = range(len(event))
        hashes = event[hashes_at] if hashes_at in present else None
        parent = event[parent_at] if parent_at in present else None
    else:
        hashes, parent = event.get(hashes_at), event.get(parent_at)
    if isinstance(hashes, list):
        event[hashes_at] = [_unsigned(value) for value in hashes]
    if isinstance(parent, int | str):
        event[parent_at] = _unsigned(parent)


def _unsigned(value: Any) -> Any:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise WireError(f"block hash is not an unsigned integer or bytes but {type(value).__name__}")
    return value & U64 if value < 0 else value
