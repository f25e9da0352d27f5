"""Our records against the conformance data of the record contract: every fixture of what a producer has to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from producers.segments import contract, reader, shape
from producers.segments.contract import COLUMNS, SCHEMA, Endpoint
from producers.segments.shape import Stats
from schemas.records import Batch, HolderReset, IdentityRefused, Lifecycle, Op, RankMessage
from tests.segments import CORPUS, DECLARED, contract_schema, heartbeat, violations
from tests.shared_data import shared_folder, shared_path

TELEMETRY = (
    "clear_is_scope_level",
    "clear_scope_undeclared",
    "content_id_rides_beside_the_engine_id",
    "evict_and_restore",
    "holder_reset_closes_the_scope",
    "lora_labelled",
    "prefix_chain",
    "reuse_labelled_rides_the_store_it_describes",
    "same_content_distinct_engine_ids",
    "same_hash_distinct_dp_ranks",
    "same_hash_distinct_instances",
    "seq_absent_where_the_transport_does_not_number",
    "seq_rides_every_cache_record",
    "sliding_window_is_carried_where_the_group_declares_one",
    "tier_absent_stays_null",
)


def corpus(relative: str) -> Any:
    return json.loads(shared_path(f"{CORPUS}/{relative}").read_text(encoding="utf-8"))


def packed(raw: int | None) -> bytes:
    return b"" if raw is None else raw.to_bytes(16, "big")


def told(event: dict[str, Any]) -> RankMessage:
    """A fixture's event as one of our messages."""
    at_us = round(event["at_ms"] * 1_000)
    message = RankMessage(event["source"], event.get("dp_rank", 0), "life", event.get("seq", 0), at_us, round(event["at_ms"]), "run")
    if event["type"] == "HolderReset":
        message.holder_reset = HolderReset(round(event["boundary_ms"] * 1_000), "restarted")
        return message
    if event["type"] == "Cleared":
        op = Op("CLEAR", event.get("group_idx"), event.get("medium"))
    else:
        place = event.get("group_idx", 0), event["medium"]
        ids = packed(event["block_hash"]), packed(event.get("content_id"))
        if event["type"] == "Removed":
            op = Op("REMOVE", *place, block_ids=ids[0], content_ids=ids[1])
        else:
            op = Op("STORE", *place, None, event["block_size"], *ids, "UNKNOWN" if "parent_hash" in event else "ROOT")
            op.parent_block_id = packed(event["parent_hash"]) if "parent_hash" in event else None
            op.spec_kind, op.spec_sliding_window = event.get("spec_kind"), event.get("spec_sliding_window")
            op.lora_id, op.lora_name, op.reused = event.get("lora_id"), event.get("lora_name"), event.get("reused", False)
    message.batch = Batch([op])
    return message


def known(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record that the contract knows for its kind, ids back as the fixture's numbers."""
    schema = contract_schema()
    assert schema is not None
    fields = schema["kinds"][record["kind"]]["fields"]
    return {
        name: str(int(value, 16)) if name in ("block_id", "content_id", "parent_id") else value
        for name, value in record.items()
        if name in fields
    }


def test_the_telemetry_fixtures_are_all_here() -> None:
    assert {path.stem for path in shared_path(f"{CORPUS}/telemetry").glob("*.json")} == set(TELEMETRY)


@pytest.mark.parametrize("name", TELEMETRY)
def test_a_telemetry_fixture_becomes_its_records(name: str) -> None:
    fixture = corpus(f"telemetry/{name}.json")
    records = []
    for event in fixture["events"]:
        for whole in shape.records(told(event), DECLARED):
            assert violations(whole) == []
            if whole["kind"] == "batch":  # of ours, behind which the contract's records stand
                continue
            record = known(whole)
            if "seq" not in event:  # what we relay is always numbered
                del record["seq"]
            if event["type"] == "Cleared" and "dp_rank" not in event:  # one forwarder, one rank: we know whose it is
                assert record.pop("dp_rank") == 0
            records.append(record)
    assert records == fixture["expect"]["records"]


def stats(given: dict[str, Any]) -> Stats:
    fields = dict(given)
    fields["endpoints"] = msgspec.convert(given["endpoints"], list[Endpoint])
    return Stats(**fields)


def test_the_lifecycle_fixtures_become_their_records() -> None:
    fixture = corpus("lifecycle/records.json")
    for case in fixture["cases"]:
        if case["kind"] == "agent_start":
            given = dict(case["config"])
            epoch = given.pop("key_epoch")
            assert isinstance(epoch, int)  # rides the segment's header
            given.pop("raw_ids", None)
            record = shape.agent_start(
                case["at_ms"],
                agent_version=fixture["agent_version"],
                endpoint_count=given["endpoint_count"],
                max_payload_bytes=given["max_payload_bytes"],
                canary=given["canary"],
                reuse_reporting=given["reuse_reporting"],
            )
        elif case["kind"] == "heartbeat":
            record = shape.heartbeat(case["at_ms"], stats(case["stats"]))
        else:
            record = shape.agent_stop(case["at_ms"], case["reason"], stats(case["stats"]))
        assert record == case["expect"]
        assert violations(record) == []


def test_the_capacity_fixture_becomes_its_record() -> None:
    for case in corpus("lifecycle/records.json")["capacity_cases"]:
        refusal = case["refusal"]
        message = RankMessage(refusal["instance_id"], refusal["dp_rank"], "life", 0, 0, round(case["at_ms"]), "run")
        message.identity_refused = IdentityRefused(
            refusal["group_idx"], refusal["refused"], round(refusal["window_start_ms"] * 1_000), round(refusal["window_end_ms"] * 1_000)
        )
        (record,) = shape.records(message, DECLARED)
        assert known(record) == case["expect"]
        assert violations(record) == []


def test_the_delivery_fixtures_become_their_records() -> None:
    fixture = corpus("delivery/records.json")
    declaration = msgspec.structs.replace(DECLARED, labels=fixture["provenance"])
    for case in fixture["cases"]:
        expected = case["expect"]
        if expected["kind"] == "segment_open":
            record = shape.segment_open(
                expected["at_ms"],
                incarnation=expected["incarnation"],
                segment_seq=expected["segment_seq"],
                instance_id="i0",
                dp_rank=0,
                declaration=declaration,
                max_segment_seconds=expected["max_segment_secs"],
            )
            assert record.items() >= expected.items()
            assert record.keys() - expected.keys() == {"instance_id", "dp_rank"}  # whose it is, which no field of the contract says
        elif expected["kind"] == "segment_recovered":
            record = shape.segment_recovered(expected["at_ms"], attributed=expected["attributed"], dropped_bytes=expected["dropped_bytes"])
            assert record == expected
        else:
            seqs = list(range(expected["first_seq"], expected["last_seq"] + 1))
            names = [f"seg-{expected['incarnation']}-{seq}.jsonl" for seq in seqs]
            record = shape.segments_dropped(expected["at_ms"], incarnation=expected["incarnation"], names=names, seqs=seqs, lost=[])
            assert record == expected
        assert violations(record) == []


def test_the_columns_are_those_of_the_contract() -> None:
    schema = contract_schema()
    if schema is None:
        shared_path(CORPUS)  # skips
        return
    fields = {name for kind in schema["kinds"].values() for name in kind["fields"]}
    assert set(COLUMNS) == fields
    twin = pq.read_schema(shared_path(f"{CORPUS}/delivery/seg-1785153670000-4242-0.parquet"))
    assert twin.names == SCHEMA.names
    assert [twin.field(name).type for name in twin.names] == [SCHEMA.field(name).type for name in SCHEMA.names]
    for kind in schema["kinds"].values():
        for name, field in kind["fields"].items():
            if not field["type"].startswith("list"):
                arrow = {"utf8": "string", "int64": "int64", "float64": "double", "bool": "bool"}[field["type"]]
                assert str(SCHEMA.field(name).type) == arrow, name


def test_the_parquet_twin_reads_as_its_lines() -> None:
    fixture = corpus("delivery/records.json")["segment"]
    twin = reader.read(shared_path(f"{CORPUS}/delivery/{fixture['parquet_twin']}"))
    assert twin == [contract.row(record) for record in fixture["lines"]]


def test_file_names_are_those_of_the_layout() -> None:
    layout = corpus("delivery/layout.json")
    assert layout["active_segment"] == contract.ACTIVE
    assert (layout["sealed_prefix"], layout["orphan_prefix"]) == (contract.SEALED_PREFIX, contract.ORPHAN_PREFIX)
    assert (layout["wal_suffix"], layout["conversion_tmp_suffix"]) == (contract.WAL_SUFFIX, contract.TMP_SUFFIX)
    found = contract.parse_sealed("seg-1785153670000-4242-10.parquet")
    assert found is not None
    assert (found.incarnation, found.segment_seq, found.orphan) == ("1785153670000-4242", 10, False)
    orphan = contract.parse_sealed("orphan-1785153680000.jsonl")
    assert orphan is not None
    assert orphan.orphan
    assert contract.parse_sealed("active.jsonl") is None


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"kind": "store", "at_ms": 1.0, "block_id": "b", "n_tokens": 16}, "store without instance_id"),
        ({"kind": "store", "at_ms": 1.0, "instance_id": "i", "block_id": 7, "n_tokens": 16}, "Expected `str | null`, got `int`"),
        ({"kind": "evict", "at_ms": -1.0, "instance_id": "i", "block_id": "b"}, "at_ms is -1.0"),
        ({"kind": "evict", "at_ms": 1.0, "instance_id": "i", "block_id": "b", "dp_rank": -1}, "dp_rank is -1"),
        ({"kind": "clear", "instance_id": "i"}, "missing required field `at_ms`"),
    ],
)
def test_a_record_of_another_form_is_refused(record: dict[str, Any], fault: str) -> None:
    with pytest.raises(contract.ContractError, match=fault.replace("|", r"\|")):
        contract.row(record)


def test_our_own_lifecycle_says_what_the_contract_asks() -> None:
    beat = heartbeat(batches=7, refused=1, lost=2, unknown_events=3, canary="c", endpoint="tcp://127.0.0.1:5557", last_message_at_ms=5)
    for kind in ("start", "heartbeat", "stop"):
        record = shape.lifecycle(msgspec.structs.replace(beat, kind=kind), DECLARED)
        assert violations(record) == []
        assert record["canary"] == "c"
        assert record["reuse_reporting"] == "unlabelled"
        assert msgspec.json.decode(record["lifecycle"], type=Lifecycle).batches == 7
    assert record["reason"] == "stopped"
    assert record["endpoints"] == [
        {
            "source": "i0",
            "endpoint": "tcp://127.0.0.1:5557",
            "msgs_seen": 8,
            "dropped": 2,
            "last_msg_at_ms": 5.0,
            "publisher_restarts": 0,
        }
    ]


def test_the_schema_is_there_wherever_the_shared_data_is() -> None:
    folder = shared_folder()
    assert (contract_schema() is None) == (folder is None or not Path(folder / CORPUS).exists())
