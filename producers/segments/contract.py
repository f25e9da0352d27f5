"""The record contract of segments, version 1.10: field names, types, file names. Pure; facts only, no files.

A record is a JSON object with a ``kind``. In a sealed segment it is a row: every field of every kind is a column, and a field
that the contract does not know goes into the map ``extra`` as text (a string as it is, anything else as JSON). A field that is
absent from a record is null in its row.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from schemas.errors import KvcensusError

VERSION = "1.10"
"""What ``segment_open`` claims as ``contract_version``."""

ACTIVE = "active.jsonl"
WAL_SUFFIX = ".jsonl"
PARQUET_SUFFIX = ".parquet"
TMP_SUFFIX = ".parquet.tmp"
SEALED_PREFIX = "seg-"
ORPHAN_PREFIX = "orphan-"
PARQUET_MAGIC = b"PAR1"
MARKERS = ("segment_open", "segment_recovered")
"""The kinds that may stand first in a segment."""

CACHE_KINDS = ("store", "evict", "clear")

Record: TypeAlias = dict[str, Any]
_Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class ContractError(KvcensusError):
    """A record that the contract does not allow; the message says what about it."""


class Endpoint(msgspec.Struct, gc=False, omit_defaults=True):
    """One event socket of a producer, in its heartbeat; counters are cumulative. ``source`` is an instance."""

    dropped: _Int
    endpoint: str
    msgs_seen: _Int
    source: str
    last_msg_at_ms: float | None = None
    publisher_restarts: _Int | None = None
    topic: str | None = None


class Row(msgspec.Struct, gc=False):
    """One record, typed: a field for every column, None where the record has none; ``extra`` holds what the contract does not know."""

    kind: str
    at_ms: float
    agent_version: str | None = None
    attributed: bool | None = None
    block_id: str | None = None
    boundary_ms: float | None = None
    canary: str | None = None
    content_bridge_entries: _Int | None = None
    content_bridge_evicted: _Int | None = None
    content_id: str | None = None
    content_unresolved: _Int | None = None
    contract_version: str | None = None
    count: _Int | None = None
    dp_rank: _Int | None = None
    dropped: _Int | None = None
    dropped_bytes: _Int | None = None
    egress: str | None = None
    endpoint_count: _Int | None = None
    endpoints: list[Endpoint] | None = None
    events_ingested: _Int | None = None
    extra_keys: list[str] | None = None
    first: str | None = None
    first_seq: _Int | None = None
    group_idx: _Int | None = None
    heartbeat_secs: _Int | None = None
    incarnation: str | None = None
    instance_id: str | None = None
    key_epoch: _Int | None = None
    last: str | None = None
    last_seq: _Int | None = None
    locality: str | None = None
    lora_id: _Int | None = None
    lora_name: str | None = None
    max_payload_bytes: _Int | None = None
    max_segment_secs: _Int | None = None
    msgs_seen: _Int | None = None
    n_tokens: _Int | None = None
    noraw_scanned: _Int | None = None
    oversized: _Int | None = None
    parent_id: str | None = None
    parent_unknown: bool | None = None
    publisher_restarts: _Int | None = None
    reason: str | None = None
    refused: _Int | None = None
    reuse_reporting: str | None = None
    reused: bool | None = None
    rss_bytes: _Int | None = None
    scope: str | None = None
    segment_seq: _Int | None = None
    seq: _Int | None = None
    spec_kind: str | None = None
    spec_sliding_window: _Int | None = None
    tier: str | None = None
    unknown_types: _Int | None = None
    window_end_ms: float | None = None
    window_start_ms: float | None = None
    workload_class: str | None = None
    extra: dict[str, str] = {}


_ENDPOINT = pa.struct(
    [
        ("dropped", pa.int64()),
        ("endpoint", pa.string()),
        ("last_msg_at_ms", pa.float64()),
        ("msgs_seen", pa.int64()),
        ("publisher_restarts", pa.int64()),
        ("source", pa.string()),
        ("topic", pa.string()),
    ]
)
_LISTS: dict[str, Any] = {"endpoints": pa.list_(_ENDPOINT), "extra_keys": pa.list_(pa.string())}


def _column_type(name: str, annotation: str) -> Any:
    if name in _LISTS:
        return _LISTS[name]
    return {"str": pa.string(), "_Int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}[annotation.removesuffix(" | None")]


COLUMNS: tuple[str, ...] = tuple(name for name in Row.__struct_fields__ if name != "extra")
"""Every field of the contract, in the order of a sealed segment's columns."""

SCHEMA = pa.schema(
    [(name, _column_type(name, str(Row.__annotations__[name]))) for name in COLUMNS] + [("extra", pa.map_(pa.string(), pa.string()))]
)
"""The columns of a sealed segment."""

_KNOWN = frozenset(COLUMNS)
_NEEDED: dict[str, tuple[str, ...]] = {
    "store": ("instance_id", "block_id", "n_tokens"),
    "evict": ("instance_id", "block_id"),
    "clear": ("instance_id",),
    "holder_reset": ("instance_id", "boundary_ms"),
    "identity_refused": ("instance_id", "group_idx", "refused", "window_start_ms", "window_end_ms"),
    "segment_open": ("incarnation", "segment_seq"),
    "segment_recovered": ("attributed",),
    "segments_dropped": ("incarnation", "first_seq", "last_seq"),
}
"""What a record must say to be of use. Less than the contract asks: segments of its older versions are read too."""

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_LAST_MS = 2.0**33 * 1_000

RANGES: dict[str, float] = {
    **dict.fromkeys(("at_ms", "boundary_ms", "window_start_ms", "window_end_ms"), _LAST_MS),
    **dict.fromkeys(("dp_rank", "group_idx", "n_tokens", "spec_sliding_window"), _INT32),
    **dict.fromkeys(("segment_seq", "seq", "first_seq", "last_seq"), _INT64),
}
"""Largest value of the numbers that are looked at; none of them may be negative."""


def as_text(value: Any) -> str:
    """A value of an unknown field as ``extra`` has it: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def row(record: Record) -> Row:
    """``record`` typed. Raises :class:`ContractError` for one that is not of the contract's types or lacks what its kind needs."""
    extra = {name: as_text(value) for name, value in record.items() if name not in _KNOWN and value is not None}
    try:
        typed = msgspec.convert({name: value for name, value in record.items() if name in _KNOWN}, Row)
    except msgspec.ValidationError as error:
        raise ContractError(str(error)) from None
    typed.extra = extra
    check(typed)
    return typed


def check(typed: Row) -> None:
    """Raises :class:`ContractError` where a record lacks what its kind needs, or has a number out of all range."""
    check_needed(typed)
    for name in RANGES:
        check_range(name, getattr(typed, name))


def check_needed(typed: Row) -> None:
    """Raises :class:`ContractError` where a record lacks what its kind needs."""
    for name in _NEEDED.get(typed.kind, ()):
        if getattr(typed, name) is None:
            raise ContractError(f"{typed.kind} without {name}")


def check_range(name: str, value: float | None) -> None:
    """Raises :class:`ContractError` for a number of field ``name`` that is out of all range. Times are from 1970 to 2242."""
    if value is not None and not 0 <= value <= RANGES[name]:  # also false for NaN
        raise ContractError(f"{name} is {value}")


class SealedName(NamedTuple):
    """What the name of a sealed segment says. ``started_ms`` and ``pid`` are those of the incarnation; an orphan has only a time."""

    orphan: bool
    started_ms: int
    pid: int
    segment_seq: int
    parquet: bool

    @property
    def incarnation(self) -> str:
        """The incarnation as records name it."""
        return incarnation(self.started_ms, self.pid)


_SEALED = re.compile(r"seg-(\d{1,19})-(\d{1,19})-(\d{1,19})(\.jsonl|\.parquet)", re.ASCII)
_ORPHAN = re.compile(r"orphan-(\d{1,19})(\.jsonl|\.parquet)", re.ASCII)


def incarnation(started_ms: int, pid: int) -> str:
    """Name of one run of a producer: its start on its own clock, unix ms, and its process id."""
    return f"{started_ms}-{pid}"


def incarnation_order(name: str) -> tuple[int, int] | None:
    """Start and process id of an incarnation, as numbers; None for a name of another form."""
    found = re.fullmatch(r"(\d{1,19})-(\d{1,19})", name, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def sealed_stem(incarnation_name: str, segment_seq: int) -> str:
    """File name of a sealed segment, without suffix."""
    return f"{SEALED_PREFIX}{incarnation_name}-{segment_seq}"


def parse_sealed(name: str) -> SealedName | None:
    """What a file name says, None if it is none of a sealed segment or orphan."""
    if found := _SEALED.fullmatch(name):
        return SealedName(False, int(found[1]), int(found[2]), int(found[3]), found[4] == PARQUET_SUFFIX)
    if found := _ORPHAN.fullmatch(name):
        return SealedName(True, int(found[1]), 0, 0, found[2] == PARQUET_SUFFIX)
    return None
