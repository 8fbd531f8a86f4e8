"""Check with an example that a model's stages, one after another, compute what the model does.

Dropout counts as computed alike where both draw the same numbers. What the example leaves in buffers is undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.larger.stages import arguments_of, stage_modules
from dist_core.partition.balance import Partition


def refuse_what_computes_otherwise(model: nn.Module, names: Sequence[str], found: Partition, example: Any) -> None:
    """Raise InvalidTraining if copies of the blocks compute something else than the model."""
    stages = stage_modules(model, names, found, range(len(found.stages)))
    difference = difference_between(model, stages, arguments_of(example))
    if difference is not None:
        raise InvalidTraining(
            f"the pipeline stages of {type(model).__name__} do not compute the same as the whole model "
            f"({difference}): a stage passes on only the first argument of a block, but the model's code gives "
            "blocks more arguments, or changes them between blocks. Move that code into the blocks, or train with "
            "layouts=('sharded',)"
        )


def difference_between(model: nn.Module, stages: Sequence[nn.Module], arguments: tuple[Any, ...]) -> str | None:
    """Describe the difference; None where there is none, or the model has no room or no numbers to be tried with.

    Raises InvalidTraining where the model itself fails.
    """
    place = next(model.parameters()).device
    tensors = [*model.parameters(), *model.buffers(), *(each for each in arguments if isinstance(each, torch.Tensor))]
    if any(each.is_meta for each in tensors):
        return None
    here = tuple(each.to(place) if isinstance(each, torch.Tensor) else each for each in arguments)
    with _as_before(model), torch.no_grad():
        model.eval()
        for stage in stages:
            stage.eval()
        try:
            expected = _drawn_alike(place, lambda: model(*here))
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            raise InvalidTraining(
                f"{type(model).__name__} fails on its example input: {type(error).__name__}: {error!s:.300}. Give "
                "example= with inputs like those of step()"
            ) from error
        try:
            values = _drawn_alike(place, lambda: _through(stages, here))
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            return f"they fail with {type(error).__name__}: {error!s:.200}"
    return None if _are_close(values, expected) else "their outputs differ"


def _through(stages: Sequence[nn.Module], arguments: tuple[Any, ...]) -> Any:
    values: Any = arguments
    for stage in stages:
        values = stage(*values) if isinstance(values, (tuple, list)) else stage(values)
    return values


def _drawn_alike(place: torch.device, compute: Any) -> Any:
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(0)
        return compute()


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    modes = {each: each.training for each in model.modules()}
    kept = [(each, each.clone()) for each in model.buffers()]
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _are_close(output: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(output, torch.Tensor)
            and output.shape == expected.shape
            and torch.allclose(output.to(expected.dtype), expected, rtol=1e-3, atol=1e-5, equal_nan=True)
        )
    if isinstance(expected, (tuple, list)):
        output = output if isinstance(output, (tuple, list)) else (output,)
        return len(output) == len(expected) and all(map(_are_close, output, expected))
    if isinstance(expected, Mapping):
        return (
            isinstance(output, Mapping)
            and output.keys() == expected.keys()
            and all(_are_close(output[key], each) for key, each in expected.items())
        )
    return type(output) is type(expected)
