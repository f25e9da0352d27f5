"""Repeat compute by cause, of the fleet, of a cut or of a rank, and what else is told of a rank. Pure.

The causes are never added together. Tokens and blocks come from the primary group of each life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas.reasons import register
from sql.figure_parts import (
    Document,
    by_rank,
    coverage,
    durations,
    identity_coverage,
    iso_or_none,
    measurable,
    primaries,
    primary_group,
    reasons_of,
    tells_copies,
    total,
)
from sql.total_types import LifeTotals, Span

CAUSES = {
    "evicted": "recompute_evicted",
    "cleared": "recompute_cleared",
    "restarted": "recompute_restarted",
    "concurrent": "recompute_concurrent",
    "ambiguous_reload": "recompute_ambiguous",
}
"""Causes as they are named in documents, and the counters they come from."""

_AWAY = ("evicted", "cleared", "restarted")
"""Causes of which it is counted how long the content was away."""


def repeat_compute(lives: Sequence[LifeTotals], span: Span) -> Document:
    """What these lives computed again, by cause; a cause is ``null`` where no rank can tell it."""
    ranks = by_rank(lives)
    able = [rank for rank in ranks if measurable(rank)]
    telling = [rank for rank in able if tells_copies(rank)]
    causes = _causes(able, telling) if able or not ranks else dict.fromkeys(CAUSES)
    reasons = reasons_of(lives, span)
    return causes | {
        "concurrent_ranks": {"telling": len(telling), "of": len(ranks)},
        "measurable_ranks": {"measurable": len(able), "of": len(ranks)},
        "coverage": coverage(lives, span),
        "identity_coverage": identity_coverage(lives),
        # What the measurable ranks paid twice is a lower bound of what all of them did.
        "register": register(reasons, measured=bool(able)),
        "reasons": sorted(reasons),
    }


def rank_figures(lives: Sequence[LifeTotals], span: Span) -> Document:
    """The entry of one rank, whose ``lives`` these are."""
    latest = max(lives, key=lambda life: (life.last_window_us, life.last_batch_us or 0, life.life_id))
    resident = primary_group(latest.groups)
    able, telling = measurable(lives), tells_copies(lives)
    reasons = reasons_of(lives, span)
    breaches = sorted((breach for life in lives for breach in life.breaches), key=lambda breach: breach.at_us)
    return {
        "instance_id": latest.instance_id,
        "dp_rank": latest.dp_rank,
        "workload": latest.workload,
        "model": latest.model,
        "reuse_reporting": latest.reuse_reporting,
        "removals": latest.removals,
        "kv_connector": latest.kv_connector,
        "prefill_rate": latest.prefill_rate,
        "prefill_rate_source": latest.prefill_rate_source,
        "gpus_per_rank": latest.gpus_per_rank,
        "stored_tokens": total(lives, "stored_tokens") if telling else None,
        "stored_blocks": total(lives, "stored_blocks") if telling else None,
        "evicted_tokens": total(lives, "evicted_tokens"),
        "evicted_blocks": total(lives, "evicted_blocks"),
        "cleared_tokens": total(lives, "cleared_tokens"),
        "cleared_blocks": total(lives, "cleared_blocks"),
        "unreused_tokens": total(lives, "unreused_tokens"),
        "unreused_blocks": total(lives, "unreused_blocks"),
        "resident_tokens": resident.resident_tokens if resident else 0,
        "resident_blocks": resident.resident_blocks if resident else 0,
        "resident_bytes": _resident_bytes(latest),
        "pool_blocks": latest.pool_blocks,
        "lifetime": durations(primaries(lives), "lifetime"),
        "reloaded_tokens": total(lives, "reloaded_tokens"),
        "reloaded_blocks": total(lives, "reloaded_blocks"),
        "repeat_compute": _causes([lives], [lives] if telling else []) if able else None,
        "forgotten_blocks": sum(group.forgotten_blocks for life in lives for group in life.groups),
        "unjoined_evicts": sum(group.unjoined_evicts for life in lives for group in life.groups),
        "unresolved_blocks": sum(life.unresolved for life in lives),
        "batches": sum(life.batches for life in lives),
        "lost_batches": sum(life.lost for life in lives),
        "refused_batches": sum(life.refused for life in lives),
        "lives": len({life.life_id for life in lives if life.life_id}),
        "departed": latest.departed,
        "first_batch": iso_or_none(min((life.first_batch_us for life in lives if life.first_batch_us), default=None)),
        "last_batch": iso_or_none(max((life.last_batch_us for life in lives if life.last_batch_us), default=None)),
        "scrapes": sum(life.scrapes for life in lives),
        "breaches": {
            "count": sum(life.breaches_found for life in lives),
            "listed": [
                {"kind": breach.kind, "at": iso_or_none(breach.at_us), "found_blocks": breach.found, "bound_blocks": breach.bound}
                for breach in breaches
            ],
        },
        "coverage": coverage(lives, span),
        "identity_coverage": identity_coverage(lives),
        "register": register(reasons, measured=able),
        "reasons": sorted(reasons),
    }


def _resident_bytes(life: LifeTotals) -> int | None:
    """Over all groups; ``None`` if the size of a group that holds something is not known."""
    held = [group for group in life.groups if group.resident_tokens]
    if any(group.kv_bytes_per_token is None for group in held):
        return None
    return sum(group.resident_tokens * (group.kv_bytes_per_token or 0) for group in held)


def _causes(ranks: Sequence[Sequence[LifeTotals]], telling: Sequence[Sequence[LifeTotals]]) -> Document:
    lives = [life for rank in ranks for life in rank]
    causes: Document = {cause: _cause(lives, cause) for cause in CAUSES if cause != "concurrent"}
    concurrent = _cause([life for rank in telling for life in rank], "concurrent") if telling else None
    return {
        "evicted": causes["evicted"],
        "cleared": causes["cleared"],
        "restarted": causes["restarted"],
        "concurrent": concurrent,
        "ambiguous_reload": causes["ambiguous_reload"],
    }


def _cause(lives: Sequence[LifeTotals], cause: str) -> Document:
    counter = CAUSES[cause]
    tokens = total(lives, f"{counter}_tokens")
    counted: Document = {"tokens": tokens, "blocks": total(lives, f"{counter}_blocks")}
    counted |= _gpu_time(lives, counter, tokens)
    if cause in _AWAY:
        counted["elapsed"] = durations(primaries(lives), f"back_{cause}")
    return counted


def _gpu_time(lives: Iterable[LifeTotals], counter: str, tokens: int) -> Document:
    """The estimate of GPU time: of ``rated_tokens`` of the tokens, by the method named; ``null`` where a rate is known of none of them."""
    seconds_us = rated = 0
    sources: set[str] = set()
    for life in lives:
        group = primary_group(life.groups)
        if group is None or not (spent := getattr(group, f"{counter}_gpu_us")):
            continue
        seconds_us += spent
        rated += getattr(group, f"rated_{counter.removeprefix('recompute_')}_tokens")
        sources.update(life.rate_sources)
    known = rated > 0 or tokens == 0
    return {
        "gpu_seconds": seconds_us / 1e6 if known else None,
        "gpu_seconds_are": "estimate",
        "rated_tokens": rated,
        "method": None if not sources else sources.pop() if len(sources) == 1 else "mixed",
    }
