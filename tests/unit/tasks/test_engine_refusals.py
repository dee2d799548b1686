"""What the torch engine refuses, and the sentence it says."""

import asyncio

import pytest
from transformers import Qwen3Config

from tasks.engines.protocol import Request
from tasks.engines.torch_engine import TorchEngine
from tests.engine_models import PLAIN, VOCAB, attached, make_engine, publish


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_slots": 0}, "num_slots and num_threads must be 1 or more"),
        ({"max_model_tokens": 1}, "max_model_tokens 2 or more"),
        ({"compute_dtype": "float16"}, r"compute_dtype must be one of \['bfloat16', 'float32'\]"),
    ],
)
def test_bad_engine_parameters_are_refused(qwen3, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_engine(qwen3, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_att"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "lets the longest row of a batch change the others",
        ),
    ],
)
def test_models_whose_rows_would_not_be_independent_are_refused(tmp_path, change, sentence):
    Qwen3Config(**change).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        TorchEngine(tmp_path, num_slots=1, max_model_tokens=8, num_threads=1, engine_id="torch-0")


@pytest.mark.parametrize(
    ("token_ids", "stop", "sentence"),
    [
        ((), (), "empty prompt"),
        ((VOCAB,), (), f"token id {VOCAB}, outside the vocabulary of {VOCAB}"),
        ((1, -1), (), "token id -1, outside the vocabulary"),
        ((1,), (VOCAB + 3,), f"token id {VOCAB + 3}, outside the vocabulary"),
        ((1,) * 64, (), "leaves no room below max_model_tokens = 64"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(qwen3, token_ids, stop, sentence):
    async def main():
        engine = await attached(qwen3)
        await engine.generate(Request("r", token_ids, PLAIN, stop))

    with pytest.raises(ValueError, match=sentence):
        asyncio.run(main())


def test_an_engine_without_weights_serves_nothing(qwen3):
    engine = make_engine(qwen3)
    assert engine.describe().weight_version is None
    with pytest.raises(RuntimeError, match="has not attested any version"):
        asyncio.run(engine.generate(Request("r", (1,), PLAIN, ())))
