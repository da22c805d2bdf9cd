"""Options of a step that are tensors, for example a learning rate that a program computes or differentiates by.

They are inputs of the step as parameters are: below a vmap they have its rows, and their derivatives raise. A closure
over them would have no derivative, which is a zero without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..torch_internals.tensors import as_number, is_number
from ..torch_internals.tracing import RefusedError, assert_when_run, untraceable
from ..torch_internals.transforms import being_traced

OPTIONS = "(options)"  # among the inputs of a step, by key of a buffer

Options = Mapping[str, Any]


@dataclass(frozen=True)
class TensorOptions:
    """The tensors among the options of a step, each once. Numbers of a traced program are not: they have no rows."""

    given: Sequence[Tensor]

    @classmethod
    def of(cls, options: Iterable[Options]) -> TensorOptions:
        """Those in ``options``, one mapping for each label."""
        found = [x for each in options for value in each.values() for x in _parts(value) if _is_input(x)]
        return cls(list({id(x): x for x in found}.values()))

    def inputs(self, rows: tuple[int, ...]) -> dict[str, list[Tensor]]:
        """For ``run_below_transforms``, with dims for the ``rows`` that other inputs have in front."""
        return {OPTIONS: [x.expand((*rows, *x.shape)) for x in self.given]} if self.given else {}

    def placed(self, options: Mapping[str, Options], values: Sequence[Tensor]) -> dict[str, Options]:
        """``options`` of every buffer with ``values`` for the given tensors; equal options stay the same objects."""
        if not self.given:
            return dict(options)
        mark = as_number if being_traced() else _as_it_is  # constructors would compare it
        new = {id(x): mark(value) for x, value in zip(self.given, values, strict=True)}
        found = {id(each): {name: _replaced(x, new) for name, x in each.items()} for each in options.values()}
        return {key: found[id(each)] for key, each in options.items()}


@contextmanager
def readings_explained(name: str, options: Sequence[Options]) -> Iterator[None]:
    """A context in which the class of this name updates: if it reads a value while it is traced, an error says so."""
    try:
        yield
    except untraceable() as error:
        given = {option: x for each in options for option, x in each.items() if option != "lr"}
        unknown = ", ".join(option for option, x in given.items() if any(isinstance(y, Tensor) for y in _parts(x)))
        why = _OF_OPTIONS.format(name=name, unknown=unknown) if unknown else _OF_STATE.format(name=name)
        refused = RefusedError(f"{why} compile the gradients, and call opt.step outside.")
        raise refused.with_traceback(error.__traceback__) from error


_OF_OPTIONS = (
    "step: {name} reads its options, and the values of {unknown} are not known when a step is recorded. "
    "Pass an fs.optimizer with the values as an argument of the step, which is recorded anew for each; or"
)
_OF_STATE = "step: {name} reads values of its state or of tensors when it updates, which a recorded step cannot do:"


_WHAT = "options, for example lr, on all ranks"


def same_in_rows(values: Iterable[Tensor], rows: tuple[int, ...], what: str = _WHAT) -> bool:
    """Whether each of ``values`` is the same in all rows of a batch; ``what`` they are, for an error."""
    return all(_same(x, rows, what) for x in values) if rows else True


def of_first_row(values: Iterable[Tensor], rows: tuple[int, ...]) -> list[Tensor]:
    """``values`` of one row."""
    return [x[(0,) * len(rows)] if rows else x for x in values]


def _same(x: Tensor, rows: tuple[int, ...], what: str) -> bool:
    if not all(rows):
        return True
    equal = (x == x[(0,) * len(rows)]).all()
    if being_traced():
        assert_when_run(equal, f"step: a compiled step needs the same {what}")
        return True
    return bool(equal)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _is_input(x: Any) -> bool:
    return isinstance(x, Tensor) and not is_number(x)


def _parts(value: Any) -> Sequence[Any]:
    """A pair such as ``betas``, or one value."""
    return value if isinstance(value, (tuple, list)) else (value,)


def _replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(new.get(id(x), x) for x in value)
    return new.get(id(value), value)
