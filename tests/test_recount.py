"""Which rows of a recount lie in a span, and under which versions."""

from __future__ import annotations

from schemas.records import Batch, Declaration, DuplicateWindow, Op, RankMessage, RankWindow, Recompute, SharedPrefix
from sql.standing import _gives_way
from streams.offline import OfflineFleet
from streams.reclassify import Recount, Row
from tests.sql_records import rank_window

SECOND = 1_000_000
W = 10 * SECOND
START = 170_000_004 * W
"""A border of windows, and of the instants of which shared prefixes are told."""

A, B = (bytes([letter]) * 16 for letter in b"ab")


def store(block: bytes) -> Op:
    return Op("STORE", 0, "GPU", None, 16, block, block, "ROOT")


def stream() -> list[RankMessage]:
    """Two ranks hold B for 150 s; one of them loses A twice, and computes it again at 60 s and at 120 s."""
    out = [
        RankMessage(name, 0, "life", 0, 0, 0, "run", declaration=Declaration("none", "per_copy", model="m", canary="c")) for name in "ij"
    ]
    acts = (
        {1: [store(A), store(B)]} | {at: [Op("REMOVE", 0, "GPU", block_ids=A)] for at in (59, 119)} | {at: [store(A)] for at in (60, 120)}
    )
    for at in range(1, 151):
        for name in "ij":
            ops = acts.get(at, []) if name == "i" else [store(B)] if at == 1 else []
            out.append(RankMessage(name, 0, "life", at - 1, START + at * SECOND, 0, "run", batch=Batch(ops)))
    return out


def rows(since: int | None = None, until: int | None = None) -> list[Row]:
    def at(seconds: int | None) -> int | None:
        return None if seconds is None else START + seconds * SECOND

    recount = Recount(OfflineFleet(), since_us=at(since), until_us=at(until))
    found = [row for offset, each in enumerate(stream()) for row in recount.apply(each.instance_id, 0, offset, each)]
    return found + list(recount.finish())


def seconds(found: list[Row]) -> dict[str, set[int]]:
    """Where the rows of each kind lie."""
    told: dict[str, set[int]] = {}
    for row in found:
        if isinstance(row, RankWindow | DuplicateWindow):
            at = row.window_start_us
        else:
            at = row.back_at_us if isinstance(row, Recompute) else row.as_of_us
        told.setdefault(type(row).__name__, set()).add((at - START) // SECOND)
    return told


def test_windows_and_recomputes_begin_in_the_span_and_instants_lie_at_the_ends_of_its_windows() -> None:
    assert START % (6 * W) == 0
    windows = {*range(60, 120, 10)}
    assert seconds(rows(60, 120)) == {"RankWindow": windows, "DuplicateWindow": windows, "Recompute": {60}, "SharedPrefix": {120}}
    whole = seconds(rows())
    assert (whole["Recompute"], whole["SharedPrefix"], whole["RankWindow"]) == ({60, 120}, {60, 120}, {*range(0, 160, 10)})


def test_what_is_told_of_the_fleet_gives_way_to_any_row_of_a_worker() -> None:
    """A worker's versions are made of positions: twice the position, and one more where the row is final."""
    found = rows()
    assert {(row.version, row.final) for row in found if isinstance(row, DuplicateWindow)} == {(0, False), (1, True)}
    assert {row.version for row in found if isinstance(row, SharedPrefix)} == {1}
    assert all(row.version > 1 for row in found if isinstance(row, RankWindow | Recompute))


def test_a_row_that_takes_anothers_place_stands_above_it() -> None:
    half = (7, True, 1, 2)
    for counted, settled in ((3, 8), (7, 8), (9, 9)):
        row = rank_window(version=counted)
        assert _gives_way(half, row, 2, 2)
        assert row.version == settled
    row = rank_window(version=3)
    assert not _gives_way(half, row, 1, 2)
    assert row.version == 3
    assert _gives_way((7, False, 1, 2), row, 1, 2), "final where what stands is provisional"
