"""Private APIs of torch, each in one place, with the reason.

``transforms``: which ``torch.func`` transforms are active, and what is differentiated at any of them.
``autograd``: the graph and the running backward pass. ``modules``: where modules keep tensors, modules and hooks.
``rank_threads``: what ranks in threads inherit and share; ``process_settings``: the cache of parametrizations.
``tracing``: programs as graphs, and compilers of these. ``tensors``, ``pytree``, ``process_groups``, ``dcp``: private
attributes of those.
``tests/torch_internals`` fails when torch changes one of them.

Every package may import this one; it imports ``errors`` only.
"""
