"""A TOML file as a source of a command's options: weaker than the command line and the environment, stronger than defaults.

Keys are the options' long names, with ``-`` or ``_``. A table stands for a repeatable ``KEY=VALUE`` option. Everything that the
command would not take is refused in one line that names the file and the key.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from console.escape import escaped
from console.option_types import ByteSize, GroupSize

MOST_BYTES = 1 << 20
"""A file larger than this is no configuration."""


@dataclass(frozen=True)
class FileOptions:
    """What a file says: ``values`` by parameter name, converted as the command line's would be; ``tables`` by their names.

    ``source`` is the file's content. ``exposed``: others than its owner can read it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[str, str]] = field(default_factory=dict)
    source: bytes = b""
    exposed: bool = False


def read(path: Path, command: click.Command, tables: Mapping[str, str], excluded: frozenset[str], ctx: click.Context) -> FileOptions:
    """What the file at ``path`` says to ``command``.

    ``tables``: name of a table -> name of the parameter that it stands for. ``excluded``: parameters that a file can't set.
    Raises :class:`click.UsageError`, one line, for anything that is wrong with it.
    """
    try:
        source, mode = _content(path)
        return replace(parse(_load(source), command, tables, excluded, ctx), source=source, exposed=bool(mode & 0o077))
    except ConfigError as error:
        raise click.UsageError(f"{path}: {error}", ctx) from None


class ConfigError(Exception):
    """What is wrong in a file, with the key. One line: a key may hold any character, and is shown escaped."""

    def __init__(self, line: str) -> None:
        super().__init__(escaped(line))


def parse(
    document: Mapping[str, Any],
    command: click.Command,
    tables: Mapping[str, str],
    excluded: frozenset[str] = frozenset(),
    ctx: click.Context | None = None,
) -> FileOptions:
    """As :func:`read`, of a document that was loaded already. Raises :class:`ConfigError`."""
    found = FileOptions()
    options = {name: option for name, option in _by_key(command).items() if option.name not in excluded}
    for key, value in document.items():
        name = key.replace("_", "-")
        if key in tables:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key}: expected a table, [{key}] with KEY = VALUE lines")
            option = next(option for option in options.values() if option.name == tables[key])
            found.tables[key] = dict(_converted(f"{key}.{inner}", (inner, text), option, ctx) for inner, text in _flat(key, value))
        elif name in options and isinstance(options[name].type, GroupSize):
            _put(found, key, options[name], tuple(_sizes(key, value, options[name], ctx)))
        elif isinstance(value, Mapping):
            raise ConfigError(f"[{key}]: unknown table; there are {' and '.join(f'[{table}]' for table in tables)}")
        elif name not in options or options[name].name in tables.values():
            raise ConfigError(f"{key}: unknown key{_meant(name, options, tables)}")
        else:
            _put(found, key, options[name], _converted(key, value, options[name], ctx))
    return found


def _put(found: FileOptions, key: str, option: click.Option, value: Any) -> None:
    assert option.name is not None
    if option.name in found.values:
        raise ConfigError(f"{key}: given twice, with - and with _")
    found.values[option.name] = value


def _sizes(key: str, value: object, option: click.Option, ctx: click.Context | None) -> Iterator[Any]:
    """One size, or a table of them by group."""
    if isinstance(value, Mapping):
        for inner, text in _flat(key, value):
            yield _convert(f"{key}.{inner}", f"{inner}={text}", option, ctx)
    elif isinstance(value, int | str) and not isinstance(value, bool):
        yield _convert(key, str(value), option, ctx)
    else:
        raise ConfigError(
            f'{key}: expected a number of bytes, a text such as "128KiB", or a table of them by cache group, not {_kind(value)}'
        )


def _content(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            data, mode = file.read(MOST_BYTES + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"more than {MOST_BYTES:,} bytes: no configuration")
    return data, mode


def _load(data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # also of numbers that are too long to be read
        raise ConfigError(f"invalid TOML: {' '.join(str(error).split())}") from None


def _by_key(command: click.Command) -> dict[str, click.Option]:
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name.removeprefix("--"): option for option in options for name in option.opts if name.startswith("--")}


def _meant(name: str, options: Mapping[str, click.Option], tables: Mapping[str, str]) -> str:
    for table, parameter in tables.items():
        if name in options and options[name].name == parameter:
            return f"; write a table, [{table}]"
    return ""


def _converted(key: str, value: object, option: click.Option, ctx: click.Context | None) -> Any:
    kinds, expected = _expected(option) if not option.multiple else ((tuple,), "a table")
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{key}: expected {expected}, not {_kind(value)}")
    if isinstance(value, bool):
        return value
    return _convert(key, value, option, ctx)


def _convert(key: str, value: object, option: click.Option, ctx: click.Context | None) -> Any:
    try:
        return option.type.convert(value, option, ctx)
    except click.BadParameter as error:
        raise ConfigError(f"{key}: {' '.join(error.message.split())}") from None


def _expected(option: click.Option) -> tuple[tuple[type, ...], str]:
    if option.is_flag:
        return (bool,), "true or false"
    if isinstance(option.type, ByteSize):
        return (int, str), 'a number of bytes or a text such as "512MiB"'
    if isinstance(option.type, click.IntRange):
        return (int,), "a whole number"
    if isinstance(option.type, click.FloatRange):
        return (int, float), "a number"
    return (str,), "a text in quotes"


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {int: "a whole number", float: "a number with a fraction", str: "a text", list: "a list"}
    return names.get(type(value), "a date or time")


def _flat(path: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys and values of a table as texts. A dotted key that was not quoted is a table within: here it means the dotted key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            for inner, text in _flat(f"{path}.{key}", value):
                yield f"{key}.{inner}", text
            continue
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{path}.{key}: expected a text, a number, true or false, not {_kind(value)}")
        yield key, str(value).lower() if isinstance(value, bool) else str(value)
