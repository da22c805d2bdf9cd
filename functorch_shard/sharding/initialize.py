"""``init_params`` and ``init_buffers``: from a model without values to shards, one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from ..mesh.fingerprints import value_lines
from .module_init import Init, fill_modules
from .module_reset import Resets
from .slicing import blank_rows, cut_buffer, fill_rows, shard_of_rows

T = TypeVar("T")
Fill = Callable[[nn.Module, Layout, int, list[str]], T]  # the last: gets lines that have to be equal on all ranks
_ADVICE = (
    "Give the module, or one around it, a reset_parameters() that fills its parameters and buffers. "
    "Or build the model with values, on one rank, and shard(model, layout, from_rank=0)."
)
_ADVICE_INIT = (
    "init is called with each module, children first, as by model.apply(init), and fills parameters of that module or "
    "of modules inside, each of them whole. If it leaves some as their constructor makes them, reset them before: "
    "def init(module): module.reset_parameters() where there is one, then model._init_weights(module)."
)
_OR_BUFFERS = " Or give the model the values of these buffers, which it keeps."
_SAME = "Every rank must initialise the same model with one seed, and init may not draw from generators of its own."


def init_params(model: nn.Module, layout: Layout, *, seed: int = 0, init: Init | None = None) -> Sharded:
    """Fresh parameters, by each module's own ``reset_parameters`` or by ``init``, without ever holding the whole model.

    The values are bitwise the same for any number of ranks, any mesh, units and labels: every module draws from a
    stream of its own, derived from ``seed`` and its name. Neither the model nor torch's random numbers are touched.

    With ``init`` they are those of ``torch.manual_seed(seed); model.apply(init)`` on a model with values: ``init`` is
    called with every module of a copy, children first, and finds the module's own parameters and buffers on the mesh's
    device and all others on the meta device. It may write to those of modules inside as well, one unit after the other.
    Hugging Face models start by ``init=model._init_weights``.

    Args:
        model: what ``layout`` was planned from, on the meta device or elsewhere: parameters' values are not looked at.
            The nearest module around a parameter that has a ``reset_parameters`` is to fill it. A module that has
            torch's private ``_reset_parameters`` instead (``MultiheadAttention``) is reset with all modules inside.
            Tied parameters are filled once, under their first name. A DTensor is filled as the whole tensor that it
            stands for, so values are those of the same model without tensor parallelism.
        layout: from :func:`plan`.
        seed: any int, the same on every rank.
        init: fills parameters, each of them whole, of the module that it is called with or of modules inside of it. A
            method of ``model`` is called as that of the copy. What it returns is not used. A parameter that is filled
            several times, for example a tied one, has the values of the last time.

    Returns:
        A ``Sharded`` as of :func:`shard`: on the mesh's device, and stacked outside ``spmd`` on simulated ranks.

    Raises:
        TypeError: ``model`` is not a module, ``layout`` not a layout, ``seed`` not an int, or ``init`` not a function.
        ValueError: the model is not the layout's, or parameters are left unfilled, in part or whole, by their reset, by
            ``init`` or for want of one; or ``init`` wrote to tensors outside of the module that it was called with; all
            of them at once.
        RuntimeError: a reset or ``init`` raised, or the ranks disagree about ``seed``, or about the values that
            ``init`` made. An error on one rank comes on all.

    Cost:
        One all-gather of 32 bytes per axis. Memory: the shards, one unit, and what else one module's reset fills. Every
        rank computes every unit; a module whose parameters are in several units is reset once for each of them, and one
        that leaves zeros in integers twice, to see that it did. With ``init``: the shards, and of whole tensors
        those of one module and what was written to of one unit.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))
        >>> two, three = (init_params(model, fs.plan(model, fs.simulated_mesh(n))) for n in (2, 3))
        >>> two["0"]   # row r = rank r: the weight, a gap, the bias
        tensor([[1., 1., 1., 0.],
                [0., 0., 0., 0.]])
        >>> fs.testing.assert_trees_close(fs.gather(two), fs.gather(three), rtol=0, atol=0)
        >>> ones = lambda module: [p.fill_(1) for p in module.parameters(recurse=False)]
        >>> init_params(model, fs.plan(model, fs.simulated_mesh(2)), init=ones)["0"]
        tensor([[1., 1., 1., 0.],
                [1., 1., 1., 0.]])

    Stands for FSDP's ``param_init_fn`` and its initialisation from the meta device.
    """
    return _on_all_ranks(
        "init_params", model, layout, seed, _fill_shards if init is None else partial(_shards_by, init)
    )


def init_buffers(model: nn.Module, layout: Layout, *, seed: int = 0, init: Init | None = None) -> dict[str, Tensor]:
    """The buffers that go with :func:`init_params`: what the same resets leave in them, such as BatchNorm's statistics.

    A buffer that has values in ``model`` keeps them where no reset writes. So a table that only ``__init__`` computes
    is to be put into the model before: ``model.rope.table = make_table()``. Resets do write to the statistics of a
    pretrained model: its own are ``dict(model.named_buffers())``, and on simulated ranks these expanded to all ranks.

    Args:
        model: as for :func:`init_params`; buffers on the meta device have no values.
        layout: from :func:`plan`; its mesh says where.
        seed: as for :func:`init_params`.
        init: as for :func:`init_params`, instead of resets.

    Returns:
        A dict name -> new tensor on the mesh's device, as ``model.named_buffers()`` lists them, for :func:`apply`.
        Outside ``spmd`` on simulated ranks each has one leading rank dim per axis.

    Raises:
        TypeError, RuntimeError: as :func:`init_params`.
        ValueError: the model is not the layout's, or a buffer without values is left unfilled; all of them at once.

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
    fill = _fill_buffers if init is None else partial(_buffers_by, init)
    buffers = _on_all_ranks("init_buffers", model, layout, seed, fill)
    if layout.mesh.in_spmd:
        return buffers
    ranks = tuple(layout.mesh.axes.values())
    with torch.inference_mode(False), torch.no_grad():
        return {name: x.expand(*ranks, *x.shape).contiguous() for name, x in buffers.items()}


def _on_all_ranks(verb: str, model: nn.Module, layout: Layout, seed: int, fill: Fill[T]) -> T:
    """``fill``, and no trace of it in torch's random numbers; an error on one rank comes on all."""
    if not isinstance(layout, Layout):
        raise TypeError(f"{verb}: layout: got {type(layout).__name__}, expected a Layout from plan().")
    device, values = layout.mesh.device, []

    def build() -> T:
        _check(verb, model, layout, seed)
        forked = [device] if device.type != "cpu" else []  # the CPU's random numbers always are
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(forked, device_type=device.type):
            return fill(model, layout, seed, values)

    return layout.mesh.agree(verb, build, lambda _: [f"seed={seed}", *values], _SAME)


def _check(verb: str, model: nn.Module, layout: Layout, seed: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{verb}: model: got {type(model).__name__}, expected an nn.Module, whose modules reset themselves"
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{verb}: seed: got {seed!r}, expected an int")
    tensors = named_tensors(model)
    check_model(verb, tensors, aliases_of(tensors), layout)


def _fill_shards(model: nn.Module, layout: Layout, seed: int, _: list[str]) -> Sharded:
    resets, shards = Resets.of(model, layout.mesh.device, seed), dict[str, Tensor]()
    problems = [problem for unit in layout.units for problem in _fill_unit(resets, unit, layout, shards)]
    reject("init_params", problems, _ADVICE)
    return Sharded(shards, layout)


def _fill_unit(resets: Resets, unit: Unit, layout: Layout, shards: dict[str, Tensor]) -> list[str]:
    """Add the shards of ``unit`` and free it; or report what is not filled."""
    slots = [slot for buffer in unit.buffers for slot in buffer.slots]
    whole, problems = resets.fill([slot.name for slot in slots])
    if not problems:
        values = {slot.name: cut_out(whole[slot.name], slot.dtensor, layout.tensor_meshes) for slot in slots}
        shards.update({buffer.key: cut_buffer(values, buffer, layout) for buffer in unit.buffers})
    return problems


def _fill_buffers(model: nn.Module, layout: Layout, seed: int, _: list[str]) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_buffers()]
    values, problems = Resets.of(model, layout.mesh.device, seed).fill(names)
    reject("init_buffers", problems, _ADVICE + _OR_BUFFERS)
    return {name: values[name] for name in names}


def _shards_by(init: Init, model: nn.Module, layout: Layout, seed: int, values: list[str]) -> Sharded:
    rows = {key: blank_rows(buffer, layout) for key, buffer in layout.buffers.items()}

    def take(name: str, x: Tensor) -> None:
        slot, key = layout.slots[name], layout.key_of[name]
        values.extend(value_lines({name: x}, [name]))
        fill_rows(rows[key], slot, cut_out(x, slot.dtensor, layout.tensor_meshes), layout.buffers[key], layout)

    unit_of = {slot.name: unit.name for unit in layout.units for buffer in unit.buffers for slot in buffer.slots}
    problems = fill_modules(model, init, unit_of, layout.mesh.device, seed, take)
    reject("init_params: init", problems, _ADVICE_INIT)
    return Sharded({key: shard_of_rows(rows[key], buffer, layout) for key, buffer in layout.buffers.items()}, layout)


def _buffers_by(init: Init, model: nn.Module, layout: Layout, seed: int, values: list[str]) -> dict[str, Tensor]:
    buffers, taken = dict(model.named_buffers()), dict[str, Tensor]()

    def take(name: str, x: Tensor) -> None:
        values.extend(value_lines({name: x}, [name]))
        taken[name] = x

    unit_of = {name: name.rpartition(".")[0] for name in buffers}
    problems = fill_modules(model, init, unit_of, layout.mesh.device, seed, take)
    reject("init_buffers: init", problems, _ADVICE_INIT + _OR_BUFFERS)
    kept = {name: x for name, x in buffers.items() if name not in taken}
    taken |= {name: x.detach().to(layout.mesh.device, copy=True) for name, x in kept.items()}
    return {name: taken[name] for name in buffers}
