"""How a tree becomes a directory: every rank writes its own, and the first makes one checkpoint of it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import reject
from ..layout.layout import Layout
from ..layout.rank_trees import party_of
from ..layout.trees import Sharded
from ..mesh.mesh import Mesh
from ..storage.atomic_directory import Draft, older, refuse_existing, remove
from ..torch_internals.tensors import version_of
from ..torch_internals.transforms import in_transform
from .chunks import Piece, aliases_of, pieces_of
from .dcp.stored import Writer, complete, has_index, order_of
from .names import Leaf, PerRank, dotted, leaves_of, plain_problem, twice

_POLL = 0.05  # seconds; until the last rank's index is there


@dataclass(frozen=True)
class Contents:
    """What is saved: the leaves of a tree, and the ranks that hold them."""

    leaves: Sequence[Leaf]
    party: Mesh

    @staticmethod
    def of(tree: Any) -> Contents:
        return Contents(leaves_of(tree), party_of(tree))

    def of_this_moment(self) -> Contents:
        """With copies of lists and dicts, to which a program may add; tensors are the same ones."""
        still = lambda x: isinstance(x, (Sharded, Tensor, PerRank))  # noqa: E731
        leaves = [leaf if still(leaf.value) else leaf._replace(value=deepcopy(leaf.value)) for leaf in self.leaves]
        return replace(self, leaves=leaves)

    def pieces(self) -> Iterator[Piece]:
        for leaf in self.leaves:
            yield from pieces_of(leaf, self.party)

    def plain(self) -> Iterator[tuple[Leaf, Any]]:
        """What is no tensor; the numbers in a ``Sharded`` under the names of its parameters."""
        for leaf in self.leaves:
            if isinstance(leaf.value, Sharded):
                yield from _plain_of(leaf, leaf.value)
            elif not isinstance(leaf.value, (Tensor, PerRank)):
                yield leaf, leaf.value

    def ranks(self) -> Sequence[int]:
        return range(self.party.size)

    def versions(self) -> Sequence[tuple[Leaf, Tensor, int]]:
        """How often each tensor has been written to, as far as tensors count it."""
        tensors = [(leaf, x) for leaf in self.leaves for x in _tensors_of(leaf) if not x.is_inference()]
        return [(leaf, x, version_of(x)) for leaf, x in tensors]

    def check(self) -> None:
        """Raise unless everything has one name, and values that can be read back without executing code."""
        names = [name for leaf in self.leaves for name in names_of(leaf)]
        reject(
            "save: names", twice(iter(names)), "Each leaf needs a name of its own: put one of them under another key."
        )
        tensors = [(leaf, x) for leaf in self.leaves for x in _tensors_of(leaf)]
        problems = [f"{dotted(leaf.path())}: without values, on the meta device" for leaf, x in tensors if x.is_meta]
        plain = [(leaf, plain_problem(value)) for leaf, value in self.plain()]
        problems += [f"{dotted(leaf.path())}: {problem}" for leaf, problem in plain if problem]
        advice = (
            "Saved are tensors, numbers, texts, None, and lists, tuples, sets and dicts of them: a checkpoint is read "
            "without executing what it contains. Of an optimizer pass its state, of a generator its get_state()."
        )
        reject("save", problems, advice, TypeError)
        reject("save", self._strangers(), "Save trees of other ranks by themselves, or reshard them first.")

    def _strangers(self) -> list[str]:
        """Trees whose ranks are not those that save."""
        trees = [(leaf, leaf.value.layout) for leaf in self.leaves if isinstance(leaf.value, Sharded)]
        mine = [self.party.is_simulated, self.party.size]
        others = [
            (leaf, layout.mesh)
            for leaf, layout in trees
            if not layout.tensor_meshes and [layout.mesh.is_simulated, layout.mesh.size] != mine
        ]
        return [f"{dotted(leaf.path())}: on {mesh}, expected one of the ranks of {self.party}" for leaf, mesh in others]

    def lines(self) -> Iterator[str]:
        """What a difference between ranks is told in."""
        for leaf in self.leaves:
            kind = type(leaf.value).__name__
            x = leaf.value.tensor if isinstance(leaf.value, PerRank) else leaf.value
            yield f"{dotted(leaf.path())}: {kind}" + (f" {tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else "")
        for layout in dict.fromkeys(leaf.value.layout for leaf in self.leaves if isinstance(leaf.value, Sharded)):
            yield from layout.places() if not layout.tensor_meshes else _wholes(layout)


def names_of(leaf: Leaf) -> list[str]:
    """Every name that a leaf's values have in files."""
    if not isinstance(leaf.value, Sharded):
        return [dotted(leaf.path())]
    layout = leaf.value.layout
    held = [name for name in layout.slots if layout.key_of[name] in leaf.value]
    paths = [path for name in held for path in (leaf.path(name), *aliases_of(leaf, name))]
    return [dotted(path) for path in paths]


def _wholes(layout: Layout) -> Iterator[str]:
    """What is alike where DTensors have parts of other sizes, and so lie at other places."""
    for slot in layout.slots.values():
        yield f"{slot.name!r}: {slot.dtensor or slot.shape}, {slot.dtype}, in buffer {layout.key_of[slot.name]!r}"


def _plain_of(leaf: Leaf, tree: Sharded) -> Iterator[tuple[Leaf, Any]]:
    for key, x in tree.items():
        if not isinstance(x, Tensor) and x is not None:  # None stands for what no gradient has made yet
            for slot in tree.layout.buffers[key].slots:
                yield Leaf(x, leaf.path(slot.name)), x


def _tensors_of(leaf: Leaf) -> list[Tensor]:
    values = leaf.value.values() if isinstance(leaf.value, Sharded) else [leaf.value]
    values = [x.tensor if isinstance(x, PerRank) else x for x in values]
    return [x for x in values if isinstance(x, Tensor)]


@dataclass
class Saving:
    """A checkpoint on its way to ``path``: what ``save`` returns.

    ``result()`` waits for it and returns the path. Every rank calls it, at the same place in the program.
    """

    path: Path
    _contents: Contents = field(repr=False)
    _keep: int | None = field(repr=False)
    _draft: Draft = field(repr=False)
    _versions: Sequence[tuple[Leaf, Tensor, int]] = field(repr=False)  # of the tensors, when ``save`` was called
    _thread: threading.Thread | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)
    _hurry: threading.Event = field(default_factory=threading.Event, repr=False)
    _left: threading.Event = field(default_factory=threading.Event, repr=False)  # the tensors are no longer looked at
    _published: bool = field(default=False, repr=False)
    _settled: bool = field(default=False, repr=False)

    @staticmethod
    def begin(path: Path, tree: Any, keep: int | None, async_save: bool) -> Saving:
        """Everything that can be known to be wrong, is, before anything is written; on every rank."""
        contents = Contents.of(tree)
        draft = Draft(path)

        def prepare() -> Saving:
            if in_transform():
                raise RuntimeError(
                    "save: inside a transform, or inside spmd, where a tree is one rank's. Call it outside."
                )
            if keep is not None and (not isinstance(keep, int) or keep < 1):
                raise ValueError(f"save: keep: got {keep!r}, expected a number of checkpoints, 1 or more")
            if path.name.startswith("."):
                raise ValueError(f"save: path: got {path}: names with a dot in front are hidden, latest() passes them")
            contents.check()
            refuse_existing(path)
            if contents.party.rank == 0:
                draft.open(order_of)
            return Saving(path, contents.of_this_moment(), keep, draft, contents.versions())

        try:
            options = [str(path), f"keep={keep}, async_save={async_save}"]
            return contents.party.agree("save", prepare, lambda _: [*options, *contents.lines()])
        except BaseException:
            draft.abandon()
            raise

    def start(self) -> Saving:
        """Write in a thread of its own. A daemon: whoever leaves without ``result()`` leaves without a checkpoint."""
        self._thread = threading.Thread(target=self._in_background, name=f"save {self.path.name}", daemon=True)
        self._thread.start()
        return self

    def done(self) -> bool:
        """Whether this rank has written all of its own, or failed: its tensors are the program's again."""
        return self._thread is None or self._left.is_set()

    def result(self) -> Path:
        """Wait for all ranks; the path, when the checkpoint is there.

        Raises:
            OSError: the disk is full, say; nothing is left of this checkpoint, and earlier ones are as they were.
            RuntimeError: a tensor was written to meanwhile, as by ``opt.step(donate=True)``; or another rank failed.
        """
        if self._settled:
            return self.path
        agree = self._contents.party.agree
        try:
            agree("save", self._written, lambda _: [])
            agree("save", self._publish, lambda _: [])
        except BaseException:
            self._draft.abandon()
            raise
        self._settled = True
        self._contents, self._versions = Contents((), self._contents.party), ()  # the tensors that were saved can go
        return self.path

    def _written(self) -> None:
        if self._thread is None:
            self._write()
        else:
            self._hurry.set()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _in_background(self) -> None:
        try:
            self._write()
            self._left.set()
            if self._contents.party.rank == 0 and self._wait_for_others():
                self._publish()
        except BaseException as error:  # for result(), on this rank and on the others
            self._error = error
            self._draft.note_failure()
        finally:
            self._left.set()

    def _wait_for_others(self) -> bool:
        """Until all ranks have written; or ``result()`` takes over, which tells them all what failed on one."""
        while not all(has_index(self._draft.folder, rank) for rank in self._writers()):
            if self._draft.has_failed() or self._hurry.wait(_POLL):
                return False
        return True

    def __del__(self) -> None:
        """Without ``result()`` nobody was told of a failure, and nobody else could write there."""
        if self._error is not None and not self._hurry.is_set():
            self._draft.abandon()
            warnings.warn(f"save: {self.path}: {self._error!r}, and nobody asked for result()", stacklevel=1)

    def _write(self) -> None:
        writers = {rank: Writer(self._draft.folder, rank) for rank in self._own()}
        try:
            for piece in self._contents.pieces():
                if piece.writes:
                    writers[piece.rank].tensor(piece.path, piece.shape, piece.box, piece.values, piece.aliases)
            if self._contents.party.rank == 0:
                for leaf, value in self._contents.plain():
                    writers[0].plain(leaf.path(), value)
            changed = sorted({dotted(leaf.path()) for leaf, x, version in self._versions if version_of(x) != version})
            advice = "A step with donate=True writes into its inputs: use donate=False until done(), or save copies."
            reject("save: written to while they were saved", changed, advice, RuntimeError)
            for writer in writers.values():
                writer.close()
        finally:
            for writer in writers.values():
                writer.abandon()

    def _own(self) -> Sequence[int]:
        """The ranks whose files this process writes."""
        return self._contents.ranks() if self._contents.party.is_simulated else [self._contents.party.rank]

    def _writers(self) -> Sequence[int]:
        return self._contents.ranks()

    def _publish(self) -> None:
        if self._published or self._contents.party.rank:
            return
        parent = self.path.parent
        order = self._draft.order
        complete(self._draft.folder, self._writers(), order)
        self._draft.publish()
        self._published = True
        if self._keep is not None:
            remove(older(parent, order_of, order, self._keep))
