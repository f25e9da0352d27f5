"""Messages of a rank as columns for ClickHouse, with their place on the topic: what can be counted from again. Pure.

The blocks of a batch are rows of :mod:`sql.block_rows`.
"""

from __future__ import annotations

import msgspec

from schemas.records import Op, RankMessage
from sql.columns import ColumnBatch


class BatchColumns(ColumnBatch):
    """``batches``: one row per engine batch."""

    table = "batches"
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "seq",
        "at",
        "observed_at",
        "incarnation",
        "partition",
        "offset",
        "skipped",
        "unknown_events",
        "unresolved_blocks",
        "events",
        "blocks",
        "empty_events",
    )

    def add(self, record: RankMessage, partition: int, offset: int, blocks: int) -> None:
        """The row of a batch that has ``blocks`` rows in ``block_events``."""
        batch = record.batch
        assert batch is not None
        values = (
            record.instance_id,
            record.dp_rank,
            record.life_id,
            record.seq,
            record.at_us,
            record.observed_at_ms,
            record.incarnation,
            partition,
            offset,
            record.skipped,
            batch.unknown_events,
            batch.unresolved_blocks,
            len(batch.ops),
            blocks,
            empty_events(batch.ops),
        )
        self.append(values)


SAID = ("holder_reset", "loss", "refusal", "declaration", "identity_refused", "scrape", "departure")
"""What a message of a rank carries that is no batch: names of the fields of :class:`RankMessage`."""


class RankMessageColumns(ColumnBatch):
    """``rank_messages``: one row per message that is no batch."""

    table = "rank_messages"
    column_names = (
        "instance_id",
        "dp_rank",
        "life_id",
        "seq",
        "kind",
        "at",
        "observed_at",
        "incarnation",
        "partition",
        "offset",
        "skipped",
        "body",
    )

    def add(self, record: RankMessage, partition: int, offset: int) -> None:
        """The row of a message that is no batch; none if it is one, or carries nothing."""
        kind = next((name for name in SAID if getattr(record, name) is not None), None)
        if kind is None:
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
            partition,
            offset,
            record.skipped,
            msgspec.json.encode(getattr(record, kind)).decode(),
        )
        self.append(values)


def empty_events(ops: list[Op]) -> str:
    """Those of ``ops`` that name no block and so have no row in ``block_events``, as JSON; empty where there are none, as nearly always."""
    empty = {index: op for index, op in enumerate(ops) if not op.block_ids and op.kind != "CLEAR"}
    return msgspec.json.encode(empty).decode() if empty else ""


def read_empty_events(text: str) -> dict[int, Op]:
    """The events that :func:`empty_events` wrote, by their index in the batch."""
    return msgspec.json.decode(text, type=dict[int, Op]) if text else {}
