"""A way to a server that can be closed and opened again, as a network can."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Passage:
    """Passes on what comes to ``port`` of this machine to another port, while it is open."""

    def __init__(self, to_port: int) -> None:
        self._to = to_port
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.is_open:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._to))
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut what is under way, and let nothing through until :meth:`open`."""
        self.is_open = False
        while self._open:
            end = self._open.pop()
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def open(self) -> None:
        """Let through again."""
        self.is_open = True

    def stop(self) -> None:
        """End for good."""
        self.close()
        self._listener.close()
