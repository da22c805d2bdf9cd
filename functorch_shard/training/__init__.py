"""The parts of a training step: derivatives, model calls, optimizers, norms and loss scales.

``grad``: ``grad`` and ``grad_and_value``; ``usage``: whether a loss uses its parameters. ``bind``: the model
with other parameters, and ``apply``, the model as a function. ``optimizer``: ``torch.optim`` classes on shards;
``optimizer_step``: their state and steps; ``trials``: what is known of a class, and with what it begins;
``elementwise``: a test of one. ``norms``, ``loss_scale``: norms, NaN and loss scales. ``estimate``: predicted memory.

Imports ``sharding`` and below; nothing but the top imports it.
"""
