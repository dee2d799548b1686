"""The fused log-probability path against log_softmax and autograd in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainers import token_logprobs as module
from trainers.token_logprobs import Targets, token_logprobs
from trainers.truncation import Truncation

POSITIONS, TOKENS, HIDDEN, VOCABULARY = 5, 12, 8, 30


def _targets(top_k: int = 0) -> Targets:
    generator = torch.Generator().manual_seed(0)
    truncation = Truncation(torch.full((TOKENS,), top_k), torch.ones(TOKENS), torch.zeros(TOKENS))
    return Targets(
        rows=torch.randint(0, POSITIONS, (TOKENS,), generator=generator),
        ids=torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        temperatures=torch.rand(TOKENS, generator=generator) + 0.5,
        truncation=truncation if top_k else None,
    )


def _inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = (POSITIONS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _expected(hidden, weight, bias, targets):
    """By autograd, in float64, from all logits at once."""
    logits = (hidden.double() @ weight.double().T + bias.double())[targets.rows]
    logits = logits / targets.temperatures[:, None].double()
    if targets.truncation is not None:
        top = logits.topk(int(targets.truncation.top_k[0]), dim=1).indices
        cut = torch.ones_like(logits, dtype=torch.bool).scatter_(1, top, False)
        logits = logits.masked_fill(cut.scatter_(1, targets.ids[:, None], False), -1e300)
    logprobs = logits.log_softmax(1)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return logprobs.gather(1, targets.ids[:, None])[:, 0], entropies


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 5 * VOCABULARY, module.CHUNK_BYTES])
def test_values_and_gradients_are_those_of_autograd(monkeypatch, top_k, chunk_bytes):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    targets = _targets(top_k)
    of_logprob, of_entropy = torch.linspace(-1, 2, TOKENS), torch.linspace(2, -1, TOKENS)
    gradients = []
    for function in (token_logprobs, _expected):
        inputs = _inputs()
        logprobs, entropies = function(*inputs, targets)
        (logprobs * of_logprob + entropies * of_entropy).sum().backward()
        gradients.append([logprobs.detach(), entropies.detach(), *(t.grad for t in inputs)])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=2e-5)


def test_a_bfloat16_weight_gradient_is_summed_in_float32(monkeypatch):
    """Chunks of one token each: summed in bfloat16, what one adds to 256 of them would be lost."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    count = 512
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = Targets(
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
        torch.ones(count),
        None,
    )
    logprobs, _ = token_logprobs(torch.ones(1, 1, dtype=torch.bfloat16), weight, None, targets)
    logprobs.sum().backward()
    # Each token adds 1 - p = 1/2 to the target's row.
    assert weight.grad.flatten().tolist() == [count / 2, -count / 2]


class _Largest(TorchDispatchMode):
    """The most elements that any operator's result has."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_of_all_positions_never_exist(monkeypatch):
    rows = 3
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * rows * VOCABULARY)
    with _Largest() as largest:
        logprobs, entropies = token_logprobs(*_inputs(), _targets())
        (logprobs.sum() + entropies.sum()).backward()
    # The weight's gradient is larger than the logits of three rows.
    assert rows * VOCABULARY < HIDDEN * VOCABULARY == largest.elements < TOKENS * VOCABULARY
