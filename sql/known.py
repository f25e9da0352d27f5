"""Ranks that are expected in a span though no row of theirs lies in it: those known when it ended that had not departed before. Pure.

A rank is known by its rows or, before it has any, by its declaration. One that has never told an engine time can be placed in no span with
an end; it is expected where none is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.records import RankWindow
from sql.total_types import LifeTotals, Span


@dataclass(frozen=True)
class KnownRank:
    """A rank as it was last declared. ``first_us``: engine time it was first heard of (``None``: it has told none).

    ``departed_us``: engine time at which its forwarder stopped on purpose, if that is its last word; 0 where it has told none.
    """

    instance_id: str
    dp_rank: int
    workload: str | None = None
    model: str | None = None
    reuse_reporting: str = "unlabelled"
    removals: str = "per_copy"
    kv_connector: str | None = None
    key_epoch: int = 0
    canary: str = ""
    first_us: int | None = None
    departed_us: int | None = None


def absent(known: Iterable[KnownRank], present: set[tuple[str, int]], span: Span, *, open_ended: bool) -> list[LifeTotals]:
    """Entries of those ``known`` that are expected in ``span`` and not ``present``."""
    entries = []
    for rank in known:
        if (rank.instance_id, rank.dp_rank) in present:
            continue
        expected = open_ended or (rank.first_us is not None and rank.first_us < span.end_us)
        departed = rank.departed_us is not None and rank.departed_us <= span.start_us
        if expected and not departed:
            entries.append(
                LifeTotals(
                    rank.instance_id,
                    rank.dp_rank,
                    "",
                    rank.workload,
                    rank.model,
                    rank.reuse_reporting,
                    rank.removals,
                    rank.kv_connector,
                    rank.key_epoch,
                    rank.canary,
                    reasons=["absent"],
                )
            )
    return entries


def known_by_rows(rows: Iterable[RankWindow], span: Span) -> list[KnownRank]:
    """The ranks of ``rows`` (one per key) that start before the span ends, as last declared, departed if the last before the span is."""
    newest: dict[tuple[str, int], RankWindow] = {}
    before: dict[tuple[str, int], RankWindow] = {}
    first: dict[tuple[str, int], int] = {}
    for row in sorted(rows, key=row_order):
        if row.window_start_us >= span.end_us:
            continue
        key = row.instance_id, row.dp_rank
        first.setdefault(key, row.window_start_us)
        newest[key] = row
        if row.window_start_us < span.start_us:
            before[key] = row
    found = []
    for key, row in newest.items():
        last = before.get(key)
        found.append(
            KnownRank(
                *key,
                row.workload,
                row.model,
                row.reuse_reporting,
                row.removals,
                row.kv_connector,
                row.key_epoch,
                row.canary,
                first[key],
                last.window_start_us if last is not None and last.departed else None,
            )
        )
    return found


def row_order(row: RankWindow) -> tuple[int, int, int, int]:
    """By time; rows of one window by the rules' version, then that which holds the later batch, then the version."""
    return row.window_start_us, row.semantics_version, row.last_batch_us, row.version
