"""What must not leave a host, in every form that bytes could carry it: token ids, cache salts and session ids of a capture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from producers import capture, wire


def secret_forms(frames: list[capture.Frame]) -> Iterator[bytes]:
    """Runs of four consecutive token ids, and every text in extra keys and session ids, in each form that bytes could carry them."""
    runs: set[tuple[int, ...]] = set()
    texts: set[str] = set()
    for frame in frames:
        for event in wire.decode(frame.payload).events:
            if isinstance(event, wire.Stored):
                tokens = event.token_ids or []
                runs.update(tuple(tokens[at : at + 4]) for at in range(0, len(tokens) - 3, 4))
                texts.update(_texts([event.extra_keys, event.session_id, event.cache_salt]))
                texts.discard(event.lora_name or "")
    for run in runs:
        if run[1] - run[0] == run[2] - run[1] == run[3] - run[2] and max(run) < 256:
            continue  # four small numbers that are equal or count up are in any data: positions, offsets
        yield msgspec.msgpack.encode(list(run))[1:]
        for order in ("little", "big"):
            for width in (2, 4):
                if max(run) < 256**width:
                    yield b"".join(token.to_bytes(width, order) for token in run)
        yield ",".join(map(str, run)).encode()
        yield ", ".join(map(str, run)).encode()
        yield b"".join(_varint(token) for token in run)
    for text in texts:
        yield text.encode()
        yield text.encode("utf-16-le")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _varint(value: int) -> bytes:
    """As Avro writes a long: zigzag, seven bits a byte."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def standing_in(secrets: Iterable[bytes], everything: bytes) -> set[bytes]:
    """Those of ``secrets``, six bytes long at least, that stand in ``everything``: all are looked for at once, by how they begin."""
    found: set[bytes] = set()
    by_length: dict[int, dict[int, list[bytes]]] = {6: defaultdict(list), 8: defaultdict(list)}
    for secret in secrets:
        width = 8 if len(secret) >= 8 else 6
        by_length[width][int.from_bytes(secret[:width], "little")].append(secret)
    for width, beginnings in by_length.items():
        wanted = np.array(sorted(beginnings), dtype=np.uint64)
        for start in range(0, len(everything) - width + 1 if len(wanted) else 0, _AT_ONCE):
            piece = np.frombuffer(everything[start : start + _AT_ONCE + width - 1], dtype=np.uint8).astype(np.uint64)
            keys = np.zeros(max(0, len(piece) - width + 1), dtype=np.uint64)
            for place in range(width):
                keys |= piece[place : place + len(keys)] << np.uint64(8 * place)
            nearest = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
            for at in np.flatnonzero(wanted[nearest] == keys):
                found.update(each for each in beginnings[int(keys[at])] if everything.startswith(each, start + int(at)))
    return found


_AT_ONCE = 1 << 20
