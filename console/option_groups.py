"""Groups of options that several commands, or one with many, are given together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def with_options(command: C, options: Sequence[Callable[[C], C]]) -> C:
    """``command`` with ``options``, which its help lists in this order."""
    for option in reversed(options):
        command = option(command)
    return command
