"""A module during a call that replaces its tensors, put away while other ranks of the process use the module.

Attributes are replaced as a whole: a model may write to any of them while it runs. See Note [Own state].
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .tensors import version_of

_INSTEAD = (
    "simulated ranks share the model, where each real rank has one. fs.apply(model, params, buffers, x) returns new "
    "buffers instead; model.eval() only reads them."
)


class CalledModule:
    """A module whose tensors are replaced while it runs."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self._others = self._attributes()
        self._buffers = [(name, x, _content(x, owner)) for name, x, owner in _buffers(module)]

    def put_away(self) -> None:
        """Replace what this rank has by what others are to see."""
        self._exchange()

    def put_back(self) -> None:
        """The inverse; others may have set attributes meanwhile."""
        self._exchange()

    def _exchange(self) -> None:
        shown = self._attributes()
        for module, (attributes, containers) in zip(self.modules, self._others, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in containers:
                _fill(container, content)
        self._others = shown

    def _attributes(self) -> list[_Attributes]:
        return [_attributes_of(module) for module in self.modules]

    def refuse_writes(self, verb: str, root: nn.Module) -> None:
        """Raise if a buffer that the module had before the call has other values now."""
        now = {name: (x, owner) for name, x, owner in _buffers(root)}
        written = [name for name, x, before in self._buffers if _is_changed(x, before, *now.get(name, (x, None)))]
        if written:
            names = ", ".join(map(repr, written[:5])) + (" and others" if len(written) > 5 else "")
            raise RuntimeError(f"{verb}: the model wrote to its buffers {names}; {_INSTEAD}")


# The attributes of a module, and what those that are containers have in them.
_Attributes = tuple[dict[str, Any], list[tuple[Any, Any]]]


def _attributes_of(module: nn.Module) -> _Attributes:
    attributes = module.__dict__.copy()
    return attributes, [(x, _content_of(x)) for x in attributes.values() if isinstance(x, (dict, list, set))]


def _content_of(container: Any) -> Any:
    if not len(container):
        return ()  # most are empty: those of hooks
    if isinstance(container, dict) and not isinstance(container, OrderedDict):
        return dict.copy(container)  # without what a subclass does when it is read
    return container.copy()


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, dict) and not isinstance(container, OrderedDict):
        dict.clear(container)
        dict.update(container, content)
    elif len(container) or len(content):
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor, nn.Module]]:
    return [
        (f"{path}.{name}" if path else name, x, owner)
        for path, owner in module.named_modules()
        for name, x in dict.items(owner._buffers)
        if x is not None
    ]


def _content(x: Tensor, owner: nn.Module) -> tuple[int, Tensor | None]:
    """A normalization writes to its statistics without counting; they are small."""
    return version_of(x), x.detach().clone() if isinstance(owner, _NormBase) else None


def _is_changed(x: Tensor, before: tuple[int, Tensor | None], now: Tensor, _: Any) -> bool:
    version, values = before
    if x.is_meta:
        return False
    if values is not None:
        return not _equal(values, now)
    return version_of(x) != version or (now is not x and not _equal(x, now))


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | (x != x) & (y != y)).all())
