"""What torch knows and has no public name for, each question in one place with its reason.

``transforms``: which ``torch.func`` transforms are active. ``autograd``: the graph and the backward pass that runs.
``checkpointing``: regions of ``torch.utils.checkpoint``. ``parameter_swap`` and ``recomputation``: tensors in the place
of a module's own, in forward and when a region is recomputed. ``rnn``, ``frames``, ``tensors``, ``pytree``,
``process_groups``, ``dcp``: private attributes of those. ``tests/torch_internals`` fails when torch changes one of
them.

Everything may import from here; this imports ``errors`` alone.
"""
