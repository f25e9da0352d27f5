"""SGLang's events, where they differ from vLLM's. Pure; :mod:`producers.wire` asks for it by profile, never by a guess.

The frames are the same. Hashes are the same 64 bits, signed. Arrays have after the medium (index 6) what vLLM does not have
there: a map with the cache salt and the session, a component's name, or both. Maps (newer releases) carry the three as fields.
docs/sglang.md says which release sends what.

Components (of hybrid models) are told apart as cache groups are elsewhere: each holds blocks of its own under the same hashes.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from producers.wire_types import U64, BlockHash, Cleared, Count, Event, Payload, Removed, Stored

_Signed = Annotated[int, msgspec.Meta(ge=-(2**63))] | Annotated[bytes, msgspec.Meta(min_length=1)]

_COMPONENTS = {"full": (0, "full_attention"), "swa": (1, "sliding_window"), "mamba": (2, "mamba")}
_OTHER_COMPONENT = 3
_CHECKPOINTS = "mamba"
"""A component whose events have one block and no parent wherever in the prompt it lies: that is no root."""


class StoredMap(Stored, tag_field="type", tag="BlockStored", gc=False, kw_only=True):
    """A store as a map. What vLLM's maps have and SGLang's do not yet is read as well: the two are meant to become one."""

    block_hashes: list[_Signed]
    parent_block_hash: _Signed | None = None
    component_type: str | None = None


class RemovedMap(Removed, tag_field="type", tag="BlockRemoved", gc=False, kw_only=True):
    """A removal as a map."""

    block_hashes: list[_Signed]
    component_type: str | None = None


class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """A store as an array; ``tail`` and ``more`` are what follows the medium, in either order."""

    block_hashes: list[_Signed]
    parent_block_hash: _Signed | None
    token_ids: list[int] | None
    block_size: Count
    lora_id: int | str | None = None
    medium: str | None = None
    tail: Any = None
    more: Any = None


class RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """A removal as an array."""

    block_hashes: list[_Signed]
    medium: str | None = None
    component_type: Any = None


class ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """A clear as an array."""


OwnEvent: TypeAlias = StoredMap | RemovedMap | StoredArray | RemovedArray | ClearedArray
AnyEvent: TypeAlias = OwnEvent | Cleared


MapPayload: TypeAlias = Payload[StoredMap | RemovedMap | Cleared]
ArrayPayload: TypeAlias = Payload[StoredArray | RemovedArray | ClearedArray]


def event_of(raw: AnyEvent) -> Event:
    """The event that ``raw`` means."""
    if isinstance(raw, StoredMap):
        event = _stored(raw, raw.component_type, raw.cache_salt, raw.session_id)
        event.lora_name, event.extra_keys = raw.lora_name, raw.extra_keys
        event.locality, event.ownership, event.reused = raw.locality, raw.ownership, raw.reused
        event.spec_sliding_window = raw.spec_sliding_window
        event.group_idx = event.group_idx if raw.group_idx is None else raw.group_idx
        event.spec_kind = raw.spec_kind or event.spec_kind
        return event
    if isinstance(raw, StoredArray):
        metadata = next((each for each in (raw.tail, raw.more) if isinstance(each, dict)), {})
        component = next((each for each in (raw.tail, raw.more) if isinstance(each, str)), None)
        return _stored(raw, component, metadata.get("cache_salt"), metadata.get("session_id"))
    if isinstance(raw, RemovedMap):
        group = _component(raw.component_type)[0] if raw.group_idx is None else raw.group_idx
        hashes = _unsigned(raw.block_hashes)
        return Removed(block_hashes=hashes, medium=raw.medium, group_idx=group, locality=raw.locality, ownership=raw.ownership)
    if isinstance(raw, RemovedArray):
        return Removed(block_hashes=_unsigned(raw.block_hashes), medium=raw.medium, group_idx=_component(raw.component_type)[0])
    return raw if isinstance(raw, Cleared) else Cleared()


def _stored(raw: StoredMap | StoredArray, component: str | None, salt: Any, session_id: Any) -> Stored:
    group, kind = _component(component)
    parent = raw.parent_block_hash
    return Stored(
        block_hashes=_unsigned(raw.block_hashes),
        block_size=raw.block_size,
        parent_block_hash=parent & U64 if isinstance(parent, int) else parent,
        token_ids=None if kind == _CHECKPOINTS else raw.token_ids,
        lora_id=raw.lora_id,
        medium=raw.medium,
        group_idx=group,
        spec_kind=kind,
        session_id=session_id,
        cache_salt=salt,
    )


def _component(label: Any) -> tuple[int | None, str | None]:
    """Group and kind of a component; None and None where none is named."""
    if not isinstance(label, str) or not label:
        return None, None
    name = label.rpartition(".")[2].lower()
    return _COMPONENTS.get(name, (_OTHER_COMPONENT, name))


def _unsigned(hashes: list[int | bytes]) -> list[BlockHash]:
    return [value & U64 if isinstance(value, int) else value for value in hashes]
