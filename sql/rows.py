"""Records of the topics as columns for ClickHouse. Pure.

One :class:`ColumnBatch` per table holds a list per column, because that is what goes over the wire: no row is ever built.
:class:`TableRows` takes any record and knows its tables.

    rows = TableRows()
    rows.add(record)
    for batch in rows.batches():
        database.insert(batch.table, batch.column_names, batch.columns)
    rows.clear()
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from typing import Any, ClassVar

from schemas.errors import KvcensusError
from schemas.records import (
    ID_BYTES,
    NO_ID,
    DuplicateWindow,
    GroupCounters,
    Lifecycle,
    Op,
    RankMessage,
    RankWindow,
    Recompute,
)

GROUP_FIELDS: tuple[str, ...] = GroupCounters.__struct_fields__
"""Fields of a cache group, each a column ``groups.<field>`` of ``rank_windows``."""

GROUP_COUNTERS: tuple[str, ...] = GROUP_FIELDS[3:]
"""Those of them that count; the last two are states, not sums."""


class ColumnBatch(ABC):
    """Rows of one table, as one list per column, in the order of ``column_names``."""

    table: ClassVar[str]
    column_names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.columns: list[list[Any]] = [[] for _ in self.column_names]

    def __len__(self) -> int:
        return len(self.columns[0])

    def clear(self) -> None:
        """Forget all rows. The lists are new ones, so that columns handed out stay as they were."""
        self.columns = [[] for _ in self.column_names]


class RankWindowColumns(ColumnBatch):
    """``rank_windows``: one row per record, its groups as arrays."""

    table = "rank_windows"
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "window_start",
        "window_us",
        "semantics_version",
        "version",
        "is_final",
        "workload",
        "model",
        "reuse_reporting",
        "removals",
        "kv_connector",
        "key_epoch",
        "canary",
        "observed_us",
        "first_batch",
        "last_batch",
        "batches",
        "duplicate_batches",
        "lost_batches",
        "refused_batches",
        "unknown_events",
        "unresolved_blocks",
        "warmup",
        "reasons",
        *(f"groups.{field}" for field in GROUP_FIELDS),
    )

    def add(self, record: RankWindow) -> None:
        """One row."""
        groups = record.groups
        values = (
            record.instance_id,
            record.dp_rank,
            record.life_id,
            record.window_start_us,
            record.window_us,
            record.semantics_version,
            record.version,
            record.final,
            record.workload,
            record.model,
            record.reuse_reporting,
            record.removals,
            record.kv_connector,
            record.key_epoch,
            record.canary,
            record.observed_us,
            record.first_batch_us or None,
            record.last_batch_us or None,
            record.batches,
            record.duplicate_batches,
            record.lost_batches,
            record.refused_batches,
            record.unknown_events,
            record.unresolved_blocks,
            record.warmup,
            record.reasons,
            *([getattr(group, field) for group in groups] for field in GROUP_FIELDS),
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class RecomputeColumns(ColumnBatch):
    """``recomputes``: one row per record."""

    table = "recomputes"
    column_names = (
        "instance_id",
        "dp_rank",
        "group_idx",
        "life_id",
        "seq",
        "block_index",
        "semantics_version",
        "version",
        "cause",
        "block_id",
        "content_id",
        "tokens",
        "stored_at",
        "lost_at",
        "back_at",
        "elapsed_us",
    )

    def add(self, record: Recompute) -> None:
        """One row."""
        values = (
            record.instance_id,
            record.dp_rank,
            record.group_idx,
            record.life_id,
            record.seq,
            record.index,
            record.semantics_version,
            record.version,
            record.cause,
            record.block_id,
            record.content_id,
            record.tokens,
            record.stored_at_us,
            record.lost_at_us,
            record.back_at_us,
            record.elapsed_us,
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class DuplicateWindowColumns(ColumnBatch):
    """``duplicate_windows``: one row per record; the columns are the record's fields, times without their unit."""

    table = "duplicate_windows"
    _FIELDS: ClassVar[tuple[str, ...]] = DuplicateWindow.__struct_fields__
    column_names = tuple(
        {"window_start_us": "window_start", "as_of_us": "as_of", "final": "is_final"}.get(field, field)
        for field in DuplicateWindow.__struct_fields__
    )

    def add(self, record: DuplicateWindow) -> None:
        """One row."""
        for column, field in zip(self.columns, self._FIELDS, strict=True):
            column.append(getattr(record, field))


class LifecycleColumns(ColumnBatch):
    """``lifecycle``: one row per record; the columns are the record's fields."""

    table = "lifecycle"
    _FIELDS: ClassVar[tuple[str, ...]] = Lifecycle.__struct_fields__
    column_names = tuple("at" if field == "at_ms" else field for field in Lifecycle.__struct_fields__)

    def add(self, record: Lifecycle) -> None:
        """One row."""
        for column, field in zip(self.columns, self._FIELDS, strict=True):
            column.append(getattr(record, field))


class BlockEventColumns(ColumnBatch):
    """``block_events``: one row per block of every STORE and REMOVE, and one per CLEAR."""

    table = "block_events"
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "seq",
        "at",
        "observed_at",
        "event_index",
        "block_index",
        "kind",
        "group_idx",
        "tier",
        "locality",
        "block_size",
        "block_id",
        "content_id",
        "parent_state",
        "parent_content_id",
        "spec_kind",
        "lora_name",
        "reused",
    )

    def add(self, record: RankMessage) -> None:
        """The rows of a message's batch; none if it carries something else. Raises :class:`KvcensusError` for ids of a wrong length."""
        if record.batch is None:
            return
        (
            instance_ids, dp_ranks, life_ids, seqs, ats, observed, event_indexes, block_indexes, kinds, groups, tiers, localities,
            sizes, block_ids, content_ids, parent_states, parents, spec_kinds, loras, reused,
        ) = self.columns  # fmt: skip
        ops = record.batch.ops
        counts = [_blocks(op, record) for op in ops]

        def fill(op: Op, rows: int) -> None:
            """The columns that are equal for all blocks of ``op``, and of those after it that are like it."""
            kinds.extend([op.kind] * rows)
            groups.extend([op.group_idx] * rows)
            tiers.extend([op.tier] * rows)
            localities.extend([op.locality] * rows)
            sizes.extend([op.block_size] * rows)
            spec_kinds.extend([op.spec_kind] * rows)
            loras.extend([op.lora_name] * rows)
            reused.extend([op.reused] * rows)

        like: Op | None = None
        waiting = 0
        for index, (op, count) in enumerate(zip(ops, counts, strict=True)):
            if not count:
                continue
            # Removals come one block at a time, many alike in a row.
            if like is None or not _alike(op, like):
                if like is not None:
                    fill(like, waiting)
                like, waiting = op, 0
            waiting += count
            if count == 1:
                event_indexes.append(index)
                block_indexes.append(0)
                block_ids.append(NO_ID if op.kind == "CLEAR" else op.block_ids)
                if op.kind == "CLEAR":
                    content_ids.append(None)
                    parent_states.append("UNKNOWN")
                    parents.append(None)
                    continue
                content = op.content_ids
                content_ids.append(content if content and content != NO_ID else None)
                parent_states.append(op.parent_state)
                parents.append(op.parent_content_id if op.parent_state == "CONTENT" else None)
                continue
            event_indexes.extend([index] * count)
            block_indexes.extend(range(count))
            block_ids.extend(_ids(op.block_ids))
            contents: list[bytes | None] = [*_ids(op.content_ids)] if op.content_ids else [None] * count
            if NO_ID in contents:
                contents = [None if content == NO_ID else content for content in contents]
            content_ids.extend(contents)
            if op.parent_state == "UNKNOWN":
                parent_states.extend(["UNKNOWN"] * count)
                parents.extend([None] * count)
            else:
                parent_states.append(op.parent_state)
                parent_states.extend(["CONTENT"] * (count - 1))
                parents.append(op.parent_content_id if op.parent_state == "CONTENT" else None)
                parents.extend(contents[:-1])
        if like is not None:
            fill(like, waiting)
        rows = sum(counts)
        instance_ids.extend([record.instance_id] * rows)
        dp_ranks.extend([record.dp_rank] * rows)
        life_ids.extend([record.life_id] * rows)
        seqs.extend([record.seq] * rows)
        ats.extend([record.at_us] * rows)
        observed.extend([record.observed_at_ms] * rows)


def _alike(op: Op, other: Op) -> bool:
    return (
        op.kind == other.kind
        and op.group_idx == other.group_idx
        and op.tier == other.tier
        and op.locality == other.locality
        and op.block_size == other.block_size
        and op.spec_kind == other.spec_kind
        and op.lora_name == other.lora_name
        and op.reused == other.reused
    )


def _ids(packed: bytes) -> list[bytes]:
    return [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]


def _blocks(op: Op, record: RankMessage) -> int:
    if op.kind == "CLEAR":
        return 1
    count, rest = divmod(len(op.block_ids), ID_BYTES)
    if rest or (op.content_ids and len(op.content_ids) != len(op.block_ids)):
        raise KvcensusError(
            f"{record.instance_id}/{record.dp_rank} life {record.life_id} seq {record.seq}: "
            f"{len(op.block_ids)} bytes of block ids and {len(op.content_ids)} of content ids are no whole ids of {ID_BYTES} bytes"
        )
    return count


class RankEventColumns(ColumnBatch):
    """``rank_events``: one row per holder reset, loss, refusal or declaration."""

    table = "rank_events"
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "seq",
        "kind",
        "at",
        "observed_at",
        "incarnation",
        "reason",
        "boundary",
        "first_seq",
        "last_seq",
        "payload_bytes",
        "reuse_reporting",
        "removals",
        "workload",
        "model",
        "kv_connector",
        "key_epoch",
        "canary",
        "forwarder_version",
        "labels",
    )

    def add(self, record: RankMessage) -> None:
        """The row of a message that is not a batch; none if it is."""
        kind: str
        reason: str | None = None
        boundary = first_seq = last_seq = payload_bytes = None
        declared: tuple[Any, ...] = (None, None, None, None, None, None, None, None, {})
        if record.holder_reset is not None:
            kind, reason, boundary = "holder_reset", record.holder_reset.reason, record.holder_reset.boundary_us
        elif record.loss is not None:
            kind, reason = "loss", record.loss.reason
            first_seq, last_seq = record.loss.first_seq, record.loss.last_seq
        elif record.refusal is not None:
            kind, reason, payload_bytes = "refusal", record.refusal.reason, record.refusal.payload_bytes
        elif record.declaration is not None:
            kind = "declaration"
            said = record.declaration
            declared = (
                said.reuse_reporting,
                said.removals,
                said.workload,
                said.model,
                said.kv_connector,
                said.key_epoch,
                said.canary,
                said.forwarder_version,
                said.labels,
            )
        else:
            return
        values = (
            record.instance_id,
            record.dp_rank,
            record.life_id,
            record.seq,
            kind,
            record.at_us,
            record.observed_at_ms,
            record.incarnation,
            reason,
            boundary,
            first_seq,
            last_seq,
            payload_bytes,
            *declared,
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class TableRows:
    """Rows of all tables: give it records, take the batches."""

    def __init__(self) -> None:
        self.rank_windows = RankWindowColumns()
        self.recomputes = RecomputeColumns()
        self.duplicate_windows = DuplicateWindowColumns()
        self.lifecycle = LifecycleColumns()
        self.block_events = BlockEventColumns()
        self.rank_events = RankEventColumns()

    def add(self, record: RankWindow | Recompute | DuplicateWindow | Lifecycle | RankMessage) -> None:
        """The rows of one record, in its table or tables."""
        if isinstance(record, RankMessage):
            if record.batch is not None:
                self.block_events.add(record)
            else:
                self.rank_events.add(record)
        elif isinstance(record, RankWindow):
            self.rank_windows.add(record)
        elif isinstance(record, Recompute):
            self.recomputes.add(record)
        elif isinstance(record, DuplicateWindow):
            self.duplicate_windows.add(record)
        else:
            self.lifecycle.add(record)

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.tables)

    def batches(self) -> Iterator[ColumnBatch]:
        """Those that hold rows."""
        return (batch for batch in self.tables if len(batch))

    def clear(self) -> None:
        """Forget all rows."""
        for batch in self.tables:
            batch.clear()

    @property
    def tables(self) -> tuple[ColumnBatch, ...]:
        """The batches of all tables, rows or not."""
        return (self.rank_windows, self.recomputes, self.duplicate_windows, self.lifecycle, self.block_events, self.rank_events)
