"""Creating and checking topics, through the API and the command line, on whatever Kafka the tests run on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from confluent_kafka.admin import AdminClient

from console.commands.topics import topics as command
from console.topic_admin import ALL_TOPICS, Difference, check_topics, create_topics, partition_count
from schemas.errors import KvcensusError
from schemas.topics import BATCHES, DUPLICATE_STEPS, Topic
from tests.kafka import Kafka


def run(*args: str) -> Result:
    return CliRunner().invoke(command, list(args))


def delete(servers: str, *names: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.delete_topics(list(names), operation_timeout=10).values():
        future.result()
    # Apache Kafka answers when the controller knows; its broker lists the topics for a moment longer.
    deadline = time.monotonic() + 30
    while counts(servers).keys() & set(names):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def counts(servers: str) -> dict[str, int]:
    listed = AdminClient({"bootstrap.servers": servers}).list_topics(timeout=10).topics
    return {name: len(topic.partitions) for name, topic in listed.items() if name.startswith("kvcensus.")}


def test_every_topic_is_made_with_equal_partitions(bootstrap_servers: str) -> None:
    assert counts(bootstrap_servers) == {topic.name: 1 if topic.single_partition else 4 for topic in ALL_TOPICS}
    assert check_topics(bootstrap_servers).differences == []


def test_creating_again_changes_nothing(bootstrap_servers: str) -> None:
    report = create_topics(bootstrap_servers)
    assert report.created == []
    assert report.existing == [topic.name for topic in ALL_TOPICS]
    assert report.differences == []
    assert counts(bootstrap_servers) == {topic.name: partition_count(topic, 4) for topic in ALL_TOPICS}


@pytest.mark.partitions(3)
def test_a_missing_topic_is_made_as_wide_as_the_others(bootstrap_servers: str) -> None:
    delete(bootstrap_servers, BATCHES.name)
    assert check_topics(bootstrap_servers).differences == [Difference(BATCHES.name, "topic", "missing", "present")]
    report = create_topics(bootstrap_servers)
    assert (report.created, report.partitions, report.differences) == ([BATCHES.name], 3, [])
    assert counts(bootstrap_servers)[BATCHES.name] == 3


def test_unequal_partition_counts_and_configurations_are_told(bootstrap_servers: str) -> None:
    delete(bootstrap_servers, BATCHES.name, DUPLICATE_STEPS.name)
    create_topics(
        bootstrap_servers,
        2,
        topics=[
            Topic(BATCHES.name, None, "rank", config={**BATCHES.config, "cleanup.policy": "compact", "retention.ms": "60000"}),
            Topic(DUPLICATE_STEPS.name, None, "shard", config={**DUPLICATE_STEPS.config, "retention.ms": "-1"}),
        ],
    )
    expected = [
        Difference(BATCHES.name, "partitions", "2", "4"),
        Difference(BATCHES.name, "cleanup.policy", "compact", "delete"),
        Difference(BATCHES.name, "retention.ms", "60000", "at least 604800000"),
        Difference(DUPLICATE_STEPS.name, "partitions", "2", "1"),  # kept for ever is more than asked for, and fine
    ]
    assert check_topics(bootstrap_servers).differences == expected
    assert create_topics(bootstrap_servers).differences == expected

    text = run("check", "--bootstrap-servers", bootstrap_servers)
    assert isinstance(text.exception, KvcensusError)
    assert "differs  kvcensus.batches: partitions is 2, expected 4\n" in text.output
    document = run("check", "--json", "--bootstrap-servers", bootstrap_servers)
    assert isinstance(document.exception, KvcensusError)
    assert json.loads(document.stdout)["differences"][0] == {
        "topic": "kvcensus.batches",
        "what": "partitions",
        "found": "2",
        "expected": "4",
    }


def test_a_configuration_that_the_broker_refuses_is_noted_and_the_topic_made(kafka: Kafka) -> None:
    odd = Topic("kvcensus.odd", None, "rank", config={"no.such.setting": "1"})
    report = create_topics(kafka.bootstrap_servers, 2, topics=[odd])
    assert report.created == ["kvcensus.odd"]
    assert counts(kafka.bootstrap_servers)["kvcensus.odd"] == 2
    assert report.notes or report.differences == []


def test_the_command_makes_and_checks(kafka: Kafka) -> None:
    delete(kafka.bootstrap_servers, *(topic.name for topic in ALL_TOPICS))
    made = run("create", "--partitions", "2", "--json", "--bootstrap-servers", kafka.bootstrap_servers)
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["created"] == [topic.name for topic in ALL_TOPICS]
    assert run("check", "--partitions", "2", "--bootstrap-servers", kafka.bootstrap_servers).exit_code == 0
    assert isinstance(run("check", "--partitions", "3", "--bootstrap-servers", kafka.bootstrap_servers).exception, KvcensusError)


def test_an_unreachable_broker_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.topic_admin.CONNECT_SECONDS", 0.5)
    with pytest.raises(KvcensusError, match=r"^Kafka at 127\.0\.0\.1:1 cannot be reached: .*refused") as caught:
        check_topics("127.0.0.1:1")
    assert "\n" not in str(caught.value)


def test_wrong_client_options_are_one_clear_line() -> None:
    with pytest.raises(KvcensusError, match=r"no\.such\.option"):
        check_topics("127.0.0.1:1", options={"no.such.option": "1"})


def test_no_kafka_at_all_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCENSUS_BOOTSTRAP_SERVERS", raising=False)
    result = run("check", "--data-dir", str(tmp_path))
    assert isinstance(result.exception, KvcensusError)
    assert "--bootstrap-servers" in str(result.exception)
