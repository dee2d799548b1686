"""Seeds of tasks and rollouts.

Every seed is a hash of where it is used, never a counter, so that a rollout sampled again after a
crash draws the same numbers and no two requests share a stream.
"""

import hashlib


def derive_seed(run_seed: int, *path: int | str) -> int:
    """A seed in [0, 2^63) for `path` (group, sample, turn, part) of the run.

    The attempt is not part of the path: a retry samples the same rollout.
    """
    text = "/".join(str(part) for part in (run_seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
