"""A Faust table that lies where its source partition lies, also when it is written from a timer."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import cast

import faust
from faust.stores.memory import Store as MemoryStore
from faust.types import AppT, StoreT
from yarl import URL

from streams.tables import group_of_key

BUFFER_MESSAGES = 10_000
"""Changelog messages that may wait for the producer before the input waits; a flush writes one per changed window."""


class PlacedStore(MemoryStore[str, bytes]):
    """In-memory store that remembers the partition of entries written here, as the base does of those it recovered.

    Faust drops the entries of partitions that moved away by that record; without it they would stay, and age.
    """

    def __init__(self, url: str | URL, app: AppT, table: PlacedTable) -> None:
        super().__init__(url, app, table, table_name=table.name, key_type=table.key_type, value_type=table.value_type)
        self.data = _PlacedEntries(self._key_partition, table.partition_for_key)


class _PlacedEntries(dict[str, bytes]):
    def __init__(self, partitions: MutableMapping[str, int], place: Callable[[str], int]) -> None:
        super().__init__()
        self._partitions = partitions
        self._place = place

    def __setitem__(self, key: str, value: bytes) -> None:
        super().__setitem__(key, value)
        self._partitions[key] = self._place(key)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._partitions.pop(key, None)


class PlacedTable(faust.Table[str, bytes]):
    """Table whose changelog partition is looked up by the key's group, not taken from the event being processed.

    Faust writes an entry to the partition of the message at hand, and refuses outside of one, unless the producer's
    partitioner may choose. That would hash "rank and window" to another partition than the rank's own, and after a
    rebalance the entry would be with another worker than the rank. ``place`` says in which partition a group lives.
    """

    def __init__(self, app: AppT, *, name: str, topic: str, place: Callable[[str], int | None]) -> None:
        self._place = place
        changelog = app.topic(
            topic,
            key_type=str,
            value_type=bytes,
            key_serializer="raw",
            value_serializer="raw",
            acks=False,
            internal=True,
            allow_empty=True,
            maxsize=131_072,
        )
        super().__init__(app, name=name, key_type=str, value_type=bytes, changelog_topic=changelog, beacon=app.tables.beacon)
        self.key_serializer = "raw"  # not JSON, which is what Faust takes for text
        app.tables.add(self)

    def partition_for_key(self, key: str) -> int:
        """The partition in which the key's group lives; of a group that is counted no more, the one its entry was read from."""
        place = self._place(group_of_key(key))
        return self._entries.get(key, 0) if place is None else place

    @property
    def _entries(self) -> MutableMapping[str, int]:
        return cast(PlacedStore, self.data)._key_partition

    def _new_store_by_url(self, url: str | URL) -> StoreT[str, bytes]:
        return PlacedStore(url, self.app, self)
