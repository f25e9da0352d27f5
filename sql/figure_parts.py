"""What every figure is made with: primary groups, coverage, identity coverage, reasons, quantiles of histograms. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from schemas.histogram import bounds
from schemas.records import GroupCounters
from sql.times import iso
from sql.total_types import GroupTotals, LifeTotals, Span

Document = dict[str, Any]

_Group = TypeVar("_Group", bound=GroupCounters)

WHOLE_CONTEXT_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups that hold every token position of a sequence; groups of no kind are taken for one."""

QUANTILES = {"p50": (1, 2), "p90": (9, 10), "p99": (99, 100)}


def _primary_rank(group: GroupCounters) -> tuple[int, int]:
    if not group.gpu:
        return 2, group.group_idx
    return (0 if group.spec_kind in WHOLE_CONTEXT_KINDS else 1), group.group_idx


def primary_group(groups: Sequence[_Group]) -> _Group | None:
    """The group that counts for tokens, each position once: the lowest GPU group that holds the whole context.

    Without one, the lowest GPU group; without any, the lowest; ``None`` if there is no group at all.
    """
    return min(groups, key=_primary_rank, default=None)


def primaries(lives: Iterable[LifeTotals]) -> list[GroupTotals]:
    """The primary group of each life that has one."""
    return [group for life in lives if (group := primary_group(life.groups)) is not None]


def total(lives: Iterable[LifeTotals], field: str) -> int:
    """A counter of the primary groups, added up."""
    return sum(getattr(group, field) for group in primaries(lives))


def by_rank(lives: Iterable[LifeTotals]) -> list[list[LifeTotals]]:
    """Lives of each rank, ranks in order."""
    found: dict[tuple[str, int], list[LifeTotals]] = {}
    for life in lives:
        found.setdefault((life.instance_id, life.dp_rank), []).append(life)
    return [found[rank] for rank in sorted(found)]


def coverage(lives: Sequence[LifeTotals], span: Span) -> float:
    """Observed share of the span, over the ranks of ``lives``; absent ones count as 0."""
    whole = len(by_rank(lives)) * span.length_us
    return sum(life.observed_us for life in lives) / whole if whole else 0.0


def identity(lives: Sequence[LifeTotals]) -> tuple[int, int]:
    """Resolved and stored tokens of the primary groups."""
    return total(lives, "resolved_tokens"), total(lives, "stored_tokens")


def identity_coverage(lives: Sequence[LifeTotals]) -> float | None:
    """Share of stored tokens that have a content id; ``None`` where nothing was stored."""
    resolved, stored = identity(lives)
    return resolved / stored if stored else None


def tells_copies(lives: Iterable[LifeTotals]) -> bool:
    """Whether a store and an announcement can be told apart, as declared."""
    return all(life.reuse_reporting in ("none", "labelled") for life in lives)


def measurable(lives: Iterable[LifeTotals]) -> bool:
    """Whether repeat compute can be told apart from loading."""
    return all(life.kv_connector is None for life in lives)


def keys(lives: Iterable[LifeTotals]) -> set[tuple[int, str]]:
    """The identity keys in use, as (epoch, canary)."""
    return {(life.key_epoch, life.canary) for life in lives}


def reasons_of(lives: Sequence[LifeTotals], span: Span) -> set[str]:
    """Reasons for a repeat compute that is less than exact."""
    if not lives:
        return {"no_ranks"}
    reasons = {reason for life in lives for reason in life.reasons}
    observed = sum(life.observed_us for life in lives)
    if span.length_us == 0 or not observed:
        reasons.add("not_observed")
    elif observed < len(by_rank(lives)) * span.length_us:
        reasons.add("coverage")
    resolved, stored = identity(lives)
    for applies, reason in (
        (not tells_copies(lives), "unlabelled"),
        (resolved < stored, "identity"),
        (total(lives, "recompute_ambiguous_blocks") > 0, "ambiguous_reload"),
        (any(life.warmup for life in lives), "warmup"),
        (not measurable(lives), "kv_connector"),
        (any(len(keys(rank)) > 1 for rank in by_rank(lives)), "key_change"),
    ):
        if applies:
            reasons.add(reason)
    return reasons


def durations(groups: Iterable[GroupTotals], name: str) -> Document:
    """Histogram ``name`` of ``groups``, merged: quantiles in seconds, ``null`` where it is empty, and its buckets.

    A quantile is the upper bound of the bucket that holds it, so it is at most a quarter too high.
    """
    counts: dict[int, int] = {}
    for group in groups:
        for bucket, count in zip(getattr(group, f"{name}_buckets"), getattr(group, f"{name}_counts"), strict=True):
            counts[bucket] = counts.get(bucket, 0) + count
    return {quantile: _quantile(counts, *share) for quantile, share in QUANTILES.items()} | {
        "histogram": [[*bounds(bucket), counts[bucket]] for bucket in sorted(counts)]
    }


def _quantile(counts: Mapping[int, int], numerator: int, denominator: int) -> float | None:
    """The smallest bound below which at least ``numerator / denominator`` of all lie, seconds."""
    whole = sum(counts.values())
    reached = 0
    for bucket in sorted(counts):
        reached += counts[bucket]
        if reached * denominator >= whole * numerator:
            return bounds(bucket)[1] / 1e6
    return None


def iso_or_none(us: int | None) -> str | None:
    """Engine time as text."""
    return None if us is None else iso(us)
