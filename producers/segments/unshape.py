"""Records that :mod:`producers.segments.shape` made, back into the very same facts. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from producers.segments.contract import ContractError, Row
from producers.segments.shape import Fact
from schemas.records import (
    NO_ID,
    Batch,
    Declaration,
    Departure,
    EngineMetrics,
    HolderReset,
    IdentityRefused,
    Lifecycle,
    Loss,
    Op,
    RankMessage,
    Refusal,
    Scrape,
)

S = TypeVar("S", bound=msgspec.Struct)


class _Beside(msgspec.Struct):
    """See ``_beside`` in :mod:`producers.segments.shape`."""

    records: int
    parent_state: str = "UNKNOWN"
    parent_content_id: str | None = None
    session_id: str | None = None
    ownership: str | None = None
    op: str | None = None


_OPS = msgspec.json.Decoder(list[_Beside])


def is_own(row: Row) -> bool:
    """Whether the row is one of ours, so that :func:`fact` can read it (with what follows it, if it is a ``batch``)."""
    if row.kind in ("batch", "loss", "refusal", "declaration", "holder_reset", "identity_refused", "scrape", "departure"):
        return "life_id" in row.extra
    if row.kind in ("agent_start", "heartbeat", "agent_stop"):
        return "lifecycle" in row.extra
    return row.kind == "engine_metrics" and "engine_metrics" in row.extra


def body_length(row: Row) -> int:
    """How many records behind this one belong to it. Raises :class:`ContractError` if it does not say."""
    if row.kind != "batch":
        return 0
    length = _number(row, "records")
    if length < 0:
        raise ContractError(f"batch {row.seq}: {length} records")
    return length


def observed_at_ms(row: Row) -> int | None:
    """When the writer of one of our rows came to know of it, on its own clock; None where the row does not say."""
    return _number(row, "observed_at_ms", -1) if "observed_at_ms" in row.extra else None


def fact(row: Row, body: Sequence[Row] = ()) -> Fact:
    """The fact in one of our rows and the ``body`` behind it. Raises :class:`ContractError` for what cannot have been ours."""
    try:
        return _fact(row, body)
    except (msgspec.MsgspecError, binascii.Error, LookupError, ValueError, TypeError) as error:
        raise ContractError(f"{row.kind}: {error}") from None


def _fact(row: Row, body: Sequence[Row]) -> Fact:
    if "lifecycle" in row.extra:
        return msgspec.json.decode(row.extra["lifecycle"], type=Lifecycle)
    if row.kind == "engine_metrics":
        return msgspec.json.decode(row.extra["engine_metrics"], type=EngineMetrics)
    message = RankMessage(
        instance_id=_given(row.instance_id, "instance_id"),
        dp_rank=_given(row.dp_rank, "dp_rank"),
        life_id=row.extra["life_id"],
        seq=_given(row.seq, "seq"),
        at_us=_number(row, "at_us"),
        observed_at_ms=_number(row, "observed_at_ms"),
        incarnation=_given(row.incarnation, "incarnation"),
        skipped=_number(row, "skipped", 0),
    )
    if row.kind == "batch":
        message.batch = _batch(row, body)
    elif row.kind == "holder_reset":
        message.holder_reset = msgspec.convert(
            {"boundary_us": _micros(row.boundary_ms), "reason": row.reason, "cause": row.extra.get("cause")}, HolderReset
        )
    elif row.kind == "identity_refused":
        message.identity_refused = IdentityRefused(
            _given(row.group_idx, "group_idx"), _given(row.refused, "refused"), _micros(row.window_start_ms), _micros(row.window_end_ms)
        )
    elif row.kind == "loss":
        message.loss = Loss(_given(row.first_seq, "first_seq"), _given(row.last_seq, "last_seq"), _given(row.reason, "reason"))
    elif row.kind == "refusal":
        message.refusal = Refusal(_given(row.reason, "reason"), _number(row, "payload_bytes"))
    elif row.kind == "scrape":
        message.scrape = msgspec.json.decode(row.extra["scrape"], type=Scrape)
    elif row.kind == "departure":
        message.departure = Departure(_given(row.reason, "reason"))
    else:
        message.declaration = msgspec.json.decode(row.extra["declaration"], type=Declaration)
    return message


def _batch(row: Row, body: Sequence[Row]) -> Batch:
    ops = []
    at = 0
    for beside in _OPS.decode(row.extra.get("ops", "")):
        rows = body[at : at + beside.records]
        if len(rows) != beside.records or beside.records < 0:
            raise ContractError(f"batch {row.seq}: its records are not all there")
        at += beside.records
        ops.append(_op(beside, rows))
    if at != len(body):
        raise ContractError(f"batch {row.seq}: {len(body)} records behind it, of which its ops have {at}")
    return Batch(ops, _number(row, "unknown_events"), _number(row, "unresolved_blocks"))


def _op(beside: _Beside, rows: Sequence[Row]) -> Op:
    if beside.op is not None:
        return msgspec.msgpack.decode(base64.b64decode(beside.op, validate=True), type=Op)
    if not rows:
        raise ContractError("an op without records")
    first = rows[0]
    if first.kind == "clear":
        return Op("CLEAR", first.group_idx, first.tier, first.locality)
    if any(row.kind != first.kind for row in rows) or first.kind not in ("store", "evict"):
        raise ContractError(f"an op of {first.kind} and other records")
    block_ids = b"".join([_id(row.block_id) for row in rows])
    contents = b""
    if any(row.content_id is not None for row in rows):
        contents = b"".join([NO_ID if row.content_id is None else _id(row.content_id) for row in rows])
    common: dict[str, Any] = {
        "group_idx": first.group_idx,
        "tier": first.tier,
        "locality": first.locality,
        "block_ids": block_ids,
        "content_ids": contents,
        "session_id": None if beside.session_id is None else _id(beside.session_id),
        "ownership": beside.ownership,
    }
    if first.kind == "evict":
        return Op("REMOVE", **common)
    extra_keys: list[bytes] = []
    if any(row.extra_keys for row in rows):
        extra_keys = [b"".join([_id(key) for key in row.extra_keys or ()]) for row in rows]
    op = Op(
        "STORE",
        **common,
        block_size=_given(first.n_tokens, "n_tokens"),
        parent_content_id=None if beside.parent_content_id is None else _id(beside.parent_content_id),
        spec_kind=first.spec_kind,
        lora_name=first.lora_name,
        reused=bool(first.reused),
        parent_block_id=None if first.parent_id is None else _id(first.parent_id),
        lora_id=first.lora_id,
        spec_sliding_window=first.spec_sliding_window,
        extra_keys=extra_keys,
    )
    op.parent_state = msgspec.convert(beside.parent_state, _STATE)
    return op


_STATE: Any = next(field.type for field in msgspec.structs.fields(Op) if field.name == "parent_state")


def _id(text: str | None) -> bytes:
    found = bytes.fromhex(text or "")
    if len(found) != len(NO_ID):
        raise ContractError(f"{text!r} is no id of {len(NO_ID)} bytes")
    return found


def _micros(at_ms: float | None) -> int:
    if at_ms is None:
        raise ContractError("a time is missing")
    return round(at_ms * 1_000)


def _number(row: Row, name: str, default: int | None = None) -> int:
    text = row.extra.get(name)
    if text is None and default is not None:
        return default
    try:
        return msgspec.json.decode(text or "", type=int)
    except msgspec.MsgspecError:
        raise ContractError(f"{row.kind} without {name}") from None


T = TypeVar("T")


def _given(value: T | None, name: str) -> T:
    if value is None:
        raise ContractError(f"no {name}")
    return value
