"""The parts of a training step: derivatives, model calls, optimizers, norms and loss scales.

``grad``: ``grad`` and ``grad_and_value`` (``argnums``, ``forward_over_reverse``, ``differentiated_leaves``);
``boundary``: where they take the mean; ``jacobian``; ``usage``: whether a loss uses its parameters.
``bind``: the model with other parameters; ``apply``: the
model as a function. ``remat``: recomputation, and ``recomputed``: its derivatives. ``optimizer``, ``optimizer_step``
and ``torch_optim``: ``torch.optim`` classes on shards; ``optimizer_probe``: which of them are refused, and why;
``optimizer_rule``: one class and the buffers that it updates; ``tensor_options``: options that are tensors; ``whole``:
classes that need whole parameters. ``vectors``: trees as vectors, ``element_bits`` their random numbers; ``curvature``:
operators on them. ``norms``,
``finite``, ``loss_scale``: norms, NaN and loss scales. ``estimate``: predicted memory and traffic.

Imports ``sharding`` and below; nothing but the top imports it.
"""
