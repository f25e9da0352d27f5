"""The writer on a real disk: what is sealed when, what a death leaves, what the bound takes, and a disk that takes nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from producers import capture
from producers.segments import seal, shape
from producers.segments.contract import ACTIVE
from producers.segments.seal import SegmentError
from producers.segments.writer import SegmentWriter, rank_folder
from schemas.records import NO_SEQ, Declaration, EngineMetrics, HolderReset, RankMessage, Refusal
from tests.counting import capture_sources, messages
from tests.secret_forms import secret_forms
from tests.segments import DECLARED, STARTED_MS, batch, by_rank, heartbeat, ingested, open_writer, records_of, write_ranks
from tests.shared_data import capture_path

RUN = f"{STARTED_MS}-4242"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def seqs(folder: Path) -> list[int]:
    facts, ingest = ingested(folder)
    assert ingest.tally.refused_files == []
    return [message.seq for message in by_rank(facts).get(("i0", 0), []) if message.batch is not None]


def test_a_segment_opens_with_its_header_and_is_sealed_as_parquet(tmp_path: Path) -> None:
    with open_writer(tmp_path, max_segment_seconds=299.5) as writer:
        assert names(tmp_path) == []
        writer.write([heartbeat(), batch(0)])
        (header, *_) = records_of(tmp_path / ACTIVE)
        assert names(tmp_path) == [ACTIVE]
        writer.write([batch(1), EngineMetrics("i0", 0, "life", "run", 7)])
    assert names(tmp_path) == [f"seg-{RUN}-0.parquet"]
    assert writer.counters.messages == 4
    records = records_of(tmp_path / f"seg-{RUN}-0.parquet")
    assert [record["kind"] for record in records] == [
        "segment_open",
        "heartbeat",
        "batch",
        "store",
        "batch",
        "store",
        "engine_metrics",
    ]
    assert records[0] == header
    assert header["max_segment_secs"] == 300
    assert header["heartbeat_secs"] == 60
    assert header["workload_class"] == "agentic"
    assert header["contract_version"] == "1.10"
    assert header["key_epoch"] == 3


def test_what_was_declared_last_stands_in_the_next_header(tmp_path: Path) -> None:
    declared = batch(0)
    declared.batch, declared.declaration = None, Declaration("none", "per_copy", workload="other")
    with open_writer(tmp_path, segment_bytes=1) as writer:
        writer.write([declared, heartbeat()])
        writer.write([batch(1)])
    first, second = (records_of(tmp_path / f"seg-{RUN}-{number}.parquet") for number in range(2))
    assert first[0]["workload_class"] == "agentic"
    assert first[2]["reuse_reporting"] == "none"
    assert second[0]["workload_class"] == "other"


def test_segments_are_sealed_by_size_and_by_age_and_never_split_a_write(tmp_path: Path) -> None:
    now = [STARTED_MS]
    with open_writer(tmp_path, segment_bytes=4_000, max_segment_seconds=10, clock=lambda: now[0]) as writer:
        for seq in range(10):
            writer.write([batch(seq, blocks=10)])
        by_size = writer.counters.segments_sealed
        assert by_size > 2
        writer.write([batch(10)])
        now[0] += 10_000
        writer.tick()
        assert writer.counters.segments_sealed == by_size + 1
    for number in range(by_size + 1):
        kinds = [record["kind"] for record in records_of(tmp_path / f"seg-{RUN}-{number}.parquet")]
        assert kinds[0] == "segment_open"
        assert kinds[1] == "batch"
    assert seqs(tmp_path) == list(range(11))


def test_a_run_never_takes_the_name_of_another(tmp_path: Path) -> None:
    for seq in range(2):  # started within one millisecond, under one process id
        with open_writer(tmp_path) as writer:
            writer.write([batch(seq)])
    assert names(tmp_path) == [f"seg-{RUN}-0.parquet", f"seg-{STARTED_MS + 1}-4242-0.parquet"]
    assert writer.incarnation == f"{STARTED_MS + 1}-4242"


def test_a_clock_that_is_set_back_keeps_no_segment_open(tmp_path: Path) -> None:
    now = [STARTED_MS]
    with open_writer(tmp_path, max_segment_seconds=10, clock=lambda: now[0]) as writer:
        writer.write([batch(0)])
        now[0] -= 3_600_000
        writer.tick()
        now[0] += 10_000
        writer.tick()
        assert writer.counters.segments_sealed == 1


def test_no_token_and_no_salt_is_in_any_segment(tmp_path: Path) -> None:
    for name in ("c_reset_salt.frames.jsonl.gz", "f_lora_salt_session.frames.jsonl.gz"):
        path = capture_path(name)
        secrets = [form for form in secret_forms(list(capture.read(path))) if len(form) >= 6]
        ranks = messages(capture_sources((name.split(".")[0], path), declaration=DECLARED))
        write_ranks(tmp_path / name, ranks)
        everything = b"\n".join(seal.lines(records_of(segment)) for segment in (tmp_path / name).rglob("*.parquet"))
        assert len(secrets) > 100
        assert [secret for secret in secrets if secret in everything] == []


def test_two_writers_do_not_share_a_folder(tmp_path: Path) -> None:
    with open_writer(tmp_path / "a"):
        with pytest.raises(SegmentError, match="another forwarder writes there"):
            open_writer(tmp_path / "a")
        open_writer(tmp_path / "b").close()
    open_writer(tmp_path / "a").close()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SegmentError, match="Not a directory"):
        open_writer(tmp_path / "file" / "segments")


def test_ranks_have_folders_of_their_own(tmp_path: Path) -> None:
    assert rank_folder(tmp_path, "chat-eu-1", 3) == tmp_path / "chat-eu-1" / "3"
    odd = [rank_folder(tmp_path, name, 0) for name in ("..", ".", "a/b", "a%2Fb", "é")]
    assert len(set(odd)) == len(odd)
    assert all(folder.parents[1] == tmp_path and ".." not in folder.parts for folder in odd)


def test_only_the_group_may_look(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        folder = rank_folder(tmp_path / "segments", "i0", 0)
        with open_writer(folder, segment_bytes=1) as writer:
            writer.write([batch(0)])
            writer.write([batch(1)])
        (folder / ACTIVE).write_bytes(b"no header\n")
        with open_writer(folder, started_ms=STARTED_MS + 1) as writer:
            writer.write([batch(2)])
            assert (folder / ACTIVE).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert [name.split("-")[0] for name in names(folder)] == ["orphan", "seg", "seg", "seg"]
    assert {(path.suffix, path.stat().st_mode & 0o777) for path in folder.iterdir()} == {(".parquet", 0o640)}


# -- what a death leaves


def died(folder: Path, *facts: shape.Fact) -> bytes:
    """A folder as a writer leaves it that was killed behind ``facts``; the active segment's bytes."""
    writer = open_writer(folder)
    for fact in facts:
        writer.write([fact])
    content = (folder / ACTIVE).read_bytes()
    writer.close()
    for path in folder.iterdir():
        path.unlink()
    (folder / ACTIVE).write_bytes(content)
    return content


def test_what_a_dead_run_left_is_sealed_under_its_own_name(tmp_path: Path) -> None:
    content = died(tmp_path, batch(0), batch(1, blocks=3))
    (tmp_path / ACTIVE).write_bytes(content + content[-30:-10])
    with open_writer(tmp_path, started_ms=STARTED_MS + 1) as writer:
        assert (writer.counters.recovered, writer.counters.recovered_bytes_lost) == (1, 20)
        writer.write([batch(2)])
    assert names(tmp_path) == [f"seg-{RUN}-0.parquet", f"seg-{STARTED_MS + 1}-4242-0.parquet"]
    marker = records_of(tmp_path / f"seg-{RUN}-0.parquet")[-1]
    assert (marker["kind"], marker["attributed"], marker["dropped_bytes"]) == ("segment_recovered", True, 20)
    assert seqs(tmp_path) == [0, 1, 2]


def test_a_batch_torn_in_the_middle_is_cut_whole_wherever_the_tear_is(tmp_path: Path) -> None:
    content = died(tmp_path, batch(0), batch(1, blocks=3))
    second = content.index(b'{"kind":"batch"', content.index(b'{"kind":"batch"') + 1)
    for number, cut in enumerate(range(second, len(content), 97)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ACTIVE).write_bytes(content[:cut])
        open_writer(folder, started_ms=STARTED_MS + 1).close()
        assert seqs(folder) == [0]
        assert records_of(folder / f"seg-{RUN}-0.parquet")[-1]["dropped_bytes"] == cut - second


def test_nothing_is_kept_behind_a_line_that_cannot_be_read(tmp_path: Path) -> None:
    content = died(tmp_path, batch(0), batch(1, blocks=3), batch(2)).splitlines(keepends=True)
    content[4] = b"rubbish\n"
    (tmp_path / ACTIVE).write_bytes(b"".join(content))
    open_writer(tmp_path, started_ms=STARTED_MS + 1).close()
    assert seqs(tmp_path) == [0]


def test_what_has_the_name_of_a_segment_that_is_there_is_told_apart(tmp_path: Path) -> None:
    died(tmp_path, batch(0))
    (tmp_path / f"seg-{RUN}-0.parquet").touch()
    open_writer(tmp_path, started_ms=STARTED_MS + 1, clock=lambda: STARTED_MS).close()
    kinds = [record["kind"] for record in records_of(tmp_path / f"orphan-{STARTED_MS}.parquet")]
    assert kinds == ["segment_recovered", "batch", "store"]


def test_what_lost_its_header_becomes_an_orphan(tmp_path: Path) -> None:
    content = died(tmp_path, batch(0), batch(1))
    (tmp_path / ACTIVE).write_bytes(b"\0" * 50 + content[50:])
    with open_writer(tmp_path, started_ms=STARTED_MS + 1, clock=lambda: STARTED_MS + 2) as writer:
        assert writer.counters.recovered == 1
    assert names(tmp_path) == [f"orphan-{STARTED_MS + 2}.parquet"]
    first = records_of(tmp_path / f"orphan-{STARTED_MS + 2}.parquet")[0]
    assert first["kind"] == "segment_recovered"
    assert first["attributed"] is False
    assert first["dropped_bytes"] == content.index(b"\n") + 1
    assert seqs(tmp_path) == [0, 1]  # ours name their batches themselves


def test_an_active_segment_of_rubbish_leaves_a_record_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / ACTIVE).write_bytes(b"\0" * 77)
    open_writer(tmp_path, clock=lambda: STARTED_MS).close()
    (record,) = records_of(tmp_path / f"orphan-{STARTED_MS}.parquet")
    assert record["dropped_bytes"] == 77
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / ACTIVE).touch()
    open_writer(empty).close()
    assert names(empty) == []


def test_conversions_cut_short_are_gone_through_again(tmp_path: Path) -> None:
    with open_writer(tmp_path, segment_bytes=1) as writer:
        for seq in range(3):
            writer.write([batch(seq)])
    (tmp_path / f"seg-{RUN}-2.parquet.tmp").write_bytes(b"PAR1 half")
    lines = seal.lines([record for seq in (1, 2) for record in shape.records(batch(seq), DECLARED)])
    (tmp_path / f"seg-{RUN}-0.jsonl").write_bytes(b"the Parquet beside it was verified")
    header = shape.segment_open(1, incarnation=RUN, segment_seq=3, instance_id="i0", dp_rank=0, declaration=DECLARED, max_segment_seconds=1)
    (tmp_path / f"seg-{RUN}-3.jsonl").write_bytes(seal.lines([header]) + lines)
    open_writer(tmp_path, started_ms=STARTED_MS + 1).close()
    assert names(tmp_path) == [f"seg-{RUN}-{number}.parquet" for number in range(4)]


def test_lines_that_cannot_be_converted_stay_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / f"seg-{RUN}-0.jsonl").write_bytes(b'{"kind":"store"\n')
    with open_writer(tmp_path, started_ms=STARTED_MS + 1) as writer:
        pass
    assert writer.counters.unconverted == 1
    assert names(tmp_path) == [f"seg-{RUN}-0.jsonl"]


_WRITE_ON = """
import sys
from tests.segments import batch, open_writer
from pathlib import Path
writer = open_writer(Path(sys.argv[1]), started_ms=int(sys.argv[2]), segment_bytes=3000)
for seq in range(int(sys.argv[3]), 10**9):
    writer.write([batch(seq, blocks=3)])
    sys.stdout.write(f"{seq}\\n")
    sys.stdout.flush()
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_written(tmp_path: Path) -> None:
    chance = random.Random(4242)
    begin = 0
    for number in range(4):
        command = [sys.executable, "-c", _WRITE_ON, str(tmp_path), str(STARTED_MS + number), str(begin)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = [process.stdout.readline()]
            time.sleep(chance.uniform(0, 0.25))
            process.send_signal(signal.SIGKILL)
            told += process.stdout.readlines()
        begin = int(told[-1]) + 1
    open_writer(tmp_path, started_ms=STARTED_MS + 9).close()
    assert all(name.endswith(".parquet") for name in names(tmp_path))
    facts, ingest = ingested(tmp_path)
    assert ingest.tally.refused_files == []
    assert ingest.tally.losses == 0
    found = {message.seq for message in by_rank(facts)["i0", 0]}
    assert found >= set(range(begin))
    assert ingest.tally.incarnations == 4


# -- the bound


def test_the_oldest_segments_give_way_and_are_declared(tmp_path: Path) -> None:
    with open_writer(tmp_path, segment_bytes=1) as writer:
        for seq in range(12):
            writer.write([batch(seq)])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    with open_writer(tmp_path, started_ms=STARTED_MS + 1, max_bytes=size, segment_bytes=1) as writer:
        for seq in range(12, 15):
            writer.write([batch(seq)])
    left = names(tmp_path)
    assert f"seg-{RUN}-11.parquet" in left  # 11 is newer than 9, although it sorts before it
    assert f"seg-{RUN}-0.parquet" not in left
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size
    records = [record for path in tmp_path.iterdir() for record in records_of(path)]
    dropped = sorted((record for record in records if record["kind"] == "segments_dropped"), key=lambda record: record["first_seq"])
    assert dropped
    assert {record["incarnation"] for record in dropped} == {RUN}
    assert dropped[0]["first_seq"] == 0
    assert [record["first_seq"] for record in dropped[1:]] == [record["last_seq"] + 1 for record in dropped[:-1]]
    assert all(record["count"] == record["last_seq"] - record["first_seq"] + 1 for record in dropped)
    assert all(json.loads(record["lost"])[0] == ["life", record["first_seq"], record["first_seq"]] for record in dropped)
    kept = seqs(tmp_path)
    assert kept == list(range(dropped[-1]["last_seq"] + 1, 15))
    assert writer.counters.segments_dropped == sum(record["count"] for record in dropped)


def test_a_drop_is_declared_before_anything_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    append = SegmentWriter._append_records

    def seen(self: SegmentWriter, records: list[dict[str, Any]]) -> bool:
        gone = [record for record in records if record["kind"] == "segments_dropped"]
        there.extend((tmp_path / record["first"]).exists() for record in gone)
        return append(self, records)

    monkeypatch.setattr(SegmentWriter, "_append_records", seen)
    with open_writer(tmp_path, segment_bytes=1, max_bytes=30_000) as writer:
        for seq in range(12):
            writer.write([batch(seq)])
    assert there
    assert all(there)


def test_each_incarnation_s_drops_are_a_record_of_their_own(tmp_path: Path) -> None:
    for number in range(3):
        with open_writer(tmp_path, started_ms=STARTED_MS + number, segment_bytes=1) as writer:
            writer.write([batch(number)])
    (tmp_path / f"orphan-{STARTED_MS - 1}.parquet").write_bytes(b"whatever it is")
    drop = seal.drop_plan(tmp_path, 1, 0, 5.0)
    assert [(record["kind"], record.get("incarnation")) for record in drop.records] == [
        ("orphan_dropped", None),
        ("segments_dropped", f"{STARTED_MS}-4242"),
        ("segments_dropped", f"{STARTED_MS + 1}-4242"),
        ("segments_dropped", f"{STARTED_MS + 2}-4242"),
    ]
    assert len(drop.files) == 4
    assert not seal.drop_plan(tmp_path, 10**9, 0, 5.0).files


# -- a disk that takes nothing

_FULL = """
import resource, sys
from pathlib import Path
from schemas.records import HolderReset
from tests.segments import batch, heartbeat, open_writer
writer = open_writer(Path(sys.argv[1]), max_bytes=1 << 30, retry_seconds=0)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # no file of this process grows beyond: what a full disk does to it
taken = [seq for seq in range(40) if writer.write([batch(seq, blocks=4)])]
assert not writer.write([heartbeat()])
reset = batch(0, "next")
reset.batch, reset.holder_reset = None, HolderReset(reset.at_us, "restarted")
assert not writer.write([reset, batch(0, "next")])
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
taken += [seq for seq in range(1, 5) if writer.write([batch(seq, "next")])]
writer.close()
print(len(taken), writer.counters.refused_batches, writer.counters.refused_records)
"""


def test_a_disk_that_takes_nothing_is_counted_and_declared(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    taken, batches, records = (int(word) for word in done.stdout.split())
    assert (taken + batches, records) == (45, 1)
    facts, ingest = ingested(tmp_path)
    assert ingest.tally.refused_files == []
    told = by_rank(facts)["i0", 0]
    kept = [message.seq for message in told if message.life_id == "life" and message.batch is not None]
    (loss,) = [message.loss for message in told if message.loss is not None and message.life_id == "life"]
    assert (loss.first_seq, loss.last_seq) == (kept[-1] + 1, 39)
    after = [message for message in told if message.life_id == "next"]
    assert [_what(message) for message in after] == ["holder_reset", "loss 0", "batch 1", "batch 2", "batch 3", "batch 4"]
    assert len(done.stderr.splitlines()) == 1  # told once, not at each write


def test_a_full_disk_is_left_alone_for_a_while(tmp_path: Path) -> None:
    target = tmp_path / "segments"
    writer = open_writer(target, retry_seconds=3_600)
    target.rmdir()  # nothing can be opened there
    assert not writer.write([batch(0)])
    target.mkdir()
    assert not writer.write([batch(1)])
    assert writer.counters.write_errors == 1
    writer.close()
    facts, _ = ingested(target)
    (loss,) = [message.loss for message in by_rank(facts)["i0", 0] if message.loss is not None]
    assert (loss.first_seq, loss.last_seq) == (0, 1)


def test_numbers_of_other_ranks_are_told_from_those_the_disk_did_not_take(tmp_path: Path) -> None:
    target = tmp_path / "segments"
    writer = open_writer(target, retry_seconds=3_600)
    target.rmdir()
    for seq, skipped in ((2, 2), (3, 0), (6, 2)):
        fact = batch(seq)
        fact.skipped = skipped
        assert not writer.write([fact])
    target.mkdir()
    writer.close()
    facts, _ = ingested(target)
    (told,) = [message for message in by_rank(facts)["i0", 0] if message.loss is not None]
    assert told.loss is not None
    assert (told.loss.first_seq, told.loss.last_seq, told.skipped, told.seq) == (0, 6, 4, 7)


def test_an_active_segment_that_somebody_removed_holds_nothing_up(tmp_path: Path) -> None:
    with open_writer(tmp_path, segment_bytes=1_500) as writer:
        writer.write([batch(0)])
        (tmp_path / ACTIVE).unlink()
        for seq in range(1, 6):
            writer.write([batch(seq)])
    kept = seqs(tmp_path)
    assert kept[-1] == 5
    assert kept == list(range(kept[0], 6))


def _what(message: RankMessage) -> str:
    if message.holder_reset is not None:
        return "holder_reset"
    return f"loss {message.loss.first_seq}" if message.loss is not None else f"batch {message.seq}"


def test_a_refusal_out_of_all_numbers_is_no_loss(tmp_path: Path) -> None:
    stray = batch(0)
    stray.batch, stray.refusal, stray.seq = None, Refusal("garbage", 3), NO_SEQ
    with open_writer(tmp_path) as writer:
        for fact in (batch(0), stray, batch(1)):
            writer.write([fact])
    assert seal.batches_in(tmp_path / f"seg-{RUN}-0.parquet") == [("life", 0, 1)]
    assert seqs(tmp_path) == [0, 1]


def test_a_reset_is_told_with_both_clocks() -> None:
    reset = batch(0)
    reset.batch, reset.holder_reset, reset.observed_at_ms = None, HolderReset(5_000, "restarted"), 60_000
    (record,) = shape.records(reset, DECLARED)
    assert (record["at_ms"], record["boundary_ms"]) == (60_000.0, 5.0)
