"""What a forwarder says of itself: lifecycle records for the topics, snapshots for its own metrics page. Reads, changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from producers.config import ForwarderConfig, forwarder_version
from producers.exporter import Snapshot
from producers.lane import Lane
from producers.outlet import Outlet
from producers.scraper import Scraper
from producers.spool import Spool
from producers.subscription import Subscription
from schemas.records import Lifecycle


class Account:
    """The parts of one run whose counters are told. ``outlet`` None: no Kafka; ``scraper`` None: no page of the engine's metrics.

    What is of the socket or the process and not of one rank (messages that were no batch or too large for Kafka, what was delivered,
    what a replay brought, what the spool dropped) counts with the first rank of the socket, so that sums over ranks are right. What came
    in on the socket, and the state of the spool, stand with each rank: they are not to be summed.
    """

    def __init__(
        self,
        config: ForwarderConfig,
        incarnation: str,
        lanes: Mapping[int, Lane],
        subscription: Subscription,
        *,
        spool: Spool,
        outlet: Outlet | None,
        scraper: Scraper | None,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._lanes = lanes
        self._subscription = subscription
        self._spool = spool
        self._outlet = outlet
        self._scraper = scraper

    def lifecycle(self, kind: Literal["start", "heartbeat", "stop"], dp_rank: int, reason: str | None = None) -> Lifecycle:
        """The lifecycle record of a rank now; what was declared since the one before goes with it."""
        config, subscription, spool = self._config, self._subscription, self._spool
        lane = self._lanes[dp_rank]
        tally, counters, resolved = lane.tally, lane.stream.counters, lane.resolver.counters
        first = self._is_first(dp_rank)
        malformed = subscription.malformed if first else 0
        too_large = self._outlet.too_large if self._outlet is not None and first else 0
        declared, more = lane.declared.take()
        return Lifecycle(
            kind=kind,
            instance_id=config.instance_id,
            dp_rank=dp_rank,
            life_id=lane.stream.life_id,
            incarnation=self._incarnation,
            at_ms=time.time_ns() // 1_000_000,
            batches=tally.batches,
            blocks_stored=tally.blocks_stored,
            blocks_removed=tally.blocks_removed,
            unresolved_blocks=tally.unresolved_blocks,
            unknown_events=tally.unknown_events,
            refused=tally.refused + malformed + too_large,
            lost=tally.lost,
            duplicates=counters.duplicates,
            replayed=subscription.continuity.counters.replayed if first else 0,
            publisher_restarts=tally.publisher_restarts,
            canary=config.key.canary,
            key_epoch=config.key.epoch,
            reason=reason,
            forwarder_version=forwarder_version(),
            endpoint=config.endpoint,
            msgs_seen=subscription.messages,
            oversized=counters.oversized,
            malformed=malformed,
            too_large=too_large,
            events_ingested=counters.events,
            identity_conflicts=resolved.identity_conflicts,
            shared_contents=resolved.shared_contents,
            content_bridge_entries=len(lane.resolver),
            content_bridge_evicted=resolved.bridge_evictions,
            rank_mismatches=counters.rank_mismatches,
            connections=subscription.connections,
            spool_bytes=spool.bytes,
            spool_messages=spool.messages,
            spool_dropped=spool.dropped_batches if first else 0,
            scrapes=self._scraper.scrapes if self._scraper is not None else None,
            scrapes_failed=self._scraper.failed if self._scraper is not None else None,
            rss_bytes=_resident_bytes(),
            last_message_at_ms=subscription.last_message_at_ms,
            heartbeat_ms=round(config.heartbeat * 1_000),
            staleness_ms=round(config.staleness * 1_000),
            declared=declared,
            declared_more=more,
        )

    def snapshots(self) -> list[Snapshot]:
        """Where each rank stands now; any thread may ask."""
        return [self._snapshot(dp_rank, lane) for dp_rank, lane in list(self._lanes.items())]

    def _snapshot(self, dp_rank: int, lane: Lane) -> Snapshot:
        config, subscription, spool = self._config, self._subscription, self._spool
        tally, counters = lane.tally, lane.stream.counters
        first = self._is_first(dp_rank)
        malformed = subscription.malformed if first else 0
        too_large = self._outlet.too_large if self._outlet is not None and first else 0
        segments = lane.segments.counters if lane.segments is not None else None
        return Snapshot(
            config.instance_id,
            dp_rank,
            version=forwarder_version(),
            incarnation=self._incarnation,
            batches=tally.batches,
            blocks_stored=tally.blocks_stored,
            blocks_removed=tally.blocks_removed,
            events=counters.events,
            unresolved_blocks=tally.unresolved_blocks,
            unknown_events=tally.unknown_events,
            refused=tally.refused + malformed + too_large,
            oversized=counters.oversized,
            malformed=malformed,
            too_large=too_large,
            lost_batches=tally.lost,
            duplicates=counters.duplicates,
            replayed_batches=subscription.continuity.counters.replayed if first else 0,
            publisher_restarts=tally.publisher_restarts,
            rank_mismatches=counters.rank_mismatches,
            identity_conflicts=lane.resolver.counters.identity_conflicts,
            identities_forgotten=lane.resolver.counters.bridge_evictions,
            delivered_messages=self._outlet.delivered if self._outlet is not None and first else 0,
            spool_dropped_batches=spool.dropped_batches if first else 0,
            spool_faults=spool.faults if first else 0,
            spool_unreadable_bytes=spool.torn_bytes + spool.bad_bytes if first else 0,
            spool_vanished_messages=spool.vanished if first else 0,
            identities_not_written=lane.identities_not_written,
            segment_records=segments.records if segments is not None else 0,
            segments_sealed=segments.segments_sealed if segments is not None else 0,
            segments_dropped=segments.segments_dropped if segments is not None else 0,
            segment_batches_refused=segments.refused_batches if segments is not None else 0,
            scrapes=self._scraper.scrapes if self._scraper is not None and first else 0,
            scrapes_failed=self._scraper.failed if self._scraper is not None and first else 0,
            spool_bytes=spool.bytes,
            spool_messages=spool.messages,
            undelivered=self._outlet.in_flight if self._outlet is not None else None,
            last_message_at_ms=subscription.last_message_at_ms,
            engine_time_us=lane.stream.position.newest_us or None,
            bridge_blocks=len(lane.resolver),
            connected=subscription.connected,
            kafka_up=self._outlet.up if self._outlet is not None else None,
        )

    def _is_first(self, dp_rank: int) -> bool:
        return dp_rank == next(iter(list(self._lanes)))


def _resident_bytes() -> int | None:
    """Resident memory of this process, where the system tells."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
