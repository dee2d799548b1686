"""Prefect's API for one run: a process on loopback that lives as long as its parent and no longer.

    python -m flows.prefect_api FD

Prefect would start a temporary server of its own, which a killed controller leaves running; this
one ends with its standard input. FD is a listening socket that the parent opened.
"""

import asyncio
import os
import socket
import sys
import threading

import uvicorn
from prefect.server.api.server import create_app


def exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> None:
    threading.Thread(target=exit_with_parent, daemon=True).start()
    listening = socket.socket(fileno=int(sys.argv[1]))
    server = uvicorn.Server(uvicorn.Config(create_app(ephemeral=True), log_level="error"))
    asyncio.run(server.serve(sockets=[listening]))


if __name__ == "__main__":
    main()
