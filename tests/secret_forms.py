"""What must not leave a host, in every form that bytes could carry it: token ids, cache salts and session ids of a capture."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

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
