"""What a simulated engine rank will publish: its batches in order, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from producers.simulate.metrics import Reading
from schemas.records import Declaration, rank_key

DEFAULT_TOPIC = b"kv-events"


class SourceBatch(NamedTuple):
    """One message of a rank: ``life`` counts its process lives from 0, ``at_us`` is the engine time inside ``payload``.

    ``reading`` is what the engine's metrics say from there on; None where nobody knows.
    """

    life: int
    seq: int
    at_us: int
    payload: bytes
    reading: Reading | None = None


@dataclass(frozen=True)
class RankSource:
    """One rank to be served.

    ``batches`` are in the order of sending; a list, or anything that can be iterated once (made while it is served).
    ``origin_us`` is the engine time that falls on the moment serving starts: equal for ranks that ran side by side.
    ``metrics`` is a file of metrics pages recorded beside a capture.
    """

    instance_id: str
    dp_rank: int
    batches: Iterable[SourceBatch]
    declaration: Declaration
    origin_us: int
    topic: bytes = DEFAULT_TOPIC
    metrics: Path | None = None

    @property
    def key(self) -> str:
        """``INSTANCE/R``."""
        return rank_key(self.instance_id, self.dp_rank)

    def batches_per_life(self) -> list[int] | None:
        """Batches in each life, in order; ``None`` while they are still being made."""
        if not isinstance(self.batches, Sequence):
            return None
        counts: list[int] = []
        for batch in self.batches:
            while len(counts) <= batch.life:
                counts.append(0)
            counts[batch.life] += 1
        return counts
