"""What ``kvcensus forward`` is told: by options, variables and a file, and what it makes of it for each rank."""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from console import config_file
from console.commands.forward import forward
from console.config_file import ConfigError, parse
from console.forward_options import NOT_IN_FILE, SECTIONS, TABLES
from console.option_types import MOST_BYTES, ByteSize, show_size
from producers.forwarder import Forwarder, ForwarderConfig
from producers.identity import ephemeral_key
from schemas.errors import KvcensusError
from tests.command import kvcensus

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "infra" / "forwarder.toml"
BASE = ("--instance", "chat", "--bootstrap-servers", "127.0.0.1:9")


class _Begun(Exception):
    """The forwarder would begin now."""

    def __init__(self, config: ForwarderConfig) -> None:
        self.config = config


def _begin(forwarder: Forwarder, _stop: threading.Event) -> NoReturn:
    raise _Begun(forwarder.config)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("KVCENSUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVCENSUS_DATA_DIR", str(tmp_path / "data"))
    # These tests are about what a forwarder is told, and end where it would begin.
    monkeypatch.setattr(Forwarder, "run", _begin)
    monkeypatch.setattr("console.commands.forward.check_options", lambda servers, options: None)


def told(*arguments: str, **environ: str) -> ForwarderConfig:
    """The configuration that these words, these variables, make."""
    done = CliRunner().invoke(forward, list(arguments), env=environ, standalone_mode=False)
    assert done.exception is not None
    if not isinstance(done.exception, _Begun):
        raise done.exception
    return done.exception.config


def refused(*arguments: str, **environ: str) -> str:
    """The one line that the command refuses these with, as a usage error."""
    with pytest.raises(click.UsageError) as error:
        told(*arguments, **environ)
    assert error.value.exit_code == 2
    line = error.value.format_message()
    assert "\n" not in line
    return line


def options() -> dict[str, click.Option]:
    """Every option that a file can set, by its key."""
    return {
        next(name for name in option.opts if name.startswith("--")).removeprefix("--"): option
        for option in forward.params
        if isinstance(option, click.Option) and option.name not in NOT_IN_FILE
    }


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "forwarder.toml"
    path.write_text(text)
    return str(path)


# -- the sample


def switched_on() -> str:
    """The sample with all its keys switched on."""
    return re.sub(r"^#(?=[a-z.-]+ = )", "", SAMPLE.read_text(), flags=re.MULTILINE)


def test_the_sample_has_every_option_exactly_once() -> None:
    document = tomllib.loads(switched_on())  # a key that stands twice is no TOML
    tables = {name for name, value in document.items() if isinstance(value, dict)}
    assert tables == set(TABLES)
    in_tables = {key for key, option in options().items() if option.name in TABLES.values()}
    assert set(document) - tables == set(options()) - in_tables
    parse(document, forward, TABLES, NOT_IN_FILE)


def test_the_sample_as_it_is_sets_one_key() -> None:
    assert parse(tomllib.loads(SAMPLE.read_text()), forward, TABLES, NOT_IN_FILE).values == {"instance": "chat-eu-1"}


def test_the_defaults_of_the_sample_are_the_real_ones() -> None:
    values = parse(tomllib.loads(switched_on()), forward, TABLES, NOT_IN_FILE).values
    context = click.Context(forward)
    blocks = re.findall(r"^# default\b.*\n((?:#[a-z-]+ = .*\n)+)", SAMPLE.read_text(), flags=re.MULTILINE)
    shown = {line.split(" = ")[0].removeprefix("#") for block in blocks for line in block.splitlines()}
    real = {}
    for key, option in options().items():
        default = option.get_default(context)
        if isinstance(default, str | int | float) and not option.multiple:
            real[key] = option.type.convert(default, option, context)
    assert shown == set(real)
    assert {key: values[options()[key].name or ""] for key in shown} == real


def test_what_nobody_says_is_what_the_forwarder_takes_for_itself() -> None:
    config = told(*BASE)
    plain = ForwarderConfig("chat", "tcp://127.0.0.1:5557", "127.0.0.1:9", config.key, dp_rank=None)
    differ = {name for name in plain.__dataclass_fields__ if getattr(plain, name) != getattr(config, name)}
    assert differ == {"spool", "metrics_listen", "metrics_port_given"}


# -- sources


def test_every_option_has_its_variable_and_its_place_in_the_help() -> None:
    names = [name for section in SECTIONS.values() for name in section]
    assert len(names) == len(set(names))
    for key, option in options().items():
        if key != "kafka-option":  # KVCENSUS_KAFKA_… stands for it
            assert option.envvar == f"KVCENSUS_{key.replace('-', '_').upper()}"
        assert option.name in names or key in ("json", "verbose")


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config = file(tmp_path, 'model = "file"\nworkload = "file"\nkv_connector = "file"\nmax-blocks = 5\n')
    found = told(*BASE, "--config", config, "--model", "line", KVCENSUS_MODEL="environment", KVCENSUS_WORKLOAD="environment")
    assert (found.model, found.workload, found.kv_connector, found.max_blocks) == ("line", "environment", "file", 5)
    assert told(KVCENSUS_CONFIG=config, KVCENSUS_INSTANCE="x", KVCENSUS_BOOTSTRAP_SERVERS="127.0.0.1:9").max_blocks == 5


def test_labels_and_kafka_properties_are_joined_one_by_one(tmp_path: Path) -> None:
    text = '[labels]\na = "file"\nb = "file"\nc = 3\n[kafka]\nsecurity.protocol = "file"\n"sasl.username" = "file"\nlinger.ms = 5\nx = true'
    config = file(tmp_path, text)
    found = told(
        *(*BASE, "--config", config, "--label", "a=line", "--kafka-option", "security.protocol=line"),
        KVCENSUS_LABEL="a=environment,b=environment two",
        KVCENSUS_KAFKA_SASL_USERNAME="environment",
    )
    assert found.labels == {"a": "line", "b": "environment two", "c": "3"}
    assert found.kafka_options == {"security.protocol": "line", "sasl.username": "environment", "linger.ms": "5", "x": "true"}


@pytest.mark.parametrize("servers", ["kafka", "kafka:9092", "a:1,b:2, c", "[::1]:9092", "SASL_SSL://kafka:9093", "10.0.0.1:9092"])
def test_addresses_of_kafka(servers: str) -> None:
    assert told("--instance", "chat", "--bootstrap-servers", servers).bootstrap_servers == servers


@pytest.mark.parametrize(
    "servers", ["::::", "kafka:99999", "kafka:0", "kafka:x", "kafka:", "a,,b", "kafka:1/x", "[::1", "a b", " ", "u@kafka:1"]
)
def test_what_is_no_address_of_a_kafka(servers: str) -> None:
    assert "is no address of a Kafka" in refused("--instance", "chat", "--bootstrap-servers", servers)


def test_a_property_may_have_several_lines_a_label_not(tmp_path: Path) -> None:
    assert told(*BASE, "--config", file(tmp_path, '[kafka]\nssl.ca.pem = "a\\nb"')).kafka_options == {"ssl.ca.pem": "a\nb"}
    assert "labels.x: " in refused(*BASE, "--config", file(tmp_path, '[labels]\nx = "a\\nb"'))


def test_everything_can_be_said_in_a_file(tmp_path: Path) -> None:
    off = ("dp-size", "no-spool", "no-metrics", "key-file")
    text = "\n".join(line for line in switched_on().splitlines() if not line.startswith(tuple(f"{key} =" for key in off)))
    text = text.replace("/var/lib/kvcensus", str(tmp_path)).replace("127.0.0.1:9557", "127.0.0.1:0")
    found = told("--config", file(tmp_path, text))
    assert found.instance_id == "chat-eu-1"
    assert found.dp_rank == 0
    assert found.labels == {"hardware": "H100", "version": "0.26.0"}
    assert (found.gpus_per_rank, found.kv_bytes_per_token, found.prefill_rate) == (2, 128 * 1024, 20_000)
    assert found.spool == tmp_path / "spool" / "chat-eu-1" / "0"
    assert found.segments == tmp_path / "segments"
    assert found.bootstrap_servers == "kafka-1:9092,kafka-2:9092"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense = 1", "nonsense: unknown key"),
        ("config = 'x'", "config: unknown key"),
        ("child-rank = 1", "child-rank: unknown key"),
        ("label = ['a=b']", "label: unknown key; write a table, [labels]"),
        ("labels = 'a=b'", "labels: expected a table"),
        ("[nonsense]\nx = 1", "[nonsense]: unknown table; there are [labels] and [kafka]"),
        ("[labels]\nx = [1]", "labels.x: expected a text"),
        ("[kafka]\nx = 1979-05-27", "kafka.x: expected a text"),
        ("instance = 1", "instance: expected a text in quotes, not a whole number"),
        ("instance = ''", "instance: a name is not empty"),
        ("model = 'a\\tb'\ninstance = \"a\\tb\"", "instance: 'a\\tb' is no name"),
        ("dp-rank = '1'", "dp-rank: expected a whole number, not a text"),
        ("dp-rank = 1.5", "dp-rank: expected a whole number, not a number with a fraction"),
        ("dp-rank = true", "dp-rank: expected a whole number, not true"),
        ("dp-rank = -1", "dp-rank: -1 is not in the range"),
        ("dp-rank = 1\ndp_rank = 1", "dp_rank: given twice"),
        ("no-spool = 'yes'", "no-spool: expected true or false, not a text"),
        ("prefill-rate = nan", "prefill-rate: "),
        ("prefill-rate = inf", "prefill-rate: "),
        (f"prefill-rate = {10**400}", "prefill-rate: "),
        ("prefill-rate = false", "prefill-rate: expected a number, not false"),
        ("spool-bytes = '1 parsec'", "spool-bytes: '1 parsec' is no size"),
        ("spool-bytes = 10", "spool-bytes: 10 is out of range: at least 1MiB"),
        ("spool-bytes = 1.5", "spool-bytes: expected a number of bytes"),
        ("kv-bytes-per-token = 1.5", 'kv-bytes-per-token: expected a number of bytes, a text such as "128KiB", or a table'),
        ("kv-bytes-per-token = 0", "kv-bytes-per-token: '0' is out of range: at least 1"),
        ("kv-bytes-per-token = 1\n[kv_bytes_per_token]\n0 = 1", "kv_bytes_per_token: given twice"),
        ("[kv-bytes-per-token]\nx = 1", "kv-bytes-per-token.x: 'x' is no cache group"),
        ("[kv-bytes-per-token]\n0 = 'a lot'", "kv-bytes-per-token.0: 'a lot' is no size"),
        ("[kv-bytes-per-token]\n0 = [1]", "kv-bytes-per-token.0: expected a text"),
        ("removals = 'some'", "removals: 'some' is not one of"),
        ("endpoint = 'localhost'", "endpoint: 'localhost' is no address"),
        ("metrics-url = 'ftp://x'", "metrics-url: 'ftp://x' is no URL"),
        ("x = ", "invalid TOML"),
        ("x = 1\nx = 2", "invalid TOML"),
        ("x = " + "[" * 5_000, "invalid TOML"),
        ("x = " + "9" * 5_000, "invalid TOML"),
        ("#" * (config_file.MOST_BYTES + 1), "no configuration"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_key(tmp_path: Path, text: str, says: str) -> None:
    path = file(tmp_path, text)
    line = refused(*BASE, "--config", path)
    assert line.startswith(f"{path}: ")
    assert says in line


def test_kv_bytes_are_one_size_or_one_for_each_cache_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*arguments: str) -> tuple[int | None, dict[str, int]]:
        declared = told(*BASE, *arguments).declaration()
        return declared.kv_bytes_per_token, declared.kv_bytes_by_group

    option = "--kv-bytes-per-token"
    assert found() == (None, {})
    assert found(option, "128KiB") == (131_072, {})
    assert found(option, "1=2KiB", option, "0=96KiB") == (None, {"0": 98_304, "1": 2_048})
    assert found("--config", file(tmp_path, "kv-bytes-per-token = { 0 = '1KiB', 1 = 7 }")) == (None, {"0": 1_024, "1": 7})
    assert found("--config", file(tmp_path, "kv-bytes-per-token = 7")) == (7, {})
    monkeypatch.setenv("KVCENSUS_KV_BYTES_PER_TOKEN", "0=1KiB,1=3")
    assert found() == found("--config", file(tmp_path, "kv-bytes-per-token = 7")) == (None, {"0": 1_024, "1": 3})
    assert found(option, "5") == (5, {})


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (("1", "0=2"), "--kv-bytes-per-token: give one size, or GROUP=SIZE for each cache group"),
        (("1", "2"), "--kv-bytes-per-token: give one size, or GROUP=SIZE for each cache group"),
        (("0=1", "00=1"), "--kv-bytes-per-token: a cache group has two sizes"),
        (("-1=1",), "'-1' is no cache group"),
        (("0=",), "'' is no size"),
        (("=1",), "'' is no cache group"),
        (("0=0",), "out of range"),
    ],
)
def test_kv_bytes_that_say_two_things_or_none_are_refused(sizes: tuple[str, ...], says: str) -> None:
    assert says in refused(*BASE, *[word for size in sizes for word in ("--kv-bytes-per-token", size)])


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    assert "nowhere.toml: cannot be read: No such file" in refused("--config", str(tmp_path / "nowhere.toml"))
    assert "is a directory" in refused("--config", str(tmp_path))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused("--config", str(binary))


@given(
    st.dictionaries(
        st.sampled_from([*options(), *TABLES]) | st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
        ),
    )
)
def test_no_document_raises_anything_but_one_line(document: dict[str, Any]) -> None:
    line = ""
    try:
        parse(document, forward, TABLES, NOT_IN_FILE)
    except ConfigError as error:
        line = str(error)
    assert not line or line.isprintable()


# -- values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("1.5 gib", 3 << 29),
        ("10k", 10_000),
        ("1048576", 1 << 20),
        ("1TiB", 1 << 40),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e3", "1KiBB", "nan", "1.MiB", "٣MB", "9" * 30, "0", "4096TiB" * 2, "2000000TiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter):
        ByteSize().convert(text, None, None)


@given(st.integers(1, MOST_BYTES))
def test_a_size_is_read_as_it_is_shown(size: int) -> None:
    assert ByteSize().convert(show_size(size), None, None) == size


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dp-rank", "60000"), "--endpoint"),
        (("--dp-rank", "-1"), "--dp-rank"),
        (("--dp-size", "0"), "--dp-size"),
        (("--dp-size", "2", "--endpoint", "ipc:///tmp/x"), "--dp-size"),
        (("--dp-size", "2", "--replay-endpoint", "ipc:///tmp/x"), "--replay-endpoint"),
        (("--dp-size", "2", "--endpoint", "tcp://127.0.0.1:65535"), "above 65535"),
        (("--dp-size", "2", "--metrics-listen", "127.0.0.1:65535"), "--metrics-listen"),
        (("--prefill-rate", "nan"), "--prefill-rate"),
        (("--prefill-rate", "inf"), "--prefill-rate"),
        (("--gpus-per-rank", "-1"), "--gpus-per-rank"),
        (("--gpus-per-rank", "0"), "--gpus-per-rank"),
        (("--kv-bytes-per-token", "0"), "--kv-bytes-per-token"),
        (("--staleness-seconds", "5"), "--heartbeat-seconds"),
        (("--label", "nothing"), "KEY=VALUE"),
        (("--label", "=x"), "KEY=VALUE"),
        (("--label", "a=\x07"), "control characters"),
        (("--workload", "a\nb"), "--workload"),
        (("--model", " a"), "--model"),
        (("--topic", "a\x00"), "--topic"),
        (("--instance", "x" * 201), "too long"),
        (("--metrics-url", "127.0.0.1:8000"), "--metrics-url"),
        (("--metrics-url", "file:///etc/passwd"), "--metrics-url"),
        (("--metrics-url", "http://[::1/metrics"), "--metrics-url"),
        (("--metrics-url", "http://u:secret@h/metrics"), "user or password"),
        (("--metrics-listen", "9557"), "HOST:PORT"),
        (("--metrics-listen", "h:x"), "HOST:PORT"),
        (("--metrics-listen", "h:1/x"), "HOST:PORT"),
        (("--spool-dir", str(SAMPLE)), "--spool-dir"),
        (("--segments", str(SAMPLE)), "--segments"),
        (("--no-spool", "--spool-dir", "x"), "exclude each other"),
        (("--no-metrics", "--metrics-listen", "127.0.0.1:0"), "exclude each other"),
        (("--max-blocks", "0"), "--max-blocks"),
        (("--max-payload-bytes", "2GiB"), "--max-payload-bytes"),
        (("--heartbeat-seconds", "0"), "--heartbeat-seconds"),
    ],
)
def test_values_that_make_no_sense_are_usage_errors(arguments: tuple[str, ...], says: str) -> None:
    line = refused(*BASE, *arguments)
    assert says in line
    assert "secret" not in line


def test_a_variable_that_is_wrong_is_named() -> None:
    assert "environment variable KVCENSUS_DP_RANK" in refused(*BASE, KVCENSUS_DP_RANK="x")
    assert "KVCENSUS_LABEL" in refused(*BASE, KVCENSUS_LABEL="a=b,c")
    assert "KVCENSUS_LABEL" in refused(*BASE, "--label", "x=y", KVCENSUS_LABEL="a=b,c")


def test_of_two_that_exclude_each_other_the_stronger_source_wins(tmp_path: Path) -> None:
    assert told(*BASE, "--spool-dir", str(tmp_path / "s"), KVCENSUS_NO_SPOOL="1").spool == tmp_path / "s"
    assert told(*BASE, "--no-spool", KVCENSUS_SPOOL_DIR=str(tmp_path / "s")).spool is None
    assert told(*BASE, "--no-metrics", "--config", file(tmp_path, 'metrics-listen = "127.0.0.1:0"')).metrics_listen is None


@pytest.mark.parametrize("name", ["sasl.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"])
def test_a_password_that_others_can_read_is_said(tmp_path: Path, name: str) -> None:
    path = file(tmp_path, f'[kafka]\n{name} = "hidden"\n')
    for mode, said in ((0o644, True), (0o600, False)):
        Path(path).chmod(mode)
        err = CliRunner().invoke(forward, [*BASE, "--config", path]).stderr
        assert ("chmod 600" in err) is said
        assert "hidden" not in err


# -- places


def test_a_password_is_in_no_print_of_what_a_forwarder_is_told() -> None:
    told = ForwarderConfig("chat", "tcp://127.0.0.1:1", "kafka:9092", ephemeral_key(), kafka_options={"sasl.password": "hunter2"})
    assert "hunter2" not in repr(told)
    assert told.key.secret.hex() not in repr(told)
    assert repr(told.key.secret) not in repr(told)


def test_the_spool_lies_in_the_data_folder_by_instance_and_rank(tmp_path: Path) -> None:
    spool = tmp_path / "data" / "spool"
    assert told(*BASE).spool == spool / "chat" / "any"
    assert told(*BASE, "--dp-rank", "3").spool == spool / "chat" / "3"
    assert told("--instance", "../x/y", *BASE[2:], "--dp-rank", "0").spool == spool / "%2E.%2Fx%2Fy" / "0"
    assert told(*BASE, "--no-spool").spool is None


def test_without_many_an_endpoint_is_the_rank_s_own() -> None:
    assert told(*BASE, "--dp-rank", "3").endpoint == "tcp://127.0.0.1:5560"
    found = told(*BASE, "--dp-rank", "3", "--endpoint", "tcp://h:6000", "--replay-endpoint", "tcp://h:7000")
    assert (found.endpoint, found.replay_endpoint) == ("tcp://h:6000", "tcp://h:7000")


def test_one_of_many_finds_everything_by_its_rank(tmp_path: Path) -> None:
    many = ("--dp-rank", "4", "--dp-size", "4", "--endpoint", "tcp://[::1]:6000", "--replay-endpoint", "tcp://h:7000")
    found = told(*BASE, *many, "--spool-dir", str(tmp_path), "--child-rank", "5")
    assert found.dp_rank == 5
    assert (found.endpoint, found.replay_endpoint) == ("tcp://[::1]:6005", "tcp://h:7005")
    assert found.spool == tmp_path / "5"


def test_segments_alone_need_no_kafka(tmp_path: Path) -> None:
    found = told("--instance", "x", "--segments", str(tmp_path))
    assert (found.segments, found.bootstrap_servers) == (tmp_path, None)
    assert told(*BASE, "--segments", str(tmp_path)).bootstrap_servers == "127.0.0.1:9"
    with pytest.raises(KvcensusError, match="no Kafka"):
        told("--instance", "x")


def test_whether_the_port_was_given_is_known() -> None:
    assert told(*BASE, "--metrics-listen", "127.0.0.1:0").metrics_port_given
    assert not told(*BASE).metrics_port_given


def test_an_address_that_others_reach_is_said() -> None:
    done = CliRunner().invoke(forward, [*BASE, "--metrics-listen", "0.0.0.0:0"])
    assert "other hosts can reach 0.0.0.0" in done.stderr
    assert "other hosts" not in CliRunner().invoke(forward, [*BASE, "--metrics-listen", "127.0.0.1:0"]).stderr


# -- screens


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_fits_the_screen(columns: int) -> None:
    done = CliRunner().invoke(forward, ["--help"], terminal_width=columns)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= columns
    for heading in SECTIONS:
        assert f"\n{heading}:\n" in done.output
    assert "child-rank" not in done.output


# -- keys


def test_a_key_is_made_once_and_shown_without_its_secrets(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = kvcensus("key", "create", str(path))
    assert made.returncode == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    again = kvcensus("key", "create", str(path))
    assert (again.returncode, again.stdout) == (1, "")
    assert "never replaced" in again.stderr
    assert path.read_bytes() == before
    shown = kvcensus("key", "show", str(path), "--json")
    assert shown.returncode == 0
    document = json.loads(shown.stdout)
    assert document["epoch"] == 0
    assert document["canary"] in made.stdout
    assert document["canary"] not in kvcensus("key", "show", str(path), "--epoch", "1").stdout
    for secret in (before[:32].hex(), before[32:].hex()):
        assert secret not in made.stdout + shown.stdout


def test_a_key_that_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "short.key"
    path.write_bytes(b"x")
    path.chmod(0o600)
    for target, says in ((path, "exactly 64"), (tmp_path / "none", "No such file")):
        done = kvcensus("key", "show", str(target))
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert says in done.stderr
    assert kvcensus("key", "show", str(path), "--epoch", "-1").returncode == 2
    assert kvcensus("key", "create", str(tmp_path / "no" / "folder")).returncode == 1
