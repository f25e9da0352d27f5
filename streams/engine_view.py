"""What the engine's own metrics said in the present life: the prefill rate, a connector at work, and what contradicts the stream. Pure."""

from __future__ import annotations

import msgspec

from schemas.records import Breach, Scrape

RATE_SPAN_MS = 10_000
"""A prefill rate is measured over at least so long."""

RATE_MEMORY_MS = 3_600_000
"""The rate in force is the highest of the scrapes so long before the newest."""

SEEN_CONNECTOR = "seen in metrics"
"""Stands as the connector of a rank that declared none, once its metrics show that blocks were loaded."""

_SLACK_BLOCKS = 8


class Reading(msgspec.Struct, gc=False, array_like=True):
    """One scrape: the forwarder's clock, prompt tokens and those of them that were cached (null: not reported), and the rate up to here."""

    at_ms: int
    prompt: int | None
    cached: int
    rate: float = 0.0


class EngineView(msgspec.Struct):
    """Scrapes of one life. ``pool_blocks`` is the last known; ``connector``: external prefix cache hits rose."""

    pool_blocks: int | None = None
    connector: bool = False
    rate: float | None = None
    hits: int | None = None
    starved: bool = False
    readings: list[Reading] = []

    def take(self, scrape: Scrape) -> bool:
        """Learn from one scrape; False if it came before (a delivery repeated), and tells nothing new."""
        if any(reading.at_ms == scrape.at_ms for reading in reversed(self.readings)):
            return False
        if scrape.num_gpu_blocks is not None:
            self.pool_blocks = scrape.num_gpu_blocks
        if scrape.external_prefix_cache_hits is not None:
            if self.hits is not None and scrape.external_prefix_cache_hits > self.hits:
                self.connector = True
            self.hits = scrape.external_prefix_cache_hits
        self._measure(scrape)
        return True

    def _measure(self, scrape: Scrape) -> None:
        """Prompt tokens computed per second since the latest scrape that is long enough ago and whose counters did not fall."""
        now = Reading(scrape.at_ms, scrape.prompt_tokens, scrape.prompt_tokens_cached or 0)
        if now.prompt is not None:
            for then in reversed(self.readings):
                if then.prompt is None or now.at_ms - then.at_ms < RATE_SPAN_MS or now.prompt < then.prompt or now.cached < then.cached:
                    continue
                computed = (now.prompt - now.cached) - (then.prompt - then.cached)
                now.rate = computed * 1_000 / (now.at_ms - then.at_ms)
                break
        border = now.at_ms - RATE_MEMORY_MS
        while len(self.readings) > 1 and self.readings[1].at_ms < border:  # the one before the border may still be measured from
            del self.readings[0]
        self.readings.append(now)
        highest = max(reading.rate for reading in self.readings if reading.at_ms >= border)
        self.rate = highest if highest > 0 else None

    def contradictions(self, scrape: Scrape, at_us: int, *, copies: int, distinct: int, groups: int, unlabelled: bool) -> list[Breach]:
        """What ``scrape`` shows to be impossible of ``copies`` physical and ``distinct`` blocks counted in ``groups`` GPU groups.

        Cached blocks never exceed the pool; where copies cannot be told from announcements, distinct blocks do not. Blocks in use
        never exceed those cached and those that running requests are filling; events and scrape travel apart, so it must hold twice.
        """
        found = []
        pool = scrape.num_gpu_blocks
        cached = distinct if unlabelled else copies
        if pool is not None and cached > pool:
            found.append(Breach("cached_over_pool", at_us, scrape.at_ms, cached, pool))
        starved = False
        if pool is not None and scrape.kv_cache_usage is not None and scrape.requests_running is not None:
            in_use = round(scrape.kv_cache_usage * pool)
            bound = copies + scrape.requests_running * groups + max(_SLACK_BLOCKS, pool // 100)
            starved = in_use > bound
            if starved and self.starved:
                found.append(Breach("in_use_over_cached", at_us, scrape.at_ms, in_use, bound))
        self.starved = starved
        return found
