"""Duplicate KV footprint, content that workloads share, and the prefixes that bear the most of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from schemas.reasons import SPOILS_EXACTNESS
from schemas.records import Register, SharedPrefix
from sql.figure_parts import Document, by_rank, coverage, identity_coverage, iso_or_none, keys, reasons_of
from sql.times import iso
from sql.total_types import PAIRS, DuplicateTotals, LifeTotals, Span, Totals

HEADLINE_TIER = "GPU"

_ONLY_REPEAT_COMPUTE = frozenset({"kv_connector", "history_forgotten"})
"""Reasons that say nothing about what is held now."""

_OF_ONE_WINDOW = frozenset({"absent", "behind", "coverage", "no_ranks", "not_observed", "single_holder"})
"""Reasons of a row that may not hold for a span: its first and last window are seen in part, one rank may have come first."""

_UNCOMPARABLE = frozenset({"key_change", "model_undeclared"})
"""Reasons for which copies between instances say nothing."""


def duplicate_footprint(totals: Totals, scope: str, key: str) -> Document:
    """Extra copies of one scope: the GPU tier, and the others beside it."""
    span, lives = totals.span, totals.lives
    tiers = {window.tier: window for window in totals.duplicates if (window.scope, window.scope_key) == (scope, key)}
    counted = [window for window in totals.duplicates if window.scope == "fleet" and window.tier == HEADLINE_TIER]
    headline = tiers.get(HEADLINE_TIER) or DuplicateTotals(scope, key, HEADLINE_TIER)

    # Extra copies are a relation between ranks: how far they were seen hangs on the whole fleet, whatever the scope.
    reasons = reasons_of(lives, span) - _ONLY_REPEAT_COMPUTE
    told = {reason for window in [headline, *counted] for reason in window.reasons} - _OF_ONE_WINDOW - _ONLY_REPEAT_COMPUTE
    reasons |= told - _UNCOMPARABLE
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
    uncomparable: set[str] = told & _UNCOMPARABLE
    if len(instances) > 1 and any(life.model is None for life in lives):
        uncomparable.add("model_undeclared")
        warnings.append("ranks without a declared model count as one model: copies between instances may be of different models")
    if len(keys(lives)) > 1:
        uncomparable.add("key_change")
        warnings.append("ranks keyed differently cannot be compared: copies between them are not seen")
    inside_split = any(len(keys(life for life in lives if life.instance_id == instance)) > 1 for instance in instances)
    alone = _comparable_holders(lives) < 2
    best: Register = "lower_bound" if reasons & (SPOILS_EXACTNESS | {"shards_missing", "behind"}) else "exact"

    def read(window: DuplicateTotals) -> Document:
        """The figures of one tier and how they may be read."""
        single = alone and not _extra(window)
        unmeasured = single or not counted or bool(reasons & {"no_ranks", "not_observed"})
        inside: Register = "indeterminate" if unmeasured or inside_split else best
        between: Register = "indeterminate" if unmeasured or uncomparable else best
        return {
            **_tier(window, span, {"inside_instances": inside, "between_instances": between}),
            "coverage": coverage(lives, span),
            "identity_coverage": identity_coverage(lives),
            "register": "indeterminate" if "indeterminate" in (inside, between) else best,
            "reasons": sorted(reasons | uncomparable | ({"single_holder"} if single and lives else set())),
        }

    return {
        **read(headline),
        "late_changes": headline.late_changes,
        "warnings": warnings,
        "other_tiers": {tier: read(tiers[tier]) for tier in sorted(tiers) if tier != HEADLINE_TIER},
    }


def workload_pairs(totals: Totals, fleet: Document) -> list[Document]:
    """Content that ranks of both workloads hold, counted once, as far as ``fleet``, the footprint of the whole, was seen.

    GPU first, then by the mean; of a pair, bytes are not known.
    """
    pairs = [window for window in totals.duplicates if window.scope == PAIRS]
    pairs.sort(key=lambda pair: (pair.tier != HEADLINE_TIER, pair.tier, -pair.between_token_us, pair.scope_key))
    return [
        {
            "key": [workload or None for workload in json.loads(pair.scope_key)],
            "tier": pair.tier,
            "tokens": _levels(totals.span, pair.between_token_us, pair.between_tokens_max, pair.between_tokens_end),
            "blocks": _levels(totals.span, pair.between_block_us, pair.between_blocks_max, pair.between_blocks_end),
            "bytes": None,
            "coverage": fleet["coverage"],
            "register": fleet["register"],
            "reasons": fleet["reasons"],
        }
        for pair in pairs
    ]


def shared_prefixes(trunks: Sequence[SharedPrefix]) -> Document:
    """The trunks with the most extra tokens, at the last instant of the span for which they were told (``null``: there is none)."""
    as_of = trunks[0].as_of_us if trunks else None
    return {"as_of": iso_or_none(as_of), "as_of_us": as_of, "trunks": [_trunk(trunk) for trunk in trunks]}


def _trunk(trunk: SharedPrefix) -> Document:
    return {
        "place": trunk.place,
        "depth_tokens": trunk.depth_tokens,
        "tokens": trunk.tokens,
        "blocks": trunk.blocks,
        "copies": trunk.copies,
        "instances": trunk.instances,
        "extra_tokens": trunk.extra_tokens,
        "extra_blocks": trunk.extra_blocks,
        "extra_bytes": trunk.extra_bytes,
        "workloads": [workload or None for workload in trunk.workloads],
        "models": [model or None for model in trunk.models],
        "ranks": trunk.ranks,
        "first_seen": iso(trunk.first_seen_us),
        "content_id": trunk.content_id.hex(),
        "head_content_id": trunk.head_content_id.hex(),
        "parent_content_id": trunk.parent_content_id and trunk.parent_content_id.hex(),
        "coverage": trunk.coverage,
        "register": trunk.register,
        "reasons": trunk.reasons,
    }


def _holds(life: LifeTotals) -> bool:
    """Whether the rank had anything resident on a GPU in the span."""
    return any(
        group.resident_blocks or group.stored_blocks or group.evicted_blocks or group.cleared_blocks or group.restarted_blocks
        for group in life.groups
    )


def _comparable_holders(lives: Sequence[LifeTotals]) -> int:
    """How many ranks held content whose ids can be compared: not those that resolved nothing of what they stored."""
    count = 0
    for rank in by_rank(lives):
        stored = sum(group.stored_tokens for life in rank for group in life.groups)
        resolved = sum(group.resolved_tokens for life in rank for group in life.groups)
        if any(_holds(life) for life in rank) and (resolved or not stored):
            count += 1
    return count


def _lags(window: DuplicateTotals, totals: Totals) -> bool:
    """Whether a shard has not heard everything of a rank that the rank's own windows hold."""
    if totals.asked != (None, None):
        return False  # what the shards have heard is told of the newest window only
    present = by_rank(life for life in totals.lives if life.life_id)
    newest = [max(life.last_batch_us or 0 for life in lives) for lives in present]
    return window.ranks < len(newest) or window.rank_lag_us > sum(totals.span.end_us - last for last in newest)


def _extra(window: DuplicateTotals) -> bool:
    return bool(window.extra_blocks_max or window.inside_block_us or window.between_block_us)


def _levels(span: Span, sum_us: int, maximum: int, end: int) -> Document:
    # Sums are whole numbers and are divided once, so that two ways of adding up agree to the last bit.
    return {"mean": sum_us / span.length_us if span.length_us else 0.0, "max": maximum, "end": end}


def _byte_mean(span: Span, sum_ms: int | None) -> float | None:
    if sum_ms is None:
        return None
    return sum_ms * 1_000 / span.length_us if span.length_us else 0.0


def _sum(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _tier(window: DuplicateTotals, span: Span, registers: dict[str, Register]) -> Document:
    def part(name: str) -> Document:
        return {
            "extra_tokens": _levels(
                span, getattr(window, f"{name}_token_us"), getattr(window, f"{name}_tokens_max"), getattr(window, f"{name}_tokens_end")
            ),
            "extra_blocks": _levels(
                span, getattr(window, f"{name}_block_us"), getattr(window, f"{name}_blocks_max"), getattr(window, f"{name}_blocks_end")
            ),
            "extra_bytes": {"mean": _byte_mean(span, getattr(window, f"{name}_byte_ms")), "end": getattr(window, f"{name}_bytes_end")},
            "register": registers[f"{name}_instances"],
        }

    return {
        "extra_tokens": _levels(
            span,
            window.inside_token_us + window.between_token_us,
            window.extra_tokens_max,
            window.inside_tokens_end + window.between_tokens_end,
        ),
        "extra_blocks": _levels(
            span,
            window.inside_block_us + window.between_block_us,
            window.extra_blocks_max,
            window.inside_blocks_end + window.between_blocks_end,
        ),
        "extra_bytes": {
            "mean": _byte_mean(span, _sum(window.inside_byte_ms, window.between_byte_ms)),
            "max": window.extra_bytes_max,
            "end": _sum(window.inside_bytes_end, window.between_bytes_end),
        },
        "inside_instances": part("inside"),
        "between_instances": part("between"),
    }
