import struct
from functools import partial
from math import log2

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tasks.weights.patch_coding import BLOCK, Changes, apply, encode, ordered, unordered

torch.set_num_threads(1)

EVERY = np.arange(1 << 16, dtype=np.uint16)


def bits_of(*values: float) -> np.ndarray:
    return torch.tensor(values, dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def applied(before: np.ndarray, changes: Changes) -> np.ndarray:
    """The result, in place and beside `before`, which both see the same bytes."""
    after, beside = before.copy(), np.empty_like(before)
    parts: list[list[bytes]] = [[], [], []]
    seen = [lambda part, into=into: into.append(bytes(part)) for into in parts]
    apply(after, changes, after, of_after=seen[0])
    kept = before.copy()
    apply(before, changes, beside, of_before=seen[1], of_after=seen[2])
    assert (before == kept).all() and (beside == after).all()
    assert [b"".join(part) for part in parts] == [
        after.tobytes(),
        before.tobytes(),
        after.tobytes(),
    ]
    return after


def planes_of(changes: Changes) -> list[bytes]:
    """The varint planes of a payload, taken apart by hand."""
    planes, payload = [], changes.payload
    while payload:
        (length,) = struct.unpack_from("<I", payload)
        frame = pa.BufferReader(payload[4 : 4 + length])
        planes.append(pa.input_stream(frame, compression="zstd").read())
        payload = payload[4 + length :]
    return planes


def test_every_pattern_has_its_place_in_the_order_of_values():
    assert sorted(ordered(EVERY)) == EVERY.tolist()
    assert (unordered(ordered(EVERY)) == EVERY).all()
    values = torch.from_numpy(EVERY.view(np.int16)).view(torch.bfloat16)
    finite = torch.isfinite(values).numpy()
    by_place = values.float().numpy()[finite][np.argsort(ordered(EVERY[finite]))]
    assert (np.diff(by_place) >= 0).all()
    assert ordered(bits_of(-0.0, 0.0)).tolist() == [32767, 32768]


def test_one_step_is_one_unit_in_the_last_place():
    # In [1, 2) bf16 values are 2^-7 apart, in [2, 4) 2^-6.
    places = ordered(bits_of(1.0, 1 + 2**-7, 2.0, 2 + 2**-6, -1.0, -1 - 2**-7)).astype(int)
    assert (places[1::2] - places[::2]).tolist() == [1, 1, -1]
    assert places[2] - places[0] == 128


@pytest.mark.parametrize("seed", range(3))
def test_every_pattern_can_become_every_other(seed: int):
    rng = np.random.default_rng(seed)
    before, after = rng.permutation(EVERY), rng.permutation(EVERY)
    changes = encode(before, after)
    assert changes.num_changed == (before != after).sum()
    assert (applied(before, changes) == after).all()


def test_the_extremes_of_the_line_are_one_apart_around_it():
    # The largest negative NaN and the largest NaN: place 0 and place 65,535.
    ends = np.array([0xFFFF, 0x7FFF], np.uint16)
    assert ordered(ends).tolist() == [0, 65535]
    assert (applied(ends, encode(ends, ends[::-1].copy())) == ends[::-1]).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_coding_is_the_inverse_of_applying(data: st.DataObject):
    size = data.draw(st.integers(0, 300))
    pair = [data.draw(arrays(np.uint16, size)) for _ in range(2)]
    same = data.draw(arrays(np.bool_, size))
    before, after = pair[0], np.where(same, pair[0], pair[1])
    seen = [b"", b""]

    def saw(which: int, part: memoryview) -> None:
        seen[which] += bytes(part)

    changes = encode(before, after, of_before=partial(saw, 0), of_after=partial(saw, 1))
    assert seen == [before.tobytes(), after.tobytes()]
    assert changes.num_changed == (before != after).sum()
    assert (applied(before, changes) == after).all()
    assert encode(before, after) == changes


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_blocks_join_without_a_seam(size: int):
    rng = np.random.default_rng(size)
    before = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    for share in (0.0, 1e-5, 0.02, 1.0):
        after = before + (rng.random(size) < share).astype(np.uint16)
        changes = encode(before, after)
        assert (applied(before, changes) == after).all()
    far_apart = before.copy()
    far_apart[[0, size - 1]] ^= 0x8000
    assert (applied(before, encode(before, far_apart)) == far_apart).all()


def test_no_change_has_no_bytes():
    assert encode(EVERY, EVERY) == Changes(0, b"")
    assert encode(EVERY[:0], EVERY[:0]) == Changes(0, b"")


def test_the_planes_are_varints():
    """Three changes, with gaps 2, 200 = 0b1_1001000 and 0, and distances 1, -1 and 300."""
    before = np.full(300, ordered(bits_of(1.0))[0], np.uint16)
    after = before.copy()
    after[[2, 203, 204]] += np.array([1, 65535, 300], np.uint16)
    changes = encode(unordered(before), unordered(after))
    assert planes_of(changes) == [
        bytes([2, 0x80 | 0b1001000, 0]),
        bytes([1]),
        bytes([0b01000000]),
        bytes([0b00100000]),
        # 300 - 2 = 0b10_0101010.
        bytes([0x80 | 0b0101010]),
        bytes([0b10]),
    ]


def test_a_payload_that_was_not_made_for_the_tensor_is_refused():
    rng = np.random.default_rng(0)
    before = rng.integers(0, 1 << 16, 5000, dtype=np.uint16)
    after = np.where(rng.random(5000) < 0.1, before ^ 3, before)
    changes = encode(before, after)
    with pytest.raises(ValueError, match="outside the tensor"):
        applied(before[:4000], changes)
    with pytest.raises(ValueError, match="do not fit"):
        applied(before[:10], changes)
    with pytest.raises(ValueError, match="longer than its planes"):
        applied(before, Changes(changes.num_changed, changes.payload + b"\0"))
    with pytest.raises(ValueError, match="no Zstandard frame of its size"):
        applied(before, Changes(changes.num_changed - 1, changes.payload))
    for size in range(len(changes.payload)):
        with pytest.raises(ValueError):
            applied(before, Changes(changes.num_changed, changes.payload[:size]))


def steps_to_change(value: float, step: float) -> int:
    """Steps of one sign until a float32 master that starts at `value` has another bf16 copy."""
    master = np.float32(value)
    copy, count = bits_of(master), 0
    while (bits_of(master) == copy).all():
        master += np.float32(step)
        count += 1
    return count


def test_adam_at_3e_6_needs_21_steps_for_0_0177_and_2_for_0_0031():
    # 0.0177 lies 2^-13 from its neighbours and 6.12e-5 below the boundary to the next one; 0.0031
    # lies 2^-16 from them and 5.16e-6 below it.
    assert pytest.approx(20.4, abs=0.1) == (145.5 * 2**-13 - 0.0177) / 3e-6
    assert pytest.approx(1.72, abs=0.01) == (203.5 * 2**-16 - 0.0031) / 3e-6
    assert steps_to_change(0.0177, 3e-6) == 21
    assert steps_to_change(0.0031, 3e-6) == 2


@pytest.mark.parametrize(("value", "share"), [(0.0177, 0.0246), (0.0031, 0.1966)])
def test_a_master_anywhere_in_its_cell_changes_as_often_as_step_over_spacing(value, share):
    spacing = {0.0177: 2**-13, 0.0031: 2**-16}[value]
    assert share == pytest.approx(3e-6 / spacing, abs=1e-4)
    within = np.random.default_rng(0).uniform(-0.5, 0.5, 200_000)
    masters = torch.from_numpy(value + spacing * within).float()
    before, after = (bits_of(*m.tolist()) for m in (masters, masters + 3e-6))
    changes = encode(before, after)
    assert changes.num_changed / len(before) == pytest.approx(share, abs=0.003)


def test_a_gap_at_one_percent_takes_1_28_bytes_and_8_08_bits():
    """Gaps are geometric with mean 100. One of 128 or more has chance 0.99^127 counted from one,
    and 0.99^128 as it is stored, from zero."""
    size = 2_000_000
    changed = np.random.default_rng(0).random(size) < 0.01
    changes = encode(np.zeros(size, np.uint16), changed.astype(np.uint16))
    *gaps, signs, more_than_one = planes_of(changes)
    assert signs == more_than_one == bytes(-(-int(changed.sum()) // 8))
    assert pytest.approx(1.28, abs=0.002) == 1 + 0.99**127
    assert sum(map(len, gaps)) / changes.num_changed == pytest.approx(1.28, abs=0.01)
    entropy = -(0.01 * log2(0.01) + 0.99 * log2(0.99)) / 0.01
    assert entropy == pytest.approx(8.08, abs=0.005)
    # All distances are alike here, so the payload is the gaps.
    assert 1.0 < 8 * len(changes.payload) / changes.num_changed / entropy < 1.1
