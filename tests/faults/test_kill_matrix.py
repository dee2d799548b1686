"""One seed of the kill matrix; `make kill-matrix` takes five."""

from pathlib import Path

import pytest

from tests.faults.kill_points import AHEAD as POINTS_AHEAD
from tests.faults.kill_points import BETWEEN_ANCHORS, IN_A_BUCKET, ON_DISK, Point
from tests.faults.kill_runs import AHEAD, PATCHED, KillMatrix, can_trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_trace(), reason="needs strace and the right to attach it"),
]


def assert_all_equal(
    folder: Path,
    policies: Path,
    points: tuple[Point, ...],
    bucket: str | None = None,
    settings: tuple[str, ...] = (),
) -> None:
    outcomes = KillMatrix(folder, policies, 0, points, bucket, settings).run()
    assert [outcome.point for outcome in outcomes] == list(points)
    assert [outcome.row() for outcome in outcomes if outcome.problems] == []


@pytest.mark.timeout(1800)
def test_a_run_killed_anywhere_on_a_disk_ends_as_one_never_killed(tmp_path, tiny_policies):
    assert_all_equal(tmp_path, tiny_policies, ON_DISK)


@pytest.mark.xdist_group("kill_matrix_in_a_bucket")
def test_a_run_ahead_of_its_trainer_loses_and_doubles_nothing(tmp_path, tiny_policies):
    assert_all_equal(tmp_path, tiny_policies, POINTS_AHEAD, settings=AHEAD)


@pytest.mark.xdist_group("kill_matrix_in_a_bucket")
def test_a_run_killed_while_it_publishes_patches_ends_as_one_never_killed(tmp_path, tiny_policies):
    assert_all_equal(tmp_path, tiny_policies, BETWEEN_ANCHORS, settings=PATCHED)


@pytest.mark.xdist_group("kill_matrix_in_a_bucket")
@pytest.mark.timeout(1800)
def test_a_run_killed_anywhere_in_a_bucket_ends_as_one_never_killed(
    tmp_path, tiny_policies, s3_uri
):
    assert_all_equal(tmp_path, tiny_policies, IN_A_BUCKET, bucket=s3_uri)
