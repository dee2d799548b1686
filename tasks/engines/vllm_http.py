"""HTTP to one vLLM server: one attempt a call, and every way it can fail told apart.

A call is never repeated here. That a server is gone is `EngineLost`; that it took too long is
`EngineTimeout`, after which the server may still be at work; what it refuses is a `ValueError`.
"""

import json
from typing import Any

import httpx

from tasks.engines.protocol import EngineLoad, EngineLost, EngineTimeout

_CONNECT_TIMEOUT_S = 30.0
"""Not less, since a burst of requests from a busy machine takes seconds to connect, and the server
would be taken for lost; one that has ended refuses at once."""
_PREEMPTIONS = "vllm:num_preemptions_total"
_KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"


class VllmHttp:
    """Connections to the server at `url`, `max_connections` of them for requests."""

    def __init__(self, url: str, *, max_connections: int, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
            # Room beside the requests in flight for pausing them and for metrics.
            limits=httpx.Limits(
                max_connections=max_connections + 4,
                max_keepalive_connections=max_connections + 4,
                # Below the server's own 5 s, or a connection is reused just as it closes it.
                keepalive_expiry=2.0,
            ),
            # A proxy setting of the shell is for the outside world.
            trust_env=False,
        )

    async def get(self, path: str) -> Any:
        return self._json(await self._call("GET", path))

    async def post(self, path: str, body: Any = None, **query: str | bool | int) -> Any:
        response = await self._call("POST", path, json=body, params=query or None)
        return self._json(response) if response.content else None

    async def exists(self, path: str) -> bool:
        """Whether the server has a POST route; an empty body is sent, which none of ours takes."""
        response = await self._send("POST", path, json={})
        return response.status_code not in (404, 405)

    async def healthy(self) -> bool:
        try:
            return (await self._send("GET", "/health")).status_code == 200
        except (EngineLost, EngineTimeout):
            return False

    async def load(self) -> EngineLoad:
        """The counters of `/metrics`, summed over the server's engines (averaged, for usage)."""
        sums: dict[str, list[float]] = {}
        for line in (await self._call("GET", "/metrics")).text.splitlines():
            name = line.partition("{")[0]
            if name in (_PREEMPTIONS, _KV_CACHE_USAGE, _QUERIES, _HITS):
                sums.setdefault(name, []).append(float(line.rpartition(" ")[2]))
        usage = sums.get(_KV_CACHE_USAGE, [0.0])
        queries = sum(sums.get(_QUERIES, []))
        return EngineLoad(
            kv_cache_usage=sum(usage) / len(usage),
            num_preemptions=round(sum(sums.get(_PREEMPTIONS, []))),
            prefix_hit_rate=sum(sums.get(_HITS, [])) / queries if queries else None,
        )

    async def close(self) -> None:
        await self._client.aclose()

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise EngineLost(
                f"{response.request.url} answered with what is no JSON; is it a vLLM server?"
            ) from None

    async def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        response = await self._send(method, path, **arguments)
        if response.is_success:
            return response
        what = (
            f"{method} {path} on {self.url} answered {response.status_code}: {_message(response)}"
        )
        if response.status_code >= 500:
            raise EngineLost(f"{what}; its log says why.")
        raise ValueError(f"{what}.")

    async def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return await self._client.request(method, path, **arguments)
        except httpx.ConnectTimeout:
            raise EngineLost(f"{self.url} takes no connection; start the server.") from None
        except httpx.TimeoutException:
            raise EngineTimeout(
                f"{method} {path} on {self.url} took longer than {self._timeout_s:g} s; raise "
                "engine.vllm.request_timeout_s if that is no fault."
            ) from None
        except httpx.TransportError as error:
            raise EngineLost(
                f"{self.url} cannot be reached ({error or type(error).__name__}); start the server."
            ) from None


def _message(response: httpx.Response) -> str:
    """The sentence in an error response of vLLM's, or its first characters."""
    try:
        body = json.loads(response.text)
        return str(body["error"]["message"]).rstrip(".")
    except (ValueError, TypeError, KeyError):
        return response.text[:300].strip() or "no body"
