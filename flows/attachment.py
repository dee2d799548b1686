"""Put engines into traffic: served, attested, probed, and put back when they return."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flows.opening import OpenRun, Report, published_dir
from tasks.engines.fleet import Fleet
from tasks.engines.probe import ProbeResult, probe
from tasks.engines.protocol import Attestation, EngineLost, EngineTimeout, RolloutEngine
from tasks.rollout import RolloutContext

RETRY_S = 1.0
MAX_RETRY_S = 60.0


class EngineRefused(RuntimeError):
    """An engine failed its probe or could not attest the weights it should serve."""


async def attach(run: OpenRun, fleet: Fleet) -> RolloutContext:
    """Attaches every engine of a new fleet; raises `EngineRefused`, `EngineLost` or `ValueError` if
    one cannot be, since a run should not begin with fewer engines than it was given."""
    context = RolloutContext(fleet, run.environment, run.renderer, run.config.run.seed)
    await asyncio.gather(*(member.connect() for member in fleet.members))
    for member in fleet.members:
        await _attach_one(run, context, member)
    return context


async def keep_attached(run: OpenRun, context: RolloutContext, report: Report) -> None:
    """Attaches engines again that were lost, once they return; never ends by itself.

    A restarted server holds the weights it was started with and may have other flags, so it goes
    through all that a new one does.
    """
    await asyncio.gather(
        *(_keep_one(run, context, member, report) for member in context.engine.members)
    )


async def _keep_one(
    run: OpenRun, context: RolloutContext, member: RolloutEngine, report: Report
) -> None:
    fleet, engine_id = context.engine, member.describe().engine_id
    while True:
        await asyncio.sleep(RETRY_S)
        if member not in fleet.out_of_traffic:
            continue
        report({"event": "engine_lost", "engine": engine_id, "reason": fleet.reason_out(member)})
        pause_s, refusal = RETRY_S, ""
        while member in fleet.out_of_traffic:
            if fleet.is_paused:
                # It would take the devices that the trainer works on.
                await asyncio.sleep(RETRY_S)
                continue
            connected = False
            try:
                await member.connect()
                connected = True
                async with fleet.changing:
                    await _attach_one(run, context, member)
            except (EngineLost, EngineTimeout, EngineRefused, ValueError) as error:
                unreachable = isinstance(error, EngineLost) and not connected
                if not unreachable and str(error) != refusal:
                    refusal = str(error)
                    report({"event": "engine_refused", "engine": engine_id, "reason": refusal})
                await asyncio.sleep(pause_s)
                if not unreachable:
                    # A try leaves rows: what does not mend itself is not tried every second.
                    pause_s = min(2 * pause_s, MAX_RETRY_S)
        report({"event": "engine_returned", "engine": engine_id})


async def serve(run: OpenRun, fleet: Fleet, version: int) -> None:
    """Has every engine in traffic load and attest `version`; those that cannot leave traffic.

    Raises `EngineRefused` if none can.
    """
    weights_dir, root_hash = published_dir(run, version)
    async with fleet.changing:
        attestations = await fleet.update(
            version, weights_dir, root_hash, run.config.asynchrony.update
        )
        _record(run, attestations)
    if attestations and not any(attestation.ok for attestation in attestations):
        raise _refused(run, attestations[0])


async def _attach_one(run: OpenRun, context: RolloutContext, member: RolloutEngine) -> None:
    """Serves the newest version on one engine, probes it, and gives it traffic."""
    published = run.ledger.last("version_published")
    assert published is not None and published.version is not None
    weights_dir, root_hash = published_dir(run, published.version)
    attestation = await member.update(published.version, weights_dir, root_hash, "abort")
    _record(run, [attestation])
    if not attestation.ok:
        raise _refused(run, attestation)
    result = await _probe_where_uncertain(run, member, context, published.version)
    run.pending.append(run.append("validations", _probe_rows(result)))
    if not result.ok:
        run.commit("lease_renewed")
        raise EngineRefused(f"The engine is not attached: {result.reason}")
    context.engine.admit(member)


def _record(run: OpenRun, attestations: Sequence[Attestation]) -> None:
    rows = [{**vars(attestation), "attested_at": datetime.now(UTC)} for attestation in attestations]
    if rows:
        run.pending.append(run.append("attestations", rows))


def _refused(run: OpenRun, attestation: Attestation) -> EngineRefused:
    run.commit("lease_renewed")  # Names what the engine said, which nothing else would.
    return EngineRefused(
        f"Engine {attestation.engine_id} could not attest version {attestation.version}: "
        f"{attestation.reason}; no request was sent to it. Run again to retry."
    )


async def _probe_where_uncertain(
    run: OpenRun, member: RolloutEngine, context: RolloutContext, version: int
) -> ProbeResult:
    """Probes on prefixes of a prompt until one leaves the policy in doubt.

    A trained policy may be certain of its answers, and then neither truncation nor temperature
    shows.
    """
    prompt = tuple(context.renderer.prompt(context.environment.heldout(1)[0].messages))
    for length in (len(prompt), len(prompt) // 2, 2, 1):
        result = await probe(
            member,
            prompt_token_ids=prompt[:length],
            vocab_size=context.renderer.vocab_size,
            weight_version=version,
            tolerance=run.config.engine.logprob_tolerance,
        )
        failed = {check.name for check in result.checks if not check.ok}
        if not failed or not failed <= {"top_k_support", "temperature_matters"}:
            break
    return result


def _probe_rows(result: ProbeResult) -> list[dict[str, Any]]:
    now = datetime.now(UTC)
    return [
        {
            "gate": 0,
            "rule": f"probe_{check.name}",
            "severity": "batch",
            "scope": result.engine_id,
            "observed": None,
            "expected": f"{check.expected} (observed: {check.observed})",
            "ok": check.ok,
            "num_failed": int(not check.ok),
            "judged_at": now,
        }
        for check in result.checks
    ]
