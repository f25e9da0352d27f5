"""Deploys: their ids and records, and declaring, listing and taking back on a real broker, with a real sink and store behind it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from console.commands.deploy import deploy as command
from console.commands.show import show
from console.deploy_topic import DeployTopic
from console.deploys import NoSuchDeploy, adding, checked_label, checked_time, deploy_id, named, newest, removing
from console.topic_admin import connect
from schemas.errors import KvcensusError
from schemas.records import Deploy
from schemas.topics import DEPLOYS, DUPLICATE_WINDOWS, RANK_WINDOWS
from sql.times import iso
from tests.kafka import Kafka
from tests.sinking import Feed, rows, sinking, until
from tests.test_change import AT_US as WINDOWS_AT_US
from tests.test_change import rows as windows

AT = "2026-01-31T12:00:00Z"
AT_US = 1_769_860_800_000_000
NAMES = st.none() | st.text(max_size=8)


def run(*arguments: str, code: int = 0) -> Result:
    """One invocation whose errors of users come out as an exit code."""
    result = CliRunner().invoke(command, arguments)
    if isinstance(result.exception, KvcensusError):
        # Without its frames, which hold those of the test and their clients until somebody collects garbage.
        result.exit_code, result.exc_info, result.exception = 1, None, result.exception.with_traceback(None)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").output)


# -- ids and records ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(max_size=8), st.integers(0, 2**53), NAMES, NAMES), min_size=2, max_size=2, unique=True))
def test_whoever_says_something_else_has_another_id(said: list[tuple[str, int, str | None, str | None]]) -> None:
    one, other = (deploy_id(*each, digits=64) for each in said)
    assert one != other
    assert deploy_id(*said[0]) == one[:8]


def test_an_id_depends_on_nothing_but_what_was_said() -> None:
    """A fixed value: scripts of other releases must make the same one."""
    assert deploy_id("tp 4 → 8", AT_US, "chat", None) == "cdbd6f8c"
    assert deploy_id("a", 1, None, "b") != deploy_id("a", 1, "b", None)


def test_adding_twice_declares_once_and_taking_back_can_be_taken_back() -> None:
    first, said = adding({}, "x", 5, None, "m", now_us=100)
    assert (said, first) == ("declared", Deploy(first.deploy_id, 100, "x", 5, None, "m"))
    known = newest([first])
    assert adding(known, "x", 5, None, "m", now_us=101) == (first, "declared_already")
    # The clock of this host is behind that of the one that declared it.
    gone, said_of_gone = removing(known, first.deploy_id, now_us=7)
    assert (said_of_gone, gone.version, gone.removed) == ("removed", 101, True)
    known = newest([gone, first])
    assert known == {first.deploy_id: gone}
    assert removing(known, first.deploy_id, now_us=500) == (gone, "removed_already")
    again = msgspec.structs.replace(gone, removed=False)
    assert newest([gone, again]) == {first.deploy_id: again}, "of one version the later, as in the table"
    back, said_of_back = adding(known, "x", 5, None, "m", now_us=500)
    assert (said_of_back, back) == ("declared_again", Deploy(first.deploy_id, 500, "x", 5, None, "m"))


def test_an_id_that_another_deploy_has_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = deploy_id("x", 5, None, None, 64)
    taken = Deploy(mine[:8], 1, "other", 9)
    made, said = adding({taken.deploy_id: taken}, "x", 5, None, None, now_us=100)
    assert (made.deploy_id, said) == (mine[:9], "declared")
    known = newest([taken, made])
    assert adding(known, "x", 5, None, None, now_us=101) == (made, "declared_already")
    assert named(known, mine[:8]) is taken
    assert named(known, mine[:9].upper()) is made


def test_a_beginning_of_an_id_names_it_if_no_other_begins_so() -> None:
    def of(name: str, *, removed: bool = False) -> Deploy:
        return Deploy(name, 1, name, 5, removed=removed)

    known = newest([of("abcd0001"), of("abcd0002", removed=True), of("abce0001"), of("abce0002"), of("ffff0001", removed=True)])
    assert named(known, "abcd").deploy_id == "abcd0001", "one that stands goes before one taken back"
    assert named(known, "abcd0002").removed
    assert named(known, "ffff").removed
    with pytest.raises(NoSuchDeploy, match="'abce' names 2 deploys: abce0001, abce0002"):
        named(known, "abce")
    with pytest.raises(NoSuchDeploy, match="give at least its first 4 digits"):
        named(known, "abc")
    with pytest.raises(NoSuchDeploy, match="no deploy has the id '1234'"):
        named(known, "1234")


def test_what_a_label_and_a_time_may_be() -> None:
    assert checked_label("  raise max-num-seqs → 512 👩‍💻 ") == "raise max-num-seqs → 512 👩‍💻"
    assert checked_label("x" * 200) == "x" * 200
    for wrong, said in (
        ("", "empty"),
        (" \t", "empty"),
        ("a\nb", "one line"),
        ("a\x1b[2Jb", "control"),
        ("\udcff", "control"),
        ("x" * 201, "201"),
    ):
        with pytest.raises(KvcensusError, match=said):
            checked_label(wrong)
    assert (checked_time(AT_US), checked_time(0)) == (AT_US, 0)
    for beyond in (-1, AT_US * 1000):
        with pytest.raises(KvcensusError, match="no time of a deploy"):
            checked_time(beyond)


def test_the_help_of_the_group_is_cut_nowhere() -> None:
    assert "..." not in CliRunner().invoke(command, ["--help"]).output.partition("Commands:")[2]


# -- on a broker ----------------------------------------------------------------------------------------------------


def test_deploys_go_through_kafka_into_the_store(module_kafka: Kafka, tmp_path: Path) -> None:
    servers = ["--bootstrap-servers", module_kafka.bootstrap_servers]
    first = document("add", "raise max-num-seqs", "--at", AT, *servers)
    assert first == {
        "status": "declared",
        "deploy_id": deploy_id("raise max-num-seqs", AT_US, None, None),
        "label": "raise max-num-seqs",
        "at": "2026-01-31T12:00:00.000000Z",
        "at_us": AT_US,
        "workload": None,
        "model": None,
        "removed": False,
    }
    assert document("add", " raise max-num-seqs", "--at", f"{AT_US / 1e6}", *servers)["status"] == "declared_already"
    second = run("add", "new \u202e tokenizer", "--at", "2026-01-31T13:00", "--workload", "chat", "--model", "m", *servers).output
    found = re.fullmatch(r"([0-9a-f]{8})  2026-01-31T13:00:00\.000000Z  new \\u202e tokenizer: declared\n", second)
    assert found, "what turns the writing round is escaped on a screen"
    other = found.group(1)
    third = document("add", "now", *servers)
    assert document("remove", other[:5], *servers)["status"] == "removed"
    assert "taken back already" in run("remove", other, *servers).output
    failed = run("remove", "0123abcd", *servers, code=1)
    assert str(failed.exception) == "no deploy has the id '0123abcd' (see `kvcensus deploy list`)"
    records = DeployTopic(module_kafka.bootstrap_servers, {}).read()
    assert [(record.deploy_id, record.removed) for record in records] == [
        (first["deploy_id"], False),
        (other, False),
        (third["deploy_id"], False),
        (other, True),
    ]

    listing = ("list", "--data-dir", str(tmp_path))
    assert run(*listing).output.startswith(f"No deploys yet: there is no store in {tmp_path}.")
    assert document(*listing)["deploys"] == []
    with sinking(module_kafka, tmp_path):
        until(lambda: len(rows("SELECT 1 FROM deploys", tmp_path)) == 3, "the deploys in the store")
        assert _ids(*listing, "--all") == [first["deploy_id"], other, third["deploy_id"]]
        until(lambda: other not in _ids(*listing), "the one that was taken back")
        assert _ids(*listing, "--until", "2026-01-31T12:30") == [first["deploy_id"]]
        assert _ids(*listing, "--since", AT, "--until", "2026-01-31T12:30") == [first["deploy_id"]]
        assert _ids(*listing, "--since", "2026-01-31T13:00", "--until", "2026-01-31T13:01", "--all") == [other]
        assert run(*listing, "--until", AT).output.startswith("No deploy is declared in this span.")
        shown = run(*listing, "--all").output
        assert re.search(rf"{other} +2026-01-31T13:00:00.000000Z +chat +m +new \\u202e tokenizer +taken back", shown)
        again = document("add", "new \u202e tokenizer", "--at", "2026-01-31T13:00", "--workload", "chat", "--model", "m", *servers)
        assert (again["status"], again["deploy_id"]) == ("declared_again", other)
        until(lambda: other in _ids(*listing), "the one that was declared again")

        feed, (ranks, duplicates) = Feed(module_kafka), windows()
        feed.send(RANK_WINDOWS, *ranks)
        feed.send(DUPLICATE_WINDOWS, *duplicates)
        flush = document("add", "flush", "--at", iso(WINDOWS_AT_US), *servers)["deploy_id"]
        counted = "SELECT (SELECT count() FROM rank_windows), (SELECT count() FROM duplicate_windows), (SELECT count() FROM deploys)"
        until(lambda: rows(counted, tmp_path) == [(len(ranks), len(duplicates), 4)], "windows in the store")
        compared = CliRunner().invoke(show, ["deploy", flush[:4], "--hours", "0.01", "--data-dir", str(tmp_path), "--json"])
        change = json.loads(compared.output)
        assert change["comparable"], change["refused"]
        assert change["repeat_compute"]["causes"]["evicted"]["tokens"] == {"before": 1200, "after": 720, "difference": -480, "ratio": 0.6}


def _ids(*arguments: str) -> list[str]:
    return [each["deploy_id"] for each in document(*arguments)["deploys"]]


def test_what_cannot_be_read_on_the_topic_is_named_and_left_out(module_kafka: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    topic = DeployTopic(module_kafka.bootstrap_servers, {})
    before = newest(topic.read())
    producer = Producer({"bootstrap.servers": module_kafka.bootstrap_servers})
    producer.produce(DEPLOYS.name, b"nonsense", key=b"x")
    producer.produce(DEPLOYS.name, None, key=b"y")
    assert producer.flush(30) == 0
    assert newest(topic.read()) == before
    assert "cannot be read and is left out: not an Avro single-object message" in caplog.text


def test_without_a_broker_or_the_topic_nothing_is_declared(module_kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of this module: it deletes the topic."""
    admin = connect(module_kafka.bootstrap_servers)
    admin.delete_topics([DEPLOYS.name], operation_timeout=10)[DEPLOYS.name].result()
    until(lambda: DEPLOYS.name not in admin.list_topics(timeout=10).topics, "the topic to go")
    failed = run("add", "x", "--bootstrap-servers", module_kafka.bootstrap_servers, code=1)
    assert str(failed.exception) == (
        f"Kafka at {module_kafka.bootstrap_servers} has no topic kvcensus.deploys: run `kvcensus topics create`"
    )
    monkeypatch.setattr("console.topic_admin.CONNECT_SECONDS", 0.1)
    failed = run("remove", "abcd", "--bootstrap-servers", "127.0.0.1:9", code=1)
    assert str(failed.exception).startswith("Kafka at 127.0.0.1:9 cannot be reached: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add"], "Missing argument 'LABEL'"),
        (["add", " "], "a label is not empty"),
        (["add", "x", "--at", "noon"], "'noon' is no time"),
        (["add", "x", "--at", "1769860800000"], "milliseconds given as seconds?"),
        (["add", "x", "--workload", ""], "a name is not empty"),
        (["list", "--since", "1h", "--until", "2h"], "must lie before --until"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    result = run(*arguments, code=2)
    assert said in " ".join(result.output.split())
