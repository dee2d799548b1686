"""What a patch of weights costs, against the whole weights and against storing new values.

    make bench-patches

The model has 102.4 M parameters in tensors of a transformer's shapes, normal with a median |v| of
0.0177. Its FP32 masters move as Adam at 3e-6 moves them: by normal multiples of the learning rate,
for as many steps, or for the share of one, as it takes until 0.5, 1, 2 or 6 % of the bf16 values
differ.

- Entropy: of the gaps and of the steps, order zero, over the whole model; what a coder of both
  could reach that knows their distribution and no more.
- Overwriting: the same gaps in the same code, and the new bf16 values split into low and high
  bytes, each behind the same Zstandard.
- Speed: encoding compares, codes and hashes parent and result; applying hashes the parent, builds
  the result beside it and hashes that. Both against Zstandard level 1 over the new values. All are
  CPU seconds over all tensors, from memory to memory, by turns.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from blake3 import blake3

from tasks.weights import patch_coding
from tasks.weights.patch_coding import Bits, Changes
from tests.benchmarks.lake.measure import by_turns, verdict

SHAPES = [(32_000, 768)] + 11 * [(768, 768)] * 4 + 11 * [(3072, 768)] * 2
"""102.4 M parameters: an embedding, then attention and two projections for 11 layers."""

MEDIAN_NORMAL = 0.6744897501960817
LEARNING_RATE = 3e-6
SHARES = (0.005, 0.01, 0.02, 0.06)
NUM_PAIRS = 5


def rounded(masters: np.ndarray) -> Bits:
    """Finite float32 values to bf16, to nearest even."""
    bits = masters.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_model(rng: np.random.Generator) -> list[np.ndarray]:
    scale = np.float32(0.0177 / MEDIAN_NORMAL)
    return [rng.standard_normal(rows * cols, np.float32) * scale for rows, cols in SHAPES]


def trained(masters: list[np.ndarray], before: list[Bits], share: float) -> list[Bits]:
    """The bf16 values after as much of Adam's steps as changes `share` of them."""
    low, high = 0.0, 64.0
    sample = masters[1], before[1]
    direction = np.random.default_rng(1).standard_normal(len(sample[0]), np.float32)
    for _ in range(20):
        steps = (low + high) / 2
        moved = rounded(sample[0] + np.float32(LEARNING_RATE * steps) * direction)
        low, high = (steps, high) if (moved != sample[1]).mean() < share else (low, steps)
    rng = np.random.default_rng(2)
    move = np.float32(LEARNING_RATE * low)
    return [rounded(m + move * rng.standard_normal(len(m), np.float32)) for m in masters]


def entropy_bits(values: np.ndarray) -> float:
    """Bits a value of the empirical distribution."""
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def overwrite_bytes(before: Bits, after: Bits, payload: bytes) -> int:
    """Bytes of the same gaps and the new values, low and high bytes apart."""
    codec = pa.Codec("zstd", compression_level=patch_coding.LEVEL)
    gaps, steps = patch_coding._compare(before, after)
    step_planes = patch_coding._distance_planes(steps)
    gap_bytes = len(payload) - sum(len(patch_coding._pack(plane)) for plane in step_planes)
    values = np.ascontiguousarray(after[np.cumsum(gaps.astype(np.int64) + 1) - 1])
    split = [np.ascontiguousarray(values.view(np.uint8)[byte::2]) for byte in (0, 1)]
    return gap_bytes + sum(4 + len(codec.compress(plane)) for plane in split)


def lines() -> Iterator[str]:
    masters = make_model(np.random.default_rng(0))
    before = [rounded(tensor) for tensor in masters]
    num_values = sum(map(len, before))
    median = float(np.median(np.abs(masters[0])))
    yield f"context: {num_values / 1e6:.1f} M parameters, median |v| {median:.4f}, Adam at 3e-6"
    codec = pa.Codec("zstd", compression_level=1)
    for share in SHARES:
        after = trained(masters, before, share)
        patch = [patch_coding.encode(*pair) for pair in zip(before, after, strict=True)]
        compared = [patch_coding._compare(*pair) for pair in zip(before, after, strict=True)]
        changes = sum(one.num_changed for one in patch)
        size = sum(len(one.payload) for one in patch)
        least = sum(
            entropy_bits(np.concatenate(part)) * changes / 8 for part in zip(*compared, strict=True)
        )
        theirs = sum(
            overwrite_bytes(old, new, one.payload)
            for old, new, one in zip(before, after, patch, strict=True)
        )
        name = f"{100 * changes / num_values:.2f} % changed"
        context = f"{size / changes:.3f} bytes a change, 1/{2 * num_values / size:.0f} of bf16"
        yield verdict(f"{name}: patch / entropy", [size / least], "<=", 1.2, context)
        yield verdict(f"{name}: patch / overwriting", [size / theirs], "<=", 0.55)
        yield from _speeds(name, before, after, patch, codec)


def _speeds(
    name: str, before: list[Bits], after: list[Bits], patch: list[Changes], codec: pa.Codec
) -> Iterator[str]:
    def encode() -> None:
        for old, new in zip(before, after, strict=True):
            hashes = blake3(), blake3()
            patch_coding.encode(old, new, of_before=hashes[0].update, of_after=hashes[1].update)

    def apply() -> None:
        for old, changes in zip(before, patch, strict=True):
            result, hashes = np.empty_like(old), (blake3(), blake3())
            patch_coding.apply(
                old, changes, result, of_before=hashes[0].update, of_after=hashes[1].update
            )

    def compress() -> None:
        for new in after:
            codec.compress(new)

    megabytes = 2 * sum(map(len, after)) / 1e6
    for verb, subject in (("encode", encode), ("apply", apply)):
        pairs = by_turns(subject, compress, num_pairs=NUM_PAIRS)
        ours, theirs = (megabytes / ms * 1e3 for ms in pairs.medians_ms())
        context = f"{ours:.0f} against {theirs:.0f} MB/CPU-s"
        title = f"{name}: {verb} speed / Zstandard level 1"
        yield verdict(title, pairs.speedup(), ">=", 1, context)


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
