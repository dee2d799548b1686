"""Bodies of `/inference/v1/generate`: nothing is left to the server, and no half answer passes."""

from copy import deepcopy

import pytest

from tasks.engines.protocol import Request, Sampling, VersionSpan
from tasks.engines.vllm_fitness import unfit
from tasks.engines.vllm_wire import payload, read_answer

REQUEST = Request("r", (5, 6, 7), Sampling(0.7, 0.9, 4, 0.1, 50, seed=11), (2, 3))
VERSIONS = {"a-3": 3, "a-4": 4}
BODY = {
    "choices": [
        {
            "token_ids": [4, 9, 2],
            "logprobs": {
                "content": [
                    {"token_id": 4, "logprob": -0.5},
                    {"token_id": 9, "logprob": -1.5},
                    {"token_id": 2, "logprob": -2.5},
                ]
            },
            "weight_versions": [
                {"start": 0, "end": 1, "version": "a-3"},
                {"start": 1, "end": 3, "version": "a-4"},
            ],
            "finish_reason": "stop",
            "routed_experts": None,
        }
    ],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    "metrics": {"speculative_decoding": {"num_draft_tokens": 6, "num_accepted_draft_tokens": 2}},
}


def test_every_parameter_is_sent_and_the_limit_fits_behind_the_prompt():
    body = payload(REQUEST, "version-3", max_model_tokens=13)
    assert body["token_ids"] == [5, 6, 7] and body["cache_salt"] == "version-3"
    assert body["sampling_params"] == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "max_tokens": 10,
        "min_tokens": 0,
        "seed": 11,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    assert "cache_salt" not in payload(REQUEST, None, 13)


@pytest.mark.parametrize(
    ("cache_outlives_update", "kv_versions"), [(True, (3, 3)), (False, (3, 4))]
)
def test_spans_name_the_cache_that_they_attended_to(cache_outlives_update, kv_versions):
    generation = read_answer(REQUEST, BODY, VERSIONS).generation(
        version=3,
        cache_outlives_update=cache_outlives_update,
        queued_s=0.1,
        decode_s=0.2,
        engine_id="vllm-0",
        load=None,
    )
    assert generation.token_ids == (4, 9, 2) and generation.logprobs == (-0.5, -1.5, -2.5)
    assert generation.spans == (
        VersionSpan(0, 1, 3, kv_versions[0]),
        VersionSpan(1, 3, 4, kv_versions[1]),
    )
    assert (generation.num_drafted_tokens, generation.num_accepted_tokens) == (6, 2)
    assert (generation.num_cached_tokens, generation.cached_version_min) == (2, 3)


def test_an_aborted_request_may_have_no_tokens():
    body = deepcopy(BODY)
    body["choices"][0] |= {
        "token_ids": [],
        "logprobs": None,
        "weight_versions": None,
        "finish_reason": "abort",
    }
    answer = read_answer(REQUEST, body, VERSIONS)
    assert (answer.token_ids, answer.spans, answer.finish_reason) == ((), (), "abort")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": [4, 9]}, "of other tokens"),
        ({"token_ids": [9, 4, 2]}, "of other tokens"),
        ({"logprobs": None}, "of other tokens"),
        ({"weight_versions": None}, "do not tile 3 tokens"),
        ({"weight_versions": [{"start": 0, "end": 2, "version": "a-3"}]}, "do not tile"),
        ({"weight_versions": [{"start": 1, "end": 3, "version": "a-3"}]}, "do not tile"),
        (
            {"weight_versions": [{"start": 0, "end": 3, "version": "default"}]},
            "'default'",
        ),
    ],
)
def test_half_an_answer_is_none(change, why):
    body = deepcopy(BODY)
    body["choices"][0] |= change
    with pytest.raises(ValueError, match=why):
        read_answer(REQUEST, body, VERSIONS)


def test_weights_that_were_not_attested_have_no_answer():
    with pytest.raises(ValueError, match=r"labelled \['a-4'\], attested are \['a-3'\]"):
        read_answer(REQUEST, BODY, {"a-3": 3})


def test_an_answer_to_another_prompt_or_of_an_unknown_end_is_none():
    body = deepcopy(BODY)
    body["usage"]["prompt_tokens"] = 4
    with pytest.raises(ValueError, match="saw 4 prompt tokens"):
        read_answer(REQUEST, body, VERSIONS)
    body = deepcopy(BODY)
    body["choices"][0]["finish_reason"] = "repetition"
    with pytest.raises(KeyError):
        read_answer(REQUEST, body, VERSIONS)


FITTING = {
    "model_config": {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "dtype": "torch.bfloat16",
        "max_model_len": 4096,
    },
    "parallel_config": {
        "worker_extension_cls": "trainers.vllm_plugin.Holding",
        "data_parallel_size": 1,
    },
    "weight_transfer_config": {"backend": "rollhouse"},
}


@pytest.mark.parametrize(
    ("section", "change", "flag"),
    [
        ("model_config", {}, None),
        ("model_config", {"logprobs_mode": "raw_logprobs"}, "set --logprobs-mode processed"),
        ("model_config", {"generation_config": "auto"}, "set --generation-config vllm"),
        ("model_config", {"dtype": "torch.float32"}, "set --dtype bfloat16"),
        ("model_config", {"max_model_len": 4095}, "set --max-model-len 4096"),
        ("parallel_config", {"worker_extension_cls": ""}, "set --worker-extension-cls"),
        ("parallel_config", {"data_parallel_size": 2}, "set --data-parallel-size 1"),
        ("weight_transfer_config", {"backend": "nccl"}, "--weight-transfer-config"),
    ],
)
def test_a_server_that_does_not_fit_is_told_its_flag(section, change, flag):
    info = FITTING | {section: FITTING[section] | change}
    reason = unfit(info, compute_dtype="bfloat16", max_model_tokens=4096)
    assert reason is None if flag is None else flag in (reason or "")
