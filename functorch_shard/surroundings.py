"""What torch is doing around a call: the questions it has no public answer to (tests/test_surroundings.py watches)."""

from __future__ import annotations

import torch
from torch._C import _current_graph_task_id
from torch._C._functorch import maybe_current_level


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or ``torch.compile`` sees what is computed here."""
    return maybe_current_level() is not None or torch.compiler.is_compiling()


def backward_pass() -> int | None:
    """The number of the backward pass that runs in this thread, or ``None`` in forward."""
    task = _current_graph_task_id()
    return None if task == -1 else task
