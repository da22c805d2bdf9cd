"""What ranks in threads must not share: random numbers are exchanged at turns, everything else is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..communication.process_group import as_bytes
from ..torch_internals.tensors import parametrizations_are_cached, version_of

_BIND = (
    "Simulated ranks share the model, where each real rank has one. Give each rank its own: inside of the function, "
    "fs.bind(model, full)(x) in place of functional_call(model, full, (x,))."
)


class RandomNumbers:
    """The random numbers of all ranks, and of the process afterwards.

    ``"same"``: every rank starts where the process is, and the process goes on where rank 0 ended. ``"different"``:
    each starts at a seed that depends on its number and on where the process is, which goes on by one number if any of
    them drew.
    """

    def __init__(self, randomness: str, device: torch.device, num_ranks: int) -> None:
        self._randomness, self._devices = randomness, [torch.device("cpu")]
        self._states: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]]
        self._states = [(torch.get_rng_state, torch.set_rng_state)]
        module = torch.get_device_module("cpu" if device.type == "meta" else device)
        if hasattr(module, "default_generators"):  # others draw from that of the CPU
            self._devices.append(device)
            self._states.append((partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)))
        self._before = self._read()
        self._of_ranks = [self._seeded(r) if randomness == "different" else self._before for r in range(num_ranks)]
        self._first = [*self._of_ranks]

    def begin(self, rank: int) -> None:
        self._write(self._of_ranks[rank])

    def end(self, rank: int) -> None:
        self._of_ranks[rank] = self._read()

    def restore(self) -> None:
        self._write(self._before)

    def go_on(self) -> None:
        pairs = zip(self._first, self._of_ranks, strict=True)
        if all(torch.equal(x, y) for before, after in pairs for x, y in zip(before, after, strict=True)):
            return
        if self._randomness == "error":
            raise RuntimeError("spmd: random numbers were drawn, with randomness='error'.")
        if self._randomness == "same":
            self._write(self._of_ranks[0])
        else:
            for device in self._devices:
                torch.rand((), device=device)

    def _read(self) -> list[Tensor]:
        return [read() for read, _ in self._states]

    def _write(self, values: Sequence[Tensor]) -> None:
        for (_, write), value in zip(self._states, values, strict=True):
            write(value)

    def _seeded(self, rank: int) -> list[Tensor]:
        digest = blake2b(as_bytes(self._before[0]) + rank.to_bytes(8, "big"), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        return [torch.Generator(device).manual_seed(seed).get_state() for device in self._devices]


class SharedModules:
    """The modules that each rank is inside of: ``functional_call`` replaces their tensors until it returns.

    Hooks of all modules, which are torch's public way to see calls, name them.
    """

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank = rank  # the one whose turn it is
        self._inside: dict[int, list[tuple[nn.Module, list[int]]]] = {}
        self._held: dict[int, dict[nn.Module, list[Tensor]]] = {}  # of each rank that waits inside: tensors by module
        self._modes = WeakKeyDictionary[nn.Module, dict[int, bool]]()  # at the first call of each rank
        self._writers: dict[int, tuple[int, Tensor]] = {}  # by the id of a buffer

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def begin(self, rank: int) -> None:
        self._held.pop(rank, None)

    def end(self, rank: int) -> None:
        inside = {part for module, _ in self._inside.get(rank, ()) for part in module.modules()}
        self._held[rank] = {module: _tensors(module) for module in inside}

    def _enter(self, module: nn.Module, args: Any) -> None:
        rank = self._rank()
        self._inside.setdefault(rank, []).append((module, _versions(module)))
        for other, held in self._held.items():
            if any(part in held and _is_replaced(part, held[part]) for part in module.modules()):
                raise RuntimeError(
                    f"rank {rank} calls {type(module).__name__} while rank {other} waits for a collective inside of "
                    f"it, with other tensors in place of its own. {_BIND}"
                )
        modes = self._modes.setdefault(module, {})
        modes.setdefault(rank, module.training)
        if len({*modes.values()}) > 1:
            raise RuntimeError(
                f"ranks call {type(module).__name__} in training and in evaluation mode, because one changed the mode "
                f"while another waited. {_BIND} It has a mode of its own: fs.bind(model, full).eval()."
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        rank, inside = self._rank(), self._inside[self._rank()]
        _, before = inside.pop(max(i for i, (other, _) in enumerate(inside) if other is module))
        # a normalization writes to its statistics without counting
        always = module.training and getattr(module, "track_running_stats", False)
        for (name, x), version in zip(module.named_buffers(recurse=False), before, strict=False):
            written = always or version_of(x) != version
            if written and self._writers.setdefault(id(x), (rank, x))[0] != rank:
                raise RuntimeError(f"ranks write to the buffer {name!r} of {type(module).__name__}. {_BIND}")


class Settings:
    """What contexts of torch change for the whole process; all ranks have the same while one waits."""

    def __init__(self) -> None:
        self._before = _settings()

    def check(self) -> None:
        changed = [name for name, value in _settings().items() if value != self._before[name]]
        if changed:
            raise RuntimeError(
                f"spmd: a simulated rank waits for a collective inside of {', '.join(changed)}, which torch keeps for "
                "the whole process, so the other ranks would be inside of it too. Set it around mesh.spmd; cache "
                "parametrizations where nothing is communicated."
            )


def _settings() -> dict[str, object]:
    cuda = torch.backends.cuda
    kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "the kernels of torch.nn.attention.sdpa_kernel": (*kernels, cuda.cudnn_sdp_enabled()),
        "torch.autograd.detect_anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "torch.nn.utils.parametrize.cached": parametrizations_are_cached(),
    }


def _versions(module: nn.Module) -> list[int]:
    return [version_of(x) for x in module.buffers(recurse=False)]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_replaced(module: nn.Module, before: list[Tensor]) -> bool:
    now = _tensors(module)
    changed = len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True))
    return changed or any(not isinstance(p, nn.Parameter) for p in module.parameters(recurse=False))
