"""``init_params`` and ``init_buffers``: from a model without values to shards, one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import reject
from ..layout.buffers import Unit
from ..layout.dtensor import cut_out
from ..layout.layout import Layout
from ..layout.planning import aliases_of, named_tensors
from ..layout.trees import Sharded
from ..layout.validation import check_model
from .module_reset import Resets
from .slicing import cut_buffer

T = TypeVar("T")
_ADVICE = (
    "Give the module, or one around it, a reset_parameters() that fills its parameters and buffers. "
    "Or build the model with values, on one rank, and shard(model, layout, from_rank=0)."
)


def init_params(model: nn.Module, layout: Layout, *, seed: int = 0) -> Sharded:
    """Fresh parameters, by each module's own ``reset_parameters``, without ever holding the whole model.

    The values are bitwise the same for any number of ranks, any mesh, units and labels: every module draws from a
    stream of its own, derived from ``seed`` and its name. Neither the model nor torch's random numbers are touched.

    Args:
        model: what ``layout`` was planned from, on the meta device or elsewhere: parameters' values are not looked at.
            The nearest module around a parameter that has a ``reset_parameters`` is to fill it. A module that has
            torch's private ``_reset_parameters`` instead (``MultiheadAttention``) is reset with all modules inside.
            Tied parameters are filled once, under their first name. A DTensor is filled as the whole tensor that it
            stands for, so values are those of the same model without tensor parallelism.
        layout: from :func:`plan`.
        seed: any int, the same on every rank.

    Returns:
        A ``Sharded`` as of :func:`shard`: on the mesh's device, and stacked outside ``spmd`` on simulated ranks.

    Raises:
        TypeError: ``model`` is not a module, ``layout`` not a layout, or ``seed`` not an int.
        ValueError: the model is not the layout's, or parameters are left unfilled, in part or whole, by their reset or
            for want of one; all of them at once.
        RuntimeError: a reset raised, or the ranks disagree about ``seed``. An error on one rank comes on all.

    Cost:
        One all-gather of 32 bytes per axis. Memory: the shards, one unit, and what else one module's reset fills. Every
        rank computes every unit; a module whose parameters are in several units is reset once for each of them, and one
        that leaves zeros in integers twice, to see that it did.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))
        >>> two, three = (init_params(model, fs.plan(model, fs.simulated_mesh(n))) for n in (2, 3))
        >>> two["0"]   # row r = rank r: the weight, a gap, the bias
        tensor([[1., 1., 1., 0.],
                [0., 0., 0., 0.]])
        >>> fs.testing.assert_trees_close(fs.gather(two), fs.gather(three), rtol=0, atol=0)

    Stands for FSDP's ``param_init_fn`` and its initialisation from the meta device.
    """
    return _on_all_ranks("init_params", model, layout, seed, lambda resets: _fill_shards(resets, layout))


def init_buffers(model: nn.Module, layout: Layout, *, seed: int = 0, from_model: bool = False) -> dict[str, Tensor]:
    """The buffers that go with :func:`init_params`: what the same resets leave in them, such as BatchNorm's statistics.

    A buffer that has values in ``model`` keeps them where no reset writes. So a table that only ``__init__`` computes
    is to be put into the model before: ``model.rope.table = make_table()``. Resets do write to the statistics of a
    pretrained model: those of the model itself are had with ``from_model=True``.

    Args:
        model: as for :func:`init_params`; buffers on the meta device have no values.
        layout: from :func:`plan`; its mesh says where.
        seed: as for :func:`init_params`.
        from_model: take the values that ``model`` has on this rank, and reset nothing: to go on from a pretrained
            model, next to ``shard(model, layout)``.

    Returns:
        A dict name -> new tensor on the mesh's device, as ``model.named_buffers()`` lists them, for :func:`apply`.
        Outside ``spmd`` on simulated ranks each has one leading rank dim per axis.

    Raises:
        TypeError, RuntimeError: as :func:`init_params`.
        ValueError: the model is not the layout's, or a buffer without values is left unfilled (with ``from_model``, is
            on the meta device); all of them at once.

    Cost:
        One all-gather of 32 bytes per axis. Memory: the buffers, and what one module's reset fills.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.BatchNorm1d(2)
        >>> init_buffers(model, fs.plan(model, fs.simulated_mesh(3)))["running_var"]   # row r = rank r
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    fill = _copy_buffers if from_model else _fill_buffers
    buffers = _on_all_ranks("init_buffers", model, layout, seed, fill, f"from_model={from_model}")
    if layout.mesh.in_spmd:
        return buffers
    ranks = tuple(layout.mesh.axes.values())
    return {name: x.expand(*ranks, *x.shape).contiguous() for name, x in buffers.items()}


def _on_all_ranks(
    verb: str, model: nn.Module, layout: Layout, seed: int, fill: Callable[[Resets], T], *options: str
) -> T:
    """``fill``, and no trace of it in torch's random numbers; an error on one rank comes on all."""
    if not isinstance(layout, Layout):
        raise TypeError(f"{verb}: layout: got {type(layout).__name__}, expected a Layout from plan().")
    device = layout.mesh.device

    def build() -> T:
        _check(verb, model, layout, seed)
        forked = [device] if device.type != "cpu" else []  # the CPU's random numbers always are
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(forked, device_type=device.type):
            return fill(Resets.of(model, device, seed))

    return layout.mesh.agree(verb, build, lambda _: [f"seed={seed}", *options])


def _check(verb: str, model: nn.Module, layout: Layout, seed: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{verb}: model: got {type(model).__name__}, expected an nn.Module, whose modules reset themselves"
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{verb}: seed: got {seed!r}, expected an int")
    tensors = named_tensors(model)
    check_model(verb, tensors, aliases_of(tensors), layout)


def _fill_shards(resets: Resets, layout: Layout) -> Sharded:
    shards: dict[str, Tensor] = {}
    problems = [problem for unit in layout.units for problem in _fill_unit(resets, unit, layout, shards)]
    reject("init_params", problems, _ADVICE)
    return Sharded(shards, layout)


def _fill_unit(resets: Resets, unit: Unit, layout: Layout, shards: dict[str, Tensor]) -> list[str]:
    """Add the shards of ``unit`` and free it; or report what is not filled."""
    slots = [slot for buffer in unit.buffers for slot in buffer.slots]
    whole, problems = resets.fill([slot.name for slot in slots])
    if not problems:
        values = {slot.name: cut_out(whole[slot.name], slot.dtensor, layout) for slot in slots}
        shards.update({buffer.key: cut_buffer(values, buffer, layout) for buffer in unit.buffers})
    return problems


def _fill_buffers(resets: Resets) -> dict[str, Tensor]:
    names = [name for name, _ in resets.model.named_buffers()]
    values, problems = resets.fill(names)
    reject("init_buffers", problems, _ADVICE + " Or give the model the values of these buffers, which it keeps.")
    return {name: values[name] for name in names}


def _copy_buffers(resets: Resets) -> dict[str, Tensor]:
    buffers = dict(resets.model.named_buffers())
    problems = [f"{name!r}: on the meta device, without values" for name, x in buffers.items() if x.is_meta]
    reject("init_buffers", problems, "Load the model's buffers first, or leave from_model out and have them reset.")
    return {name: x.detach().to(resets.device, copy=True) for name, x in buffers.items()}
