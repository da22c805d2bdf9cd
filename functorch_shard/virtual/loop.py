"""The gradient of the mean over virtual ranks, with one order of additions for any number of real ones.

Note [Virtual ranks]: virtual rank v is the microbatch j of the real rank r, with v = j N + r. So microbatch j of all
ranks is a block of N neighbours among the V leaves of one tree (Note [Tree] in communication/collective.py). The
reduction of a buffer in backward sends each rank its part of the leaves, and adds nothing up on the way: an all-to-all,
the bytes of a reduce-scatter. What arrives is added up as the tree says, to one sum if N is a power of two, and to a
few if not; replicas exchange their sums in the same way. Sums wait for their neighbours in later microbatches: those of
at most log2(V/N) + 1 blocks. The mean divides by V, once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..collectives.sinks import inside
from ..communication.backend import Finished, Issue, Work, wrap
from ..communication.collective import Collective, Subtree, add_in_tree, sums_in_tree
from ..errors import reject
from ..layout.layout import Layout, shard_axis
from ..layout.trees import Sharded, check_sharded
from ..storage.memory_kind import to_memory_kind_of, to_working_device
from ..torch_internals.autograd import in_transform
from ..training.grad import grad_and_value as of_one
from .keys import Key


def ranks(layout: Layout) -> range:
    """The virtual ranks of this real rank, in the order that it runs them in: ``N`` apart."""
    return range(_Places(_checked("ranks", layout)).rank, layout.virtual_ranks, layout.num_ranks)


def grad(loss: Callable[..., Any]) -> Callable[..., Sharded]:
    """Return a function that computes the gradient of the mean of ``loss`` over all virtual ranks.

    :func:`grad_and_value` without the value.
    """
    both = grad_and_value(loss)
    return lambda params, batches, *args, key=None: both(params, batches, *args, key=key)[0]


def grad_and_value(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient and the mean of ``loss`` over all virtual ranks.

    Both have the same bits on any number N of ranks that divides V, as shards and replicas of any kind, on machines of
    one kind with one thread. ``loss`` is called once for each virtual rank of this rank, one after the other, as
    ``loss(params, batch, *args)``; it gathers ``params`` once. Collectives of its own are over the N real ranks.

    Args:
        loss: returns a floating-point scalar, or ``(scalar, aux)`` with ``has_aux``.
        has_aux: whether it returns ``(scalar, aux)``.

    Returns:
        A function ``(params, batches, *args, key=None)``. ``params``: a ``Sharded`` of a layout with virtual ranks.
        ``batches``: one for each of :func:`ranks`. ``key``: of this step; torch's global generators begin at
        ``key.fold_in(v)`` in virtual rank v, and are as they were afterwards. It returns ``(grads, value)``: the
        mean, or the sum with ``reduction="sum"``, over virtual ranks; or ``(grads, (value, [aux, ...]))``.

    Raises:
        ValueError: a layout without virtual ranks; another number of batches.
        NotImplementedError: on batched simulated ranks, whose kernels round otherwise; inside of another derivative;
            or where ``loss`` gathers twice, uses shards without a gather, or differentiates by its parameters itself.

    Cost:
        That of ``fs.grad`` for each virtual rank here: over any axis, the bytes of its reduce-scatters. Gradients are
        cast to ``reduce_dtype`` once, and added up in it. Memory for log2(V/N) + 1 gradients of shards. Replicas
        exchange theirs for each virtual rank, and gather the mean once.

    Example:
        >>> mesh = fs.simulated_mesh(2, kind="sequential")
        >>> layout = fs.plan({"w": torch.zeros(2)}, mesh, virtual_ranks=4)
        >>> params = fs.shard({"w": torch.tensor([1.0, 2.0])}, layout)
        >>> loss = lambda params, x: (fs.gather(params)["w"] * x).sum()
        >>> def step(params, x):    # x: of all virtual ranks
        ...     return fs.virtual.grad_and_value(loss)(params, [x[v] for v in fs.virtual.ranks(layout)])
        >>> grads, value = mesh.spmd(step, in_dims=(0, None))(params, torch.arange(4.0))
        >>> fs.gather(grads)["w"], value
        (tensor([1.5000, 1.5000]), tensor([4.5000, 4.5000]))
    """

    def gradient_and_value(params: Sharded, batches: Sequence[Any], *args: Any, key: Key | None = None) -> Any:
        check_sharded("virtual.grad", params)
        layout, device = _checked("grad", params.layout), params.layout.mesh.device
        if in_transform() or inside() or any(x.requires_grad for x in params.values() if isinstance(x, Tensor)):
            raise NotImplementedError("virtual.grad: differentiated once more. Its gradients have no derivative.")
        own = ranks(layout)
        free: list[_Sums] = layout.derived.setdefault((_Sums, own), [])  # each with a layout of its own, to use again
        sums, values, extra = free.pop() if free else _Sums(layout), list[Tensor](), list[Any]()
        there = Sharded(dict(params), sums.layout)

        def returned(params: Sharded, *args: Any) -> Any:
            sums.is_open = False
            result = loss(params, *args)
            sums.is_open = True
            return result

        for v, batch in zip(own, batches, strict=True):
            with key.fold_in(v).seeded(device) if key else nullcontext():
                grads, value = of_one(returned, has_aux=has_aux)(there, batch, *args)
            sums.end_microbatch(grads)
            values.append(value[0] if has_aux else value)
            extra.append(value[1] if has_aux else None)
        made = {
            key: to_memory_kind_of(sums.take_mean(key), x) if key in sums.keys else None for key, x in params.items()
        }
        sums.finish()
        free.append(sums)
        total = mean(values, layout)
        return Sharded(made, layout), (total, extra) if has_aux else total

    return gradient_and_value


def mean(values: Iterable[Tensor], layout: Layout) -> Tensor:
    """Compute the mean over all virtual ranks, in the order of gradients; the sum with ``reduction="sum"``.

    Args:
        values: a tensor for each of :func:`ranks`, of one shape, such as losses or numbers of right answers.
        layout: that of the parameters.

    Returns:
        A tensor of that shape, the same on every rank, without a derivative.

    Cost:
        One all-gather of the values over each axis.
    """
    places = _Places(_checked("mean", layout))
    with torch.no_grad():
        rows = torch.stack([to_working_device(x.detach(), layout.mesh.device) for x in values])[:, None]
        for axis in filter(None, (places.shards, places.replicas)):  # (V / N, N, ...), in the order of leaves
            rows = axis.issue("all_gather", rows.contiguous(), dim=1).wait()
        return _divided(_joined(sums_in_tree([*rows.flatten(0, 1)], 0)), layout)


def _checked(verb: str, layout: Layout) -> Layout:
    if not layout.virtual_ranks:
        raise ValueError(f"virtual.{verb}: a layout without virtual ranks: plan(model, mesh, virtual_ranks=24)")
    if layout.mesh.is_simulated or not layout.mesh.in_spmd:
        raise NotImplementedError(
            f"virtual.{verb}: on {layout.mesh}: kernels on batched ranks round otherwise. Use simulated_mesh(n, "
            'kind="sequential"), and call it inside of mesh.spmd.'
        )
    return layout


class _Places:
    """The axes that gradients are reduced over, and this rank's place on them, the replica first."""

    def __init__(self, layout: Layout) -> None:
        self.shards = shard_axis(layout) if layout.num_shards > 1 else None
        self.replicas = layout.mesh[layout.replicate_axis] if layout.axis_size(layout.replicate_axis) > 1 else None
        replica = int(self.replicas.backend.index()) if self.replicas else 0
        self.start = replica * layout.num_shards  # of the ranks of this replica
        self.rank = self.start + (int(self.shards.backend.index()) if self.shards else 0)


class _Sums:
    """The sums of gradients by buffer; made by the reductions of ``layout``, which return zeros to backward."""

    def __init__(self, given: Layout) -> None:
        self.given, self.places, self.is_open = given, _Places(given), False
        self.keys = {key: buffer for key, buffer in given.buffers.items() if buffer.trainable}
        self.sums: dict[str, list[Subtree]] = {key: [] for key in self.keys}
        self.begun = 0  # leaves before this microbatch
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._strays = list[Tensor]()  # whether there was more in a gradient than those zeros
        schedules = {key: given.schedules[key, None] for key in self.keys}
        lossy = [
            f"{key!r}: gradients in {each.returned}, added up in {each.reduced}"
            for key, each in schedules.items()
            if torch.promote_types(each.reduced, each.returned) != each.returned
        ]  # one rank alone would round them before they are added up
        reject("virtual.grad", lossy, "Pass MixedPrecision(keep_low_precision_grads=True).", NotImplementedError)
        self.layout = given.on(given.mesh.with_backend(wrap(self._issue)))

    def _issue(self, op: Collective, x: Tensor, send: Issue) -> Work:
        """Issue ``op``; in place of a reduction of gradients, what adds up leaves in the tree."""
        if op.key not in self.keys or op.kind not in ("psum_scatter", "psum"):
            return send(op, x)
        if not self.is_open or x.ndim != 1:
            raise NotImplementedError(f"virtual.grad: {op.key!r}: the loss differentiates by its parameters itself.")
        if op.kind == "psum_scatter":
            work = send(replace(op, kind="sums_in_tree", source=self.begun + self.places.start), x)

            def taken(sums: Tensor) -> Tensor:
                self._take(op.key, sums)
                return self._zeros_for(x.dtype, sums.shape[1])

            return work.then(taken)
        if self.keys[op.key].num_shards > 1:
            self._strays.append(x.any())
        elif not self._is_taken(op.key):  # whole on every rank
            self._take(op.key, self._over_shards(op.key, x))
        return Finished(self._zeros_for(x.dtype, x.numel()))

    def _zeros_for(self, dtype: torch.dtype, numel: int) -> Tensor:
        """What backward gets: the same memory for all buffers, as fresh memory costs more than to divide zeros."""
        if dtype not in self._zeros or self._zeros[dtype].numel() < numel:
            self._zeros[dtype] = torch.zeros(numel, dtype=dtype, device=self.given.mesh.device)
        return self._zeros[dtype][:numel]

    def _is_zeros(self, x: Tensor) -> bool:
        """Whether ``x`` is in that memory, which :meth:`finish` looks at once."""
        return any(x.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() for own in self._zeros.values())

    def _over_shards(self, key: str, x: Tensor) -> Tensor:
        """The sums of the leaves ``x`` of one replica, a row for each: this rank's part."""
        axis, start = self.places.shards, self.begun + self.places.start
        return x[None] if axis is None else axis.of(key).issue("sums_in_tree", x, source=start).wait()

    def _is_taken(self, key: str) -> bool:
        return bool(self.sums[key]) and self.sums[key][-1].start + self.sums[key][-1].size > self.begun

    def _take(self, key: str, rows: Tensor) -> None:
        """Exchange the sums of a microbatch of this replica with the others, and add them to those before."""
        if self._is_taken(key):
            raise NotImplementedError(f"virtual.grad: {key!r}: the loss gathers twice. Use one gather for both.")
        axis, size = self.places.replicas, self.given.num_shards
        starts = range(self.begun, self.begun + self.given.num_ranks, size)
        nodes = [sums_in_tree([0] * size, start) for start in starts]
        received = rows[None]
        if axis:  # each replica adds up a part, and has several sums unless shards are a power of two
            padded = pad(rows, (0, 0, 0, max(map(len, nodes)) - len(rows)))
            received = axis.of(key).issue("all_to_all", padded.unflatten(1, (axis.size, -1)).movedim(1, 0)).wait()
        sums = self.sums[key]
        for of_replica, each in zip(nodes, received, strict=True):
            for node, x in zip(of_replica, each, strict=False):
                add_in_tree(sums, node._replace(sum=x))
        for i, node in enumerate(sums):
            if node.sum.untyped_storage().nbytes() > node.sum.nbytes:
                sums[i] = node._replace(sum=node.sum.clone())  # without the memory of others

    def end_microbatch(self, grads: Sharded) -> None:
        """Take what was not reduced: all gradients of one rank, and those of units that no rank has gathered."""
        for key in self.keys:
            if not self._is_taken(key):
                x = grads[key].to(self.given.schedules[key, None].reduced)
                if self.given.num_ranks > 1:
                    x = x.new_zeros(self.keys[key].numel)
                self._take(key, self._over_shards(key, x))
            elif self.keys[key].num_shards > 1 and not self._is_zeros(grads[key]):
                self._strays.append(grads[key].any())
        self.begun += self.given.num_ranks

    def finish(self) -> None:
        """Raise if gradients came to shards by another way than a gather, which is not in the sums."""
        strays, self._strays, self.begun = [*self._strays, *(x.any() for x in self._zeros.values())], [], 0
        if any(map(bool, strays)):
            raise NotImplementedError("virtual.grad: the loss uses shards without a gather, as a norm of them does.")

    def take_mean(self, key: str) -> Tensor:
        """The mean over virtual ranks of the gradient of a buffer: this rank's shard; its sums are let go."""
        schedule = self.given.schedules[key, None]
        total, self.sums[key] = _joined(self.sums[key]), []
        x = _divided(total.to(schedule.carried), self.given).to(schedule.returned)
        for axis in (self.places.replicas, self.places.shards if self.keys[key].num_shards == 1 else None):
            x = axis.of(key).issue("all_gather", x).wait() if axis else x
        return x


def _joined(sums: Sequence[Subtree]) -> Tensor:
    """The sum of all leaves, the last nodes first."""
    total = sums[-1].sum
    for node in reversed(sums[:-1]):
        total = node.sum + total
    return total


def _divided(x: Tensor, layout: Layout) -> Tensor:
    return x / layout.virtual_ranks if layout.reduction == "mean" else x
