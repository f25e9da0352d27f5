"""What one forwarder run has counted of one rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from schemas import records
from schemas.records import ID_BYTES, Declared, RankMessage

DECLARED_AT_ONCE = 100
"""Most declared events that one lifecycle record names; of the others it gives the number."""


@dataclass
class Tally:
    """Cumulative counters of one incarnation, from the messages it gave out.

    A stream's own counters are ahead of these by what was fed and waits to be given out: a rank's first record says 0.
    """

    batches: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    unresolved_blocks: int = 0
    unknown_events: int = 0
    refused: int = 0
    lost: int = 0
    publisher_restarts: int = 0

    def count(self, message: RankMessage) -> None:
        """Add what ``message`` says."""
        if message.batch is not None:
            self.batches += 1
            self.unknown_events += message.batch.unknown_events
            self.unresolved_blocks += message.batch.unresolved_blocks
            for op in message.batch.ops:
                if op.kind == "STORE":
                    self.blocks_stored += len(op.block_ids) // ID_BYTES
                elif op.kind == "REMOVE":
                    self.blocks_removed += len(op.block_ids) // ID_BYTES
        elif message.loss is not None:
            self.lost += message.loss.last_seq - message.loss.first_seq + 1 - message.skipped
        elif message.refusal is not None:
            self.refused += 1
        elif message.holder_reset is not None and message.holder_reset.cause == "restarted":
            self.publisher_restarts += 1

    @staticmethod
    def sum(tallies: Iterable[Tally]) -> Tally:
        """All of them together."""
        total = Tally()
        for tally in tallies:
            for field in fields(Tally):
                setattr(total, field.name, getattr(total, field.name) + getattr(tally, field.name))
        return total


class DeclaredLog:
    """What was declared about a rank since the last lifecycle record: the first of it, and how many more there were."""

    def __init__(self) -> None:
        self._named: list[Declared] = []
        self._more = 0

    def note(self, message: RankMessage) -> None:
        """Take in ``message``, unless it is a batch."""
        declared = in_brief(message)
        if declared is None:
            return
        if len(self._named) < DECLARED_AT_ONCE:
            self._named.append(declared)
        else:
            self._more += 1

    def take(self) -> tuple[list[Declared], int]:
        """What was noted since the last call, and how many more than is named."""
        taken = self._named, self._more
        self._named, self._more = [], 0
        return taken


def in_brief(message: RankMessage) -> records.Declared | None:
    """What ``message`` declares; None for a batch."""

    def brief(kind: records.DeclaredKind, reason: str | None = None) -> records.Declared:
        return Declared(kind, message.life_id, message.seq, message.seq, message.at_us, reason)

    if message.loss is not None:
        return Declared("loss", message.life_id, message.loss.first_seq, message.loss.last_seq, message.at_us, message.loss.reason)
    if message.refusal is not None:
        return brief("refusal", message.refusal.reason)
    if message.holder_reset is not None:
        return brief("holder_reset", message.holder_reset.reason)
    if message.identity_refused is not None:
        return brief("identity_refused", f"{message.identity_refused.refused} blocks of group {message.identity_refused.group_idx}")
    return brief("declaration") if message.declaration is not None else None
