"""The topics' schemas: they say what the record types say, bytes come back as they were, and no change breaks a released form."""

from __future__ import annotations

import contextlib
import copy
import re
import types
import typing
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import fastavro
import msgspec
import pytest
from fastavro.schema import to_parsing_canonical_form
from hypothesis import given
from hypothesis import strategies as st

from schemas import binary, codec, records
from schemas.codec import CodecError, decode, encode, record_types, released_schemas, schema_fingerprint, schema_json
from schemas.compatibility import can_read
from schemas.topics import RECORD_TOPICS

TYPES = record_types()
NAMES = [kind.__name__ for kind in TYPES]
ROOT = Path(__file__).parents[1]
LONG = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


# --- the record types and the schemas say the same ---


def expected_type(hint: Any, null_first: bool = True) -> Any:
    """The Avro type that a field of Python type ``hint`` must have; records as ``{"record": name}``."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        others = [arm for arm in get_args(hint) if arm is not type(None)]
        assert len(others) == 1, f"{hint}: only T | None is expected"
        inner = expected_type(others[0])
        return ["null", inner] if null_first else [inner, "null"]
    if get_origin(hint) is Literal:
        assert all(isinstance(value, str) for value in get_args(hint))
        return "string"
    if get_origin(hint) is list:
        return {"type": "array", "items": expected_type(get_args(hint)[0])}
    if get_origin(hint) is dict:
        assert get_args(hint)[0] is str
        return {"type": "map", "values": expected_type(get_args(hint)[1])}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return {"record": hint.__name__}
    return {int: "long", str: "string", bool: "boolean", bytes: "bytes", float: "double"}[hint]


def plain(avro: Any) -> Any:
    """An Avro type with each record put as ``{"record": name}``."""
    if isinstance(avro, list):
        return [plain(branch) for branch in avro]
    if isinstance(avro, dict):
        if avro["type"] == "record":
            return {"record": avro["name"]}
        return {key: plain(value) if key in ("items", "values") else value for key, value in avro.items()}
    return avro


def nested_records(schema: Any) -> Iterator[dict[str, Any]]:
    """Every record in ``schema``, itself included."""
    if isinstance(schema, dict):
        if schema.get("type") == "record":
            yield schema
        for value in schema.values():
            yield from nested_records(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from nested_records(value)


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_has_the_fields_of_its_type(name: str) -> None:
    found = list(nested_records(schema_json(name)))
    assert found[0]["name"] == name
    for schema in found:
        kind = getattr(records, schema["name"])
        hints = typing.get_type_hints(kind)
        fields = msgspec.structs.fields(kind)
        assert [field["name"] for field in schema["fields"]] == [field.name for field in fields]
        assert schema["doc"], f"{schema['name']} has no doc"
        assert schema["namespace"] == "kvcensus"
        for written, field in zip(schema["fields"], fields, strict=True):
            where = f"{schema['name']}.{field.name}"
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            # Avro takes the default of a union for its first branch.
            null_first = default is msgspec.NODEFAULT or default is None
            assert plain(written["type"]) == expected_type(hints[field.name], null_first), where
            if default is msgspec.NODEFAULT:
                assert "default" not in written, where
            else:
                assert written["default"] == (default.decode("latin-1") if isinstance(default, bytes) else default), where


def test_every_topic_has_a_record_with_a_schema_and_no_schema_is_left_over() -> None:
    assert {topic.record for topic in RECORD_TOPICS} == set(TYPES)
    assert {path.stem for path in (ROOT / "schemas" / "avro").iterdir()} == set(NAMES)


# --- bytes ---


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field of type ``hint``, over the whole range that the schema allows."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of(*(values(arm) for arm in get_args(hint)))
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]), max_size=3)
    if get_origin(hint) is dict:
        return st.dictionaries(TEXT, values(get_args(hint)[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return of_type(hint)
    return {int: LONG, str: TEXT, bool: st.booleans(), bytes: st.binary(max_size=40), type(None): st.none(), float: st.floats()}[hint]


def of_type(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Records of ``kind``."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})


ANY_RECORD = st.one_of(*(of_type(kind) for kind in TYPES))


@given(ANY_RECORD)
def test_the_bytes_are_those_of_the_general_library(record: records.Record) -> None:
    """What is compiled from the types is what anybody's Avro library writes and reads by the schema."""
    schema = fastavro.parse_schema(schema_json(type(record).__name__))
    source = BytesIO(encode(record))
    source.seek(10)
    there = msgspec.convert(fastavro.schemaless_reader(source, schema, None), type(record), builtin_types=(bytes,))
    assert source.read() == b""
    assert repr(there) == repr(record)  # NaN is not equal to itself
    again = BytesIO()
    fastavro.schemaless_writer(again, schema, msgspec.to_builtins(record, builtin_types=(bytes,)))
    assert encode(record)[10:] == again.getvalue()


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, 8191, 8192, 2**31, 2**63 - 1, -(2**63)])
def test_numbers_of_any_size(value: int) -> None:
    assert binary.read_long(binary.write_long(value), 0) == (value, len(binary.write_long(value)))


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        binary.write_long(value)
    with pytest.raises(ValueError, match="64 bits"):
        binary.read_long(b"\xff" * 9 + b"\x02", 0)


def test_arrays_and_maps_may_come_in_several_blocks_with_their_size() -> None:
    """Other writers may cut them so (Avro 1.11, "Arrays")."""
    two, one = binary.write_long(-2) + binary.write_long(8), binary.write_long(1)
    text = b"\x06abc"
    strings = two + text + text + one + text + b"\0"
    assert binary._reader(list[str])(strings, 0) == (["abc"] * 3, len(strings))
    numbers = one + text + b"\x02" + one + b"\x02z\x04" + b"\0"
    assert binary._reader(dict[str, int])(numbers, 0) == ({"abc": 1, "z": 2}, len(numbers))


@given(ANY_RECORD)
def test_every_record_comes_back_as_it_was(record: records.Record) -> None:
    assert decode(encode(record), type(record)) == record


@given(ANY_RECORD, st.sampled_from(TYPES))
def test_a_record_is_not_taken_for_one_of_another_topic(record: records.Record, kind: type[records.Record]) -> None:
    if kind is type(record):
        return
    with pytest.raises(CodecError, match=f"unknown schema .* for {kind.__name__}"):
        decode(encode(record), kind)


@given(ANY_RECORD, st.data())
def test_damaged_bytes_are_refused_or_read_and_nothing_else(record: records.Record, data: st.DataObject) -> None:
    message = bytearray(encode(record))
    cut = data.draw(st.integers(0, len(message)))
    for at, value in data.draw(st.dictionaries(st.integers(0, max(0, cut - 1)), st.integers(0, 255), max_size=4)).items():
        if at < cut:
            message[at] = value
    with contextlib.suppress(CodecError):
        assert isinstance(decode(bytes(message[:cut]), type(record)), type(record))


@given(ANY_RECORD)
def test_a_cut_or_lengthened_message_is_refused(record: records.Record) -> None:
    message = encode(record)
    for bad in (message[:-1], message + b"\0", message[:9], b""):
        with pytest.raises(CodecError):
            decode(bad, type(record))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(message: bytes) -> None:
    for kind in TYPES:
        with pytest.raises(CodecError):
            decode(message, kind)


def rabin(data: bytes) -> int:
    """CRC-64-AVRO, from its definition in the specification."""
    empty = 0xC15D213AA4D7A795
    table = []
    for index in range(256):
        entry = index
        for _ in range(8):
            entry = (entry >> 1) ^ (empty & -(entry & 1))
        table.append(entry)
    fingerprint = empty
    for byte in data:
        fingerprint = (fingerprint >> 8) ^ table[(fingerprint ^ byte) & 0xFF]
    return fingerprint


def test_the_fingerprint_is_the_published_one() -> None:
    published = 0x63DD24E7CC258F8A  # of the schema "null"
    assert rabin(b'"null"') == published
    assert schema_fingerprint({"type": "null"}) == bytes.fromhex("8a8f25cce724dd63") == published.to_bytes(8, "little")


@pytest.mark.parametrize("name", NAMES)
def test_a_message_starts_with_marker_and_fingerprint_lowest_byte_first(name: str) -> None:
    canonical = to_parsing_canonical_form(schema_json(name)).encode()
    header = b"\xc3\x01" + rabin(canonical).to_bytes(8, "little")
    assert codec._present(name)[1] == header


def test_a_message_of_known_bytes() -> None:
    record = records.ResidencyChanges("i", 1, None, "m", 2, -1, [records.ResidencyStep(3, 4, "GPU", 16, b"\xff", b"")])
    body = bytes.fromhex("0269 02 00 02026d 04 01 02 06 08 06475055 20 02ff 00 00 00 00 00 00 00 00 00 00 00".replace(" ", ""))
    assert encode(record)[10:] == body


# --- released forms ---


def releases() -> list[tuple[str, str]]:
    """(record, release) of every released schema."""
    return [(name, release) for name in NAMES for release, _ in released_schemas(name)]


def breaks(present: dict[str, Any], released: dict[str, Any]) -> list[str]:
    """Why ``present`` must not replace ``released``: data of either must be readable with the other."""
    return [
        *(f"what was released can't be read: {reason}" for reason in can_read(present, released)),
        *(f"released readers can't read it: {reason}" for reason in can_read(released, present)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_change_breaks_a_released_schema(name: str) -> None:
    for release, released in released_schemas(name):
        assert breaks(schema_json(name), released) == [], f"{name} of {release}"


def test_released_schemas_read_each_other() -> None:
    for name in NAMES:
        forms = [schema for _, schema in released_schemas(name)]
        for older in forms:
            for newer in forms:
                assert breaks(newer, older) == [], name


def test_every_release_in_the_changelog_has_its_schemas() -> None:
    versions = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    for version in versions:
        assert (ROOT / "schemas" / "released" / version).is_dir(), f"schemas/released/{version}: copy schemas/avro there at the release"


def test_released_schemas_of_records_that_are_gone_are_kept_on_purpose() -> None:
    root = ROOT / "schemas" / "released"
    left = {path.stem for path in root.glob("*/*.avsc")} - set(NAMES)
    assert left == set(), f"records without a type: {left}"


Path_ = tuple[str | int, ...]


def places(schema: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Path of every record in ``schema``."""
    if isinstance(schema, dict):
        if schema.get("type") == "record":
            yield path
        for key, value in schema.items():
            yield from places(value, (*path, key))
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from places(value, (*path, index))


def at(schema: Any, path: Path_) -> Any:
    for step in path:
        schema = schema[step]
    return schema


def fields_of(schema: dict[str, Any]) -> Iterator[tuple[Path_, int, dict[str, Any]]]:
    """(place of the record, index, field) of every field anywhere in ``schema``."""
    for path in places(schema):
        for index, field in enumerate(at(schema, path)["fields"]):
            yield path, index, field


@pytest.mark.parametrize("name", NAMES)
def test_the_check_finds_every_field_that_is_removed(name: str) -> None:
    present = schema_json(name)
    for path, index, field in fields_of(present):
        changed = copy.deepcopy(present)
        del at(changed, path)["fields"][index]
        found = breaks(changed, present)
        if "default" in field:
            assert found == [], f"{field['name']}: has a default, so readers can do without"
        else:
            assert any(field["name"] in reason and "not written" in reason for reason in found), field["name"]


@pytest.mark.parametrize("name", NAMES)
def test_the_check_finds_every_type_that_is_changed(name: str) -> None:
    present = schema_json(name)
    for path, index, field in fields_of(present):
        # string and bytes promote into each other, but what is read is another Python type: the codec would refuse it.
        for other in ("boolean", "long", "double", {"type": "array", "items": "long"}):
            if other == field["type"]:
                continue
            changed = copy.deepcopy(present)
            at(changed, path)["fields"][index]["type"] = other
            assert breaks(changed, present), f"{field['name']} as {other}"


@pytest.mark.parametrize("name", NAMES)
def test_the_check_finds_every_field_that_is_added_without_a_default_or_renamed(name: str) -> None:
    present = schema_json(name)
    for path in places(present):
        changed = copy.deepcopy(present)
        at(changed, path)["fields"].append({"name": "brand_new", "type": "long"})
        assert any("brand_new" in reason for reason in breaks(changed, present))
        at(changed, path)["fields"][-1]["default"] = 0
        assert breaks(changed, present) == []
        renamed = copy.deepcopy(present)
        at(renamed, path)["fields"][0]["name"] = "renamed"
        assert breaks(renamed, present)


@pytest.mark.parametrize("name", NAMES)
def test_the_check_finds_every_null_that_is_taken_away(name: str) -> None:
    present = schema_json(name)
    for path, index, field in fields_of(present):
        if isinstance(field["type"], list):
            changed = copy.deepcopy(present)
            del at(changed, path)["fields"][index]["type"][field["type"].index("null")]
            at(changed, path)["fields"][index].pop("default", None)
            assert any("null" in reason for reason in breaks(changed, present)), field["name"]


def test_a_message_of_a_released_form_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec finds the writer's schema by its fingerprint: here one that lacks a field, and has one more."""
    older = schema_json("Lifecycle")
    older["fields"] = [field for field in older["fields"] if field["name"] != "canary"]
    older["fields"].insert(0, {"name": "long_gone", "type": "string", "default": ""})
    present = records.Lifecycle("start", "i", 0, "l", "x", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, canary="abc", reason="r")
    with monkeypatch.context() as patched:
        patched.setattr(codec, "released_schemas", lambda name: [("0.0.1", older)] if name == "Lifecycle" else [])
        codec._writers.cache_clear()
        body = msgspec.to_builtins(present, builtin_types=(bytes,)) | {"long_gone": "x"}
        message = b"\xc3\x01" + schema_fingerprint(older) + written(older, body)
        assert decode(message, records.Lifecycle) == msgspec.structs.replace(present, canary="")
    codec._writers.cache_clear()
    with pytest.raises(CodecError, match="newer version"):
        decode(message, records.Lifecycle)


def written(schema: dict[str, Any], body: dict[str, Any]) -> bytes:
    """The Avro body alone."""
    from io import BytesIO

    import fastavro

    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), body)
    return out.getvalue()
