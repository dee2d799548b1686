"""A whole run on a vLLM server, from sampling to the attestation of the last version."""

from collections.abc import Callable

import pytest

from tasks.query import connect
from tests.recompute import largest_error
from tests.tiny_run import RUN_ID, TinyRun
from tests.vllm_world import RUN_ON_VLLM, run_at

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEMPERATURES = ("sampling.temperature=0.7", "evaluation.temperature=1.0")


def test_a_run_on_a_server_that_it_starts(tiny_run: Callable[..., TinyRun]):
    check_run(tiny_run(*RUN_ON_VLLM, *TEMPERATURES, "asynchrony.k=1", "asynchrony.update=keep"))


def test_a_run_on_a_server_that_leaves_the_device_to_the_trainer(
    tiny_run: Callable[..., TinyRun], url: str
):
    colocated = ("engine.vllm.colocated=true", "engine.vllm.prefix_cache=clear")
    check_run(tiny_run(*run_at(url), *TEMPERATURES, *colocated))


def check_run(tiny: TinyRun) -> None:
    tiny.execute()
    lake = tiny.lake
    connection = connect(lake)

    def rows(sql: str):
        return connection.sql(sql).fetchall()

    assert rows("SELECT count(DISTINCT batch) FROM steps") == [(4,)]
    assert tiny.trained_twice() == []
    # Every action token has a logprob, a version and a segment.
    assert rows(
        "SELECT count(*) FROM tokens_all WHERE kind = 'action'"
        " AND (rollout_logprob IS NULL OR weight_version IS NULL)"
    ) == [(0,)]
    assert rows(
        "SELECT version, bool_and(ok), max(canary_max_abs_diff) <= 0.002 FROM attestations"
        " GROUP BY 1 ORDER BY 1"
    ) == [(version, True, True) for version in range(5)]
    assert rows(
        "SELECT count(*) FROM requests WHERE kv_cache_usage IS NULL OR engine_id <> 'vllm-0'"
    ) == [(0,)]
    for entry in tiny.entries:
        if entry.kind == "version_published":
            folder = tiny.root / "store" / RUN_ID / entry.details["uri"]
            num_tokens, error = largest_error(lake, RUN_ID, entry.version, folder)
            assert error <= 0.002, f"version {entry.version}, {num_tokens} tokens"
