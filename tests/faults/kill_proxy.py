"""Stands between a run and its S3 server, and kills the run at one request.

Bytes pass through as they are, so signatures stay valid: they are made for this address. A request
begins with the first bytes a client sends on a connection after an answer, since neither boto3 nor
delta-rs pipelines.
"""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

METHOD = re.compile(rb"(GET|PUT|POST|HEAD|DELETE) (\S+) HTTP/1\.1\r\n")


class KillingProxy:
    """Listens on a free loopback port; `victim` is asked for the process to kill.

    The n-th request whose "METHOD path" matches `request` is the last thing the process did: it
    dies `before` the server gets it, `within`, when the server has half of its body, or when the
    server has `answered`.
    """

    def __init__(
        self, server: str, request: str, moment: str, nth: int, victim: Callable[[], int]
    ) -> None:
        self.server = (str(urlsplit(server).hostname), int(urlsplit(server).port or 80))
        self.request, self.moment, self.left = re.compile(request), moment, nth
        self.victim = victim
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream = socket.create_connection(self.server)
        dying = threading.Event()

        def answers() -> None:
            try:
                while data := upstream.recv(1 << 16):
                    if dying.is_set():
                        self._kill()
                        break
                    client.sendall(data)
            except OSError:
                pass
            for end in (client, upstream):
                _shut(end)

        threading.Thread(target=answers, daemon=True).start()
        try:
            while data := client.recv(1 << 16):
                if self._is_the_one(data):
                    if self.moment == "before":
                        self._kill()
                        break
                    if self.moment == "within":
                        self._pass_half(client, upstream, data)
                        self._kill()
                        break
                    dying.set()
                upstream.sendall(data)
        except OSError:
            pass
        for end in (client, upstream):
            _shut(end)

    def _is_the_one(self, data: bytes) -> bool:
        first = METHOD.match(data)
        if first is None:
            return False
        if not self.request.match(f"{first[1].decode()} {first[2].decode()}"):
            return False
        with self.lock:
            self.left -= 1
            return self.left == 0

    def _pass_half(self, client: socket.socket, upstream: socket.socket, data: bytes) -> None:
        while b"\r\n\r\n" not in data:
            data += client.recv(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        assert length is not None, head
        if re.search(rb"expect: 100-continue", head, re.IGNORECASE):
            # The client sends no body before it is told to.
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        half = max(1, int(length[1]) // 2)
        while len(body) < half:
            body += client.recv(1 << 16)
        upstream.sendall(head + b"\r\n\r\n" + body[:half])

    def _kill(self) -> None:
        os.kill(self.victim(), signal.SIGKILL)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
