"""What stands for messages that the spool's bound forced out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from producers.restate import SPOOL_FULL, Entry, restate
from schemas import codec
from schemas.records import Loss, RankMessage
from tests.spooling import batch, droppable, facts, keep, lasting, loss, refusal, reset


def said(entries: list[Entry]) -> list[RankMessage]:
    return [codec.decode(entry.value, RankMessage) for entry in entries]


def test_adjoining_batches_and_refusals_become_one_loss_with_the_last_ones_times() -> None:
    outcome = restate([batch(5), batch(6), refusal(7), batch(8)])
    assert (outcome.batches, outcome.droppable) == (4, 0)
    (only,) = said(outcome.entries)
    assert only.loss == Loss(5, 8, SPOOL_FULL)
    assert (only.seq, only.life_id, only.at_us, only.observed_at_ms, only.incarnation) == (9, "life", 80, 800, "run-8")
    assert outcome.entries[0].kind == "keep"
    assert (outcome.entries[0].topic, outcome.entries[0].key) == ("batches", b"a/0")


def test_a_loss_declared_before_merges_with_what_adjoins_it() -> None:
    (only,) = said(restate([loss(2, 4), batch(5), loss(6, 6), batch(7)]).entries)
    assert only.loss == Loss(2, 7, SPOOL_FULL)
    (same_reason,) = said(restate([loss(2, 4), loss(5, 6)]).entries)
    assert same_reason.loss == Loss(2, 6, "missing in the stream")


def test_a_loss_alone_stays_as_it_is() -> None:
    declared = loss(2, 4)
    outcome = restate([declared])
    assert outcome.entries == [declared]
    assert (outcome.batches, outcome.droppable) == (0, 0)


def test_what_must_not_be_dropped_stays_in_its_place() -> None:
    outcome = restate([batch(0), keep(1, seq=1), batch(1), droppable(9), batch(2)])
    assert facts(outcome.entries) == [("batch", 0), ("keep", 1), ("batch", 1), ("batch", 2)]
    assert len(outcome.entries) == 3
    assert (outcome.batches, outcome.droppable) == (3, 1)


def test_lives_are_kept_apart() -> None:
    entries = [batch(7, "one"), batch(8, "one"), reset("two"), batch(0, "two"), batch(1, "two")]
    first, boundary, second = said(restate(entries).entries)
    assert (first.life_id, first.loss) == ("one", Loss(7, 8, SPOOL_FULL))
    assert boundary.holder_reset is not None
    assert (second.life_id, second.loss) == ("two", Loss(0, 1, SPOOL_FULL))
    without_reset = said(restate([batch(7, "one"), batch(8, "two")]).entries)
    assert [one.life_id for one in without_reset] == ["one", "two"], "numbers that adjoin by chance"


def test_numbers_of_other_ranks_inside_the_range_are_told_from_lost_ones() -> None:
    first, second = batch(5, skipped=3), batch(8, skipped=2)
    (only,) = said(restate([first, second]).entries)
    assert (only.loss, only.skipped) == (Loss(2, 8, SPOOL_FULL), 5)
    (again,) = said(restate([*restate([first]).entries, *restate([second, batch(10, skipped=1)]).entries]).entries)
    assert (again.loss, again.skipped) == (Loss(2, 10, SPOOL_FULL), 6)


def test_a_hole_between_batches_is_not_declared_by_way_of_them() -> None:
    assert [one.loss for one in said(restate([batch(1), batch(4)]).entries)] == [Loss(1, 1, SPOOL_FULL), Loss(4, 4, SPOOL_FULL)]


def test_keys_are_kept_apart_and_their_order_holds() -> None:
    entries = [batch(0), batch(0, key=b"a/1"), batch(1), keep(1, key=b"a/1"), batch(2)]
    outcome = restate(entries)
    assert [entry.key for entry in outcome.entries] == [b"a/1", b"a/1", b"a/0"]
    assert [facts([entry]) for entry in outcome.entries] == [[("batch", 0)], [("keep", 1)], [("batch", 0), ("batch", 1), ("batch", 2)]]


def test_a_refusal_out_of_turn_names_no_batch_that_is_lost() -> None:
    for stray in (refusal(3), refusal(10), refusal(2**63 - 1)):
        outcome = restate([batch(10), stray, batch(11)])
        assert facts(outcome.entries) == [("batch", 10), ("batch", 11)]
        assert (outcome.batches, outcome.droppable) == (2, 1)
    outcome = restate([refusal(3), batch(10)])
    assert facts(outcome.entries) == [("batch", 10)]
    assert facts(restate([refusal(9), batch(10)]).entries) == [("batch", 9), ("batch", 10)]
    assert facts(restate([refusal(9)]).entries) == [("batch", 9)]
    assert restate([refusal(2**63 - 1)]).entries == []


def test_what_cannot_be_read_stays() -> None:
    strange = Entry("batches", b"a/0", b"?", "batch")
    assert restate([strange]).entries == [strange]


@st.composite
def streams(draw: st.DrawFn) -> list[Entry]:
    entries: list[Entry] = []
    seqs = {b"a/0": 0, b"a/1": 0}
    for number, (kind, key) in enumerate(draw(st.lists(st.tuples(st.sampled_from("bbbrkdl"), st.sampled_from(sorted(seqs))), max_size=30))):
        if kind == "k":
            entries.append(keep(number, seqs[key], key))
        elif kind == "d":
            entries.append(droppable(number))
        else:
            made = {"b": batch, "r": refusal, "l": lambda seq: loss(seq, seq + 1)}[kind](seqs[key])
            entries.append(Entry(made.topic, key, made.value, made.kind))
            seqs[key] += 2 if kind == "l" else 1
    return entries


@given(streams(), st.integers(0, 30))
def test_each_number_is_accounted_for_however_often_it_is_restated(entries: list[Entry], split: int) -> None:
    once = restate(entries)
    assert len(once.entries) <= len(entries)
    twice = restate(once.entries)
    assert twice.entries == once.entries
    assert (twice.batches, twice.droppable) == (0, 0)
    in_parts = restate([*restate(entries[:split]).entries, *restate(entries[split:]).entries])
    for key in (b"a/0", b"a/1"):
        expected = lasting(facts([entry for entry in entries if entry.key == key]))
        for outcome in (once, in_parts):
            assert facts([entry for entry in outcome.entries if entry.key == key]) == expected
    assert len(in_parts.entries) == len(once.entries)
    partly = restate([*entries[:split], *restate(entries[split:]).entries])
    assert len(partly.entries) == len(once.entries)
