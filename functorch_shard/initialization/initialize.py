"""``init``: from a model without values to shards and buffers, one unit in memory at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import reject
from ..layout.layout import Layout
from ..layout.planning import aliases_of, named_tensors
from ..layout.trees import Sharded
from ..layout.validation import check_model
from ..mesh.agreement import value_lines
from ..sharding.shard import blank_rows, fill_rows, shard_of_rows
from ..torch_internals.autograd import outside_transforms
from .filling import Filling, Init

_RESETS = (
    "Give the module, or one around it, a reset_parameters() that fills its parameters and buffers, give the model the "
    "values of buffers that __init__ computes, or shard(model, layout, from_rank=0) a model with values."
)
_FUNCTION = (
    "init is called with each module, children first, as by model.apply(init), and fills whole tensors of that module "
    "or of modules inside. Let it call module.reset_parameters() where nothing else fills them, and give the model the "
    "values of buffers that __init__ computes."
)
_SAME = "Every rank must initialise the same model with one seed, and init may not draw from generators of its own."


def init(
    model: nn.Module, layout: Layout, *, seed: int = 0, init: Init | None = None
) -> tuple[Sharded, dict[str, Tensor]]:
    """Return fresh parameters and buffers, by each module's ``reset_parameters`` or by ``init``, a unit at a time.

    The values are bitwise the same for any number of ranks, any mesh, units and labels. Every reset draws from a stream
    of its own, derived from ``seed`` and the module's name. With ``init`` the values are those of
    ``torch.manual_seed(seed); model.apply(init)`` on a model with values. Neither the model nor torch's random numbers
    are touched. Hugging Face models start by ``init=model._init_weights``.

    Args:
        model: what ``layout`` was planned from, on the meta device or elsewhere: parameters' values are not looked at.
            Each module that has a ``reset_parameters``, or torch's private ``_reset_parameters``, is reset after the
            modules inside of it, and the last values count, as in constructors. Tied parameters are filled under their
            first name. A DTensor is filled as the whole tensor it stands for.
            A buffer that has values keeps them where nothing writes, so put a table that only ``__init__`` computes
            into the model before: ``model.rope.table = make_table()``.
        layout: from :func:`plan`.
        seed: any int, the same on every rank.
        init: called in place of resets with every module of a copy, children first. It fills whole tensors of this
            module or of modules inside, one unit after the other; the last values count. A method of ``model`` is
            called as that of the copy.

    Returns:
        ``(params, buffers)``: a ``Sharded`` as of :func:`shard`, and a dict name -> tensor on the mesh's device, as
        ``model.named_buffers()`` lists them, for :func:`apply`. Outside ``spmd`` on simulated ranks, both are stacked.

    Raises:
        TypeError: ``model`` is not a module, ``layout`` not a layout, or ``seed`` not an int.
        ValueError: the model is not the layout's, or parameters, or buffers without values, are left unfilled in part
            or whole; or ``init`` wrote to tensors outside of the module it was called with; all of them at once.
        RuntimeError: a reset or ``init`` raised, or the ranks disagree about ``seed`` or the values. An error on one
            rank comes on all.

    Cost:
        One all-gather of 32 bytes per axis. Memory: the shards, the buffers, and of whole tensors those of one module
        and what was written to of one unit. Every rank computes every unit.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> params, buffers = fs.init(model, fs.plan(model, fs.simulated_mesh(2)))
        >>> params["0"]   # row r = rank r: the weight, a gap, the bias
        tensor([[1., 1., 1., 0.],
                [0., 0., 0., 0.]])
        >>> buffers["0.running_var"]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        >>> three, _ = fs.init(model, fs.plan(model, fs.simulated_mesh(3)))
        >>> fs.testing.assert_trees_close(fs.gather(params), fs.gather(three), rtol=0, atol=0)

    Stands for FSDP's ``param_init_fn`` and its initialisation from the meta device.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"init: layout: got {type(layout).__name__}, expected a Layout from plan().")
    mesh, lines = layout.mesh, list[str]()  # the lines have to be equal on all ranks

    def build() -> tuple[Sharded, dict[str, Tensor]]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"init: model: got {type(model).__name__}, expected an nn.Module, whose modules are filled")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"init: seed: got {seed!r}, expected an int")
        tensors = named_tensors(model)
        check_model("init", tensors, aliases_of(tensors), layout)
        forked = [mesh.device] if mesh.device.type != "cpu" else []  # the CPU's random numbers always are
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(forked, device_type=mesh.device.type):
            return _fill(model, layout, seed, init, lines)

    return mesh.agree("init", build, lambda _: [f"seed={seed}", *lines], _SAME)


def _fill(
    model: nn.Module, layout: Layout, seed: int, init: Init | None, lines: list[str]
) -> tuple[Sharded, dict[str, Tensor]]:
    rows: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}  # of the model's buffers

    def take(name: str, x: Tensor) -> None:
        if init is not None:
            lines.extend(value_lines({name: x}, [name]))
        if name not in layout.slots:
            filled[name] = x
            return
        slot, key = layout.slots[name], layout.key_of[name]
        if slot.dtensor:
            from ..tensor_parallel.forms import cut_out

            x = cut_out(x, slot.dtensor, layout.tensor_meshes)
        fill_rows(rows[key], slot, x, layout.buffers[key], layout)

    buffers = dict(model.named_buffers())
    unit_of = {name: name.rpartition(".")[0] for name in buffers}
    unit_of |= {slot.name: unit.name for unit in layout.units for buffer in unit.buffers for slot in buffer.slots}
    device, ranks = layout.mesh.device, () if layout.mesh.in_spmd else tuple(layout.mesh.axes.values())
    with outside_transforms():
        rows.update({key: blank_rows(buffer, layout) for key, buffer in layout.buffers.items()})
        problems = Filling(model, init, unit_of, device, seed, take).fill()
    reject("init", problems, _RESETS if init is None else _FUNCTION)
    shards = {key: shard_of_rows(rows[key], buffer, layout) for key, buffer in layout.buffers.items()}
    values = {n: filled[n] if n in filled else x.detach().to(device, copy=True) for n, x in buffers.items()}
    return Sharded(shards, layout), {n: x.expand(ranks + x.shape).contiguous() for n, x in values.items()}
