"""The figures: repeat compute by cause and duplicate footprint, with their coverage and how each may be read. Pure.

:func:`assemble` turns totals (of :func:`sql.load.load` or :func:`sql.totals.totals_from_records`) into one JSON document. The
causes are never added together, nor the two leading figures. Tokens and blocks of a rank come from its primary group.

Every figure has a ``register``: ``exact``, ``lower_bound``, or ``indeterminate`` where it says nothing, and ``reasons``, each a
word of :data:`REASONS`.
"""

from __future__ import annotations

from collections.abc import Callable

from schemas.reasons import REASONS, UNSETTLED, reason_text
from schemas.records import rank_key
from sql.duplicate_figures import HEADLINE_TIER, duplicate_footprint, shared_prefixes, workload_pairs
from sql.figure_parts import WHOLE_CONTEXT_KINDS, Document, by_rank, primary_group
from sql.load import load
from sql.repeat_figures import CAUSES, rank_figures, repeat_compute
from sql.times import iso
from sql.total_types import By, DuplicateTotals, LifeTotals, Span, Totals
from sql.totals import totals_from_records

__all__ = [
    "CAUSES",
    "HEADLINE_TIER",
    "REASONS",
    "UNDECLARED",
    "UNSETTLED",
    "WHOLE_CONTEXT_KINDS",
    "By",
    "Document",
    "DuplicateTotals",
    "LifeTotals",
    "Span",
    "Totals",
    "assemble",
    "load",
    "primary_group",
    "reason_text",
    "span_document",
    "totals_from_records",
]

UNDECLARED = "(undeclared)"

_A_DAY_US = 86_400_000_000


def assemble(totals: Totals) -> Document:
    """The document of figures of ``totals``.

    With ``totals.by``, ``repeat_compute`` and ``duplicate_footprint`` are lists with one entry per ``key`` (``null`` for undeclared),
    and ``fleet`` holds both for the whole fleet.
    """
    span, by = totals.span, totals.by
    fleet_repeat = repeat_compute(totals.lives, span)
    fleet_duplicates = duplicate_footprint(totals, "fleet", "")
    document: Document = {
        "span": span_document(totals),
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
            "repeat_compute": [_keyed(key) | repeat_compute(buckets.get(key, []), span) for key in ordered],
            "duplicate_footprint": [_keyed(key) | duplicate_footprint(totals, by, key or "") for key in ordered],
            "fleet": {"repeat_compute": fleet_repeat, "duplicate_footprint": fleet_duplicates},
        }
    document["workload_pairs"] = workload_pairs(totals, fleet_duplicates)
    document["shared_prefixes"] = shared_prefixes(totals.prefixes)
    document["ranks"] = [rank_figures(lives, span) for lives in by_rank(totals.lives)]
    return document


def span_document(totals: Totals) -> Document:
    """The span of ``totals`` as it stands in documents: ISO 8601 and microseconds, and whether it was widened to whole windows."""
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
    if totals.asked[1] is None and (ahead := _far_ahead(totals)):
        warnings.append(ahead)
    return warnings


def _far_ahead(totals: Totals) -> str | None:
    """A sentence on a single rank whose last batch lies more than a day beyond all others': its clock, most likely, stretches the span."""
    newest = []
    for lives in by_rank(totals.lives):
        lasts = [life.last_batch_us for life in lives if life.last_batch_us]
        if lasts:
            newest.append((max(lasts), rank_key(lives[0].instance_id, lives[0].dp_rank)))
    newest.sort()
    if len(newest) < 2 or newest[-1][0] - newest[-2][0] <= _A_DAY_US:
        return None
    (before, _), (last, rank) = newest[-2:]
    return (
        f"the last batch of {rank} is of {iso(last)}, all others end by {iso(before)}: the span ends with it unless --until says otherwise"
    )


def _keyed(key: str | None) -> Document:
    return {"key": key, "label": UNDECLARED if key is None else key}


def _key(life: LifeTotals, by: By) -> str | None:
    if by == "rank":
        return rank_key(life.instance_id, life.dp_rank)
    return life.workload if by == "workload" else life.model


def _key_order(totals: Totals, by: By) -> Callable[[str | None], tuple[int, int, str]]:
    ranks: dict[str | None, int] = {}
    if by == "rank":  # as the ranks are listed, so that rank 10 comes after rank 9
        for number, lives in enumerate(by_rank(totals.lives)):
            ranks[_key(lives[0], by)] = number
    return lambda key: (key is None, ranks.get(key, len(ranks)), key or "")
