"""Rows of `routing` beside the tokens they belong to."""

import re

import numpy as np
import pyarrow as pa
import pytest

from schemas.tables import TABLES
from trainers.recorded_experts import RoutedLayers, recorded_experts

LAYERS = RoutedLayers(places=(1, 2), num_layers=3, num_experts=300, top_k=2)


def _segments():
    rows = [
        {"trajectory_id": name, "sequence_index": 0, "segment_index": segment, "token_ids": ids}
        for name, segment, ids in (("a", 0, [1, 2]), ("a", 1, [3, 4, 5]), ("b", 0, [6]))
    ]
    return pa.Table.from_pylist(rows, TABLES["segments"].own_schema)


def _routing(*rows):
    return pa.Table.from_pylist(
        [
            {
                "trajectory_id": name,
                "sequence_index": 0,
                "segment_index": segment,
                "num_layers": experts.shape[1],
                "top_k": experts.shape[2],
                "dtype": experts.dtype.name,
                "num_rows": len(experts),
                "experts": experts.tobytes(),
            }
            for name, segment, experts in rows
        ],
        TABLES["routing"].own_schema,
    )


def test_rows_stand_beside_their_tokens_in_order_and_the_rest_is_missing():
    later = np.array([[[0, 0], [9, 7], [1, 2]], [[0, 0], [3, 4], [299, 256]]], "<u2")
    first = np.array([[[5, 4], [3, 2]], [[1, 0], [0, 1]]], np.uint8)
    found = recorded_experts(_routing(("a", 1, later), ("a", 0, first)), _segments(), LAYERS)
    none = [[-1, -1], [-1, -1]]
    # Experts ascend, and of three reported layers those that the model routes are taken.
    assert found.tolist() == [
        [[4, 5], [2, 3]],
        [[0, 1], [0, 1]],
        [[7, 9], [1, 2]],
        [[3, 4], [256, 299]],
        none,
        none,
    ]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            ("a", 0, np.zeros((1, 4, 2), np.uint8)),
            "routing of 4 layers with 2 experts a token, and the trainer's model has 2 routed of 3 "
            "layers and takes 2",
        ),
        (("a", 0, np.zeros((1, 2, 3), np.uint8)), "routing of 2 layers with 3 experts a token"),
        (("a", 0, np.full((1, 2, 2), 300, "<u2")), "trajectory a to expert 300 of 300"),
        (("a", 0, np.zeros((3, 2, 2), np.uint8)), "tokens that trajectory a has not"),
        (("c", 0, np.zeros((1, 2, 2), np.uint8)), "tokens that trajectory c has not"),
        (("b", 0, np.zeros((1, 2, 2), np.uint32)), "trajectory b that cannot be read"),
    ],
)
def test_what_fits_no_token_or_model_is_refused(row, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        recorded_experts(_routing(row), _segments(), LAYERS)
