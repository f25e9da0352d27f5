"""Whether a demo's run is complete, and whether its figures show what they should. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.records import rank_key
from sql.totals import LifeTotals, Totals

CAUSES = ("evicted", "cleared", "restarted", "concurrent")
"""Causes of repeat compute that every demo shows; ``ambiguous_reload`` needs an offload tier, and has none here."""

PLACES = ("inside_instances", "between_instances")


@dataclass(frozen=True)
class Published:
    """What one rank has published: batches in each process life."""

    instance_id: str
    dp_rank: int
    lives: tuple[int, ...]

    @property
    def key(self) -> str:
        """``INSTANCE/R``."""
        return rank_key(self.instance_id, self.dp_rank)

    @property
    def batches(self) -> int:
        """Over all lives."""
        return sum(self.lives)


_GOES_ON = frozenset({"scrapes"})
"""Keys whose values grow although nothing is published any more: the engines are asked as long as they run."""


def settled(document: Any) -> Any:
    """What no longer moves once everything was counted: the document without what goes on by itself."""
    if isinstance(document, Mapping):
        return {key: settled(value) for key, value in document.items() if key not in _GOES_ON}
    return [settled(value) for value in document] if isinstance(document, list) else document


def counted_lives(lives: Iterable[LifeTotals]) -> dict[str, list[int]]:
    """Batches counted of each life of each rank, in the order of their first batch."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for life in lives:
        if life.first_batch_us is None:
            continue
        of_rank = found.setdefault(rank_key(life.instance_id, life.dp_rank), {})
        first, batches = of_rank.get(life.life_id, (life.first_batch_us, 0))
        of_rank[life.life_id] = (min(first, life.first_batch_us), batches + life.batches)
    return {rank: [batches for _, batches in sorted(of_rank.values())] for rank, of_rank in found.items()}


def missing(published: Sequence[Published], totals: Totals) -> list[str]:
    """What was published and is not in the rank windows, a line per rank; more than was published is as wrong."""
    counted = counted_lives(totals.lives)
    lines = []
    for rank in published:
        have = counted.get(rank.key, [])
        if have != [batches for batches in rank.lives if batches]:
            lines.append(f"{rank.key}: counted {_lives(have)} of {_lives(rank.lives)} batches")
    return lines


def unexpected(totals: Totals) -> list[str]:
    """Batches that were lost, refused or counted twice: none should be."""
    return [
        f"{rank_key(life.instance_id, life.dp_rank)}: {count} batches {what}"
        for life in totals.lives
        for count, what in ((life.lost, "lost"), (life.refused, "refused"), (life.duplicate_batches, "came twice"))
        if count
    ]


def recomputed_blocks(totals: Totals) -> int:
    """Blocks computed again, over all causes and groups: as many as there are rows of their own. No figure: causes are not added."""
    return sum(
        group.recompute_evicted_blocks
        + group.recompute_cleared_blocks
        + group.recompute_restarted_blocks
        + group.recompute_concurrent_blocks
        + group.recompute_ambiguous_blocks
        for life in totals.lives
        for group in life.groups
    )


def zeros(document: Mapping[str, Any]) -> list[str]:
    """Figures of the two numbers that are zero or absent, by name."""
    found = []
    for cause in CAUSES:
        counted = document["repeat_compute"][cause]
        found += [f"repeat_compute.{cause}.{unit}" for unit in ("tokens", "blocks") if counted is None or not counted[unit]]
    for place in PLACES:
        for unit in ("extra_tokens", "extra_blocks"):
            levels = document["duplicate_footprint"][place][unit]
            found += [f"duplicate_footprint.{place}.{unit}.{name}" for name in ("mean", "max") if not levels[name]]
    return found


def _lives(batches: Sequence[int]) -> str:
    return "+".join(str(count) for count in batches) or "0"
