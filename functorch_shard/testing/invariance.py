"""Trees compared leaf by leaf, programs that give the same on any ranks, and mutants of programs.

A *mutant* of a program is that program with one wrong collective, a word of mutation testing: what a test of the
program is worth shows in the mutants that it notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import optree
import torch
from torch import Tensor

from ..communication.backend import Axis, Issue, Work, wrap
from ..communication.collective import Collective
from ..communication.wrappers import skip
from ..containers import opened, place
from ..layout.layout import as_held
from ..layout.trees import Sharded, is_node
from ..mesh.mesh import Mesh, simulated_mesh
from ..running import RUN
from ..sharding.gather import gather
from ..sharding.shard import copy_dims

Axes = int | Mapping[str, int]
Program = Callable[[Mesh], Any]


def assert_trees_close(actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Raise unless two pytrees have one structure and close leaves; every leaf that differs is named.

    Args:
        actual: the tree under test.
        expected: what it should be; dtypes count. Mappings are compared by key: a ``Full`` and a ``dict`` are alike.
        rtol, atol: as in ``torch.testing.assert_close``; by default those of the dtype. They count for tensors, arrays
            of numpy, floats and complex numbers, of which NaN equals NaN; everything else has to be equal.

    Raises:
        AssertionError: a line for each leaf that is missing, too much, or different.

    Example:
        >>> assert_trees_close({"a": torch.ones(2)}, {"a": torch.ones(2) + 1e-9})
        >>> assert_trees_close({"a": torch.ones(2)}, {"a": torch.zeros(2)})
        Traceback (most recent call last):
        AssertionError: 1 leaf differs:
          ['a']: Tensor-likes are not close!
            Mismatched elements: 2 / 2 (100.0%)
            Greatest absolute difference: 1.0 at index (0,) (up to 1e-05 allowed)
            Greatest relative difference: inf at index (0,) (up to 1.3e-06 allowed)
    """
    got, want = _leaves(actual), _leaves(expected)
    problems = [f"{path}: missing" for path in want if path not in got]
    problems += [f"{path}: not expected" for path in got if path not in want]
    for path in got.keys() & want.keys():
        problems += _difference(path, got[path], want[path], rtol, atol)
    if problems:
        count = "1 leaf differs" if len(problems) == 1 else f"{len(problems)} leaves differ"
        raise AssertionError("\n  ".join([f"{count}:", *sorted(problems)]))


def _leaves(tree: Any) -> dict[str, Any]:
    paths, leaves, _ = optree.tree_flatten_with_path(opened(tree), none_is_leaf=True)
    return {place(path) or "the tree": x for path, x in zip(paths, leaves, strict=True)}


def _difference(path: str, got: Any, want: Any, rtol: float | None, atol: float | None) -> list[str]:
    alike = type(got) is type(want)
    number = isinstance(got, (float, complex)) or getattr(getattr(got, "dtype", None), "kind", None) in {*"biufc"}
    if not (isinstance(got, Tensor) and isinstance(want, Tensor)) and not (alike and number):
        return [] if alike and got == want else [f"{path}: got {got!r}, expected {want!r}"]
    try:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return [f"{path}: " + str(error).replace("\n\n", "\n").replace("\n", "\n    ")]
    return []


def assert_rank_invariant(
    program: Program,
    meshes: Sequence[Axes | Mesh] = (1, 2, 3, {"replicate": 2, "shard": 2}),
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Raise unless a program gives the same whole values on every mesh: what it computes does not depend on ranks.

    The one property that all sharded programs should have, and most errors of theirs break: a reduction that is
    missing, that counts twice or is over another axis, a mean over the wrong number, padding or copies that count.

    Args:
        program: ``program(mesh) -> tree`` plans, shards, and splits one global batch that does not depend on the mesh.
            It returns whole values: what ``mesh.spmd(..., out_dims=None)`` or ``gather`` returns outside of ``spmd``.
            A ``Sharded`` in the tree is gathered, in its stored dtypes, after its copies were compared.
        meshes: numbers of ranks, sizes of axes by name, for simulated ranks; or meshes. The first one is what the
            others are compared with: of one rank, it communicates nothing. In a function that :func:`run_ranks` runs,
            ``[1, fs.init_mesh()]`` compares real ranks.
        rtol, atol: as in :func:`assert_trees_close`. Sums over ranks are rounded in other places than those of one
            batch, so use float64.

    Raises:
        AssertionError: the first mesh that differs, with each leaf that does and by how much.

    Cost:
        A run of the program on each mesh.

    Example:
        >>> x = torch.arange(12.0)
        >>> def mean(mesh):
        ...     step = mesh.spmd(lambda x: fs.collectives.pmean(x.mean(), mesh["shard"]), out_dims=None)
        ...     return {"mean": step(mesh.split(x))}
        >>> assert_rank_invariant(mean, [1, 2, 3])
        >>> def total(mesh):
        ...     step = mesh.spmd(lambda x: fs.collectives.psum(x.mean(), mesh["shard"]), out_dims=None)
        ...     return {"total": step(mesh.split(x))}
        >>> assert_rank_invariant(total, [1, 2, 3])
        Traceback (most recent call last):
        AssertionError: assert_rank_invariant: on Mesh(shard=2, simulated, cpu), unlike Mesh(shard=1, simulated, cpu):
        1 leaf differs:
          ['total']: Scalars are not close!
            Expected 5.5 but got 11.0.
            Absolute difference: 5.5 (up to 1e-05 allowed)
            Relative difference: 1.0 (up to 1.3e-06 allowed)
    """
    first, *others = (each if isinstance(each, Mesh) else simulated_mesh(each) for each in meshes)
    expected = _whole(program(first))
    for mesh in others:
        try:
            assert_trees_close(_whole(program(mesh)), expected, rtol=rtol, atol=atol)
        except AssertionError as error:
            raise AssertionError(f"assert_rank_invariant: on {mesh}, unlike {first}:\n{error}") from None


def _whole(tree: Any) -> Any:
    """Return ``tree`` with whole parameters in place of each ``Sharded``."""
    whole = lambda x: _whole_of(x) if isinstance(x, Sharded) else x  # noqa: E731
    return optree.tree_map(whole, opened(tree), is_leaf=is_node, none_is_leaf=True)


def _whole_of(tree: Sharded) -> dict[str, Any]:
    """Return whole parameters by name, and what is one number for a buffer, as the steps of an optimizer, by key."""
    layout, kept = tree.layout, {key: x.detach() for key, x in tree.items() if x is not None}
    num_axes = len(layout.mesh.axes) if layout.mesh.is_simulated else 0
    numbers = {key: x for key, x in kept.items() if x.ndim == num_axes}
    for key, x in kept.items() if num_axes else ():
        for dim in range(num_axes) if key in numbers else copy_dims(layout.buffers[key], layout):
            copies = x.select(dim, 0).unsqueeze(dim).expand_as(x)
            assert_trees_close({f"copies of {key}": x}, {f"copies of {key}": copies}, rtol=0, atol=0)
    shards = {key: x for key, x in kept.items() if key not in numbers}
    full = gather(Sharded(shards, as_held(layout, shards)), lazy=False)
    return {**full, **{key: x.flatten()[0] for key, x in numbers.items()}}


@dataclass(frozen=True)
class Mutant:
    """A program, one of whose collectives is wrong on every mesh; :func:`mutants` makes them.

    Args:
        program: the right one.
        number: which of the collectives that a rank issues, from 0, those of backward included.
        change: ``"dropped"``: each rank keeps what it has; ``"doubled"``: twice the result; or the name of another
            axis, over which it is.
        collective: as the right program issued it.
    """

    program: Program
    number: int
    change: str
    collective: Collective

    def __call__(self, mesh: Mesh) -> Any:
        """Run it; on sequential ranks in place of batched ones, so that values may differ where they should not."""
        return self.program(_watched(mesh, self._issue))

    def is_noticed_by(self, check: Callable[[Program], object]) -> bool:
        """Return whether ``check``, for example ``assert_rank_invariant``, raises any error of it."""
        try:
            check(self)
        except Exception:  # of shapes that do not fit, too
            return True
        return False

    def _issue(self, number: int, axes: Mapping[str, Axis], op: Collective, x: Tensor, send: Issue) -> Work:
        if number != self.number or self.change not in ("dropped", "doubled", *axes):
            return send(op, x)
        if self.change == "dropped":
            return skip(op.kind)(axes[op.axis]).send(op, x)
        if self.change == "doubled":
            return send(op, x).then(lambda result: result + result)
        return axes[self.change].send(replace(op, axis=self.change), x)

    def __str__(self) -> str:
        how = self.change if self.change in ("dropped", "doubled") else f"over {self.change!r}"
        return f"collective {self.number}, {self.collective} over {self.collective.axis!r}: {how}"


def mutants(program: Program, mesh: Mesh | None = None) -> list[Mutant]:
    """Return the program with one wrong collective each: dropped, doubled, or over another axis.

    A test of a program should notice them, :meth:`Mutant.is_noticed_by`. One that it does not notice shows a
    collective that the test does not depend on, or that the program does not: where a factor has no effect, as one of
    a gradient before Adam, or a value is the same on every rank anyway. Simulated mutants run on sequential ranks, so a
    model with collectives inside is bound, ``fs.bind(model, full)(x)``, and not called by ``functional_call``.

    Args:
        program: as in :func:`assert_rank_invariant`.
        mesh: where the collectives are counted, of several axes for mutants over another one; by default 2 x 2
            simulated ranks.

    Returns:
        Mutants in the order of their collectives, each a program like ``program``.

    Cost:
        One run of the program.

    Example:
        >>> x = torch.arange(8.0)
        >>> def mean(mesh):
        ...     return mesh.spmd(lambda x: fs.collectives.pmean(x.mean(), mesh), out_dims=None)(mesh.split(x))
        >>> for mutant in mutants(mean):
        ...     print(mutant, mutant.is_noticed_by(assert_rank_invariant))
        collective 0, psum of 1 float32 over 'replicate': dropped True
        collective 0, psum of 1 float32 over 'replicate': doubled True
        collective 0, psum of 1 float32 over 'replicate': over 'shard' True
        collective 1, psum of 1 float32 over 'shard': dropped True
        collective 1, psum of 1 float32 over 'shard': doubled True
        collective 1, psum of 1 float32 over 'shard': over 'replicate' True
    """
    seen: dict[int, Collective] = {}
    mesh = mesh or simulated_mesh({"replicate": 2, "shard": 2})

    def note(number: int, axes: Mapping[str, Axis], op: Collective, x: Tensor, send: Issue) -> Work:
        seen[number] = op
        return send(op, x)

    program(_watched(mesh, note))
    return [Mutant(program, number, change, op) for number, op in seen.items() for change in _changes(op, mesh)]


def _changes(op: Collective, mesh: Mesh) -> Iterator[str]:
    if op.kind != "ragged_all_to_all":  # skip knows no result to keep, which would have another shape
        yield "dropped"
    yield "doubled"
    yield from (axis for axis, size in mesh.axes.items() if size > 1 and axis not in op.axis.split(","))


def _watched(mesh: Mesh, issue: Callable[..., Work]) -> Mesh:
    """Return ranks that pass ``issue`` each collective with its number, in the order in which a rank issues them."""
    if mesh.kind in ("batched", "sequential"):
        mesh = simulated_mesh(mesh.axes, device=mesh.device, kind="sequential")
    numbers: dict[int | None, Iterator[int]] = {}
    axes = {axis.name: axis for axis in mesh}

    def wrapped(axis: Axis) -> Axis:
        def of_rank(op: Collective, x: Tensor, send: Issue) -> Work:
            if axis.backend.simulated or op.law.begins:  # of all ranks, outside of spmd; or of plan and shard
                return send(op, x)
            number = next(numbers.setdefault(RUN.get().rank, count()))
            return issue(number, {**axes, axis.name: axis}, op, x, send)

        return wrap(of_rank)(axis)

    return mesh.with_backend(wrapped)
