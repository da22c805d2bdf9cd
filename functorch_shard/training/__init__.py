"""What a training step is made of: derivatives, model calls, optimizers, norms and loss scales.

``grad``: ``grad`` and ``grad_and_value``; ``usage``: whether a loss uses its parameters. ``call`` and ``apply``: the
model as a function. ``optimizer``, ``torch_optim`` and ``optimizer_probe``: stock optimizers on shards, and which of
them are refused. ``vectors``: trees as vectors. ``norms``, ``finite``, ``loss_scale``: norms, NaN and scales.
``estimate``: memory and traffic before there is a rank.

Imports ``sharding`` and below; nothing but the top imports it.
"""
