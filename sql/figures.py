"""The figures: repeat compute by cause and duplicate footprint, with their coverage and how each may be read. Pure.

:func:`assemble` turns totals (of :func:`sql.load.load` or :func:`sql.totals.totals_from_records`) into one JSON document. The
causes are never added together, nor the two leading figures. Tokens and blocks of a rank come from its primary group.

Every figure has a ``register``: ``exact``, ``lower_bound``, or ``indeterminate`` where it says nothing, and ``reasons``, each a
word of :data:`REASONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from schemas.reasons import REASONS, SPOILS_EXACTNESS, UNSETTLED, reason_text, register
from schemas.records import GroupCounters, Register, rank_key
from sql.load import load
from sql.times import iso
from sql.totals import By, DuplicateTotals, LifeTotals, Span, Totals, totals_from_records

__all__ = [
    "REASONS",
    "UNSETTLED",
    "By",
    "DuplicateTotals",
    "LifeTotals",
    "Span",
    "Totals",
    "assemble",
    "load",
    "primary_group",
    "reason_text",
    "totals_from_records",
]

Document = dict[str, Any]

UNDECLARED = "(undeclared)"
HEADLINE_TIER = "GPU"

WHOLE_CONTEXT_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups that hold every token position of a sequence; groups of no kind are taken for one."""

CAUSES = {
    "evicted": "recompute_evicted",
    "cleared": "recompute_cleared",
    "restarted": "recompute_restarted",
    "concurrent": "recompute_concurrent",
    "ambiguous_reload": "recompute_ambiguous",
}
"""Causes as they are named in documents, and the counters they come from."""


def primary_group(groups: Sequence[GroupCounters]) -> GroupCounters | None:
    """The group that counts for tokens, each position once: the lowest GPU group that holds the whole context.

    Without one, the lowest GPU group; without any, the lowest; ``None`` if there is no group at all.
    """

    def rank(group: GroupCounters) -> tuple[int, int]:
        if not group.gpu:
            return 2, group.group_idx
        return (0 if group.spec_kind in WHOLE_CONTEXT_KINDS else 1), group.group_idx

    return min(groups, key=rank, default=None)


def assemble(totals: Totals) -> Document:
    """The document of figures of ``totals``.

    With ``totals.by``, ``repeat_compute`` and ``duplicate_footprint`` are lists with one entry per ``key`` (``null`` for undeclared),
    and ``fleet`` holds both for the whole fleet.
    """
    span, by = totals.span, totals.by
    fleet_repeat = _repeat_compute(totals.lives, span)
    fleet_duplicates = _duplicate_footprint(totals, "fleet", "")
    document: Document = {
        "span": _span(totals),
        "semantics_version": totals.semantics_version,
        "provisional": not (all(life.final for life in totals.lives) and all(window.final for window in totals.duplicates)),
        "warnings": _warnings(totals),
    }
    if by is None:
        document |= {"repeat_compute": fleet_repeat, "duplicate_footprint": fleet_duplicates}
    else:
        buckets: dict[str | None, list[LifeTotals]] = {}
        for life in totals.lives:
            buckets.setdefault(_key(life, by), []).append(life)
        keys = buckets.keys() | {window.scope_key or None for window in totals.duplicates if window.scope == by}
        ordered = sorted(keys, key=_key_order(totals, by))
        document |= {
            "by": by,
            "repeat_compute": [_keyed(key) | _repeat_compute(buckets.get(key, []), span) for key in ordered],
            "duplicate_footprint": [_keyed(key) | _duplicate_footprint(totals, by, key or "") for key in ordered],
            "fleet": {"repeat_compute": fleet_repeat, "duplicate_footprint": fleet_duplicates},
        }
    document["ranks"] = [_rank(lives, span) for lives in _by_rank(totals.lives)]
    return document


def _span(totals: Totals) -> Document:
    span = totals.span
    since, until = totals.asked
    # A side that was not asked for is a batch's own time, not a border.
    moved = (since is not None and since != span.start_us) or (until is not None and until != span.end_us)
    return {
        "since": iso(span.start_us) if _has_time(totals) else None,
        "until": iso(span.end_us) if _has_time(totals) else None,
        "since_us": span.start_us,
        "until_us": span.end_us,
        "widened_to_windows": moved,
    }


def _has_time(totals: Totals) -> bool:
    return totals.asked != (None, None) or any(life.first_batch_us is not None for life in totals.lives)


def _warnings(totals: Totals) -> list[str]:
    warnings = []
    if totals.left_out_versions:
        others = ", ".join(str(version) for version in totals.left_out_versions)
        warnings.append(f"only rows of semantics_version {totals.semantics_version} are summed; rows of {others} in this span are left out")
    epochs = sorted({life.key_epoch for life in totals.lives})
    if len(epochs) > 1:
        named = ", ".join(str(epoch) for epoch in epochs)
        warnings.append(f"key epochs {named} in this span: content ids of different epochs cannot be compared")
    return warnings


def _keyed(key: str | None) -> Document:
    return {"key": key, "label": UNDECLARED if key is None else key}


def _key(life: LifeTotals, by: By) -> str | None:
    if by == "rank":
        return rank_key(life.instance_id, life.dp_rank)
    return life.workload if by == "workload" else life.model


def _key_order(totals: Totals, by: By) -> Callable[[str | None], tuple[int, int, str]]:
    ranks: dict[str | None, int] = {}
    if by == "rank":  # as the ranks are listed, so that rank 10 comes after rank 9
        for number, lives in enumerate(_by_rank(totals.lives)):
            ranks[_key(lives[0], by)] = number
    return lambda key: (key is None, ranks.get(key, len(ranks)), key or "")


def _by_rank(lives: Iterable[LifeTotals]) -> list[list[LifeTotals]]:
    """Lives of each rank, ranks in order."""
    found: dict[tuple[str, int], list[LifeTotals]] = {}
    for life in lives:
        found.setdefault((life.instance_id, life.dp_rank), []).append(life)
    return [found[rank] for rank in sorted(found)]


def _coverage(lives: Sequence[LifeTotals], span: Span) -> float:
    ranks = len(_by_rank(lives))
    whole = ranks * span.length_us
    return sum(life.observed_us for life in lives) / whole if whole else 0.0


def _fully_covered(lives: Sequence[LifeTotals], span: Span) -> bool:
    whole = len(_by_rank(lives)) * span.length_us
    return whole > 0 and sum(life.observed_us for life in lives) >= whole


def _observed(lives: Sequence[LifeTotals], span: Span) -> bool:
    return span.length_us > 0 and any(life.observed_us for life in lives)


def _identity(lives: Sequence[LifeTotals]) -> tuple[int, int]:
    """Resolved and stored tokens of the primary groups."""
    primaries = [group for life in lives if (group := primary_group(life.groups)) is not None]
    return sum(group.resolved_tokens for group in primaries), sum(group.stored_tokens for group in primaries)


def _identity_coverage(lives: Sequence[LifeTotals]) -> float | None:
    resolved, stored = _identity(lives)
    return resolved / stored if stored else None


def _tells_copies(lives: Iterable[LifeTotals]) -> bool:
    """Whether a store and an announcement can be told apart, as declared."""
    return all(life.reuse_reporting in ("none", "labelled") for life in lives)


def _measurable(lives: Iterable[LifeTotals]) -> bool:
    return all(life.kv_connector is None for life in lives)


def _keys(lives: Iterable[LifeTotals]) -> set[tuple[int, str]]:
    return {(life.key_epoch, life.canary) for life in lives}


def _sum(lives: Iterable[LifeTotals], field: str) -> int:
    return sum(getattr(group, field) for life in lives if (group := primary_group(life.groups)) is not None)


def _cause(lives: Sequence[LifeTotals], cause: str) -> Document:
    return {unit: _sum(lives, f"{CAUSES[cause]}_{unit}") for unit in ("tokens", "blocks")}


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


def _reasons(lives: Sequence[LifeTotals], span: Span) -> set[str]:
    """Reasons for a repeat compute that is less than exact."""
    reasons = {reason for life in lives for reason in life.reasons}
    if not lives:
        return {"no_ranks"}
    if not _observed(lives, span):
        reasons.add("not_observed")
    elif not _fully_covered(lives, span):
        reasons.add("coverage")
    resolved, stored = _identity(lives)
    for applies, reason in (
        (not _tells_copies(lives), "unlabelled"),
        (resolved < stored, "identity"),
        (_sum(lives, "recompute_ambiguous_blocks") > 0, "ambiguous_reload"),
        (any(life.warmup for life in lives), "warmup"),
        (not _measurable(lives), "kv_connector"),
        (any(len(_keys(rank)) > 1 for rank in _by_rank(lives)), "key_change"),
    ):
        if applies:
            reasons.add(reason)
    return reasons


def _repeat_compute(lives: Sequence[LifeTotals], span: Span) -> Document:
    ranks = _by_rank(lives)
    measurable = [rank for rank in ranks if _measurable(rank)]
    telling = [rank for rank in measurable if _tells_copies(rank)]
    causes = _causes(measurable, telling) if measurable or not ranks else dict.fromkeys(CAUSES)
    reasons = _reasons(lives, span)
    return causes | {
        "concurrent_ranks": {"telling": len(telling), "of": len(ranks)},
        "measurable_ranks": {"measurable": len(measurable), "of": len(ranks)},
        "coverage": _coverage(lives, span),
        "identity_coverage": _identity_coverage(lives),
        # What the measurable ranks paid twice is a lower bound of what all of them did.
        "register": register(reasons, measured=bool(measurable)),
        "reasons": sorted(reasons),
    }


def _rank(lives: Sequence[LifeTotals], span: Span) -> Document:
    latest = max(lives, key=lambda life: (life.last_window_us, life.last_batch_us or 0, life.life_id))
    resident = primary_group(latest.groups)
    measurable, telling = _measurable(lives), _tells_copies(lives)
    reasons = _reasons(lives, span)
    return {
        "instance_id": latest.instance_id,
        "dp_rank": latest.dp_rank,
        "workload": latest.workload,
        "model": latest.model,
        "reuse_reporting": latest.reuse_reporting,
        "removals": latest.removals,
        "kv_connector": latest.kv_connector,
        "stored_tokens": _sum(lives, "stored_tokens") if telling else None,
        "stored_blocks": _sum(lives, "stored_blocks") if telling else None,
        "evicted_tokens": _sum(lives, "evicted_tokens"),
        "evicted_blocks": _sum(lives, "evicted_blocks"),
        "resident_tokens": resident.resident_tokens if resident else 0,
        "resident_blocks": resident.resident_blocks if resident else 0,
        "reloaded_tokens": _sum(lives, "reloaded_tokens"),
        "repeat_compute": _causes([lives], [lives] if telling else []) if measurable else None,
        "unjoined_evicts": sum(group.unjoined_evicts for life in lives for group in life.groups),
        "unresolved_blocks": sum(life.unresolved for life in lives),
        "batches": sum(life.batches for life in lives),
        "lost_batches": sum(life.lost for life in lives),
        "refused_batches": sum(life.refused for life in lives),
        "lives": len({life.life_id for life in lives}),
        "first_batch": _iso_or_none(min((life.first_batch_us for life in lives if life.first_batch_us), default=None)),
        "last_batch": _iso_or_none(max((life.last_batch_us for life in lives if life.last_batch_us), default=None)),
        "coverage": _coverage(lives, span),
        "identity_coverage": _identity_coverage(lives),
        "register": register(reasons, measured=measurable),
        "reasons": sorted(reasons),
    }


def _iso_or_none(us: int | None) -> str | None:
    return None if us is None else iso(us)


def _holds(life: LifeTotals) -> bool:
    """Whether the rank had anything resident on a GPU in the span."""
    return any(
        group.resident_blocks or group.stored_blocks or group.evicted_blocks or group.cleared_blocks or group.restarted_blocks
        for group in life.groups
    )


def _comparable_holders(lives: Sequence[LifeTotals]) -> int:
    """How many ranks held content whose ids can be compared: not those that resolved nothing of what they stored."""
    count = 0
    for rank in _by_rank(lives):
        stored = sum(group.stored_tokens for life in rank for group in life.groups)
        resolved = sum(group.resolved_tokens for life in rank for group in life.groups)
        if any(_holds(life) for life in rank) and (resolved or not stored):
            count += 1
    return count


def _lags(window: DuplicateTotals, totals: Totals) -> bool:
    """Whether a shard has not heard everything of a rank that the rank's own windows hold."""
    if totals.asked != (None, None):
        return False  # what the shards have heard is told of the newest window only
    newest = [max(life.last_batch_us or 0 for life in lives) for lives in _by_rank(totals.lives)]
    return window.ranks < len(newest) or window.rank_lag_us > sum(totals.span.end_us - last for last in newest)


def _duplicate_footprint(totals: Totals, scope: str, key: str) -> Document:
    span, lives = totals.span, totals.lives
    tiers = {window.tier: window for window in totals.duplicates if (window.scope, window.scope_key) == (scope, key)}
    counted = [window for window in totals.duplicates if window.scope == "fleet" and window.tier == HEADLINE_TIER]
    headline = tiers.get(HEADLINE_TIER) or DuplicateTotals(scope, key, HEADLINE_TIER)

    # Extra copies are a relation between ranks: how far they were seen hangs on the whole fleet, whatever the scope.
    reasons = _reasons(lives, span) - {"kv_connector"}
    if any(life.unresolved or any(group.resolved_tokens < group.stored_tokens for group in life.groups) for life in lives):
        reasons.add("identity")
    if not counted and lives:
        reasons.add("no_duplicate_windows")
    if any(not window.complete for window in counted):
        reasons.add("shards_missing")
    if any(window.as_of_us < span.end_us or _lags(window, totals) for window in counted):
        reasons.add("behind")

    warnings: list[str] = []
    instances = {life.instance_id for life in lives}
    uncomparable: set[str] = set()
    if len(instances) > 1 and any(life.model is None for life in lives):
        uncomparable.add("model_undeclared")
        warnings.append("ranks without a declared model count as one model: copies between instances may be of different models")
    if len(_keys(lives)) > 1:
        uncomparable.add("key_change")
        warnings.append("ranks keyed differently cannot be compared: copies between them are not seen")
    inside_split = any(len(_keys(life for life in lives if life.instance_id == instance)) > 1 for instance in instances)
    single = _comparable_holders(lives) < 2 and not _extra(headline)
    if single and lives:
        reasons.add("single_holder")
    unmeasured = single or not counted or bool(reasons & {"no_ranks", "not_observed"})
    best: Register = "lower_bound" if reasons & (SPOILS_EXACTNESS | {"shards_missing", "behind"}) else "exact"
    inside: Register = "indeterminate" if unmeasured or inside_split else best
    between: Register = "indeterminate" if unmeasured or uncomparable else best
    parts = {"inside_instances": inside, "between_instances": between}
    return {
        **_tier(headline, span, parts),
        "coverage": _coverage(lives, span),
        "identity_coverage": _identity_coverage(lives),
        "register": "indeterminate" if "indeterminate" in (inside, between) else best,
        "reasons": sorted(reasons | uncomparable),
        "warnings": warnings,
        "other_tiers": {tier: _tier(tiers[tier], span, {}) for tier in sorted(tiers) if tier != HEADLINE_TIER},
    }


def _extra(window: DuplicateTotals) -> bool:
    return bool(window.extra_blocks_max or window.inside_block_us or window.between_block_us)


def _tier(window: DuplicateTotals, span: Span, registers: dict[str, Register]) -> Document:
    def figure(sum_us: int, maximum: int, end: int) -> Document:
        # Sums are whole numbers and are divided once, so that two ways of adding up agree to the last bit.
        return {"mean": sum_us / span.length_us if span.length_us else 0.0, "max": maximum, "end": end}

    def part(name: str) -> Document:
        return {
            "extra_tokens": figure(
                getattr(window, f"{name}_token_us"), getattr(window, f"{name}_tokens_max"), getattr(window, f"{name}_tokens_end")
            ),
            "extra_blocks": figure(
                getattr(window, f"{name}_block_us"), getattr(window, f"{name}_blocks_max"), getattr(window, f"{name}_blocks_end")
            ),
            **({"register": registers[f"{name}_instances"]} if registers else {}),
        }

    return {
        "extra_tokens": figure(
            window.inside_token_us + window.between_token_us,
            window.extra_tokens_max,
            window.inside_tokens_end + window.between_tokens_end,
        ),
        "extra_blocks": figure(
            window.inside_block_us + window.between_block_us,
            window.extra_blocks_max,
            window.inside_blocks_end + window.between_blocks_end,
        ),
        "inside_instances": part("inside"),
        "between_instances": part("between"),
    }
