"""Fixtures that the tests share: brokers and data."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from schemas.topics import DEFAULT_PARTITIONS
from sql import migrate
from sql.database import Database
from sql.store import connect
from tests.kafka import Kafka, empty_kafka, external_servers
from tests.shared_data import SHIPPED, shared_folder
from tests.workers import View

# Examples take what they take on a busy machine: no test here depends on how fast it runs.
settings.register_profile("kvcensus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvcensus")


def pytest_configure(config: pytest.Config) -> None:
    """Declare our markers; be interruptible."""
    # A shell that starts us in the background has SIGINT ignored, and programs that the tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "partitions(n): how many partitions the topics of the `kafka` fixture have (default 4)")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Files run at a time: one more than cores, since much of a test is waiting; one where all share a Kafka."""
    return 0 if external_servers() else (os.cpu_count() or 1) + 1


_LONGEST_FIRST = (
    "test_pipeline.py",
    "test_worker.py",
    "test_worker_state.py",
    "test_nothing_leaves.py",
    "test_demo.py",
    "test_reclassify.py",
    "test_sink.py",
    "test_forwarder_faults.py",
    "test_rollups.py",
    "test_exactly_once.py",
    "test_sql_cluster.py",
    "test_deploys.py",
)
"""Files that take a minute or more: begun last, they would run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; the order within a file stays."""
    places = {name: place for place, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which Kafka and which data the run uses."""
    from console.broker import chosen_kind

    return [
        f"kafka: {external_servers() or f'embedded ({chosen_kind()})'}",
        f"shared data: {shared_folder() or 'none: its cases are skipped'}",
    ]


@pytest.fixture
def kafka(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kafka]:
    """A Kafka with the topics of kvcensus, all empty, for this test alone.

    An embedded broker of its own, or the Kafka of $KVCENSUS_TEST_BOOTSTRAP_SERVERS with the topics and groups of kvcensus
    deleted and made anew. ``@pytest.mark.partitions(n)`` sets the partition count.
    """
    marker = request.node.get_closest_marker("partitions")
    with empty_kafka(tmp_path / "kafka", marker.args[0] if marker else DEFAULT_PARTITIONS) as running:
        yield running


@pytest.fixture(scope="module")
def module_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """As ``kafka``, but one for all tests of a module: they share its topics. Not together with ``kafka`` in one module."""
    with empty_kafka(tmp_path_factory.mktemp("kafka")) as running:
        yield running


@pytest.fixture
def view(kafka: Kafka) -> Iterator[View]:
    """The result topics of ``kafka`` as a subscriber sees them."""
    shown = View(kafka)
    yield shown
    shown.close()


@pytest.fixture(scope="module")
def module_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """An embedded store with its schema, one for all tests of a module: they share its tables."""
    with connect(None, tmp_path_factory.mktemp("store")) as database:
        migrate.apply(database)
        yield database


@pytest.fixture
def bootstrap_servers(kafka: Kafka) -> str:
    """Where the ``kafka`` of this test listens."""
    return kafka.bootstrap_servers


@pytest.fixture
def shared() -> Path:
    """The folder of shared test data; skips the test where it is missing."""
    folder = shared_folder()
    if folder is None:
        pytest.skip("no shared test data: set KVCENSUS_SHARED to run this case")
    return folder


@pytest.fixture
def shipped() -> Path:
    """The folder of the captures that the project ships."""
    return SHIPPED


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    """Logging set up by a command that a test ran must not outlive the test."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before[0], before[1]
