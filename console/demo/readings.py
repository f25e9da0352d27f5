"""What the demo reads: the figures from ClickHouse through the process that owns it, as any other command would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas import codec
from schemas.records import DuplicateSteps, rank_key
from schemas.topics import DUPLICATE_STEPS
from sql.database import Database, StoreError
from sql.figures import assemble, load
from sql.store import connect
from sql.totals import Totals

_CLOSED = """
    SELECT toUnixTimestamp64Micro(max(window_end)), count()
    FROM duplicate_windows FINAL
    WHERE scope = 'fleet' AND tier = 'GPU' AND is_final
"""
_NEWEST_VERSION = "SELECT max(version) FROM duplicate_windows WHERE scope = 'fleet' AND tier = 'GPU'"
_RECOMPUTES = "SELECT count() FROM recomputes FINAL"


@dataclass(frozen=True)
class Reading:
    """The figures at one moment. ``settled`` is the document up to ``settled_us``, the end of the last closed window, if one has closed."""

    totals: Totals
    document: dict[str, Any]
    settled: dict[str, Any] | None = None
    settled_us: int | None = None

    @property
    def counted(self) -> int:
        """Batches in the rank windows."""
        return sum(life.batches + life.duplicate_batches + life.refused for life in self.totals.lives)

    @property
    def lost(self) -> int:
        """Batches declared lost."""
        return sum(life.lost for life in self.totals.lives)


class Figures:
    """A connection to the demo's store."""

    def __init__(self, folder: Path) -> None:
        self._database: Database = connect(None, folder)
        self._settled: tuple[int, dict[str, Any]] | None = None

    def close(self) -> None:
        """Let go of the connection."""
        self._database.close()

    def version(self) -> str:
        """Version of ClickHouse."""
        return str(self._database.query("SELECT version()").rows[0][0])

    def read(self, *, settled: bool = False) -> Reading | None:
        """The figures of everything counted so far; None while the schema is being made. With ``settled``, also those of closed windows."""
        try:
            totals = load(self._database)
            document = assemble(totals)
            if not settled:
                return Reading(totals, document)
            ((closed_us, windows),) = self._database.query(_CLOSED).rows
        except StoreError as error:
            if error.schema_missing:
                return None
            raise
        if not windows:
            return Reading(totals, document)
        if self._settled is None or self._settled[0] != closed_us:
            self._settled = (closed_us, assemble(load(self._database, until_us=closed_us)))
        return Reading(totals, document, self._settled[1], closed_us)

    def duplicates_version(self) -> int:
        """Version of the newest fleet window of duplicates; -1 without one."""
        found = self._database.query(_NEWEST_VERSION).rows[0][0]
        return -1 if found is None else int(found)

    def recomputes(self) -> int:
        """Recomputed blocks that have a row of their own."""
        return int(self._database.query(_RECOMPUTES).rows[0][0])


class StepsReader:
    """Follows ``kvcensus.duplicate-steps`` to tell when every rank's last batch has passed every content shard.

    The topic's only partition is read from its start; where it ends is not asked.
    """

    def __init__(self, bootstrap_servers: str) -> None:
        config: dict[str, str | int | float | bool] = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "kvcensus-demo",
            "enable.auto.commit": False,
            "log.connection.close": False,
        }
        self._consumer = Consumer(config)
        self._consumer.assign([TopicPartition(DUPLICATE_STEPS.name, 0, 0)])
        self._marks: dict[tuple[int, str], int] = {}
        self._reached_at: dict[tuple[int, str], int] = {}
        self._shards = 0

    def close(self) -> None:
        """Let go of the connection."""
        self._consumer.close()

    def read(self, timeout: float = 0.2) -> None:
        """Take in what has arrived, waiting ``timeout`` seconds at most for the first."""
        try:
            messages = self._consumer.consume(1_000, timeout)
        except KafkaException:  # the broker is away: its own process tells
            return
        for message in messages:
            value, offset = message.value(), message.offset()
            if message.error() is None and value is not None and offset is not None:
                self._take(codec.decode(value, DuplicateSteps), offset)

    def _take(self, steps: DuplicateSteps, offset: int) -> None:
        self._shards = max(self._shards, steps.shards)
        place = (steps.shard, rank_key(steps.instance_id, steps.dp_rank))
        if steps.watermark_us > self._marks.get(place, -1):
            self._marks[place] = steps.watermark_us
            self._reached_at[place] = offset

    def passed(self, last_us: dict[str, int]) -> int | None:
        """Offset by which every rank (by its key) has passed its last engine time in every shard; None if that is yet to come."""
        places = [(shard, rank) for shard in range(self._shards) for rank in last_us]
        if not places or any(self._marks.get(place, -1) < last_us[place[1]] for place in places):
            return None
        return max(self._reached_at[place] for place in places)
