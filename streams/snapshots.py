"""Keeping the agents' block-level state on the state topic, and giving it to whoever reads a partition next.

One owner (a rank, a slice of a shard, the merger) is written at a time, every ``snapshot_seconds`` if anything was counted for it,
staggered, so that no pause is long. Only what was given out and acknowledged is written: whoever goes on from a snapshot gives out
what follows it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.errors import KvcensusError
from streams.agents.common import Agent, Cut, Marks
from streams.positions import Place
from streams.residency import SEMANTICS_VERSION
from streams.settings import WorkerSettings
from streams.startup import Layout
from streams.state import NOTHING_NEEDED, Book, Restored, Rules, Saved, chunks, manifest_key, saved_as
from streams.state_topic import StateTopic
from streams.tables import STATE

log = logging.getLogger("kvcensus.worker")

AnyAgent = Agent[Any]

MOST_OF_THE_TIME = 0.05
"""Share of a worker's time that dumps of one owner may take: a rank with very many blocks is written less often."""


def resume_position(position: int, marks: Marks, saved: dict[str, Saved]) -> int:
    """Where a partition must be read from again: what every owner lacks lies at or behind it.

    ``position``: where reading stood when ``marks`` were taken. An owner for which nothing was counted since its snapshot lacks nothing.
    """
    lacking = [position]
    for owner, (first, last) in marks.items():
        kept = saved.get(owner)
        if kept is None:
            lacking.append(first)
        elif last >= kept.position:
            lacking.append(kept.position)
    return min(lacking)


class Snapshots:
    """All agents' snapshots of one worker. Methods are for its event loop; the clients work in threads."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._topic: StateTopic | None = None
        self._books: dict[tuple[str, int], Book] = {}
        self._due: dict[tuple[str, int, str], float] = {}
        self._readers: list[tuple[str, int]] = []
        self._writer = os.urandom(4).hex()
        self.written = 0
        self.written_bytes = 0

    @property
    def tick_seconds(self) -> float:
        """Between two looks for what is due."""
        return min(max(self._settings.snapshot_seconds / 16, 0.05), 1.0)

    async def _client(self) -> StateTopic:
        if self._topic is None:
            self._topic = await asyncio.to_thread(StateTopic, self._settings)
        return self._topic

    def _rules(self, layout: Layout, input_id: str) -> Rules:
        chosen = self._settings
        return Rules(
            semantics_version=SEMANTICS_VERSION,
            window_us=chosen.window_us,
            partitions=layout.shards,
            grace_us=chosen.grace_us,
            history_us=chosen.history_us,
            history_blocks=chosen.history_blocks,
            input_id=input_id,
        )

    # -- restoring ----------------------------------------------------------------------------------------------

    async def restore(self, agents: Sequence[AnyAgent], layout: Layout) -> None:
        """Have the partitions that came here begin where their state says. Raises :class:`KvcensusError` if the broker does not answer."""
        self._readers = [(agent.name, layout.partitions[agent.topic.name]) for agent in agents]
        self._forget_moved(agents)
        if not any(agent.unready for agent in agents):
            return
        topic = await self._client()
        wanted: dict[int, dict[str, Rules]] = {}
        for agent in agents:
            rules = self._rules(layout, await asyncio.to_thread(topic.topic_id, agent.topic.name))
            for partition in agent.unready:
                wanted.setdefault(partition, {})[agent.name] = rules
        found = await asyncio.to_thread(topic.restore, wanted)
        for agent in agents:
            for partition in sorted(agent.unready):
                restored = found.get((partition, agent.name))
                if restored is not None:  # else it came while we were reading
                    self._begin(agent, partition, restored, wanted[partition][agent.name])

    def _forget_moved(self, agents: Sequence[AnyAgent]) -> None:
        """Books of partitions that are no longer here say nothing."""
        here = {(agent.name, partition) for agent in agents for partition in agent.held()}
        for key in self._books.keys() - here:
            del self._books[key]
        for due in [due for due in self._due if due[:2] not in here]:
            del self._due[due]

    def _begin(self, agent: AnyAgent, partition: int, restored: Restored, rules: Rules) -> None:
        where = f"{agent.topic.name}[{partition}]"
        try:
            began = time.monotonic()
            agent.begin(partition, restored.resume, restored.owners)
            log.debug("%s: %d owners restored in %.3f s", where, len(restored.owners), time.monotonic() - began)
        except Exception as error:  # whatever a dump that cannot be read raises: the topics hold the truth
            log.warning("%s: its snapshot cannot be read: %r", where, error)
            restored = Restored(epoch=restored.epoch, strays=restored.strays, why="unreadable")
            agent.begin(partition, 0, {})
        if restored.found:
            log.info("%s: goes on from a snapshot, at offset %d", where, restored.resume)
        elif restored.why is not None:
            log.warning("%s: read from its start, because its snapshot is %s", where, restored.why)
        self._books[agent.name, partition] = Book(agent.name, rules, restored, self._writer)
        # All of it is written once more, soon: who had the partition before may still delete what it replaced.
        now = time.monotonic()
        for owner in restored.owners:
            self._due[agent.name, partition, owner] = now + self._stagger(owner)

    def _stagger(self, owner: str) -> float:
        return self._settings.snapshot_seconds * (zlib.crc32(owner.encode()) % 64 + 1) / 64

    # -- writing ------------------------------------------------------------------------------------------------

    async def keep(self, agents: Sequence[AnyAgent], *, everything: bool = False) -> None:
        """Write what is due (``everything``: all that changed). What cannot be written now is tried again."""
        for agent in agents:
            for partition in agent.held():
                done: set[str] = set()
                while owners := [owner for owner in self._to_write(agent, partition, everything) if owner not in done]:
                    cut = await agent.cut(partition, owners)
                    if cut is None:
                        break
                    done.update(dump.owner for dump in cut.dumps)
                    try:
                        await self._write(agent, cut)
                    except KvcensusError as error:
                        log.warning("snapshot of %s[%d] not written: %s", agent.topic.name, partition, error)
                        self._put_off(agent, cut)
                        break

    def _to_write(self, agent: AnyAgent, partition: int, everything: bool) -> list[str]:
        """Owners whose snapshot is due, the longest due first."""
        book = self._books.get((agent.name, partition))
        if book is None:
            return []
        now = time.monotonic()
        due: list[tuple[float, str]] = []
        for owner, (_, last) in agent.marks(partition).items():
            kept = book.saved.get(owner)
            key = (agent.name, partition, owner)
            if kept is not None and last < kept.position and book.ours(owner):
                continue
            at = self._due.get(key)
            if at is None:
                at = self._due[key] = now + self._stagger(owner)
            if everything or at <= now:
                due.append((at, owner))
        return [owner for _, owner in sorted(due)]

    def _put_off(self, agent: AnyAgent, cut: Cut) -> None:
        now = time.monotonic()
        for dump in cut.dumps:
            later = max(self._settings.snapshot_seconds, dump.seconds / MOST_OF_THE_TIME)
            self._due[agent.name, cut.partition, dump.owner] = now + later

    async def _write(self, agent: AnyAgent, cut: Cut) -> None:
        """The dumps, the manifest that names them, the deletion of what they replaced, the positions: each once the one before is there."""
        topic = await self._client()
        book = self._books[agent.name, cut.partition]
        named = [(dump, book.snapshot_id()) for dump in cut.dumps]
        parts = [chunks(agent.name, dump.owner, snapshot, dump.data) for dump, snapshot in named]
        offsets = iter(await asyncio.to_thread(topic.write, cut.partition, [pair for part in parts for pair in part]))
        for (dump, snapshot), part in zip(named, parts, strict=True):
            first = min(next(offsets) for _ in part)
            book.keep(dump.owner, saved_as(snapshot, dump.data, dump.position, first))
            self.written += 1
            self.written_bytes += len(dump.data)
        book.forget(book.saved.keys() - cut.marks.keys())
        if not agent.holds(cut):  # moved away meanwhile: whoever has it now goes on from the manifest before
            return
        self._put_off(agent, cut)
        resume = resume_position(cut.position, cut.marks, book.saved)
        manifest = book.manifest(resume)
        written = await asyncio.to_thread(topic.write, cut.partition, [(manifest_key(agent.name), msgspec.msgpack.encode(manifest))])
        book.needs = min([*written, *(kept.first_offset for kept in manifest.owners.values())])
        await asyncio.to_thread(topic.write, cut.partition, book.replaced())
        positions: dict[Place, int] = {(agent.topic.name, cut.partition): resume}
        oldest = self._oldest_needed(cut.partition)
        if oldest is not None:
            positions[STATE.name, cut.partition] = oldest
        await asyncio.to_thread(topic.commit, positions)

    def _oldest_needed(self, partition: int) -> int | None:
        """Before which nothing in a partition of the state topic is needed; ``None`` where another worker may need something there."""
        needs: list[int] = []
        for name, count in self._readers:
            if partition < count:
                book = self._books.get((name, partition))
                if book is None or book.needs is None:
                    return None
                needs.append(book.needs)
        oldest = min(needs)
        return None if oldest == NOTHING_NEEDED else oldest

    def abandon(self) -> None:
        """Finish nothing more that is under way."""
        if self._topic is not None:
            self._topic.abandon()

    async def close(self) -> None:
        """Let go of the clients."""
        if self._topic is not None:
            await asyncio.to_thread(self._topic.close)
