"""What goes to Kafka in place of a message that is too large for it. Pure."""

from __future__ import annotations

from schemas import codec
from schemas.records import RankMessage, Refusal


def stand_in(value: bytes) -> bytes:
    """A refusal of the same batch; a message that is none of a batch, as it is (no such message is large)."""
    try:
        message = codec.decode(value, RankMessage)
    except codec.CodecError:
        return value
    message.batch = None
    message.refusal = Refusal(reason="message too large for Kafka", payload_bytes=len(value))
    return codec.encode(message)
