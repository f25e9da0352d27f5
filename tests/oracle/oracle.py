"""The counting rules, written down a second time and as plainly as possible: the reference the real pipeline is compared with.

`identity` reads frames and finds contents, `rank` counts one rank, `footprint` sweeps over what all ranks held, `fleet` says what each
window of the fleet must hold. Here: the figures over one whole span.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from .footprint import footprint
from .identity import GPU, Contents, read_capture
from .rank import CAUSES, Declared, Departed, Rank, RankInput, Scraped

__all__ = ["CAUSES", "Contents", "Declared", "Departed", "Rank", "RankInput", "Scraped", "figures", "ranks_of_capture", "read_capture"]


def ranks_of_capture(
    path: str | Path,
    instance_id: str,
    *,
    reuse_reporting: str = "unlabelled",
    removals: str = "per_copy",
    model: str | None = None,
    workload: str | None = None,
) -> list[RankInput]:
    """One capture file as one instance."""
    ranks: dict[int, RankInput] = {}
    for dp_rank, seq, payload in read_capture(path):
        if dp_rank not in ranks:
            ranks[dp_rank] = RankInput(instance_id, dp_rank, [], reuse_reporting, removals, workload, model)
        ranks[dp_rank].frames.append((seq, payload))
    return [ranks[k] for k in sorted(ranks)]


def figures(ranks: list[RankInput], skew_us: int = 1_000_000) -> dict[str, Any]:
    """All figures over the whole span. `recomputes` lists every group; the sums count each life's primary group only."""
    contents = Contents()
    read = [Rank(r, contents) for r in ranks]
    times = [t for r in read for t in r.times]
    span = (min(times), max(times)) if times else (0, 0)
    observed = sum(r.observed_us() for r in read)
    expected = len(read) * (span[1] - span[0])

    repeat: dict[str, Any] = {}
    for cause in CAUSES:
        parts = [r.cause(cause) for r in read]
        repeat[cause] = {"tokens": sum(p.tokens for p in parts), "blocks": sum(p.blocks for p in parts)}
    known = [r.cause("concurrent") for r in read if not r.unlabelled]
    repeat["concurrent"] = {"tokens": sum(p.tokens for p in known), "blocks": sum(p.blocks for p in known)} if known else None

    duplicate = footprint(read, GPU, span, skew_us, contents)
    others = sorted({tier for r in read for tier in r.tiers} - {GPU})
    duplicate["other_tiers"] = {tier: footprint(read, tier, span, skew_us, contents) for tier in others}
    return {
        "span": [span[0], span[1]],
        "repeat_compute": repeat,
        "coverage": Fraction(observed, expected) if expected else Fraction(0),
        "duplicate_footprint": duplicate,
        "ranks": [rank_figures(r) for r in read],
        "recomputes": sorted(row for r in read for row in r.recomputes),
    }


def rank_figures(rank: Rank) -> dict[str, Any]:
    causes: dict[str, Any] = {}
    for cause in (*CAUSES, "concurrent"):
        tally = rank.cause(cause)
        causes[cause] = {"tokens": tally.tokens, "blocks": tally.blocks}
    if rank.unlabelled:
        causes["concurrent"] = None
    return {
        "instance_id": rank.given.instance_id,
        "dp_rank": rank.given.dp_rank,
        "stored_tokens": None if rank.unlabelled else rank.total("stored_tokens"),
        "evicted_tokens": rank.total("evicted_tokens"),
        "unjoined_evicts": rank.unjoined,
        "recompute": causes,
        "observed_us": rank.observed_us(),
        "lives": len(rank.lives),
    }


if __name__ == "__main__":  # oracle.py [none|labelled|unlabelled] CAPTURE...: each capture one instance, one fleet of them all
    reuse = sys.argv[1] if sys.argv[1] in ("none", "labelled", "unlabelled") else "unlabelled"
    paths = [a for a in sys.argv[1:] if a not in ("none", "labelled", "unlabelled")]
    fleet = [r for p in paths for r in ranks_of_capture(p, Path(p).name.removesuffix(".gz").removesuffix(".jsonl"), reuse_reporting=reuse)]
    json.dump(figures(fleet), sys.stdout, indent=1, default=str)
    print()
