"""Where a forwarder stands, as it is kept with its spool: enough for a successor to go on in the same engine life. Pure."""

from __future__ import annotations

import msgspec

from producers.stream import Position


class Checkpoint(msgspec.Struct, frozen=True):
    """``positions`` by data-parallel rank. ``scope`` says under which key, model and profile ids were made (:func:`identity_scope`).

    ``endpoint`` is the socket that the positions are of (empty: not known): another one may be another engine's or rank's.
    """

    scope: bytes
    positions: dict[int, Position]
    endpoint: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Checkpoint)


def identity_scope(canary: str, model: str | None, profile: str) -> bytes:
    """Bytes that are equal where ids compare: same key and epoch (told by the canary), same declared model, same reading of events."""
    return _encoder.encode([canary, model, profile])


def encode(checkpoint: Checkpoint) -> bytes:
    """``checkpoint`` as bytes."""
    return _encoder.encode(checkpoint)


def decode(data: bytes) -> Checkpoint | None:
    """The checkpoint in ``data``; None if it is none that this version can read."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return None
