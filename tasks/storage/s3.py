"""Storage in an S3 bucket, of AWS or any server that speaks its protocol.

Address and credentials come from where every AWS client looks: `AWS_ENDPOINT_URL`, `AWS_REGION`,
`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, a profile, a container's or an instance's role.
boto3 resolves them once for all readers and writers; they are renewed as they expire, and never
written anywhere. A put is atomic and durable when it returns, so there is nothing to fsync.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from tasks.storage.errors import explain_errors
from tasks.storage.protocol import StoredFile

T = TypeVar("T")

OUTAGE = re.compile(
    r"connection (refused|reset|closed)|could not connect|error sending request|timed? ?out"
    r"|\bHTTP (code )?5\d\d\b|status: 5\d\d"
    r"|\b5\d\d (Internal Server Error|Bad Gateway|Service Unavailable|Gateway Timeout)",
    re.IGNORECASE,
)

OUTAGE_S = 60
"""How long a server may be gone before a call gives up; boto3's own retries end after seconds."""

RETRY_S = 1.0

AWS_DOMAIN = ".amazonaws.com"

MAX_DELETES = 1000
"""Keys a delete request may hold."""


class S3Storage:
    """A prefix of a bucket; see `tasks.storage.Storage`. `client` and `session` are boto3's."""

    def __init__(self, bucket: str, prefix: str, session: Any, client: Any):
        self.bucket = bucket
        self.prefix = prefix
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self.session = session
        self.client = client

    @classmethod
    def open(cls, uri: str) -> "S3Storage":
        """Connects nothing yet.

        Raises:
            ValueError: the address has no bucket, or the credential chain is empty.
        """
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise ValueError(f"{uri} names no bucket; write s3://bucket/prefix.")
        surroundings = tuple(sorted(i for i in os.environ.items() if i[0].startswith("AWS_")))
        with explain_errors(f"find credentials for {uri}", uri, *_errors()):
            connected = _connected(surroundings)
        if connected is None:
            raise ValueError(
                f"No credentials for {uri}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name "
                "a profile in AWS_PROFILE, or run where an instance role applies."
            )
        session, client = connected
        return cls(bucket, prefix.strip("/"), session, client)

    def child(self, name: str) -> "S3Storage":
        return S3Storage(self.bucket, self._key(name), self.session, self.client)

    def location(self, path: str) -> str:
        return f"s3://{self.bucket}/{self._key(path)}"

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}".lstrip("/")

    def prepare(self) -> None:
        with explain_errors(f"use bucket {self.bucket} for {self.uri}", self.uri, *_errors()):
            self.patiently(partial(self.client.head_bucket, Bucket=self.bucket))

    def write(self, path: str, data: memoryview | bytes) -> None:
        with explain_errors(f"write {self.location(path)}", self.uri, *_errors()):
            put = partial(self.client.put_object, Bucket=self.bucket, Key=self._key(path))
            self.patiently(partial(put, Body=bytes(data)))

    def read(self, path: str) -> bytes:
        with explain_errors(f"read {self.location(path)}", self.uri, *_errors()):
            get = partial(self.client.get_object, Bucket=self.bucket, Key=self._key(path))
            return self.patiently(lambda: get()["Body"].read())

    def upload(self, source: Path, path: str) -> None:
        """Puts a file of any size, in parts where it is large."""
        with explain_errors(f"write {self.location(path)}", self.uri, *_errors()):
            put = partial(self.client.upload_file, str(source), self.bucket)
            self.patiently(partial(put, self._key(path)))

    def download(self, path: str, target: Path) -> None:
        """Gets a file of any size."""
        with explain_errors(f"read {self.location(path)}", self.uri, *_errors()):
            get = partial(self.client.download_file, self.bucket, self._key(path))
            self.patiently(partial(get, str(target)))

    def exists(self, path: str) -> bool:
        from botocore.exceptions import ClientError

        with explain_errors(f"look for {self.location(path)}", self.uri, *_errors()):
            try:
                self.patiently(
                    partial(self.client.head_object, Bucket=self.bucket, Key=self._key(path))
                )
            except ClientError as error:
                if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                    return False
                raise
        return True

    def walk(self, prefix: str = "") -> Iterator[StoredFile]:
        folder = self._key(prefix).rstrip("/") + "/" if prefix or self.prefix else ""
        root = len(self.prefix) + 1 if self.prefix else 0
        with explain_errors(f"list {self.location(prefix)}", self.uri, *_errors()):
            pages = self.client.get_paginator("list_objects_v2")
            found = self.patiently(lambda: list(pages.paginate(Bucket=self.bucket, Prefix=folder)))
        for page in found:
            for entry in page.get("Contents", ()):
                yield StoredFile(entry["Key"][root:], entry["Size"], entry["LastModified"])

    def delete(self, paths: Iterable[str]) -> None:
        all_keys = [{"Key": self._key(path)} for path in paths]
        for start in range(0, len(all_keys), MAX_DELETES):
            keys = all_keys[start : start + MAX_DELETES]
            with explain_errors(f"delete files of {self.uri}", self.uri, *_errors()):
                delete = partial(self.client.delete_objects, Bucket=self.bucket)
                answer = self.patiently(partial(delete, Delete={"Objects": keys, "Quiet": True}))
                if failed := answer.get("Errors"):
                    raise OSError(f"{failed[0]['Key']}: {failed[0].get('Message', 'refused')}")

    def patiently(self, call: Callable[[], T]) -> T:
        until = time.monotonic() + OUTAGE_S
        while True:
            try:
                return call()
            except Exception as error:
                if not _is_outage(error) or time.monotonic() > until:
                    raise
            time.sleep(RETRY_S)

    def flush(self, paths: Iterable[str]) -> None:
        """A put that returned is durable."""

    def options(self) -> dict[str, str]:
        """Options of delta-rs, with the credentials of this moment."""
        keys = self.session.get_credentials().get_frozen_credentials()
        options = {
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
            "AWS_REGION": self.client.meta.region_name,
            # Commits are put only where no object of that name is, which is what makes them atomic.
            "AWS_CONDITIONAL_PUT": "etag",
            # `patiently` repeats what matters; delta-rs does not repeat such a put at all.
            "retry_timeout": "5s",
        }
        if keys.token:
            options["AWS_SESSION_TOKEN"] = keys.token
        endpoint = self.client.meta.endpoint_url
        if AWS_DOMAIN not in endpoint:
            options["AWS_ENDPOINT_URL"] = endpoint
        if endpoint.startswith("http://"):
            options["AWS_ALLOW_HTTP"] = "true"
        return options


@cache
def _connected(surroundings: tuple[tuple[str, str], ...]) -> tuple[Any, Any] | None:
    """boto3's session and client under the environment's AWS settings; None without credentials.

    Making one takes a tenth of a second, and a run opens its store for each folder. A client may
    be shared by threads.
    """
    import boto3
    from botocore.config import Config

    del surroundings  # the key of the cache; boto3 reads the environment itself
    session = boto3.Session()
    if session.get_credentials() is None:
        return None
    region = session.region_name or "us-east-1"
    endpoint = session.client("s3", region_name=region).meta.endpoint_url
    client = session.client(
        "s3",
        region_name=region,
        config=Config(
            retries={"mode": "standard"},
            connect_timeout=5,
            read_timeout=60,
            # A server of one's own seldom has a host name for each bucket.
            s3={"addressing_style": "auto" if AWS_DOMAIN in endpoint else "path"},
        ),
    )
    return session, client


def _errors() -> tuple[type[Exception], ...]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return Boto3Error, BotoCoreError, ClientError


def _is_outage(error: Exception) -> bool:
    """Whether the server could not be reached or failed by itself, rather than refused.

    boto3 has kinds of errors for that; delta-rs and DuckDB only have texts.
    """
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    if isinstance(error, ClientError):
        return error.response["ResponseMetadata"].get("HTTPStatusCode", 0) >= 500
    return isinstance(error, ConnectionError | HTTPClientError) or bool(OUTAGE.search(str(error)))
