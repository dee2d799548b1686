"""What a replayed batch is called: equal, or how and how far it came out otherwise.

Where run and replay both computed on CPUs every bit has to agree. Elsewhere log-probabilities may
be as far off as `engine.logprob_tolerance`, and weights as `tolerance` allows; values that come
from recorded scores alone must agree all the same.
"""

from collections.abc import Iterator
from typing import Any

from schemas.config import RunConfig

LOGPROBS = ("old_logprobs", "own_version_logprobs", "reference_logprobs", "entropies")
"""Quantities that differ by what `engine.logprob_tolerance` allows where kernels do."""

OF_DEVICE = ("loss", "gradient_norm", "update/", "reference/")
"""Beginnings of the names of those that no bound is known for."""

NOTHING_FOUND: dict[str, Any] = {
    "verdict": "equal",
    "ok": True,
    "found": "",
    "origin": None,
    "elsewhere": None,
    "differences": [],
    "tensors": [],
}
"""What is said of a step beside its numbers, if there is nothing to say."""


def judged_rows(
    rows: list[dict[str, Any]], outcome: dict[str, Any], config: RunConfig, tolerance: float
) -> Iterator[dict[str, Any]]:
    """The rows of a batch's steps with what the replay came to."""
    if outcome["fault"] is not None and "steps" not in outcome:
        for row in rows:
            yield (
                NOTHING_FOUND | row | {"verdict": "differs", "ok": False, "found": outcome["fault"]}
            )
        return
    then, now = outcome["recorded_on"], outcome["replayed_on"]
    on_cpus = all(place["hardware"].endswith("CPU threads") for place in (then, now))
    # An older Rollhouse did not record all of it.
    changed = [
        f"recorded on {value}, replayed on {now[name]}"
        for name, value in then.items()
        if value not in (None, now[name])
    ]
    common = {"origin": outcome["origin"], "elsewhere": "; ".join(changed) or None}
    bound = config.engine.logprob_tolerance
    for row, step in zip(rows, outcome["steps"], strict=True):
        is_last = step is outcome["steps"][-1]
        weights = outcome if is_last else None
        differences = step["differences"]
        if on_cpus:
            ok = not differences and (weights is None or _is_equal(weights))
            verdict = "equal" if ok else "differs"
        else:
            differences = [d for d in differences if not _is_of_device(d, bound)]
            ok = not differences and (weights is None or _is_near(weights, tolerance))
            verdict = "near" if ok else "far"
        found = [*map(_of_quantity, differences[:1]), *_of_weights(weights, row["batch"], on_cpus)]
        yield (
            row
            | common
            | {
                "verdict": verdict,
                "ok": ok,
                "found": "; ".join(found),
                "differences": step["differences"],
                "tensors": outcome["tensors"] if is_last else [],
            }
        )


def _is_equal(weights: dict[str, Any]) -> bool:
    return (
        weights["fault"] is None
        and not weights["tensors"]
        and weights["root_hash"] == weights["recorded_root_hash"]
    )


def _share(weights: dict[str, Any]) -> float:
    """How far the weights came out, as a share of how far the batch moved them."""
    if weights["distance"] == 0:
        return 0.0
    return weights["distance"] / weights["update"] if weights["update"] else float("inf")


def _is_near(weights: dict[str, Any], tolerance: float) -> bool:
    return weights["fault"] is None and _share(weights) <= tolerance


def _is_of_device(difference: dict[str, Any], logprob_tolerance: float) -> bool:
    """Whether another order of summation explains it."""
    name = difference["quantity"]
    if name in LOGPROBS:
        return difference["largest"] <= logprob_tolerance
    return name.startswith(OF_DEVICE)


def _of_quantity(difference: dict[str, Any]) -> str:
    return (
        "{quantity} is the first quantity that differs, in {num_differing} of {num_values} values, "
        "by at most {largest:.3g} ({where})"
    ).format_map(difference)


def _of_weights(weights: dict[str, Any] | None, version: int, on_cpus: bool) -> Iterator[str]:
    if weights is None:
        return
    if weights["fault"] is not None:
        yield f"version {version} cannot be compared: {weights['fault']}"
        return
    tensors = weights["tensors"]
    if tensors:
        first = (
            "{tensor} is the first, in {num_differing} of {num_values} values, by at most "
            "{largest:.3g}, relative L2 distance {relative_l2:.3g}"
        ).format_map(tensors[0])
        yield (
            f"{len(tensors)} of {weights['num_tensors']} tensors of version {version} differ: "
            f"{first}; all together by {_share(weights):.3g} of the batch's update"
        )
    elif weights["root_hash"] != weights["recorded_root_hash"]:
        yield (
            f"version {version} has root hash {weights['root_hash']}, as published, and the ledger "
            f"has {weights['recorded_root_hash']}"
        )
    else:
        same = "the same bits" if on_cpus else "no distance"
        yield f"{same} in all {weights['num_tensors']} tensors of version {version}"
