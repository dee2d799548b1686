"""A real S3 server for tests: SeaweedFS on loopback, with its own credentials and data folder."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

BUCKET = "rollouts"
KEYS = {"AWS_ACCESS_KEY_ID": "rollhouse-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
READER_KEYS = {"AWS_ACCESS_KEY_ID": "rollhouse-reader", "AWS_SECRET_ACCESS_KEY": "nor-this"}
READER = {
    "name": "reader",
    "credentials": [
        {
            "accessKey": READER_KEYS["AWS_ACCESS_KEY_ID"],
            "secretKey": READER_KEYS["AWS_SECRET_ACCESS_KEY"],
        }
    ],
    "actions": ["Read", "List"],
}
IDENTITY = {
    "name": "tests",
    "credentials": [
        {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    ],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; SeaweedFS adds 10,000 to each for gRPC.

    All lie below 32,768, where those of outgoing connections begin: one of these would keep a
    server that was stopped from coming back.
    """
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 10_000 + 12_000
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


@dataclass
class S3Server:
    """`stop` and `start` keep data and port, so that an outage can be played."""

    root: Path
    ports: list[int] = field(default_factory=lambda: free_ports(4))
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[3]}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client's standard credential chain needs to reach this server."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1"}

    def start(self) -> None:
        data = self.root / "data"
        data.mkdir(parents=True, exist_ok=True)
        config = self.root / "s3.json"
        config.write_text(json.dumps({"identities": [IDENTITY, READER]}))
        master, volume, filer, s3 = self.ports
        command = [
            *(str(Path(sys.executable).parent / "weed"), "-logtostderr=false"),
            *(f"-logdir={self.root}", "server", f"-dir={data}", "-s3", f"-s3.config={config}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *(f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=100"),
            *("-master.volumeSizeLimitMB=64", "-volume.fileSizeLimitMB=64", "-debug.port=0"),
        ]
        with (self.root / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ
            )
        self._wait()

    def _wait(self) -> None:
        assert self.process is not None
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert self.process.poll() is None, (self.root / "server.log").read_text()[-2000:]
            try:
                with urlopen(f"{self.endpoint}/healthz", timeout=1):
                    return
            except (URLError, OSError):
                time.sleep(0.1)
        raise TimeoutError(f"the S3 server at {self.endpoint} never answered")

    def create_bucket(self, name: str) -> None:
        import boto3

        boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        ).create_bucket(Bucket=name)

    def stop(self) -> None:
        assert self.process is not None
        # Asked politely it takes ten seconds.
        self.process.kill()
        self.process.wait()
