"""Which units are whole at a moment, and which is fetched next: decided by the order of use alone.

Note [Residency]: at most two units of a session are whole: the one in use and the one that is fetched ahead of it (or,
where none follows, the one before it). What is next is guessed: in forward what followed the last time that this unit
came after that one, or what the order of the parameters says; in backward what came before in forward. A wrong guess
costs two gathers, its own and that of what it pushed out, so a unit that comes back where nobody expected it (a head
that shares the embedding's unit) has no guess. Nothing here looks at a clock, at what has arrived or at what the
garbage collector has done, so that all ranks fetch in the same order, whatever their timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from ..collectives.codecs import Codec, decode_rows, encode_rows
from ..communication.axis import Axis
from ..communication.work import Finished, Work
from ..communication.writes import content_of
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..storage.memory_kind import MemoryKind, working_device
from ..torch_internals.autograd import backward_pass
from ..torch_internals.tensors import version_of
from .reduction import Reductions
from .streams import Streams, streams_of
from .unused import Owed

# Units so small that all of them together are no more than this part of the largest one (norms, scalars, position
# tables) stay once they are fetched: a gather costs a round of messages however little it moves, and a scalar that
# every block uses would push the block out of its place each time.
SMALL_PART = 1 / 8


@dataclass(frozen=True, eq=False)
class Part:
    """Buffers of one unit that are gathered and differentiated together, and the dtype they are gathered in."""

    unit: int
    buffers: tuple[Buffer, ...]
    layout: Layout
    dtype: torch.dtype | None
    codec: Codec | None = None
    joined: bool = False  # whether a node behind it waits for what is under way

    @property
    def is_sharded(self) -> bool:
        return all(buffer.num_shards > 1 for buffer in self.buffers)

    def gathered_dtype(self, buffer: Buffer) -> torch.dtype:
        return self.layout.travel(buffer, self.dtype).gathered


class Cell:
    """The shards of a part, and the whole buffers while they are resident; dims before the last are batch dims."""

    __slots__ = (
        "_made",
        "_sent_on",
        "_shards",
        "_streams",
        "_versions",
        "_works",
        "device",
        "flats",
        "left_in",
        "part",
    )

    def __init__(self, part: Part, shards: Sequence[Tensor], streams: Streams | None = None) -> None:
        self.part, self.device = part, working_device(shards[0], part.layout.mesh.device)
        self._streams = streams or streams_of(self.device)
        self._shards = [shard.detach() for shard in shards]
        self._versions = [_version(shard) for shard in self._shards]
        self._works: list[Work] | None = None
        self.flats: list[Tensor] | None = None
        self.left_in: int | None = None  # the backward pass that is done with it

    def numel(self, index: int) -> int:
        """Elements of a whole buffer, batch and all."""
        return self._shards[index].numel() * self.part.buffers[index].num_shards

    def start(self) -> None:
        """Send for the whole buffers."""
        if self.flats is None and self._works is None:
            self._check_unchanged()
            self._sent_on = self._streams.current()
            pairs = zip(self.part.buffers, self._shards, strict=True)
            with _no_inference_mode():
                self._works = [self._work(buffer, shard) for buffer, shard in pairs]

    def land(self) -> None:
        """Wait for them."""
        self.start()
        if self._works is not None:
            with _no_inference_mode(), self._streams.on(self._sent_on):
                self.flats, self._works = [work.wait().contiguous() for work in self._works], None
                self._made = self._streams.made()

    def whole(self, index: int) -> Tensor:
        """The whole buffer ``index``, which has landed, for use on the current stream."""
        assert self.flats is not None
        self._made.take(self.flats)
        return self.flats[index]

    def drop(self) -> None:
        """Let them go."""
        self.flats = self._works = None

    def _work(self, buffer: Buffer, shard: Tensor) -> Work:
        dtype = self.part.gathered_dtype(buffer)
        if buffer.num_shards == 1:
            whole = self._copied(shard, dtype)
            return Finished(whole)
        if self.part.codec is None or not buffer.dtype.is_floating_point:
            return self._send(shard, dtype, buffer.key)
        return self._send_encoded(shard.to(self.device, non_blocking=True), dtype, buffer.key, self.part.codec)

    def _send(self, x: Tensor, dtype: torch.dtype, key: str) -> Work:
        """Ranks are laid side by side in the last dim."""
        axis = self.part.layout.mesh[self.part.layout.shard_axis]
        if x.ndim > 1:
            here = self._copied(x, dtype)
            return Work(lambda: _gather_batch(axis, key, here))
        return axis.issue("all_gather", x, dtype=dtype, key=key, device=self.device)

    def _copied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """As it is now, row-major in memory of its own: a shard may be a view, and may be written to meanwhile."""
        return x.new_empty(x.shape, dtype=dtype, device=self.device).copy_(x, non_blocking=True)

    def _send_encoded(self, shard: Tensor, dtype: torch.dtype, key: str, codec: Codec) -> Work:
        message, form = encode_rows(shard, codec)
        sizes = self.part.layout.num_shards, message.shape[-1]
        work = self._send(message, message.dtype, key)
        return work.then(lambda rows: decode_rows(rows.unflatten(-1, sizes), form, codec).flatten(-2).to(dtype))

    def _check_unchanged(self) -> None:
        if [_version(shard) for shard in self._shards] != self._versions:
            keys = ", ".join(repr(buffer.key) for buffer in self.part.buffers)
            raise RuntimeError(
                f"gather: {keys}: the shards were written to (by a step with donate=True, say) after they were "
                "gathered, and a lazy parameter would now have other values than before. Gather again from the new "
                "shards, or take plain values with gather(params, lazy=False)."
            )


class Session:
    """All cells of one ``gather``: it owns what is resident and what is under way, and dies with the last lazy tensor.

    The first cell of a part is fetched ahead with its unit. Nothing that a session knows refers back to it. ``homes``
    is where each buffer's shard lives, and where its gradient is put; ``streams``, unless they are those of the device.
    """

    def __init__(
        self, layout: Layout, homes: Mapping[str, MemoryKind] | None = None, streams: Streams | None = None
    ) -> None:
        self.homes = homes or {}
        self._streams = streams
        self.reductions = Reductions(self.homes)
        self.owed = Owed()
        self._keeps = not layout.reshard_after_forward
        self._small = small_units(layout)
        self._trail = _Trail(expected_order(layout, self._small), _in_front(layout))
        self._cells: dict[int, dict[Part, Cell]] = {}
        self._resident: dict[int, list[Cell]] = {}  # from the least to the most recently used unit
        self._current: int | None = None

    def cell(self, part: Part, shards: Sequence[Tensor]) -> Cell:
        cell = Cell(part, shards, self._streams)
        self._cells.setdefault(part.unit, {}).setdefault(part, cell)
        return cell

    def data(self, cell: Cell, index: int) -> Tensor:
        """The whole buffer ``index`` of ``cell``, which is in use from now on."""
        if cell.flats is None or cell.part.unit != self._current:
            self._arrive(cell)
        return cell.whole(index)

    def leave(self, part: Part) -> None:
        """Let ``part`` go: its gradients are complete, and so backward is done with it (not with frozen neighbours)."""
        for cell in self._resident.get(part.unit, []):
            if cell.part is part:
                cell.drop()
                cell.left_in = backward_pass()

    def _evict(self, unit: int) -> None:
        for cell in self._resident.pop(unit):
            cell.drop()

    def _arrive(self, cell: Cell) -> None:
        unit = cell.part.unit
        ahead = None
        if unit != self._current and unit not in self._small:
            ahead = self._trail.arrive(unit)
            self._current = unit
            self._make_room(unit, ahead)
        self._fetch(cell)
        if ahead is not None:  # before waiting for this one: the wire is never idle
            for next_unit in self._up_to(unit, ahead):
                for next_cell in self._cells.get(next_unit, {}).values():
                    if next_cell.left_in is None or next_cell.left_in != backward_pass():
                        self._fetch(next_cell)
        cell.land()

    def _fetch(self, cell: Cell) -> None:
        cells = self._resident.setdefault(cell.part.unit, [])
        if cell not in cells:
            cells.append(cell)
            if backward_pass() is None and cell.part.is_sharded:
                self.owed.gather(cell.part)
        cell.start()

    def _make_room(self, unit: int, ahead: int | None) -> None:
        """For ``unit`` and the one ahead; where none is, the last one that was used or fetched may stay."""
        self._resident[unit] = self._resident.pop(unit, [])
        large = [other for other in self._resident if other not in self._small]
        kept = {unit, ahead} if ahead is not None else set(large[-2:])
        for other in large:
            if other not in kept and not self._keeps:
                self._evict(other)

    def _up_to(self, unit: int, ahead: int) -> list[int]:
        """The small units that lie on the way, and ``ahead``."""
        return [*(other for other in range(unit + 1, ahead) if other in self._small), ahead]


class _Trail:
    """The order in which units were used, and from it the next one in the direction of travel."""

    def __init__(self, expected: Sequence[int], frozen_in_front: range) -> None:
        self._expected = {(a, b): c for a, b, c in zip([None, *expected], expected, expected[1:], strict=False)}
        self._next = dict(reversed([*pairwise(expected)]))  # of its first place
        self._frozen_in_front = frozen_in_front
        self._followers: dict[tuple[int | None, int], int] = {}  # of a unit that came after another one
        self._seen: set[int] = set()
        self._before: int | None = None
        self._last: int | None = None  # in forward
        self._units: list[int] = []
        self._position = 0  # in the list, of the backward pass
        self._backward_pass: int | None = None

    def arrive(self, unit: int) -> int | None:
        """``unit`` is in use from now on; which one may be next."""
        now = backward_pass()
        if now is None:
            return self._forward(unit)
        if now != self._backward_pass:
            self._backward_pass, self._position, self._before, self._last = now, len(self._units) - 1, None, None
        return self._backward(unit)

    def _forward(self, unit: int) -> int | None:
        if self._last is not None:
            self._followers[self._before, self._last] = unit
        self._before, self._last = self._last, unit
        self._units += [unit] if torch.is_grad_enabled() else []
        is_new = unit not in self._seen
        self._seen.add(unit)
        here = (self._before, unit)
        for known in (self._followers, self._expected):
            if here in known:
                return known[here]
        return self._unseen_after(unit) if is_new else None

    def _unseen_after(self, unit: int) -> int | None:
        follower = self._next.get(unit)
        return None if follower in self._seen else follower

    def _backward(self, unit: int) -> int | None:
        """From where it was used nearest to here, on in the same direction; at the turn, back."""
        for distance in range(len(self._units)):
            for step in (-1, 1):
                i = self._position + step * distance
                if 0 <= i < len(self._units) and self._units[i] == unit:
                    self._position = i
                    return self._ahead(i + step, unit)
        return None

    def _ahead(self, i: int, unit: int) -> int | None:
        """The unit at ``i``, but not the first one: nothing was computed before it, so seldom is its data asked for.

        Nor the frozen ones in front: backward does not come there, unless somebody asks for the input's gradient.
        """
        return self._units[i] if self._first() <= i < len(self._units) and self._units[i] != unit else None

    def _first(self) -> int:
        return max(next((i for i, unit in enumerate(self._units) if unit not in self._frozen_in_front), 0), 1)


def _gather_batch(axis: Axis, key: str, shards: Tensor) -> Tensor:
    return axis.issue("all_gather", shards, key=key, dim=shards.ndim - 1).wait().contiguous()


def small_units(layout: Layout) -> frozenset[int]:
    sizes = sorted((sum(buffer.nbytes for buffer in unit.buffers), i) for i, unit in enumerate(layout.units))
    limit = SMALL_PART * sizes[-1][0] if sizes else 0
    sums = accumulate(size for size, _ in sizes)
    return frozenset(i for (_, i), total in zip(sizes, sums, strict=True) if total <= limit)


def expected_order(layout: Layout, small: Set[int]) -> list[int]:
    """The large units in the order that a model uses them in, as far as the order of its parameters tells.

    What has parameters before and after others (embedding and head of one unit) comes more than once; so does a unit
    that is tied, if it is the only one.
    """
    unit_of = {slot.name: i for i, unit in enumerate(layout.units) for buffer in unit.buffers for slot in buffer.slots}
    in_source = [unit_of[name] for name in layout.slots if unit_of[name] not in small]
    tied = {unit_of[name] for _, name in layout.aliases} - small
    return [unit for unit, _ in groupby([*in_source, *(tied if len(tied) == 1 else ())])]


def _in_front(layout: Layout) -> range:
    """The units before the first one that has anything to train."""
    trainable = (i for i, unit in enumerate(layout.units) if any(buffer.trainable for buffer in unit.buffers))
    return range(next(trainable, 0))


def _no_inference_mode() -> AbstractContextManager[object]:
    """What is made in inference mode may not be saved for a backward after it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _version(shard: Tensor) -> int:
    """How often ``shard`` was written to; of an inference tensor, which does not count that, what it holds."""
    return content_of(shard) if shard.is_inference() else version_of(shard)
