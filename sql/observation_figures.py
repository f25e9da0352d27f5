"""Questions to a document of figures whose answer is a word: is its zero a finding, and can insertions be counted at all. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sql.observation import Observation

Residual = Literal["positive", "measured", "single_holder", "split_key_space", "unobserved"]


@dataclass(frozen=True)
class Insertions:
    """Blocks and tokens that were stored anew, and those of them that had not been there before. None where stores cannot be told apart.

    A rank of which nobody can tell a store from an announcement makes the sum over all of them unknown: the weakest declaration holds.
    """

    countable: bool
    blocks: int | None = None
    tokens: int | None = None
    first_blocks: int | None = None
    first_tokens: int | None = None


def residual(document: dict[str, Any], observation: Observation) -> Residual:
    """What the duplicate footprint of a fleet document says beside its number.

    ``positive``: content lies on several ranks, or is about to count. A zero is ``measured`` only where at least two ranks held content
    whose ids compare; else it says how they were keyed (``split_key_space``), that there was only one (``single_holder``), or nothing.
    """
    footprint = document["duplicate_footprint"] if "by" not in document else document["fleet"]["duplicate_footprint"]
    extra = footprint["extra_blocks"]
    if extra["max"] or extra["mean"] or observation.unripe_contents:
        return "positive"
    reasons = set(footprint["reasons"])
    if "no_ranks" in reasons:
        return "unobserved"
    if "single_holder" in reasons:
        return "single_holder"
    return "split_key_space" if "key_change" in reasons else "measured"


def insertions(document: dict[str, Any]) -> Insertions:
    """Blocks stored anew over all ranks of ``document``."""
    ranks = document["ranks"]
    if any(rank["stored_blocks"] is None or rank["repeat_compute"] is None for rank in ranks):
        return Insertions(countable=False)
    blocks = sum(rank["stored_blocks"] for rank in ranks)
    tokens = sum(rank["stored_tokens"] for rank in ranks)
    again = [cause for rank in ranks for cause in rank["repeat_compute"].values() if cause is not None]
    return Insertions(
        countable=True,
        blocks=blocks,
        tokens=tokens,
        first_blocks=blocks - sum(cause["blocks"] for cause in again) - sum(rank["reloaded_blocks"] for rank in ranks),
        first_tokens=tokens - sum(cause["tokens"] for cause in again) - sum(rank["reloaded_tokens"] for rank in ranks),
    )
