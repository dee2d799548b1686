"""What a trainer's forward pass is held against: transformers alone, one sequence at a time."""

import copy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainers.packing import TrainingSequence
from trainers.policy import Policy


def plain_copy(policy: Policy) -> PreTrainedModel:
    """The policy's values in an unsharded model with the plainest attention."""
    config = copy.deepcopy(policy.model.config)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    named = dict(model.named_parameters())
    assert named.keys() == policy.parameters.keys()
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            named[name].copy_(parameter.full_tensor())
    return model.eval()


def action_logits(model: PreTrainedModel, sequence: TrainingSequence) -> Tensor:
    """Logits that predict the sequence's action tokens, one row each."""
    logits = model(input_ids=sequence.token_ids[None], use_cache=False).logits[0]
    return logits[sequence.action_mask.nonzero().flatten() - 1]


def action_logprobs(
    model: PreTrainedModel, sequence: TrainingSequence, temperature: float
) -> Tensor:
    """Log-probability of each of the sequence's action tokens."""
    logprobs = (action_logits(model, sequence) / temperature).log_softmax(-1)
    return logprobs.gather(1, sequence.token_ids[sequence.action_mask][:, None])[:, 0]
