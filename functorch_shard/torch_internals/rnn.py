"""The list of weights that torch's RNNs keep in addition to their parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress

from torch import nn


def takes_own_weights(rnn: nn.RNNBase) -> None:
    """Set the list of ``rnn`` to its own weights, instead of those that it was last called with."""
    rnn._update_flat_weights()


def own_weights_again(tensors: Mapping[str, object]) -> None:
    """Reset the lists of RNNs with weights in ``tensors``; called by ``functional_call`` at its end.

    An RNN keeps a list of the weights that it was last called with. ``functional_call`` does not reset it, which keeps
    the weights alive. The module is known from the stack only.
    """
    paths = [name.rpartition(".")[0] for name in tensors if name.endswith("weight_ih_l0")]
    frame = sys._getframe(2) if paths else None
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.utils.stateless":
        return
    module = frame.f_locals.get("module")
    for path in paths:
        with suppress(AttributeError):  # of another model: functional_call raises
            rnn = module.get_submodule(path) if isinstance(module, nn.Module) else None
            if isinstance(rnn, nn.RNNBase):
                takes_own_weights(rnn)
