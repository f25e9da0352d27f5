"""Kinds of option values: names, addresses, sizes, pairs. What is wrong with a value is said in half a sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from producers.subscription import check_endpoint
from schemas.errors import KvcensusError

MOST_BYTES = 1 << 60
HIGHEST_PORT = 65_535

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"(\d{1,19})(?:\.(\d{1,9}))?\s*([kmgt]i?|)b?", re.IGNORECASE | re.ASCII)


class Name(click.ParamType):
    """A text that is shown and compared: printable, without spaces around it. ``optional``: empty is allowed and means none."""

    name = "text"

    def __init__(self, *, optional: bool = False, most: int = 200) -> None:
        self.optional = optional
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text itself."""
        text = str(value)
        if not text and not self.optional:
            self.fail("a name is not empty", param, ctx)
        if not text.isprintable() or text != text.strip():
            self.fail(f"{text!r} is no name: control characters and spaces around it are not allowed", param, ctx)
        if len(text) > self.most:
            self.fail(f"a name of {len(text)} characters is too long: at most {self.most}", param, ctx)
        return text


class Folder(click.Path):
    """A folder, there or to be made. An empty name, most often of a variable that is not set, is not the folder one stands in."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click has it."""
        if not str(value):
            self.fail("an empty name is no folder", param, ctx)
        return super().convert(value, param, ctx)


class Endpoint(click.ParamType):
    """An address to connect to."""

    name = "endpoint"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address itself, once it is seen to be one."""
        try:
            check_endpoint(str(value))
        except KvcensusError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class ListenAddress(click.ParamType):
    """``HOST:PORT`` to listen on; an IPv6 address stands in brackets, port 0 is any free one."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """(host, port)."""
        if isinstance(value, tuple):
            return value
        try:
            parts = urlsplit(f"//{value}")
            host, port = parts.hostname, parts.port
            plain = parts.netloc == value and "@" not in parts.netloc
        except ValueError:  # a port that is no port, a bracket that is not closed
            host, port, plain = None, None, False
        if not host or port is None or not plain:
            self.fail(f"{value!r} is no address to listen on: expected HOST:PORT, e.g. 127.0.0.1:9557", param, ctx)
        return host, port


class HttpUrl(click.ParamType):
    """A http or https URL. One with a password in it is refused: it would be shown in logs and process lists."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The URL itself, once it is seen to be one."""
        text = str(value)
        try:
            parts = urlsplit(text)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            self.fail("no URL: expected http://HOST:PORT/metrics", param, ctx)
        if parts.username is not None or parts.password is not None:
            self.fail("a URL with a user or password in it is not taken", param, ctx)
        if not usable or not text.isprintable() or " " in text:
            self.fail(f"{text!r} is no URL to ask: expected http://HOST:PORT/metrics", param, ctx)
        return text


class ByteSize(click.ParamType):
    """A number of bytes, plain or with a unit: ``512MiB``, ``2GB``, ``1.5 GiB``; k, M, G, T are powers of 1000, Ki… of 1024."""

    name = "size"

    def __init__(self, least: int = 1, most: int = MOST_BYTES) -> None:
        self.least = least
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        match = _SIZE.fullmatch(str(value).strip()) if not isinstance(value, int) else None
        if isinstance(value, int):
            size = value
        elif match is None:
            self.fail(f"{value!r} is no size: expected a number of bytes, or e.g. 512MiB or 2GB", param, ctx)
        else:
            whole, fraction, unit = match.group(1), match.group(2) or "", _UNITS[match.group(3).lower()]
            size = int(whole + fraction) * unit // 10 ** len(fraction)
        if not self.least <= size <= self.most:
            self.fail(f"{value!r} is out of range: at least {show_size(self.least)}, at most {show_size(self.most)}", param, ctx)
        return size


class GroupSize(ByteSize):
    """A size, or ``GROUP=SIZE`` for one cache group, by its index; several in an environment variable are separated by commas."""

    name = "size"
    envvar_list_splitter = ","

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """(group, bytes); the group is None where none is named."""
        if isinstance(value, tuple):
            return value
        group, equals, size = str(value).rpartition("=")
        if not equals:
            return None, super().convert(value, param, ctx)
        if not re.fullmatch(r"\d{1,9}", group.strip(), re.ASCII):
            self.fail(f"{group!r} is no cache group: expected SIZE, or GROUP=SIZE with the group's index, e.g. 0=96KiB", param, ctx)
        return int(group), super().convert(size, param, ctx)


def sizes_by_group(given: Sequence[tuple[int | None, int]]) -> tuple[int | None, dict[int, int]]:
    """The one size for all groups (None: not given), and the sizes by group. Raises :class:`ValueError` for both, or one group twice."""
    plain = [size for group, size in given if group is None]
    by_group = {group: size for group, size in given if group is not None}
    if len(plain) > 1 or (plain and by_group):
        raise ValueError("give one size, or GROUP=SIZE for each cache group")
    if len(by_group) + len(plain) < len(given):
        raise ValueError("a cache group has two sizes")
    return (plain[0] if plain else None), by_group


class KeyValue(click.ParamType):
    """``KEY=VALUE``; several in an environment variable are separated by commas. ``lines``: a value may have several lines."""

    name = "key=value"
    envvar_list_splitter = ","

    def __init__(self, *, lines: bool = False) -> None:
        self.lines = lines

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """(key, value); the key is not empty."""
        key, equals, text = (value[0], "=", value[1]) if isinstance(value, tuple) else str(value).partition("=")
        key = key.strip()
        if not equals or not key:
            # Not shown: what stands there may be a password whose name was forgotten.
            self.fail("expected KEY=VALUE", param, ctx)
        if not key.isprintable() or not (self.lines or text.isprintable()):
            self.fail(f"{key!r}: control characters are not allowed", param, ctx)
        return key, text


def show_size(size: int) -> str:
    """``size`` bytes in the largest unit of 1024 that divides it, e.g. ``16MiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit[:-1].lower()]
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


class RankName(click.ParamType):
    """A rank as everything names it, ``INSTANCE/R``; anything else is a usage error."""

    name = "rank"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """``value`` as it is."""
        instance, slash, number = value.rpartition("/")
        if not instance or not slash or not (number.isascii() and number.isdecimal()):
            self.fail(f"{value!r}: expected INSTANCE/R, such as chat-0/1", param, ctx)
        return value
