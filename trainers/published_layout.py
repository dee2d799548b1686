"""Published tensors and the parameters they are loaded into.

transformers keeps the experts of a mixture in one parameter where their checkpoints, and engines
that load these, have tensors for each, and it may rename others. Parameters, masters and moments
are in the model's layout; what is read from a version or published as one is in that of version 0.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tasks.weights.checkpoints import Part, published_parts


class PublishedLayout:
    """Cuts the parameters of a model into published tensors, and joins these.

    `parts` has the parameters that are published otherwise than they are: the tensors each one is
    cut into.

    Raises:
        ValueError: a tensor of the checkpoint is not a range of rows of one parameter.
    """

    def __init__(self, model: PreTrainedModel):
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._shapes = shapes
        places, rows = {}, {}
        start = 0
        for name, shape in shapes.items():
            # Each row of a matrix, and each value of a vector, by a number of its own.
            last = [1] if len(shape) > 1 else list(shape[-1:])
            rows[name] = torch.arange(start, start + _rows(shape)).view(*shape[:-1], *last)
            places |= {start: name}
            start += _rows(shape)
        starts = torch.tensor(list(places))
        self.parts: dict[str, list[Part]] = {}
        for published, numbers in revert_weight_conversion(model, rows).items():
            first, count = int(numbers.flatten()[0]), numbers.numel()
            begin = int(starts[int(torch.searchsorted(starts, first, right=True)) - 1])
            name = places[begin]
            of_parameter = shapes[name]
            if not torch.equal(numbers.flatten(), torch.arange(first, first + count)):
                raise ValueError(
                    f"{type(model).__name__} keeps {published} scattered over {name}, which the "
                    "trainer cannot publish; use a model whose experts are kept one after another."
                )
            shape = list(numbers.shape)
            if len(of_parameter) > 1:
                shape[-1] = of_parameter[-1]
            if published != name or shape != list(of_parameter):
                part = Part(published, first - begin, first - begin + count, tuple(shape))
                self.parts.setdefault(name, []).append(part)
        for name, parts in self.parts.items():
            assert sum(part.stop - part.start for part in parts) == _rows(shapes[name]), name

    def published(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(published name, tensor) pairs of (parameter name, whole tensor) pairs."""
        for name, value in values:
            yield from published_parts(name, value, self.parts)

    def joined(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, whole tensor) pairs of published ones in any order.

        A parameter comes once all of its parts have; names that are no part are passed on.
        Raises `ValueError` at the end where parts are missing.
        """
        owner = {part.name: name for name, parts in self.parts.items() for part in parts}
        found: dict[str, Tensor] = {}
        missing = set(owner)
        for published, value in values:
            name = owner.get(published)
            if name is None:
                yield published, value
                continue
            found[published] = value
            missing.discard(published)
            parts = sorted(self.parts[name], key=lambda part: part.start)
            if not missing.isdisjoint(part.name for part in parts):
                continue
            rows = [_checked(part, found.pop(part.name)).flatten() for part in parts]
            yield name, torch.cat(rows).view(self._shapes[name])
        if missing:
            raise ValueError(
                f"{len(missing)} tensors of the model are missing, the first of them "
                f"{min(missing)}; its config.json and weights must belong together."
            )


def _checked(part: Part, value: Tensor) -> Tensor:
    if tuple(value.shape) != part.shape:
        raise ValueError(
            f"{part.name} has shape {list(value.shape)} and the model wants "
            f"{list(part.shape)}; its config.json and weights must belong together."
        )
    return value


def _rows(shape: torch.Size) -> int:
    return shape.numel() // shape[-1] if len(shape) > 1 else shape.numel()
