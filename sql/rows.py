"""Records of the topics as columns for ClickHouse. Pure.

One :class:`ColumnBatch` per table holds a list per column.
:class:`TableRows` takes any record and knows its tables.

    rows = TableRows()
    rows.add(record)
    for batch in rows.batches():
        database.insert(batch.table, batch.column_names, batch.columns)
    rows.clear()
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.records import (
    DeadLetter,
    Deploy,
    DuplicateWindow,
    EngineMetrics,
    Lifecycle,
    RankMessage,
    RankWindow,
    Recompute,
    SharedPrefix,
)
from sql.block_rows import BlockEventColumns
from sql.columns import ColumnBatch
from sql.fact_rows import BatchColumns, RankMessageColumns
from sql.result_rows import (
    DeadLetterColumns,
    DeployColumns,
    DuplicateWindowColumns,
    RankWindowColumns,
    RecomputeColumns,
    SharedPrefixColumns,
)
from sql.said_rows import EngineMetricsColumns, LifecycleColumns, RankEventColumns

Row = RankWindow | Recompute | DuplicateWindow | SharedPrefix | DeadLetter | Deploy | Lifecycle | EngineMetrics | RankMessage
"""A record that has a table."""


class TableRows:
    """Rows of all tables: give it records, take the batches."""

    def __init__(self) -> None:
        self.rank_windows = RankWindowColumns()
        self.recomputes = RecomputeColumns()
        self.duplicate_windows = DuplicateWindowColumns()
        self.shared_prefixes = SharedPrefixColumns()
        self.dead_letters = DeadLetterColumns()
        self.deploys = DeployColumns()
        self.lifecycle = LifecycleColumns()
        self.engine_metrics = EngineMetricsColumns()
        self.block_events = BlockEventColumns()
        self.batches_of_ranks = BatchColumns()
        self.rank_messages = RankMessageColumns()
        self.rank_events = RankEventColumns()

    def add(self, record: Row, partition: int = -1, offset: int = -1) -> None:
        """The rows of one record, in its table or tables.

        ``partition`` and ``offset`` are where a :class:`RankMessage` stood on its topic. One without a place leaves no row in ``batches``
        or ``rank_messages``: it could not be counted from again.
        """
        if isinstance(record, RankMessage):
            if record.batch is not None:
                before = len(self.block_events)
                self.block_events.add(record)
                if offset >= 0:
                    self.batches_of_ranks.add(record, partition, offset, len(self.block_events) - before)
            else:
                self.rank_events.add(record)
                if offset >= 0:
                    self.rank_messages.add(record, partition, offset)
        elif isinstance(record, RankWindow):
            self.rank_windows.add(record)
        elif isinstance(record, Recompute):
            self.recomputes.add(record)
        elif isinstance(record, DuplicateWindow):
            self.duplicate_windows.add(record)
        elif isinstance(record, SharedPrefix):
            self.shared_prefixes.add(record)
        elif isinstance(record, DeadLetter):
            self.dead_letters.add(record)
        elif isinstance(record, Deploy):
            self.deploys.add(record)
        elif isinstance(record, EngineMetrics):
            self.engine_metrics.add(record)
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
        return (
            self.rank_windows,
            self.recomputes,
            self.duplicate_windows,
            self.shared_prefixes,
            self.dead_letters,
            self.deploys,
            self.lifecycle,
            self.engine_metrics,
            self.block_events,
            self.batches_of_ranks,
            self.rank_messages,
            self.rank_events,
        )
