"""What the holder core makes of messages that no oracle sees: losses, refusals, forwarders that attach anew, declarations that change."""

from __future__ import annotations

from typing import Any

from schemas.records import NO_SEQ, Batch, Declaration, HolderReset, IdentityRefused, Loss, Op, RankMessage, RankWindow, Refusal
from sql.figures import assemble
from sql.totals import totals_from_records
from streams.offline import count
from streams.residency import RankCore

SECOND = 1_000_000
START = 1_700_000_000 * SECOND
X = b"x" * 16
EXACT = Declaration("none", "per_copy", model="m")


def message(seq: int = 0, at: int = 0, *, life: str = "one", **what: Any) -> RankMessage:
    made = RankMessage("a", 0, life, seq, START + at * SECOND if at else 0, 0, "run")
    for name, value in what.items():
        setattr(made, name, value)
    return made


def batch(seq: int, at: int, *ops: Op, life: str = "one") -> RankMessage:
    return message(seq, at, life=life, batch=Batch(list(ops), 0, 0))


def store() -> Op:
    return Op("STORE", 0, "GPU", None, 16, X, X)


def remove() -> Op:
    return Op("REMOVE", 0, "GPU", None, block_ids=X)


DECLARED = message(declaration=EXACT)


def document(*stream: RankMessage) -> dict[str, Any]:
    counted = count(stream)
    return assemble(totals_from_records(counted.rank_windows, counted.duplicate_windows))


def test_all_seen_is_exact() -> None:
    repeat = document(DECLARED, batch(0, 1, store()), batch(1, 2, remove()), batch(2, 3, store()))["repeat_compute"]
    assert (repeat["evicted"]["blocks"], repeat["coverage"], repeat["register"]) == (1, 1.0, "exact")


def test_what_is_missing_outside_any_stretch_of_time_is_not_exact() -> None:
    between = document(DECLARED, batch(0, 1), batch(1, 2), message(2, loss=Loss(2, 2, "gone")), batch(3, 2), batch(4, 3))
    undeclared = document(DECLARED, batch(0, 1), batch(1, 2), batch(3, 2), batch(4, 3))
    after = document(DECLARED, batch(0, 1), batch(1, 2), message(2, 2, refusal=Refusal("broken", 1)))
    before = document(DECLARED, message(0, refusal=Refusal("broken", 1)), batch(1, 1), batch(2, 2))
    for found in (between, undeclared, after, before):
        assert found["repeat_compute"]["coverage"] == 1.0, "nothing that time could show"
        assert found["repeat_compute"]["register"] == "lower_bound", found["repeat_compute"]["reasons"]


def test_a_refusal_before_anything_else_belongs_to_the_first_row() -> None:
    rows = count([DECLARED, message(7, refusal=Refusal("broken", 1)), batch(8, 1), batch(9, 2)]).rank_windows
    assert [(row.refused_batches, row.warmup, row.window_start_us > 0) for row in rows] == [(1, True, True)]
    assert "late_attach" in rows[0].reasons


def test_batches_missing_before_a_refused_one_are_lost() -> None:
    (rank,) = document(DECLARED, batch(0, 1), message(4, 1, refusal=Refusal("broken", 1)), batch(5, 2))["ranks"]
    assert (rank["lost_batches"], rank["refused_batches"]) == (3, 1)


def test_a_refusal_under_an_impossible_number_does_not_end_the_stream() -> None:
    (rank,) = document(DECLARED, batch(0, 1), message(NO_SEQ, 1, refusal=Refusal("out of range", 1)), batch(1, 2), batch(2, 3))["ranks"]
    assert (rank["batches"], rank["refused_batches"], rank["lost_batches"]) == (3, 1, 0)


def test_a_forwarder_that_reads_all_again_counts_nothing_twice_and_remembers_when() -> None:
    first = [batch(0, 1, store()), batch(1, 2, remove()), batch(2, 3, store()), batch(3, 4, remove()), batch(4, 5)]
    again = [batch(each.seq, (each.at_us - START) // SECOND, *each.batch.ops, life="two") for each in first if each.batch]
    rows = count([DECLARED, *first, message(life="two", declaration=EXACT), *again, batch(5, 9, store(), life="two")])
    found = assemble(totals_from_records(rows.rank_windows, rows.duplicate_windows))
    assert found["repeat_compute"]["evicted"]["blocks"] == 2
    assert found["ranks"][0]["batches"] == 6
    assert [(row.lost_at_us - START) // SECOND for row in rows.recomputes] == [2, 4]
    assert [row.elapsed_us // SECOND for row in rows.recomputes] == [1, 5]


def test_a_forwarder_that_attaches_anew_before_the_first_batch_missed_nothing() -> None:
    seen = batch(0, 1, store(), life="two"), batch(1, 2, remove(), life="two"), batch(2, 3, store(), life="two")
    assert document(DECLARED, message(life="two", declaration=EXACT), *seen) == document(message(life="two", declaration=EXACT), *seen)


def test_a_row_is_declared_as_it_was_counted_whenever_it_is_given_out() -> None:
    stream = [
        message(declaration=Declaration("none", "per_copy", workload="old")),
        batch(0, 1, store()),
        message(life="two", declaration=Declaration("unlabelled", "per_copy", workload="new")),
        batch(1, 30, store(), life="two"),
    ]

    def rows(drains: set[int]) -> dict[tuple[str, int], RankWindow]:
        core, found = RankCore("a", 0), dict[tuple[str, int], RankWindow]()
        for offset, each in enumerate(stream):
            core.apply(each, offset)
            if offset in drains:
                found |= {(row.life_id, row.window_start_us): row for row in core.drain().windows}
        return found

    often, late = rows({0, 1, 2, 3}), rows({3})
    assert often == late
    assert [row.workload for _, row in sorted(late.items())] == ["old", "new"]


def rows(*stream: RankMessage) -> list[RankWindow]:
    core = RankCore("a", 0)
    for offset, each in enumerate(stream):
        core.apply(each, offset)
    return core.drain().windows


def test_numbers_of_other_ranks_are_not_missing() -> None:
    def counted(skipped: int) -> RankWindow:
        last = batch(4, 3, remove())
        last.skipped = skipped
        return rows(DECLARED, batch(0, 1, store()), last)[-1]

    assert (counted(3).lost_batches, counted(3).observed_us, counted(3).reasons) == (0, 2 * SECOND, [])
    assert (counted(2).lost_batches, counted(2).observed_us, counted(2).reasons) == (1, 0, ["undeclared_gap"])
    refused = message(seq=4, refusal=Refusal("garbage", 3))
    refused.skipped = 3
    assert rows(DECLARED, batch(0, 1, store()), refused)[-1].lost_batches == 0


def test_a_stream_that_shares_its_numbers_is_seen_from_its_beginning() -> None:
    first = batch(2, 1, store())
    first.skipped = 2
    assert not rows(DECLARED, first)[-1].warmup
    assert rows(DECLARED, batch(2, 1, store()))[-1].warmup


def test_where_no_medium_is_named_it_is_the_gpu() -> None:
    bare = Op("STORE", 0, None, None, 16, X, X)
    gone = Op("REMOVE", 0, None, None, block_ids=X)
    total = rows(DECLARED, batch(0, 1, bare), batch(1, 2, gone), batch(2, 3, store()))[-1].groups[0]
    assert (total.gpu, total.stored_blocks, total.evicted_blocks, total.recompute_evicted_blocks) == (True, 2, 1, 1)


def test_a_new_key_ends_what_was_held_without_a_cause_and_is_named() -> None:
    y = b"y" * 16
    rekeyed = message(seq=2, life="two", holder_reset=HolderReset(START + 2 * SECOND, "another key", "rekeyed"))
    stream = [DECLARED, batch(0, 1, store()), batch(1, 2, Op("STORE", 0, "GPU", None, 16, y, y)), rekeyed]
    stream += [message(life="two", declaration=EXACT), batch(2, 3, store(), life="two")]
    old, new = rows(*stream)
    assert (old.groups[0].restarted_blocks, old.groups[0].resident_blocks, old.reasons) == (0, 0, ["rekeyed"])
    assert (new.groups[0].recompute_restarted_blocks, new.groups[0].resident_blocks, new.warmup) == (0, 1, True)
    assert set(new.reasons) == {"rekeyed", "late_attach", "warmup"}


def test_a_changed_declaration_is_named_where_it_falls_and_an_equal_one_is_not() -> None:
    again = message(seq=1, declaration=EXACT)
    other = message(seq=1, declaration=Declaration("none", "per_copy", workload="batch", model="m"))
    assert rows(DECLARED, batch(0, 1, store()), again, batch(1, 2, remove()))[-1].reasons == []
    changed = rows(DECLARED, batch(0, 1, store()), other, batch(1, 12, remove()), batch(2, 25, store()))
    assert [(row.workload, row.reasons) for row in changed] == [("batch", ["redeclared"]), ("batch", ["redeclared"]), ("batch", [])]


def test_forgotten_identities_are_named() -> None:
    forgotten = message(seq=1, identity_refused=IdentityRefused(0, 3, START, START + SECOND))
    assert rows(DECLARED, batch(0, 1, store()), forgotten)[-1].reasons == ["identity_refused"]
