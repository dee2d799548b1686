"""Replayed experts against mixtures written out by hand, one sequence at a time."""

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.plain_transformers import action_logprobs, plain_copy
from trainers.packing import TrainingSequence, empty_microbatch, pack
from trainers.policy import Policy
from trainers.recorded_experts import MISSING

TEMPERATURE = 0.7
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}
QWEN = {**SIZES, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3}
# A grouped product in bfloat16 wants rows of whole 16 bytes.
QWEN |= {"moe_intermediate_size": 16}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}


def _softmax_of_all(logits, experts):
    return logits.softmax(-1).gather(1, experts)


def _softmax_of_chosen(logits, experts):
    return logits.gather(1, experts).softmax(-1)


def _sigmoid(logits, experts):
    chosen = logits.sigmoid().gather(1, experts)
    return 2.5 * chosen / chosen.sum(-1, keepdim=True)


ARCHITECTURES = {
    "qwen3_moe": (Qwen3MoeConfig(**QWEN, norm_topk_prob=False), _softmax_of_all),
    # A softmax over all, normalised over the chosen, is the softmax over the chosen.
    "normalised": (Qwen3MoeConfig(**QWEN, norm_topk_prob=True), _softmax_of_chosen),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=3),
        _softmax_of_chosen,
    ),
    "olmoe": (OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3), _softmax_of_all),
    # One dense layer, and two groups of experts of which a router takes one.
    "deepseek_v3": (
        DeepseekV3Config(
            **{**SIZES, "num_hidden_layers": 3},
            **LATENT,
            v_head_dim=8,
            moe_intermediate_size=12,
            n_routed_experts=6,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
        ),
        _sigmoid,
    ),
}


class ByHand(nn.Module):
    """A mixture that computes every expert of every token and weighs those that `given` names."""

    def __init__(self, block, weigh, given, layer):
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        self.shared_experts = getattr(block, "shared_experts", None)
        self.weigh, self.given, self.layer = weigh, given, layer

    def forward(self, hidden):
        x = hidden[0]
        logits = x @ self.gate.weight.T
        recorded = self.given["experts"][:, self.layer].long()
        own = self.gate(hidden)[-1].reshape(recorded.shape)
        chosen = torch.where(recorded == MISSING, own, recorded)
        gate, up = torch.einsum("th,eih->tei", x, self.experts.gate_up_proj).chunk(2, -1)
        of_all = torch.einsum("tei,ehi->teh", nn.functional.silu(gate) * up, self.experts.down_proj)
        weights = self.weigh(logits, chosen)
        out = (of_all[torch.arange(len(x))[:, None], chosen] * weights[..., None]).sum(1)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out[None]


def _by_hand(policy, weigh):
    plain, given = plain_copy(policy), {}
    layer = 0
    for decoder in plain.model.layers:
        if hasattr(decoder.mlp, "gate"):
            decoder.mlp = ByHand(decoder.mlp, weigh, given, layer)
            layer += 1
    return plain, given


def _experts(generator, length, num_layers, num_missing=0):
    scores = torch.rand(length, num_layers, 6, generator=generator)
    experts = scores.topk(3).indices.sort(-1).values.to(torch.int16)
    experts[length - num_missing :] = MISSING
    return experts


def _sequences(num_layers):
    """A group of four that share a prompt of seven tokens, as does their routing in two of them; of
    the third it differs from the fourth token on, of the last throughout, and its end is missing.
    """
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, 32, (7,), generator=generator)
    of_prompt = _experts(generator, 7, num_layers)
    late = torch.cat([of_prompt[:3], _experts(generator, 4, num_layers)])
    other = _experts(generator, 7, num_layers)
    sequences = []
    for number, routed in enumerate((of_prompt, of_prompt, late, other)):
        answer = torch.randint(0, 32, (5,), generator=generator)
        experts = [routed, _experts(generator, 5, num_layers, 1 + 2 * (number == 3))]
        mask = torch.arange(12) >= 7
        sequences.append(TrainingSequence(torch.cat([prompt, answer]), mask, torch.cat(experts)))
    return sequences


@pytest.fixture(scope="module", params=ARCHITECTURES)
def replayed(request, one_rank, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config, weigh = ARCHITECTURES[request.param]
    config.save_pretrained(folder)
    torch.manual_seed(3)
    policy = Policy(folder, torch.float32, torch.device("cpu"), routing_replay=True)
    return policy, weigh


def test_logprobs_and_gradients_are_those_of_the_recorded_experts(replayed):
    policy, weigh = replayed
    assert policy.routed_layers.top_k == 3
    sequences = _sequences(len(policy.routed_layers.places))
    plain, given = _by_hand(policy, weigh)
    expected = []
    for sequence in sequences:
        given["experts"] = sequence.experts
        expected.append(action_logprobs(plain, sequence, TEMPERATURE))
    alone = torch.cat(expected)
    values = torch.linspace(-1, 2, len(alone))
    (alone * values).sum().backward()
    # Of 44 tokens read, the second shares 7 with the first, and the third 3.
    (whole,) = pack(sequences, 1000)
    assert whole.num_tokens == 44 - 7 - 3
    for microbatches in ([whole], pack(sequences, 15), [*pack(sequences, 1), empty_microbatch()]):
        logprobs = torch.zeros(len(values))
        for microbatch in microbatches:
            index = microbatch.action_index
            found, _ = policy.logprobs(microbatch, torch.full((len(index),), TEMPERATURE))
            (found * values[index]).sum().backward()
            logprobs[index] = found.detach()
        torch.testing.assert_close(logprobs, alone.detach(), rtol=0, atol=1e-5)
        for name, parameter in plain.named_parameters():
            gradient = policy.parameters[name].grad.full_tensor()
            assert parameter.grad.norm() > 0, name
            assert (gradient - parameter.grad).norm() / parameter.grad.norm() <= 1e-5, name
            policy.parameters[name].grad = None


def test_gradients_of_the_router_equal_finite_differences(replayed):
    """At fixed experts the log-probability is smooth in the router, whatever its own choice.

    Norms compute in float32, so the step is not small.
    """
    policy, weigh = replayed
    sequence = _sequences(len(policy.routed_layers.places))[0]
    plain, given = _by_hand(policy, weigh)
    given["experts"] = sequence.experts
    plain.double()
    (microbatch,) = pack([sequence], 1000)
    policy.logprobs(microbatch, torch.full((5,), TEMPERATURE))[0].sum().backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in plain.named_parameters():
        if not name.endswith("mlp.gate.weight"):
            continue
        direction = torch.randn(parameter.shape, generator=generator).double()
        sums = []
        with torch.no_grad():
            for step in (1e-3, -2e-3):
                parameter += step * direction
                sums.append(action_logprobs(plain, sequence, TEMPERATURE).sum())
        slope = float(sums[0] - sums[1]) / 2e-3
        found = float((policy.parameters[name].grad.full_tensor() * direction).sum())
        assert abs(slope) > 1e-3 and found == pytest.approx(slope, rel=5e-3)
        with torch.no_grad():
            parameter += 1e-3 * direction
    for parameter in policy.parameters.values():
        parameter.grad = None


@torch.no_grad()
def test_agreement_counts_what_the_router_would_have_taken(replayed):
    policy, _ = replayed
    num_layers = len(policy.routed_layers.places)
    base = _sequences(num_layers)[0]
    nothing = torch.full_like(base.experts, MISSING)
    one = torch.ones(5)
    (microbatch,) = pack([TrainingSequence(base.token_ids, base.action_mask, nothing)], 100)
    policy.logprobs(microbatch, one)
    assert policy.routing.agreeing().tolist() == [[0] * num_layers, [0] * num_layers]
    own = torch.stack(policy.routing._own, 1).sort(-1).values.to(torch.int16)

    # The router's own, but for another expert at two positions of the last layer.
    experts = torch.cat([own, nothing[11:]])
    for position in (2, 5):
        missing = set(range(6)) - set(experts[position, -1].tolist())
        experts[position, -1, 0] = min(missing)
    experts[8:] = MISSING
    sequences = [TrainingSequence(base.token_ids, base.action_mask, experts)] * 2
    (microbatch,) = pack(sequences, 100)
    assert microbatch.num_tokens == 11
    policy.logprobs(microbatch, torch.ones(10))
    counts = policy.routing.agreeing()
    metrics = policy.routing.metrics(counts, sequences)
    assert metrics["routing/num_replayed"] == 16 and metrics["routing/num_not_replayed"] == 6
    places = policy.routed_layers.places
    expected = {f"routing/agreement_layer_{place:03d}": 1.0 for place in places}
    expected[f"routing/agreement_layer_{places[-1]:03d}"] = 0.75
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["routing/agreement"] == pytest.approx(1 - 0.25 / num_layers)
    # One of three experts is another at a quarter of the positions of one layer.
    assert metrics["routing/overlap"] == pytest.approx(1 - 0.25 / 3 / num_layers)


def test_a_pass_without_recorded_experts_is_the_routers_own(replayed):
    policy, _ = replayed
    sequence = _sequences(len(policy.routed_layers.places))[0]
    plain = plain_copy(policy)
    (microbatch,) = pack([TrainingSequence(sequence.token_ids, sequence.action_mask)], 100)
    with torch.no_grad():
        found, _ = policy.logprobs(microbatch, torch.full((5,), TEMPERATURE))
        expected = action_logprobs(plain, sequence, TEMPERATURE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert policy.routing.agreeing().sum() == 0
    assert policy.routing.metrics(policy.routing.agreeing(), [sequence])
    only = policy.routing.metrics(
        policy.routing.agreeing(), [TrainingSequence(sequence.token_ids, sequence.action_mask)]
    )
    assert only == {"routing/num_replayed": 0.0, "routing/num_not_replayed": 11.0}


def test_bfloat16_replays_the_same_experts(one_rank, tmp_path):
    ARCHITECTURES["qwen3_moe"][0].save_pretrained(tmp_path)
    torch.manual_seed(3)
    policy = Policy(tmp_path, torch.bfloat16, torch.device("cpu"), routing_replay=True)
    (microbatch,) = pack(_sequences(2), 1000)
    chosen = []
    mixture = policy.model.model.layers[1].mlp.experts
    mixture.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    policy.logprobs(microbatch, torch.ones(20))[0].sum().backward()
    known = microbatch.experts[:, 1] != MISSING
    assert torch.equal(chosen[0][known], microbatch.experts[:, 1][known].long())
    router = policy.parameters["model.layers.1.mlp.gate.weight"]
    assert router.grad.dtype == torch.float32 and router.grad.full_tensor().norm() > 0


def test_a_router_that_cannot_be_replayed_is_refused_with_the_way_out(one_rank, tmp_path):
    PhimoeConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2).save_pretrained(tmp_path)
    device = torch.device("cpu")
    sentence = (
        "the routing of PhimoeForCausalLM cannot be replayed: a layer takes its experts by 0 calls "
        "of topk over their scores, and not by one; set trainer.routing_replay = false"
    )
    with pytest.raises(ValueError, match=sentence):
        Policy(tmp_path, torch.float32, device, routing_replay=True)
    assert Policy(tmp_path, torch.float32, device).routing is None


def test_a_dense_model_has_nothing_to_replay(one_rank, tmp_path):
    Qwen3Config(**SIZES, head_dim=8).save_pretrained(tmp_path)
    policy = Policy(tmp_path, torch.float32, torch.device("cpu"), routing_replay=True)
    assert policy.routing is None and policy.routed_layers is None
