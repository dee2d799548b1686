"""What the trainer spares where no loss is, and the models for which it may."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, Qwen3Config

from trainers.loss_positions import checked_head
from trainers.packing import TrainingSequence, pack

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_only_the_first_layers_run_at_every_position(make_policy):
    policy = make_policy()
    ids = torch.arange(1, 13)
    mask = torch.zeros(12, dtype=torch.bool)
    mask[[3, 4, 9]] = True
    (microbatch,) = pack([TrainingSequence(ids, mask)], 64)
    seen = {}
    layers = policy.model.model.layers
    for number, layer in enumerate((layers[0], layers[-1])):
        for name in ("mlp.down_proj", "self_attn.k_proj"):
            layer.get_submodule(name).register_forward_hook(
                lambda module, args, output, key=(number, name): seen.update({key: output.shape[1]})
            )
    policy.logprobs(microbatch, torch.ones(3))
    assert seen == {
        (0, "mlp.down_proj"): 9,
        (0, "self_attn.k_proj"): 9,
        (1, "mlp.down_proj"): 3,
        (1, "self_attn.k_proj"): 9,
    }


@pytest.mark.parametrize(
    "config", [CohereConfig(**SIZES, logit_scale=0.5), GraniteConfig(**SIZES, logits_scaling=2.0)]
)
def test_logits_that_are_not_those_of_the_head_are_refused(config):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"changes its logits after its LM head.*such as Qwen3"):
        checked_head(model)


def test_a_checked_model_is_as_before():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=8)).eval()
    ids = torch.arange(5)[None]
    before = model(input_ids=ids).logits
    assert checked_head(model) is model.lm_head
    assert torch.equal(model(input_ids=ids).logits, before)
