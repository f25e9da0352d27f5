"""Entries for the tests of the spool, and what a sequence of entries says in the end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from producers.restate import Entry
from producers.spool import Spool
from schemas import codec
from schemas.records import Batch, Declaration, HolderReset, Loss, Op, RankMessage, Refusal

Fact = tuple[str, int]
"""``("batch", seq)``: this number is accounted for, by a batch or a loss. ``("keep", n)`` or ``("droppable", n)``: entry n of that kind."""

FOLDER_BOUND = 6_000
FILE_BYTES = 1_500


def message(seq: int, life_id: str = "life", skipped: int = 0) -> RankMessage:
    """A message of rank a/0 that says nothing yet."""
    return RankMessage("a", 0, life_id, seq, seq % 1_000_000 * 10, seq % 1_000_000 * 100, f"run-{seq}", skipped=skipped)


def entry(said: RankMessage, key: bytes = b"a/0") -> Entry:
    """``said`` as an entry for the spool."""
    droppable_by_loss = said.batch is not None or said.refusal is not None
    return Entry("batches", key, codec.encode(said), "batch" if droppable_by_loss else "keep")


def batch(seq: int, life_id: str = "life", skipped: int = 0, size: int = 0, key: bytes = b"a/0") -> Entry:
    """Batch ``seq`` with ``size`` bytes of removed blocks."""
    said = message(seq, life_id, skipped)
    said.batch = Batch([Op("REMOVE", block_ids=bytes(size))])
    return entry(said, key=key)


def refusal(seq: int, life_id: str = "life") -> Entry:
    """A payload that could not be read, at ``seq``."""
    said = message(seq, life_id)
    said.refusal = Refusal("malformed", 3)
    return entry(said)


def loss(first: int, last: int, life_id: str = "life", reason: str = "missing in the stream") -> Entry:
    """Batches that were lost before they came."""
    said = message(last + 1, life_id)
    said.loss = Loss(first, last, reason)
    return entry(said)


def reset(life_id: str) -> Entry:
    """The beginning of another life."""
    said = message(0, life_id)
    said.holder_reset = HolderReset(0, "restarted")
    return entry(said)


def keep(number: int, seq: int = 0, key: bytes = b"a/0") -> Entry:
    """A declaration that can be told by ``number``."""
    said = message(seq)
    said.declaration = Declaration("none", "per_copy", key_epoch=number)
    return entry(said, key=key)


def droppable(number: int) -> Entry:
    """A heartbeat, as far as the spool is concerned."""
    return Entry("lifecycle", b"a/0", b"%d" % number, "droppable")


def facts(entries: Iterable[Entry]) -> list[Fact]:
    """What ``entries`` say, in order; a loss says every number in it."""
    said: list[Fact] = []
    for one in entries:
        if one.kind == "droppable":
            said.append(("droppable", int(one.value)))
            continue
        decoded = codec.decode(one.value, RankMessage)
        if decoded.declaration is not None:
            said.append(("keep", decoded.declaration.key_epoch))
        elif decoded.loss is not None:
            said += [("batch", seq) for seq in range(decoded.loss.first_seq, decoded.loss.last_seq + 1)]
        else:
            said.append(("batch", decoded.seq))
    return said


def lasting(said: Iterable[Fact]) -> list[Fact]:
    """Without what may vanish."""
    return [fact for fact in said if fact[0] != "droppable"]


def drain(spool: Spool) -> list[Entry]:
    """Everything not handed out yet, a little at a time."""
    entries: list[Entry] = []
    while taken := spool.take(1_000):
        entries += [one for _, one in taken]
    return entries


def left_in(folder: Path, max_bytes: int = FOLDER_BOUND) -> tuple[list[Entry], bytes | None]:
    """What a forwarder that finds ``folder`` would send, and the checkpoint it would go on from."""
    with Spool(folder, max_bytes, file_bytes=FILE_BYTES) as spool:
        assert spool.bad_bytes == 0
        assert spool.vanished == 0
        entries = drain(spool)
        assert spool.messages == len(entries)
        return entries, spool.checkpoint
