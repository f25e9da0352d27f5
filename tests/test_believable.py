"""Well-formed messages with numbers that cannot be true: they are set aside, and neither hang nor break what comes after them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from schemas import codec
from schemas.records import Batch, Declaration, HolderReset, Loss, Op, RankMessage, Record, Scrape
from streams.believable import unbelievable
from streams.offline import OfflineFleet

FIRST_US = 1_796_000_000_000_000
DECLARED = Declaration("none", "per_copy")


def message(**what: Any) -> RankMessage:
    return structs.replace(RankMessage("a", 0, "life", 3, FIRST_US + 3_000_000, 0, "run"), **what)


def batch(seq: int, **op: Any) -> RankMessage:
    content = bytes([seq % 2]) * 16
    store = Op("STORE", block_size=16, block_ids=bytes([seq]) * 16, content_ids=content, parent_state="ROOT")
    ops = [structs.replace(store, **op), Op("REMOVE", block_ids=bytes([seq]) * 16)]
    return message(seq=seq, at_us=FIRST_US + seq * 1_000_000, batch=Batch(ops))


BEYOND = [
    structs.replace(batch(3), at_us=2**62),
    structs.replace(batch(3), at_us=-1),
    structs.replace(batch(3), skipped=-(2**63)),
    structs.replace(batch(3), seq=2**62),
    batch(3, block_size=2**62),
    batch(3, block_size=-16),
    message(batch=Batch([], unknown_events=2**63 - 1)),
    message(batch=Batch([], unresolved_blocks=-1)),
    message(loss=Loss(0, 2**63 - 1, "x")),
    message(loss=Loss(-(2**63), 5, "x")),
    message(life_id="next", holder_reset=HolderReset(2**63 - 1, "x")),
    message(scrape=Scrape(5, kv_cache_usage=float("nan"), num_gpu_blocks=10)),
    *(message(declaration=structs.replace(DECLARED, prefill_rate=rate)) for rate in (0.0, -1.0, 1e-300, float("nan"), float("inf"))),
    *(message(declaration=structs.replace(DECLARED, gpus_per_rank=gpus)) for gpus in (0.0, 1e300, float("nan"))),
    message(declaration=structs.replace(DECLARED, staleness_ms=2**63 - 1)),
    message(declaration=structs.replace(DECLARED, kv_bytes_per_token=2**62)),
    message(declaration=structs.replace(DECLARED, kv_bytes_by_group={"0": -1})),
]


@pytest.mark.parametrize("bad", BEYOND)
def test_what_cannot_be_true_is_as_if_it_could_not_be_read(bad: RankMessage) -> None:
    bad = codec.decode(codec.encode(bad), RankMessage)
    assert unbelievable(bad) is not None
    told, unread = OfflineFleet(), OfflineFleet()
    for number, each in enumerate([message(seq=0, at_us=0, declaration=DECLARED), batch(0), batch(1), batch(2), bad, batch(4), batch(5)]):
        told.apply(each, number)
        if each is bad:
            unread.unreadable("a", 0, number)
        else:
            unread.apply(each, number)
    found = told.drain()
    assert found == unread.drain()
    assert any("unreadable" in row.reasons for row in found.rank_windows)
    rows: list[Record] = [*found.rank_windows, *found.recomputes, *found.duplicate_windows]
    for row in rows:
        codec.encode(row)


@pytest.mark.parametrize(
    "good",
    [
        batch(3),
        batch(3, block_size=0),
        structs.replace(batch(3), at_us=2**33 * 1_000_000, seq=2**48 - 1),
        message(loss=Loss(3, 2**48 - 1, "x")),
        message(declaration=structs.replace(DECLARED, prefill_rate=0.5, gpus_per_rank=0.25, kv_bytes_per_token=0)),
        message(scrape=Scrape(5)),
    ],
)
def test_what_a_forwarder_may_send_is_counted(good: RankMessage) -> None:
    assert unbelievable(good) is None
