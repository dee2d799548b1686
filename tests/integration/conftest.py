"""The vLLM server that the integration tests share."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.vllm_world import Version, engine_at, launch, publish_versions


@pytest.fixture(scope="package")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    return publish_versions(tmp_path_factory.mktemp("published"), 2)


@pytest.fixture(scope="package")
def url(versions: list[Version], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one server. Whoever connects is a new attachment: it loads the weights it wants, and
    neither labels nor caches from before are taken for its own."""
    server = launch(versions[0].path, tmp_path_factory.mktemp("server") / "vllm.log")

    async def ready() -> None:
        client = engine_at(server.url, versions[0])
        await server.ready(client._http.healthy)
        await client.close()

    try:
        asyncio.run(ready())
        yield server.url
    finally:
        server.stop()
