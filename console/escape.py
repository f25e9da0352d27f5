"""Text of others, such as names of files, on a terminal."""

from __future__ import annotations


def escaped(text: str) -> str:
    """``text`` on one line, with an escape in place of whatever is not printable: nothing in it can move a cursor or fake a line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
