"""The parts of a training step: derivatives, model calls, optimizers, norms and loss scales.

``grad``: ``grad`` and ``grad_and_value``; ``usage``: whether a loss uses its parameters. ``call`` and ``apply``: the
model as a function. ``optimizer``, ``torch_optim`` and ``optimizer_probe``: ``torch.optim`` classes on shards, and
which of them are refused. ``vectors``: trees as vectors. ``norms``, ``finite``, ``loss_scale``: norms, NaN and loss
scales. ``estimate``: predicted memory and traffic.

Imports ``sharding`` and below; nothing but the top imports it.
"""
