"""Requests from a trace in the Mooncake FAST'25 form: JSON lines, gzipped or not.

A line has ``timestamp`` (ms from the start of the trace), ``input_length`` and ``output_length`` (tokens) and ``hash_ids``, one
per 512 tokens of the input; equal ids stand for equal prefixes. Token ids are derived from the hash ids alone, so equal ids give
equal tokens in every run. The trace does not say what was answered: answers are derived from the line's number.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator
from functools import lru_cache
from hashlib import shake_128
from pathlib import Path
from typing import IO

import msgspec

from producers.simulate.workload import Request, tokens_from_bytes
from schemas.errors import KvcensusError

TOKENS_PER_HASH = 512
_ROUTE_HASHES = 3


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@lru_cache(maxsize=4096)
def _hash_tokens(hash_id: int) -> array[int]:
    return tokens_from_bytes(shake_128(b"input/%d" % hash_id).digest(2 * TOKENS_PER_HASH))


class TraceRequest(Request):
    """A request whose tokens are made when the engine takes it in, since a trace holds hundreds of millions of them."""

    __slots__ = ("_hash_ids", "_number")

    def __init__(self, number: int, arrival_us: int, line: _Line) -> None:
        ids = line.hash_ids[:_ROUTE_HASHES]
        super().__init__(arrival_us, (), array("I"), shake_128(repr(ids).encode()).digest(8))
        self.prompt_tokens = line.input_length
        self.output_tokens = line.output_length
        self._hash_ids = line.hash_ids
        self._number = number

    def tokens(self) -> array[int]:
        """Prompt and answer, ``prompt_tokens + output_tokens`` long."""
        joined: array[int] = array("I")
        for hash_id in self._hash_ids:
            joined.extend(_hash_tokens(hash_id))
        del joined[self.prompt_tokens :]
        joined.extend(tokens_from_bytes(shake_128(b"output/%d" % self._number).digest(2 * self.output_tokens)))
        return joined


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_trace(path: Path, *, limit: int | None = None, from_s: float = 0.0, until_s: float | None = None) -> Iterator[Request]:
    """Requests of the trace with ``from_s <= timestamp < until_s``, at most ``limit``; arrivals count from ``from_s``.

    Raises :class:`KvcensusError`, naming file and line, for anything that isn't such a trace.
    """
    decoder = msgspec.json.Decoder(_Line)
    given = 0
    newest = 0.0
    number = 0
    try:
        with _open(path) as lines:
            for number, raw in enumerate(lines, 1):
                if limit is not None and given >= limit:
                    return
                if not raw.strip():
                    continue
                line = decoder.decode(raw)
                if line.input_length < 1 or len(line.hash_ids) * TOKENS_PER_HASH < line.input_length or line.output_length < 0:
                    raise KvcensusError(
                        f"{path}, line {number}: {len(line.hash_ids)} hash ids don't cover {line.input_length} tokens of input "
                        f"at {TOKENS_PER_HASH} tokens each"
                    )
                seconds = line.timestamp / 1000
                if seconds < newest:
                    raise KvcensusError(
                        f"{path}, line {number}: timestamp {line.timestamp:g} is older than the line before; sort the trace"
                    )
                newest = seconds
                if seconds < from_s:
                    continue
                if until_s is not None and seconds >= until_s:
                    return
                line.output_length = max(1, line.output_length)
                given += 1
                yield TraceRequest(number, round((seconds - from_s) * 1_000_000), line)
    except FileNotFoundError:
        raise KvcensusError(f"{path}: no such trace") from None
    except (OSError, EOFError, zlib.error) as error:
        raise KvcensusError(f"{path}: can't be read after line {number}: {error or type(error).__name__}") from error
    except msgspec.MsgspecError as error:
        raise KvcensusError(f"{path}, line {number}: not a request of a Mooncake trace: {error}") from error
