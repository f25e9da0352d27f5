"""The worker put together: the Faust app with its agents, tables and timer, and the services beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import faust
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]
from faust.app.base import BootStrategy
from faust.types import TP, StreamT, TopicT
from mode.utils.objects import cached_property
from mode.utils.queues import FlowControlEvent

from schemas.errors import KvcensusError
from schemas.records import DuplicateWindow, RankWindow
from schemas.topics import (
    DEAD_LETTERS,
    DUPLICATE_STEPS,
    DUPLICATE_WINDOWS,
    RANK_WINDOWS,
    RECOMPUTES,
    RECORD_TOPICS,
    RESIDENCY,
    SHARED_PREFIXES,
    Topic,
)
from streams.agents.common import Agent, log
from streams.agents.fleet import FleetAgent
from streams.agents.holder import HolderAgent
from streams.agents.merger import MergerAgent
from streams.faust_table import BUFFER_MESSAGES, PlacedTable
from streams.positions import Place
from streams.probe import Probe
from streams.settings import WorkerSettings, faust_config, untranslated
from streams.sink_service import SinkService
from streams.snapshots import Snapshots
from streams.startup import Layout, find_layout
from streams.tables import DUPLICATE_WINDOW_TABLE, RANK_WINDOW_TABLE, WindowLedger
from streams.watchdog import Source, Watchdog

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Upper bound of what is handed to the producer: the broker's own limit is the one that counts."""

MEND_SECONDS = 0.5
"""Between two attempts to read what was skipped."""

LAST_FLUSH_SECONDS = 3.0
"""How long a worker that was told to stop tries to give out what it has, and then to write down what it knows."""


class _WithoutWeb(BootStrategy):
    """Starts no web server: the worker opens nothing inbound, whatever ``faust worker`` was told."""

    enable_web = False


class _FlowControl(FlowControlEvent):
    """Flow control that, opened twice, keeps what came in between.

    After reading changelogs Faust opens the flow for its source topics and, some round trips later, opens it again, which empties
    the agents' buffers; messages that had arrived meanwhile would be gone, with no acknowledged offset to return to.
    """

    def resume(self) -> None:
        """Open the flow; the buffers are emptied only if it was closed."""
        if not self.is_active():
            super().resume()


class CensusApp(faust.App):
    """The Faust app of a worker. Nothing touches the broker before it starts."""

    BootStrategy = _WithoutWeb

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.layout: Layout | None = None
        self.failure: BaseException | None = None
        self.failing = asyncio.Event()
        self._skipped = asyncio.Event()
        self._keeping = asyncio.Lock()
        self.snapshots = Snapshots(settings)
        super().__init__(
            settings.group,
            **faust_config(settings),
            datadir=str(settings.data_dir / "worker"),
            store="memory://",
            web_enabled=False,
            autodiscover=False,
            topic_allow_declare=False,
            topic_disable_leader=True,
            # This group commits nothing: where a partition is read from is said by the snapshots of what the cores know.
            consumer_auto_offset_reset="earliest",
            stream_wait_empty=False,
            stream_recovery_delay=0.0,
            stream_processing_timeout=10 * 365 * 86_400,  # its checks take an empty partition for a stuck one; the watchdog does not
            # Compares what was read of a changelog with the end the broker tells, which embedded brokers tell too low.
            recovery_consistency_check=False,
            producer_acks=-1,
            producer_max_request_size=MAX_MESSAGE_BYTES,
            worker_redirect_stdouts=False,
        )
        self.counting = self._build()
        sources: list[Source] = [self._positions]
        self.sink: SinkService | None = None
        if settings.sink:
            self.sink = SinkService(settings, self.fail_soon)
            sources.append(self.sink.sink.positions)
        watchdog = Watchdog(settings, sources, lambda message: self.fail_soon(KvcensusError(message)))
        self.service(cast(Any, watchdog))  # declared for classes, made for instances too

    # -- putting together ---------------------------------------------------------------------------------------

    def _build(self) -> tuple[HolderAgent, FleetAgent, MergerAgent]:
        """Declare topics, tables and agents. The cores are made later, when partition counts are known."""
        chosen = self.settings
        base_us, rules = chosen.window_us, f".{chosen.grace_us}.{chosen.history_us}.{chosen.history_blocks}"
        places: dict[str, int] = {}
        rank_table = PlacedTable(self, name="rank-windows", topic=RANK_WINDOW_TABLE, place=places.get)
        duplicate_table = PlacedTable(self, name="duplicate-windows", topic=DUPLICATE_WINDOW_TABLE, place=lambda _: 0)
        rank_ledger = WindowLedger(rank_table, RankWindow, base_us=base_us, rules=rules)
        duplicate_ledger = WindowLedger(duplicate_table, DuplicateWindow, base_us=base_us, rules=rules)
        self._ledgers = (rank_ledger, duplicate_ledger)

        async def recovered() -> None:
            rank_ledger.rebuild()
            duplicate_ledger.rebuild()

        duplicate_table.on_recover(recovered)

        topics = {topic.name: self._raw_topic(topic) for topic in RECORD_TOPICS}
        holder = HolderAgent(
            settings=self.settings,
            shards=self._shards,
            rank_windows=topics[RANK_WINDOWS.name],
            recomputes=topics[RECOMPUTES.name],
            residency=topics[RESIDENCY.name],
            dead_letters=topics[DEAD_LETTERS.name],
            ledger=rank_ledger,
            places=places,
            skipped=self._skipped,
        )
        fleet = FleetAgent(
            settings=self.settings,
            shards=self._shards,
            duplicate_steps=topics[DUPLICATE_STEPS.name],
            dead_letters=topics[DEAD_LETTERS.name],
            skipped=self._skipped,
        )
        merger = MergerAgent(
            settings=self.settings,
            shards=self._shards,
            duplicate_windows=topics[DUPLICATE_WINDOWS.name],
            shared_prefixes=topics[SHARED_PREFIXES.name],
            dead_letters=topics[DEAD_LETTERS.name],
            ledger=duplicate_ledger,
            skipped=self._skipped,
        )
        for agent in (holder, fleet, merger):
            self.agent(topics[agent.topic.name], name=agent.name)(self._guarded(agent))
        self.on_partitions_assigned.connect(self._assigned)
        self.on_rebalance_complete.connect(self._go_on)
        self.on_before_shutdown.connect(self._last_flush)
        self.task(self._keep_flushing)
        self.task(self._keep_mending)
        self.task(self._keep_snapshots)
        return holder, fleet, merger

    def _raw_topic(self, topic: Topic) -> TopicT:
        # Without acks Faust tracks no message and commits no offset of the topic.
        return self.topic(
            topic.name, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", acks=False, allow_empty=True
        )

    def _shards(self) -> int:
        assert self.layout is not None, "no message arrives before the app has started"
        return self.layout.shards

    def _guarded(self, agent: Agent[Any]) -> Callable[[StreamT[bytes]], Awaitable[None]]:
        async def read(stream: StreamT[bytes]) -> None:
            try:
                await agent.run(stream)
            except Exception as error:
                # Faust would start the agent again behind the message that failed; going on without it would count wrong.
                await self.fail(error)

        read.__qualname__ = agent.name  # what Faust's log lines call it
        return read

    # -- life ---------------------------------------------------------------------------------------------------

    async def on_first_start(self) -> None:
        """Check the broker and its topics before anything else starts. Raises :class:`KvcensusError`."""
        if self.layout is None:
            self.layout = await asyncio.to_thread(find_layout, self.settings)
        for name in untranslated(self.settings):
            log.warning("kafka option %s is not known to the counting half: it reaches the other clients only", name)
        self.settings.data_dir.mkdir(parents=True, exist_ok=True)
        await super().on_first_start()
        if self.sink is not None:  # with the others, not behind the first rebalance like a service
            self.add_dependency(self.sink)
        self.producer.buffer.max_messages = BUFFER_MESSAGES

    async def fail(self, error: BaseException) -> None:
        """Stop the worker because of ``error``: it starts again from the topics, with nothing lost."""
        if self.failure is None:
            self.failure = error
            self.failing.set()
            if not isinstance(error, KvcensusError):
                log.error("the worker cannot go on", exc_info=error)
            await self.crash(error)

    def fail_soon(self, error: BaseException) -> None:
        """:meth:`fail`, from another thread."""
        asyncio.run_coroutine_threadsafe(self.fail(error), self.loop)

    async def _keep_flushing(self) -> None:
        while not self.should_stop:
            await self.sleep(self.settings.flush_seconds)
            if self.should_stop or self.rebalancing:
                continue
            try:
                for agent in self.counting:
                    await agent.flush()
                for ledger in self._ledgers:
                    ledger.expire(time.monotonic())
            except Exception as error:
                await self.fail(error)
                return

    async def _keep_snapshots(self) -> None:
        while not self.should_stop:
            await self.sleep(self.snapshots.tick_seconds)
            if self.should_stop or self.rebalancing:
                continue
            try:
                async with self._keeping:
                    await self.snapshots.keep(self.counting)
            except Exception as error:
                await self.fail(error)
                return

    async def _last_flush(self, *_: Any, **__: Any) -> None:
        for agent in self.counting:
            log.debug(
                "%s: %d counted, %d set aside, %d failed, %d sent",
                agent.name,
                agent.applied,
                agent.poisoned,
                agent.failed,
                agent.outbox.sent,
            )
        if self.failure is not None or self.layout is None:
            return
        try:
            async with asyncio.timeout(LAST_FLUSH_SECONDS):
                for agent in self.counting:
                    await agent.flush()
        except Exception as error:
            log.warning("results of the last second were not given out (%s); the next start does it", str(error) or type(error).__name__)
            return
        try:
            async with asyncio.timeout(LAST_FLUSH_SECONDS), self._keeping:
                await self.snapshots.keep(self.counting, everything=True)
            async with asyncio.timeout(LAST_FLUSH_SECONDS):
                await self.snapshots.close()
        except Exception as error:
            self.snapshots.abandon()
            log.info("the last snapshot was not completed (%s); the next start reads a little more", str(error) or type(error).__name__)

    # -- rebalance ----------------------------------------------------------------------------------------------

    async def _assigned(self, *args: Any, **_: Any) -> None:
        assigned: set[TP] = args[1]  # after the sender
        for agent in self.counting:
            agent.hold({tp.partition for tp in assigned if tp.topic == agent.topic.name})
        log.info("holds %s", ", ".join(f"{agent.topic.name} {agent.positions}" for agent in self.counting))

    @cached_property
    def flow_control(self) -> FlowControlEvent:
        """Gate of the agents' buffers."""
        return _FlowControl()

    async def _go_on(self, *_: Any, **__: Any) -> None:
        """Everything is paused, changelogs were read: restore what came here, and begin each partition where its agent stands.

        Faust would go on wherever the client is: at the start, for partitions that stayed here, and behind messages that it fetched
        and dropped while the partitions moved, since it counts on acknowledged offsets to return to.
        """
        try:
            assert self.layout is not None
            await self.snapshots.restore(self.counting, self.layout)
        except Exception as error:
            await self.fail(error)
            return
        places = {place: offset for agent in self.counting for place, offset in agent.positions.all().items()}
        if not places:
            return
        try:
            starts = await self.consumer.earliest_offsets(*(TP(*place) for place in places))
            for agent in self.counting:
                for tp, start in starts.items():
                    if tp.topic == agent.topic.name and start:
                        resume = places[tp.topic, tp.partition]
                        self._tell_missing(tp, resume, start)
                        if 0 < resume < start and isinstance(agent, FleetAgent):
                            agent.missed(tp.partition, start - 1)
                        agent.positions.starts_at(tp.partition, start)
                        places[tp.topic, tp.partition] = max(start, places[tp.topic, tp.partition])
        except (KafkaError, TimeoutError) as error:
            log.debug("start of the partitions not known: %s", error)
        await self._seek(places)

    def _tell_missing(self, tp: TP, resume: int, start: int) -> None:
        if 0 < resume < start:
            log.warning(
                "%s[%d]: messages %d to %d were deleted before they were counted: retention is shorter than this worker was away",
                tp.topic,
                tp.partition,
                resume,
                start - 1,
            )

    async def _seek(self, places: Mapping[Place, int]) -> None:
        if places:
            try:
                await self.consumer.seek_wait({TP(*place): offset for place, offset in places.items()})
            except (KafkaError, TimeoutError) as error:  # another rebalance is under way; it positions everything anew
                log.debug("positions not restored: %s", error)

    async def _keep_mending(self) -> None:
        """Have messages that Faust skipped read after all, until they were: a clearing of its buffers may overtake the reading again."""
        probe = await asyncio.to_thread(Probe, self.settings)
        try:
            while not self.should_stop:
                await self.wait_first(self._skipped.wait())
                self._skipped.clear()
                if not self.should_stop and not self.rebalancing:
                    await self._mend(probe)
                await self.sleep(MEND_SECONDS)
        finally:
            await asyncio.to_thread(probe.close)

    async def _mend(self, probe: Probe) -> None:
        for agent in self.counting:
            for place, expected in agent.positions.holes().items():
                first = await asyncio.to_thread(probe.first, place, expected)
                if first is not None and agent.positions.holes().get(place) == expected:
                    log.debug("reading %s[%d] again from offset %d, behind which messages were skipped", *place, first)
                    agent.positions.starts_at(place[1], first)
                    await self._seek({place: first})
            if agent.positions.holes():
                self._skipped.set()

    # -- watchdog -----------------------------------------------------------------------------------------------

    def _positions(self) -> dict[tuple[str, int], int]:
        """Where the agents stand; partitions whose state is being read do not move, and are not stuck."""
        positions: dict[tuple[str, int], int] = {}
        for agent in self.counting:
            unready = agent.unready
            positions.update({place: offset for place, offset in agent.positions.all().items() if place[1] not in unready})
        return positions
