"""The resolver's bridge on disk: what a forwarder that comes back still knows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.bridge_journal import BridgeJournal
from producers.resolver import Learned
from schemas.errors import KvcensusError
from schemas.records import NO_ID
from tests.full_disk import Disk

HASHES = st.one_of(st.integers(0, 2**64 - 1), st.integers(-(2**63), -1), st.binary(min_size=32, max_size=32), st.binary(max_size=70))
LEARNED: st.SearchStrategy[Learned] = st.tuples(
    HASHES, st.sampled_from([16, 64, 0]), st.none() | st.just(NO_ID) | st.binary(min_size=16, max_size=16), st.integers(0, 3)
)
ALIKE: list[st.SearchStrategy[Learned]] = [
    st.tuples(hashes, st.just(16), st.binary(min_size=16, max_size=16), st.just(0))
    for hashes in (st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32))
]
PARTS = st.lists(st.one_of(*(st.lists(entries, max_size=6) for entries in (LEARNED, *ALIKE))), max_size=6)


def block(number: int) -> Learned:
    return number, 16, number.to_bytes(16), 0


def read(path: Path, scope: bytes = b"scope") -> list[Learned]:
    with BridgeJournal(path, scope) as journal:
        learned = list(journal.recovered())
        assert journal.entries == len(learned)
        return learned


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    full = Disk()
    monkeypatch.setattr(os, "write", full.write)
    return full


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bridge"


@settings(max_examples=40)
@given(parts=PARTS, cut=st.floats(0, 1))
def test_what_was_written_comes_back_and_a_cut_costs_only_the_last(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[Learned]], cut: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "bridge-roundtrip"
    path.unlink(missing_ok=True)
    before, size = 0, 0
    with BridgeJournal(path, b"scope") as journal:
        for part in parts:
            before = journal.bytes
            journal.append(part)
        size = journal.bytes
    assert size == path.stat().st_size
    assert read(path) == [learned for part in parts for learned in part]
    if parts and parts[-1]:
        os.truncate(path, before + int(cut * (size - before - 1)))
        assert read(path) == [learned for part in parts[:-1] for learned in part]
        assert path.stat().st_size == before
        with BridgeJournal(path, b"scope") as journal:
            journal.append([block(7)])
        assert read(path)[-1] == block(7)


def test_another_scope_starts_empty(path: Path) -> None:
    with BridgeJournal(path, b"one") as journal:
        journal.append([block(1)])
        assert path.stat().st_mode & 0o777 == 0o600
    assert read(path, b"two") == []
    assert read(path, b"one") == [], "what another life began has replaced it"


def test_another_life_begins_in_the_same_journal(path: Path) -> None:
    with BridgeJournal(path, b"one") as journal:
        journal.append([block(1)])
        journal.begin(b"two")
        assert (journal.entries, list(journal.recovered())) == (0, [])
        journal.append([block(2)])
    assert read(path, b"two") == [block(2)]


def test_compaction_keeps_what_is_known_now(path: Path) -> None:
    with BridgeJournal(path, b"scope") as journal:
        for number in range(0, 80_000, 1_000):
            journal.append([block(number + more) for more in range(1_000)])
        assert journal.due(1_000)
        assert not journal.due(20_000)
        known = [block(number) for number in range(60_000, 80_000)]
        journal.compact(iter(known))
        assert (journal.entries, journal.bytes) == (20_000, path.stat().st_size)
        assert not journal.due(1_000)
        journal.append([block(80_000)])
        assert path.stat().st_mode & 0o777 == 0o600
    assert read(path) == [*known, block(80_000)]
    assert [left.name for left in path.parent.iterdir()] == [path.name]


def test_damage_costs_the_entries_it_hits(path: Path) -> None:
    ends = []
    with BridgeJournal(path, b"scope") as journal:
        for number in range(3):
            journal.append([block(number)])
            ends.append(journal.bytes)
    data = bytearray(path.read_bytes())
    data[ends[1] - 3] ^= 0xFF
    path.write_bytes(data)
    with BridgeJournal(path, b"scope") as journal:
        assert list(journal.recovered()) == [block(0), block(2)]
        assert journal.bad_bytes == ends[1] - ends[0]


@pytest.mark.parametrize("data", [b"", b"foreign", bytes(100)])
def test_a_file_that_is_no_journal_begins_anew(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert read(path) == []
    with BridgeJournal(path, b"scope") as journal:
        journal.append([block(1)])
    assert read(path) == [block(1)]


def test_a_journal_can_be_opened_on_a_full_disk(path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.room = 0
    with BridgeJournal(path, b"scope") as journal:
        journal.append([block(1)])
        assert (journal.skipped, len(caplog.records)) == (1, 1)
        disk.room = None
        journal.append([block(2)])
    assert read(path) == [block(2)]


def test_a_full_disk_costs_entries_and_is_told_once(path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    with BridgeJournal(path, b"one") as journal:
        journal.append([block(1)])
        for room in (0, 5, 50):
            disk.room = room
            journal.append([block(number) for number in range(2, 5)])
        assert journal.skipped == 9
        journal.compact([block(9)])
        assert len(caplog.records) == 1
        disk.room = None
        journal.append([block(5)])
        assert "can be written again" in caplog.text
        assert list(journal.recovered()) == [block(1), block(5)]
        disk.room = 0
        journal.begin(b"two")
        assert not path.exists(), "what is known of one life must not be taken for another's"
        journal.append([block(6)])
        disk.room = None
        journal.append([block(7)])
    assert read(path, b"two") == [block(7)]


def test_a_compaction_that_failed_is_not_tried_again_at_once(path: Path, disk: Disk) -> None:
    with BridgeJournal(path, b"scope") as journal:
        journal.append([block(number) for number in range(100_000)])
        assert journal.due(10)
        disk.room = 100
        journal.compact([block(1)] * 100)
        assert not journal.due(10)
        disk.room = None
        journal.append([block(number) for number in range(60_000)])
        assert journal.due(10)
        journal.compact([block(1)])
        assert not journal.due(10)
    assert read(path) == [block(1)]
    assert [left.name for left in path.parent.iterdir()] == [path.name]


def test_a_journal_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KvcensusError, match=r"the bridge journal .* cannot be used: Is a directory"):
        BridgeJournal(tmp_path, b"scope")
