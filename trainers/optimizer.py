"""AdamW over FP32 masters that the model never computes with.

After each step a master is rounded to bf16 and copied into the policy's parameter, so small updates
add up in the master until they move the published value. Masters and moments are sharded as the
parameters are; each rank steps its own part.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainers.loss_scale import LossScale
from trainers.policy import Policy


@dataclass(frozen=True)
class AdamWSettings:
    """Decoupled weight decay (Loshchilov and Hutter, 2019), applied to matrices only."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_gradient_norm: float


class MasterAdamW:
    """Owns the masters of a policy; `load` or a checkpoint fills them, `publish` shows them."""

    def __init__(self, policy: Policy, settings: AdamWSettings):
        self.policy = policy
        self.settings = settings
        self.num_steps = 0
        self.loss_scale = LossScale.of(policy.compute_dtype)
        self.masters = {
            name: torch.nn.Parameter(torch.zeros_like(parameter.to_local()))
            for name, parameter in policy.parameters.items()
        }
        decayed = {name for name, p in policy.parameters.items() if p.ndim >= 2}
        groups = [
            {
                "params": [m for name, m in self.masters.items() if name in decayed],
                "weight_decay": settings.weight_decay,
            },
            {
                "params": [m for name, m in self.masters.items() if name not in decayed],
                "weight_decay": 0.0,
            },
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @torch.no_grad()
    def load(self, values: Iterable[tuple[str, Tensor]], source: str) -> None:
        """Masters from published tensors, upcast, and shown; moments, steps and loss scale begin
        anew.

        Raises `ValueError` where they are not those of the model.
        """
        seen = []
        for name, value in self.policy.layout.joined(values):
            seen.append(name)
            if name in self.masters:
                self.masters[name].copy_(self.policy.local(name, value.float()))
        self.policy.check_names(seen, source)
        for master in self.masters.values():
            for moment in ("exp_avg", "exp_avg_sq"):
                self.adamw.state[master][moment].zero_()
        self.set_num_steps(0)
        self.loss_scale = LossScale.of(self.policy.compute_dtype)
        self.publish()

    def publish(self) -> None:
        """Copies every master, rounded to bf16, into the policy's parameter."""
        self.policy.set_local_values((n, m.detach()) for n, m in self.masters.items())

    def step(self, learning_rate: float) -> float | None:
        """One update from the policy's gradients, which it clears; returns their norm.

        The gradients are `loss_scale.value` times too large. The norm is the L2 norm over all
        parameters and ranks, before clipping. None where it is not finite and the scale could be
        halved: nothing else has changed, and the gradients must be computed again.

        Raises `ValueError` where the scale could not be halved, leaving masters and moments as they
        were.
        """
        gradients = []
        for name, parameter in self.policy.parameters.items():
            assert isinstance(parameter.grad, DTensor), f"{name} has no gradient"
            gradients.append(parameter.grad.to_local())
        norm = _global_norm(gradients) / self.loss_scale.value
        if not torch.isfinite(norm):
            if not self.loss_scale.halve():
                raise self.not_finite(f"the gradient norm is {float(norm)}")
            self._clear_gradients()
            return None
        clip = (self.settings.max_gradient_norm / (norm + 1e-6)).clamp(max=1.0)
        for master, gradient in zip(self.masters.values(), gradients, strict=True):
            master.grad = gradient.mul_(clip / self.loss_scale.value)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.num_steps += 1
        self.loss_scale.count()
        self._clear_gradients()
        self.publish()
        return float(norm)

    def not_finite(self, what: str) -> ValueError:
        """What to raise where the next step has no gradient."""
        range_of_float32 = ""
        if self.policy.compute_dtype == torch.float16:
            range_of_float32 = ' or with trainer.compute_dtype = "bfloat16", which has more range'
        return ValueError(
            f"optimizer step {self.num_steps + 1}: {what}; begin another run with a lower "
            f"trainer.learning_rate, a correction with a cap{range_of_float32}."
        )

    def _clear_gradients(self) -> None:
        self.adamw.zero_grad()
        for parameter in self.policy.parameters.values():
            parameter.grad = None

    def sharded_state(self) -> dict[str, Tensor]:
        """Masters and moments as sharded tensors over the same memory, by `kind.name`."""
        state: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            moments = self.adamw.state[master]
            parts = {
                "master": master.detach(),
                "exp_avg": moments["exp_avg"],
                "exp_avg_sq": moments["exp_avg_sq"],
            }
            parameter = self.policy.parameters[name]
            for kind, local in parts.items():
                state[f"{kind}.{name}"] = DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        return state

    def set_num_steps(self, num_steps: int) -> None:
        """The step count that bias correction uses, after `sharded_state` was filled."""
        self.num_steps = num_steps
        for master in self.masters.values():
            self.adamw.state[master]["step"].fill_(num_steps)


def _global_norm(gradients: list[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()
