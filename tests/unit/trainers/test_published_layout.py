"""Parameters of mixtures against what transformers itself writes and reads."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from tasks.weights.checkpoints import published_values
from trainers import checkpoint
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.policy import Policy
from trainers.published_layout import PublishedLayout

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=5, moe_intermediate_size=6),
    # Names of its own, and a router under another one.
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
}
SETTINGS = AdamWSettings(
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, max_gradient_norm=1.0
)


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    model.to(torch.bfloat16).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def test_a_version_is_loaded_as_transformers_does_and_published_as_it_was(
    one_rank, folder, tmp_path
):
    values = load_file(folder / "model.safetensors")
    policy = Policy(folder, torch.float32, torch.device("cpu"))
    optimizer = MasterAdamW(policy, SETTINGS)
    optimizer.load(reversed(values.items()), str(folder))
    loaded = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
    assert len(values) > len(policy.parameters) == len(loaded)
    for name, parameter in policy.parameters.items():
        assert torch.equal(parameter.full_tensor(), loaded[name]), name
    checkpoint.save(tmp_path / "checkpoint", optimizer, batch=1)
    published = dict(published_values(tmp_path / "checkpoint"))
    assert published.keys() == values.keys()
    for name, value in published.items():
        assert torch.equal(value, values[name]), name


def test_a_lacking_expert_is_named(one_rank, folder):
    values = load_file(folder / "model.safetensors")
    optimizer = MasterAdamW(Policy(folder, torch.float32, torch.device("cpu")), SETTINGS)
    lost = next(name for name in values if ".experts.3." in name)
    del values[lost]
    with pytest.raises(
        ValueError, match=f"1 tensors of the model are missing, the first of them {lost}"
    ):
        optimizer.load(values.items(), "the folder")


def test_a_dense_model_is_published_as_it_is(make_policy):
    assert PublishedLayout(make_policy().model).parts == {}
