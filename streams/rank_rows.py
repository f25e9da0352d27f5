"""One row of a rank's windows while it is being counted, and the record it becomes. Pure."""

from __future__ import annotations

from copy import copy

import msgspec

from schemas.reasons import register
from schemas.records import Breach, Declaration, GroupCounters, RankWindow
from streams.blocks import AMBIGUOUS, CAUSE_NAMES, CLEARED, CONCURRENT, EVICTED, RESTARTED

BREACHES_SHOWN = 10
"""So many contradictions with the engine's metrics a row shows; it counts them all."""

_CAUSES = {EVICTED: "evicted", CLEARED: "cleared", RESTARTED: "restarted", CONCURRENT: "concurrent", AMBIGUOUS: "ambiguous"}
_AWAY = (EVICTED, CLEARED, RESTARTED)


class Tally(msgspec.Struct):
    """Counters of one group in one row. ``recomputed`` is, by cause, blocks, tokens and GPU microseconds; ``back`` and ``lifetime`` are
    histograms by bucket, the former by cause."""

    counters: GroupCounters
    recomputed: list[list[int]]
    back: list[dict[int, int]]
    lifetime: dict[int, int]

    def record(self) -> GroupCounters:
        """A copy of the counters with everything filled in."""
        out = copy(self.counters)
        for cause, name in _CAUSES.items():
            blocks, tokens, gpu_us = self.recomputed[cause]
            if blocks:
                setattr(out, f"recompute_{name}_blocks", blocks)
                setattr(out, f"recompute_{name}_tokens", tokens)
                setattr(out, f"recompute_{name}_gpu_us", gpu_us)
        for cause in _AWAY:
            if self.back[cause]:
                buckets, counts = _columns(self.back[cause])
                setattr(out, f"back_{_CAUSES[cause]}_buckets", buckets)
                setattr(out, f"back_{_CAUSES[cause]}_counts", counts)
        out.lifetime_buckets, out.lifetime_counts = _columns(self.lifetime)
        return out


def new_tally(group: int) -> Tally:
    """Counters of ``group``, all zero."""
    causes = range(len(CAUSE_NAMES))
    return Tally(GroupCounters(group), [[0, 0, 0] for _ in causes], [{} for _ in causes], {})


def tally_of(tallies: dict[int, Tally], group: int) -> Tally:
    """The tally of ``group``, made if there was none."""
    tally = tallies.get(group)
    if tally is None:
        tally = tallies[group] = new_tally(group)
    return tally


def _columns(histogram: dict[int, int]) -> tuple[list[int], list[int]]:
    buckets = sorted(histogram)
    return buckets, [histogram[bucket] for bucket in buckets]


class Row(msgspec.Struct):
    """Counters of one rank in one window [``start``, ``start + length``) of one life; names as in :class:`RankWindow`.

    ``standing`` are the reasons that hold for the rank as a whole, as last taken over into ``reasons``.
    """

    start: int
    length: int
    life_id: str
    declared: Declaration
    warmup: bool = False
    changed_at: int = 0
    observed_us: int = 0
    first_batch_us: int = 0
    last_batch_us: int = 0
    batches: int = 0
    duplicate_batches: int = 0
    lost_batches: int = 0
    refused_batches: int = 0
    unknown_events: int = 0
    unresolved_blocks: int = 0
    scrapes: int = 0
    breaches: list[Breach] = []
    breaches_found: int = 0
    departed: bool = False
    connector: str | None = None
    rate: float | None = None
    rate_source: str | None = None
    pool_blocks: int | None = None
    standing: list[str] = []
    reasons: list[str] = []
    groups: dict[int, Tally] = {}

    @property
    def end(self) -> int:
        """Where the window ends, engine time."""
        return self.start + self.length

    def record(self, instance_id: str, dp_rank: int, semantics_version: int, *, final: bool) -> RankWindow:
        """The record of this row as it stands."""
        declared = self.declared
        lowering = set(self.reasons)
        if not self.observed_us:
            lowering.add("not_observed")
        elif self.observed_us < self.length:
            lowering.add("coverage")
        return RankWindow(
            instance_id=instance_id,
            dp_rank=dp_rank,
            life_id=self.life_id,
            window_start_us=self.start,
            window_us=self.length,
            semantics_version=semantics_version,
            version=self.changed_at * 2 + final,
            final=final,
            workload=declared.workload,
            model=declared.model,
            reuse_reporting=declared.reuse_reporting,
            removals=declared.removals,
            kv_connector=self.connector,
            key_epoch=declared.key_epoch,
            canary=declared.canary,
            observed_us=self.observed_us,
            first_batch_us=self.first_batch_us,
            last_batch_us=self.last_batch_us,
            batches=self.batches,
            duplicate_batches=self.duplicate_batches,
            lost_batches=self.lost_batches,
            refused_batches=self.refused_batches,
            unknown_events=self.unknown_events,
            unresolved_blocks=self.unresolved_blocks,
            warmup=self.warmup,
            reasons=sorted(self.reasons),
            groups=[tally.record() for _, tally in sorted(self.groups.items())],
            register=register(lowering, measured=self.connector is None),
            prefill_rate=self.rate,
            prefill_rate_source=self.rate_source,
            gpus_per_rank=1.0 if declared.gpus_per_rank is None else declared.gpus_per_rank,
            pool_blocks=self.pool_blocks,
            scrapes=self.scrapes,
            breaches=list(self.breaches),
            breaches_found=self.breaches_found,
            departed=self.departed,
        )
