"""Capture files: every recorded form is read, what is damaged is named by file and line."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import capture, wire
from producers.capture import Frame
from producers.wire import WireError, decode
from schemas.errors import KvcensusError
from tests.shared_data import CAPTURE_NAMES, capture_path, shared_path

PAYLOAD = msgspec.msgpack.encode([1.5, [["AllBlocksCleared"]], 0])


def line(*parts: bytes, **more: Any) -> str:
    return json.dumps({"t": 12.5, **more, "frames": [base64.b64encode(part).decode() for part in parts]})


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=number < 0)


def write(path: Path, *lines: str, packed: bool = False) -> Path:
    data = "".join(text + "\n" for text in lines).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_every_recorded_form(tmp_path: Path, packed: bool) -> None:
    path = write(
        tmp_path / "c",
        line(b"kv", seq(3), PAYLOAD),
        line(b"", seq(4), PAYLOAD),
        line(seq(5), PAYLOAD),
        "",
        line(b"", seq(0), dir="send"),
        line(b"", seq(6), PAYLOAD, dir="recv"),
        line(b"", b"kv", seq(7), PAYLOAD, dir="recv"),
        line(b"", b"kv", seq(-1), b"", dir="recv"),
        line(b"", seq(-1), b"", dir="recv"),
        json.dumps({"arrival": 2, "seq": 8, "topic_hex": "6b76", "payload_hex": PAYLOAD.hex()}),
        packed=packed,
    )
    assert list(capture.read(path)) == [
        Frame(12.5, b"kv", 3, PAYLOAD),
        Frame(12.5, b"", 4, PAYLOAD),
        Frame(12.5, b"", 5, PAYLOAD),
        Frame(12.5, b"", 6, PAYLOAD),
        Frame(12.5, b"kv", 7, PAYLOAD),
        Frame(2.0, b"kv", 8, PAYLOAD),
    ]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "not JSON"),
        ("\x00\x01", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"kind": "mark"}', "neither `frames` nor `payload_hex`"),
        ('{"t": 1, "frames": []}', "0 parts"),
        ('{"t": 1, "frames": ["", "", "", "", ""]}', "5 parts"),
        ('{"t": 1, "frames": 7}', "not a frame"),
        ('{"t": 1, "frames": ["***", "AA==", ""]}', "not a frame"),
        ('{"frames": ["", "AAAAAAAAAAA=", ""]}', "not a frame"),
        ('{"t": null, "frames": ["", "AAAAAAAAAAA=", ""]}', "not a frame"),
        ('{"t": 1, "frames": ["", "AAAA", ""]}', "sequence of 3 bytes, expected 8"),
        ('{"arrival": 1, "seq": 1, "payload_hex": "zz"}', "not a frame"),
        ('{"arrival": 1, "payload_hex": ""}', "not a frame"),
        ('{"arrival": 1, "seq": -1, "payload_hex": ""}', "not a frame"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, bad: str, says: str, packed: bool) -> None:
    path = write(tmp_path / "cap.jsonl", line(b"", seq(0), PAYLOAD), "", bad, packed=packed)
    with pytest.raises(KvcensusError) as caught:
        list(capture.read(path))
    assert str(caught.value).startswith(f"{path}: line 3: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frames_before_a_damage_are_given_out(tmp_path: Path) -> None:
    path = write(tmp_path / "cap.jsonl", line(b"", seq(0), PAYLOAD), line(b"", seq(1), PAYLOAD), "{")
    reader = capture.read(path)
    assert [next(reader).seq, next(reader).seq] == [0, 1]
    with pytest.raises(KvcensusError, match="line 3"):
        next(reader)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 40]) + data[middle + 40 :]


def wrong_sum(data: bytes) -> bytes:
    return data[:-8] + bytes(8)


@pytest.mark.parametrize("damage", [cut, flip, wrong_sum])
def test_a_damaged_gzip_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    lines = [line(b"kv", seq(number), PAYLOAD + bytes([number % 251]) * 20) for number in range(500)]
    path = tmp_path / "cap.jsonl.gz"
    path.write_bytes(damage(gzip.compress("\n".join(lines).encode())))
    with pytest.raises(KvcensusError, match=r"cap\.jsonl\.gz: line \d+: ") as caught:
        list(capture.read(path))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvcensusError, match="absent: No such file"):
        list(capture.read(tmp_path / "absent"))
    with pytest.raises(KvcensusError, match="Is a directory"):
        list(capture.read(tmp_path))
    (tmp_path / "empty").touch()
    assert list(capture.read(tmp_path / "empty")) == []


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "cap", line(b"", seq(0), PAYLOAD), "x" * 5000)
    with pytest.raises(KvcensusError, match="line 2: longer than 1000 bytes"):
        list(capture.read(path))


def test_ranks_are_split_by_the_batch_itself(tmp_path: Path) -> None:
    def of(rank: Any, number: int) -> str:
        return line(b"", seq(number), msgspec.msgpack.encode([number, [], *rank]))

    path = write(tmp_path / "cap", of([1], 0), of([0], 0), line(b"", seq(1), b"\xc1"), of([1], 1), of([], 2), of([None], 3))
    ranks = capture.ranks(path)
    assert list(ranks) == [0, 1]
    assert [frame.seq for frame in ranks[1]] == [0, 1]
    assert [frame.seq for frame in ranks[0]] == [0, 1, 2, 3]  # the unreadable one stays with its neighbour


# -- restamp


@given(
    st.floats(0, 4e9) | st.integers(0, 4 * 10**9),
    st.integers(-(10**15), 10**15),
    st.lists(st.sampled_from([["AllBlocksCleared"], {"type": "New", "x": [1, 2]}, ["BlockRemoved", [2**64 - 1]]]), max_size=20),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_restamp_moves_the_time_and_nothing_else(ts: float, delta_us: int, events: list[Any], tail: list[int]) -> None:
    payload = msgspec.msgpack.encode([ts, events, *tail])
    before = wire.micros(ts)
    if not 0 <= before + delta_us < wire.MAX_TS_SECONDS * 1_000_000:
        with pytest.raises(WireError):
            capture.restamp(payload, delta_us)
        return
    moved = capture.restamp(payload, delta_us)
    assert decode(moved).at_us == before + delta_us
    assert msgspec.msgpack.decode(moved)[1:] == msgspec.msgpack.decode(payload)[1:]
    if isinstance(ts, float):
        assert moved[10:] == payload[10:]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\xcb", msgspec.msgpack.encode(["x", []]), msgspec.msgpack.encode({"ts": 1})])
def test_restamp_refuses_what_has_no_time(payload: bytes) -> None:
    with pytest.raises(WireError):
        capture.restamp(payload, 1)


# -- the recorded captures


@pytest.mark.parametrize("name", CAPTURE_NAMES)
def test_every_capture_reads(name: str) -> None:
    path = capture_path(name)
    frames = list(capture.read(path))
    ranks = capture.ranks(path)
    assert sum(len(of_rank) for of_rank in ranks.values()) == len(frames) > 0
    assert list(ranks) == ([0, 1] if name.startswith("g_dp2") else [0])
    for of_rank in ranks.values():
        numbers = [frame.seq for frame in of_rank]
        breaks = [b for a, b in itertools.pairwise(numbers) if b != a + 1]
        assert breaks == ([0] if "restart" in name else [])
    for frame in frames:
        assert decode(capture.restamp(frame.payload, 123_456_789)).at_us == decode(frame.payload).at_us + 123_456_789


@pytest.mark.parametrize(("replay", "live"), [("e_replay", None), ("g_dp2_replay", "g_dp2"), ("j_v0.16.0_array_replay", "j_v0.16.0_array")])
def test_replay_exchanges_read_as_the_frames_they_replay(replay: str, live: str | None) -> None:
    replayed = capture.ranks(shared_path(f"captures/{replay}.jsonl.gz"))
    if live is None:
        lives = [frame for name in ("a_shared_prefix", "b_pressure") for frame in capture.read(capture_path(f"{name}.frames.jsonl.gz"))]
        known = {frame.seq: frame.payload for frame in lives}
        assert {frame.seq: frame.payload for frame in replayed[0]} == known
        return
    recorded = capture.ranks(capture_path(f"{live}.frames.jsonl.gz"))
    assert {rank: [(f.seq, f.payload) for f in frames] for rank, frames in replayed.items()} == {
        rank: [(f.seq, f.payload) for f in frames] for rank, frames in recorded.items()
    }


@pytest.mark.parametrize("name", ["a_shared_prefix.requests.jsonl.gz", "a_shared_prefix.metrics.jsonl.gz"])
def test_what_is_no_capture_says_so(name: str) -> None:
    with pytest.raises(KvcensusError, match=r"line 1: .*not a capture"):
        list(capture.read(shared_path(f"captures/{name}")))
