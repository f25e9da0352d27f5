"""The queue between an engine and Kafka, on real files: order, bound, crashes, and disks that refuse."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from producers.frames import MARK
from producers.restate import SPOOL_FULL, Entry
from producers.spool import Spool
from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import RankMessage
from tests.full_disk import Disk
from tests.spooling import FILE_BYTES, FOLDER_BOUND, Fact, batch, drain, droppable, facts, keep, lasting, left_in

PLENTY = 1 << 30


def small(folder: Path | None, max_bytes: int = FOLDER_BOUND, fallback_bytes: int = 1 << 20) -> Spool:
    return Spool(folder, max_bytes, file_bytes=FILE_BYTES, fallback_bytes=fallback_bytes)


def spool_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.spool"))


# -- against a list -------------------------------------------------------------------------------------------------


class SpoolAgainstList(RuleBasedStateMachine):
    """A spool says what a plain list of everything appended says, whatever happened to it in between."""

    base: Path
    disk: Disk
    memory_only = False

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.others = 0
        self.facts: list[Fact] = []
        self.done = 0
        """How many of ``facts`` are acknowledged."""
        self.handed = 0
        self.saved_done = 0
        self.reach: dict[int, int] = {}
        """Index last handed out: how many of ``facts`` are done with it."""
        self.index = -1

    @initialize(bound=st.sampled_from([FOLDER_BOUND, PLENTY]))
    def open(self, bound: int) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
        self.bound = bound
        self.folder = None if self.memory_only else self.base / "spool"
        self.spool = small(self.folder, bound)
        self.checkpoint: bytes | None = None
        self.reached: dict[bytes | None, int] = {None: 0}
        """How many facts each checkpoint holds after."""
        self.trouble = False
        """The disk refused, and may not hold everything yet."""

    @precondition(lambda self: self.folder is not None)
    @rule(room=st.sampled_from([0, 100, 1_000]))
    def fill_the_disk(self, room: int) -> None:
        if not self.trouble:
            self.before_trouble = self.checkpoint
        self.disk.room = room
        self.trouble = True

    @precondition(lambda self: self.trouble)
    @rule()
    def make_room_on_the_disk(self) -> None:
        self.disk.room = None
        self.spool.sync()
        self.saved_done = self.done
        self.trouble = False
        self.check(self.copy(), self.facts, self.checkpoint)

    @rule(kinds=st.lists(st.sampled_from("bbbbkd"), max_size=4), size=st.sampled_from([0, 160, 800]), cut=st.none() | st.floats(0, 1))
    def append(self, kinds: list[str], size: int, cut: float | None) -> None:
        entries: list[Entry] = []
        for kind in kinds:
            if kind == "b":
                entries.append(batch(self.batches, size=size))
                self.batches += 1  # the numbers of batches adjoin
            else:
                entries.append({"k": keep, "d": droppable}[kind](self.others))
                self.others += 1
        before, checkpoint = list(self.facts), self.checkpoint
        sizes = {path.name: path.stat().st_size for path in spool_files(self.folder)} if self.folder else {}
        self.checkpoint = b"checkpoint %d" % (len(self.facts) + len(entries))
        self.spool.append(entries, self.checkpoint)
        self.facts += facts(entries)
        self.reached[self.checkpoint] = len(self.facts)
        if self.folder is not None and cut is not None and not self.trouble:
            self.crash_within_the_last_write(cut, sizes, before, checkpoint)

    def crash_within_the_last_write(self, cut: float, sizes: dict[str, int], before: list[Fact], checkpoint: bytes | None) -> None:
        assert self.folder is not None
        newest = spool_files(self.folder)[-1]
        was = sizes.get(newest.name, 0)
        now = newest.stat().st_size
        if now <= was or (was == 0 and sizes):  # the file is a new one: what its first frame holds is not of this append
            return
        copy = self.copy()
        keep_bytes = was + int(cut * (now - was))
        os.truncate(copy / newest.name, keep_bytes)
        whole = keep_bytes == now
        self.check(copy, self.facts if whole else before, self.checkpoint if whole else checkpoint)

    @rule(size=st.sampled_from([1, 500, 5_000]))
    def take(self, size: int) -> None:
        taken = self.spool.take(size)
        assert len(taken) < 2 or sum(len(entry.value) for _, entry in taken) <= size
        for index, entry in taken:
            assert index > self.index
            self.index = index
            self.handed = self.after(lasting(facts([entry])))
            self.reach[index] = self.handed
        if not taken:
            assert lasting(self.facts[self.handed :]) == []

    def after(self, said: list[Fact]) -> int:
        """How many facts are handed out with ``said``, which goes on where that is, or, being a loss, says what is done once more."""
        numbered = [(place, fact) for place, fact in enumerate(self.facts) if fact[0] != "droppable"]
        handed = sum(place < self.handed for place, _ in numbered)
        if not said:
            return self.handed
        start = [fact for _, fact in numbered].index(said[0])
        assert start <= handed
        assert start == handed or numbered[start][0] < self.done
        assert [fact for _, fact in numbered[start : start + len(said)]] == said
        return max(self.handed, numbered[start + len(said) - 1][0] + 1)

    @precondition(lambda self: self.reach)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.reach)))
        self.spool.acknowledge(index)
        self.done = max(self.done, self.reach[index])
        self.index = max(self.index, index)
        self.handed = max(self.handed, self.done)

    @rule()
    def sync(self) -> None:
        self.spool.sync()
        if not self.trouble:
            self.saved_done = self.done

    @precondition(lambda self: self.folder is not None and not self.trouble)
    @rule(gently=st.booleans())
    def reopen(self, gently: bool) -> None:
        assert self.folder is not None
        if gently:
            self.spool.close()
        else:
            shutil.move(self.copy(), self.base / "next")
            self.spool.close()
            shutil.rmtree(self.folder)
            (self.base / "next").rename(self.folder)
        entries, checkpoint = left_in(self.copy(), self.bound)
        assert checkpoint == self.checkpoint
        self.spool = small(self.folder, self.bound)
        assert self.spool.checkpoint == self.checkpoint
        assert self.spool.torn_bytes == 0
        self.done = self.handed = self.place_of(lasting(facts(entries)))
        # Unless a loss, made of what was handed out and then taken back, says what is done once more.
        first = next((one for one in entries if one.kind != "droppable"), None)
        assert not gently or self.done >= self.saved_done or (first is not None and first.kind == "keep")
        self.reach = {}
        self.index = -1

    @precondition(lambda self: self.folder is not None)
    @rule()
    def crash_elsewhere(self) -> None:
        self.check(self.copy(), self.facts, self.checkpoint)

    def copy(self) -> Path:
        assert self.folder is not None
        copy = self.base / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(self.folder, copy))

    def check(self, folder: Path, expected: list[Fact], checkpoint: bytes | None) -> None:
        room, self.disk.room = self.disk.room, None
        entries, found = left_in(folder, self.bound)
        self.disk.room = room
        said = lasting(facts(entries))
        if self.trouble:  # older, but what comes behind its checkpoint is asked for once more
            before = lasting(expected[: self.reached[found]])
            assert said == before[len(before) - len(said) :]
            if self.bound == PLENTY:
                assert self.reached[found] >= self.reached[self.before_trouble]
            return
        assert found == checkpoint
        wanted = lasting(expected)
        assert said == wanted[len(wanted) - len(said) :]
        assert len(said) >= len(lasting(expected[self.done :]))

    def place_of(self, said: list[Fact]) -> int:
        """From where on ``facts`` are ``said``, which must reach to their end and miss nothing that is not done."""
        wanted = lasting(self.facts[self.done :])
        assert said[len(said) - len(wanted) :] == wanted
        place, left = len(self.facts), len(said)
        while left or (place and self.facts[place - 1][0] == "droppable" and place > self.done):
            place -= 1
            left -= self.facts[place][0] != "droppable"
        assert lasting(self.facts[place:]) == said
        return place

    @invariant()
    def bounded_and_counted(self) -> None:
        if not hasattr(self, "spool"):
            return
        if self.folder is not None and not self.trouble:
            assert self.spool.bytes == sum(path.stat().st_size for path in spool_files(self.folder))
            assert not list(self.folder.glob("*.bad"))
        if self.bound == PLENTY:
            assert (self.spool.dropped_batches, self.spool.dropped_other) == (0, 0)

    def teardown(self) -> None:
        if hasattr(self, "spool"):
            self.disk.room = None
            self.spool.close()


def machine(base: Path, disk: Disk, in_memory: bool) -> Any:
    of_this_test: Any = type("OfThisTest", (SpoolAgainstList,), {"base": base, "disk": disk, "memory_only": in_memory})
    of_this_test.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
    return of_this_test


@pytest.mark.parametrize("in_memory", [False, True], ids=["on disk", "in memory"])
def test_it_is_a_list_that_survives(tmp_path: Path, disk: Disk, in_memory: bool) -> None:
    case = machine(tmp_path / "base", disk, in_memory).TestCase()
    case.runTest()


# -- crashes --------------------------------------------------------------------------------------------------------


def test_a_crash_between_any_two_steps_on_the_disk_leaves_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, copies = tmp_path / "spool", tmp_path / "copies"
    appended: list[Fact] = []
    checked = 0

    def check() -> None:
        nonlocal checked
        copy = copies / "copy"
        shutil.copytree(folder, copy)
        with monkeypatch.context() as undone:
            for name, step in steps.items():
                undone.setattr(os, name, step)
            entries, checkpoint = left_in(copy)
        shutil.rmtree(copy)
        said = lasting(facts(entries))
        whole = len(appended) + 1 if said and said[-1] == ("batch", len(appended)) else len(appended)
        assert checkpoint == (b"%d" % (whole - 1) if whole else None)
        assert said == [("batch", seq) for seq in range(whole - len(said), whole)]
        assert not said or said[0][1] <= acknowledged + 1
        checked += 1

    steps: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("write", "rename", "unlink")}

    def stepwise(name: str) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            if named:  # not the spool, but whoever clears the copy away
                return steps[name](*arguments, **named)
            check()
            result = steps[name](*arguments)
            check()
            return result

        return step

    acknowledged = -1
    with small(folder) as spool:
        for name in steps:
            monkeypatch.setattr(os, name, stepwise(name))
        for seq in range(40):
            spool.append([batch(seq, size=320)], b"%d" % seq)
            appended.append(("batch", seq))
            if seq == 30:
                ((index, entry),) = spool.take(1)
                acknowledged = facts([entry])[-1][1]
                spool.acknowledge(index)
        assert spool.dropped_batches > 10
        monkeypatch.undo()
    assert checked > 150


_APPENDER = """
import sys
from pathlib import Path
from producers.spool import Spool
from tests.full_disk import Disk
from tests.spooling import batch
with Spool(Path(sys.argv[1]), 1 << 30, file_bytes=20_000) as spool:
    seq = int(spool.checkpoint or b"-1") + 1
    while True:
        spool.append([batch(seq, size=800), batch(seq + 1, size=800)], b"%d" % (seq + 1))
        seq += 2
        print(seq, flush=True)
        if seq % 64 == 0:
            spool.sync()
"""


def test_a_kill_loses_nothing_that_an_append_returned_for(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    returned = 0
    for until in (50, 171, 333):
        child = subprocess.Popen([sys.executable, "-c", _APPENDER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        goal = returned + until
        while returned < goal:
            returned = int(child.stdout.readline())
        child.kill()
        returned = int((child.stdout.read().split() or [str(returned)])[-1])
        child.wait()
        child.stdout.close()
        with Spool(folder, PLENTY) as spool:
            entries = drain(spool)
            said = facts(entries)
            assert said == [("batch", seq) for seq in range(len(said))]
            assert len(said) >= returned
            assert spool.checkpoint == b"%d" % (len(said) - 1)
            returned = len(said)


# -- one at a time, and folders that cannot be used ------------------------------------------------------------------


def test_a_second_forwarder_is_told_who_uses_the_folder(tmp_path: Path) -> None:
    with small(tmp_path / "spool"), pytest.raises(KvcensusError, match=rf"another forwarder uses .*spool \(process {os.getpid()}\)"):
        small(tmp_path / "spool")
    small(tmp_path / "spool").close()


def test_nobody_else_may_look(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "spool"
    with small(folder) as spool:
        for seq in range(30):
            spool.append([batch(seq, size=800)], b"c")
        spool.take(1)
        spool.sync()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {path.name: 0o600 for path in folder.iterdir()}


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KvcensusError, match=r"the spool folder .*file/spool cannot be used: Not a directory"):
        small(tmp_path / "file" / "spool")
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(KvcensusError, match="Permission denied"):
            small(tmp_path / "spool")
        tmp_path.chmod(0o700)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / f"{0:020d}.spool").mkdir()
    with pytest.raises(KvcensusError, match=r"odd cannot be used: Is a directory"):
        small(tmp_path / "odd")


# -- files that are not as they were left ----------------------------------------------------------------------------


def filled(folder: Path, count: int = 20) -> list[Path]:
    """Files of a spool with the batches 0 to ``count`` - 1, several of them."""
    with small(folder, PLENTY) as spool:
        for seq in range(count):
            spool.append([batch(seq, size=320)], b"%d" % seq)
    return spool_files(folder)


def test_damage_in_the_middle_costs_what_is_damaged_and_is_kept_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    second = filled(tmp_path)[1]
    data = second.read_bytes()
    at = data.index(MARK, data.index(MARK, 1) + 1)
    second.write_bytes(data[: at + 20] + b"\xff\xff" + data[at + 22 :])
    with small(tmp_path, PLENTY) as spool:
        said = facts(drain(spool))
        assert len(said) == 19
        assert set(said) < {("batch", seq) for seq in range(20)}
        assert spool.bad_bytes > 300
        assert (spool.torn_bytes, spool.checkpoint) == (0, b"19")
    (aside,) = tmp_path.glob("*.bad")
    assert len(aside.read_bytes()) == spool.bad_bytes
    assert "set aside" in caplog.text
    with small(tmp_path, PLENTY) as spool:
        assert facts(drain(spool)) == said
        assert spool.bad_bytes == 0


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_foreign_file_is_set_aside_whole(tmp_path: Path, which: int) -> None:
    paths = filled(tmp_path)
    lost = len(paths)
    paths[which].write_bytes(b"not a spool file at all" * 40)
    with small(tmp_path, PLENTY) as spool:
        assert len(drain(spool)) >= 20 - 20 // lost - 3
        assert spool.bad_bytes == 23 * 40
    (aside,) = tmp_path.glob("*.bad")
    assert aside.read_bytes() == b"not a spool file at all" * 40


def test_a_torn_tail_is_cut_off_and_counted(tmp_path: Path) -> None:
    newest = filled(tmp_path)[-1]
    with newest.open("ab") as file:
        file.write(MARK + b"\x99\x00")
    with small(tmp_path, PLENTY) as spool:
        assert (spool.torn_bytes, spool.bad_bytes) == (6, 0)
        spool.append([batch(20)], b"20")
    with small(tmp_path, PLENTY) as spool:
        assert facts(drain(spool)) == [("batch", seq) for seq in range(21)]
        assert (spool.torn_bytes, spool.bad_bytes, spool.checkpoint) == (0, 0, b"20")


def test_files_taken_away_underneath_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    with small(tmp_path, PLENTY) as spool:
        spool_files(tmp_path)[1].unlink()
        entries = drain(spool)
        assert spool.vanished == 20 - len(entries) > 0
        assert spool.messages == len(entries)
    assert "cannot be read" in caplog.text


def test_the_checkpoint_outlives_what_was_acknowledged(tmp_path: Path) -> None:
    with small(tmp_path) as spool:
        for seq in range(50):
            spool.append([batch(seq, size=320)], b"%d" % seq)
            for index, _ in spool.take(1 << 20):
                spool.acknowledge(index)
        assert spool.messages == 0
        assert len(spool_files(tmp_path)) == 1
        assert spool.dropped_batches == 0
    with small(tmp_path) as spool:
        assert (spool.checkpoint, spool.messages, spool.take(1)) == (b"49", 0, [])
        spool.append([], b"later")
    with small(tmp_path) as spool:
        assert spool.checkpoint == b"later"


def test_checkpoints_alone_do_not_add_up(tmp_path: Path) -> None:
    with small(tmp_path) as spool:
        for number in range(300):
            spool.append([], b"checkpoint %d" % number)
            assert spool.bytes == sum(path.stat().st_size for path in spool_files(tmp_path)) <= 2 * FILE_BYTES
        spool.append([batch(0)], b"with a batch")
        spool.append([], b"the last")
    entries, checkpoint = left_in(tmp_path)
    assert (facts(entries), checkpoint) == ([("batch", 0)], b"the last")


# -- the bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_oldest_give_way_and_losses_say_which(tmp_path: Path, on_disk: bool) -> None:
    with small(tmp_path / "spool" if on_disk else None) as spool:
        spool.append([batch(0, size=320)], b"")
        ((handed, _),) = spool.take(1)
        for seq in range(1, 200):
            spool.append([batch(seq, size=320), droppable(seq)], b"")
            assert spool.bytes <= spool.max_bytes
        spool.acknowledge(handed)
        entries = drain(spool)
        said = [codec.decode(entry.value, RankMessage) for entry in entries if entry.kind != "droppable"]
        losses = [message.loss for message in said if message.loss is not None]
        assert 1 <= len(losses) <= 2, "one beside the batch that was handed out, and one for all others"
        assert {loss.reason for loss in losses} == {SPOOL_FULL}
        assert all(message.batch is not None for message in said[len(losses) :])
        assert lasting(facts(entries)) == [("batch", seq) for seq in range(1, 200)]
        assert spool.dropped_batches == losses[-1].last_seq
        assert 0 < spool.dropped_other == 199 - sum(entry.kind == "droppable" for entry in entries)


@pytest.mark.parametrize("on_disk", [True, False])
def test_where_nothing_can_give_way_the_new_ones_do(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path / "spool" if on_disk else None
    with small(folder) as spool:
        for seq in range(8):
            spool.append([batch(seq, size=480)], b"")
        handed = spool.take(1 << 20)
        assert len(handed) == 8
        for seq in range(8, 60):
            spool.append([batch(seq, size=480)], b"")
            assert spool.bytes <= spool.max_bytes + 1_000
        spool.append([batch(60, size=16_000)], b"")
        said = facts(drain(spool))
        assert said == [("batch", seq) for seq in range(8, 61)]
        assert spool.messages < 40
    if folder is not None:
        assert facts(left_in(folder)[0]) == [("batch", seq) for seq in range(61)]


def test_what_an_earlier_forwarder_handed_out_is_not_acknowledged_in_a_loss(tmp_path: Path) -> None:
    with small(tmp_path) as spool:
        for seq in range(3):
            spool.append([batch(seq, size=320)], b"")
        handed = spool.take(1 << 20)
    with small(tmp_path) as spool:
        for seq in range(3, 40):
            spool.append([batch(seq, size=320)], b"")
        assert spool.dropped_batches > 3
        spool.acknowledge(handed[1][0])
        assert facts(drain(spool)) == [("batch", seq) for seq in range(40)]


def test_what_is_done_leaves_its_room_to_what_comes(tmp_path: Path) -> None:
    with Spool(tmp_path, FOLDER_BOUND, file_bytes=FOLDER_BOUND) as spool:
        for seq in range(8):
            spool.append([batch(seq, size=4_000)], b"")
            assert facts(drain(spool)) == [("batch", seq)]
            spool.acknowledge(seq)
        assert spool.dropped_batches == 0


def test_a_sync_waits_for_the_disk_if_something_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with small(tmp_path, PLENTY) as spool:
        monkeypatch.setattr(os, "fsync", synced.append)
        spool.append([batch(0)], b"")
        assert not synced
        spool.sync()
        spool.sync()
        assert len(synced) == 1


def test_what_was_never_handed_out_cannot_be_acknowledged(tmp_path: Path) -> None:
    with small(tmp_path, PLENTY) as spool:
        spool.append([batch(0), batch(1)], b"")
        ((index, _),) = spool.take(1)
        spool.acknowledge(index + 1_000)
        assert facts(drain(spool)) == [("batch", 1)]


# -- disks that refuse -----------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    full = Disk()
    monkeypatch.setattr(os, "write", full.write)
    return full


@pytest.mark.parametrize("room", [0, 1, 200, 1_000, 3_000])
def test_a_full_disk_is_told_once_and_recovered_from(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, room: int) -> None:
    folder = tmp_path / "spool"
    with small(folder, PLENTY) as spool:
        for seq in range(5):
            spool.append([batch(seq, size=320)], b"%d" % seq)
        disk.room = room
        for seq in range(5, 25):
            spool.append([batch(seq, size=320)], b"%d" % seq)
            spool.sync()
        assert spool.bytes > sum(path.stat().st_size for path in spool_files(folder))
        assert (spool.faults, spool.dropped_batches) == (1, 0)
        assert [record.message for record in caplog.records if "No space left on device" in record.message]
        assert len(caplog.records) == 1
        disk.room = None
        copy = Path(shutil.copytree(folder, tmp_path / "killed"))
        entries, checkpoint = left_in(copy, PLENTY)
        assert facts(entries) == [("batch", seq) for seq in range(int(checkpoint or b"-1") + 1)], "what is there is what came first"
        spool.append([batch(25)], b"25")
        spool.sync()
        assert spool.bytes == sum(path.stat().st_size for path in spool_files(folder))
        assert "can be written again" in caplog.text
        spool.append([batch(26)], b"26")
        entries, checkpoint = left_in(Path(shutil.copytree(folder, tmp_path / "recovered")), PLENTY)
        assert (facts(entries), checkpoint) == ([("batch", seq) for seq in range(27)], b"26")
        assert facts(drain(spool)) == facts(entries)
        assert spool.bytes == sum(path.stat().st_size for path in spool_files(folder))


def test_a_full_disk_keeps_the_newest_checkpoint_though_all_before_it_is_acknowledged(tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "spool"
    with small(folder, PLENTY) as spool:
        spool.append([batch(0)], b"0")
        disk.room = 0
        for seq in range(1, 60):
            spool.append([batch(seq, size=800)], b"%d" % seq)
            spool.acknowledge(spool.take(1)[-1][0])
        spool.acknowledge(spool.take(PLENTY)[-1][0])
        assert spool.messages == 0
        copy = Path(shutil.copytree(folder, tmp_path / "killed"))
        disk.room = None
        assert left_in(copy)[1] == b"0"
        spool.sync()
        spool.append([batch(60)], b"60")
        spool.acknowledge(spool.take(PLENTY)[-1][0])
        assert len(spool_files(folder)) == 1
    assert left_in(folder)[1] == b"60"


@pytest.mark.parametrize("acknowledged", [0, 1, 2, 3])
def test_no_file_is_forgotten_on_a_disk_that_was_full_from_the_start(tmp_path: Path, disk: Disk, acknowledged: int) -> None:
    with small(tmp_path) as spool:
        disk.room = 0
        spool.append([batch(0)], b"0")
        spool.append([batch(1, size=800), batch(2, size=800)], b"2")
        for _ in range(acknowledged):
            spool.acknowledge(spool.take(1)[0][0])
        disk.room = None
        spool.sync()
        assert spool.bytes == sum(path.stat().st_size for path in spool_files(tmp_path))
        assert facts(drain(spool)) == [("batch", seq) for seq in range(acknowledged, 3)]
    entries, checkpoint = left_in(tmp_path)
    assert (facts(entries), checkpoint) == ([("batch", seq) for seq in range(acknowledged, 3)], b"2")


def test_what_waits_in_memory_for_a_disk_is_bounded(tmp_path: Path, disk: Disk) -> None:
    with small(tmp_path, PLENTY, fallback_bytes=4_000) as spool:
        for seq in range(20):
            spool.append([batch(seq, size=320)], b"%d" % seq)
        on_disk = spool.bytes
        disk.room = 0
        for seq in range(20, 90):
            spool.append([batch(seq, size=320)], b"%d" % seq)
            assert spool.bytes <= on_disk + 4_000
        assert spool.dropped_batches > 50
        disk.room = None
        spool.sync()
        entries = drain(spool)
        assert facts(entries) == [("batch", seq) for seq in range(90)]
        assert [codec.decode(entry.value, RankMessage).loss is None for entry in entries[:20]] == [True] * 20


def test_a_full_disk_and_a_full_spool_together_lose_no_declaration(tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "spool"
    with small(folder) as spool:
        for seq in range(12):
            spool.append([batch(seq, size=320)], b"%d" % seq)
        disk.room = 0
        for seq in range(12, 60):
            spool.append([batch(seq, size=320)], b"%d" % seq)
            assert spool.bytes <= spool.max_bytes
        assert facts(drain(spool)) == [("batch", seq) for seq in range(60)]
        disk.room = None
        spool.sync()
        assert facts(left_in(Path(shutil.copytree(folder, tmp_path / "killed")))[0]) == [("batch", seq) for seq in range(60)]
    assert facts(left_in(folder)[0]) == [("batch", seq) for seq in range(60)]


def test_a_spool_can_be_opened_on_a_full_disk(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.room = 0
    caplog.set_level(logging.WARNING)
    with small(tmp_path / "spool") as spool:
        spool.append([batch(0)], b"0")
        assert facts(drain(spool)) == [("batch", 0)]
        assert caplog.text.count("No space left") == 1
        disk.room = None
    with small(tmp_path / "spool") as spool:
        assert (facts(drain(spool)), spool.checkpoint) == ([("batch", 0)], b"0")
