"""Private APIs of torch, each in one place, with the reason.

``transforms``: which ``torch.func`` transforms are active; ``lowering``: what is differentiated at any of them.
``autograd``: the graph and the running backward pass. ``checkpointing``: regions of ``torch.utils.checkpoint``.
``modules``: where modules keep tensors, modules and hooks.
``parameter_swap`` and ``recomputation``: other tensors in place of a module's own, in forward and in recomputation.
``taking_turns``, ``called_module``, ``module_changes`` and ``thread_state``: what ranks in threads have of their own,
and what of their caller. ``while_it_runs``: what transforms change for the whole process, and ``process_settings``
what programs do. ``tracing``, ``compilers`` and ``operators``: programs as graphs. ``rnn``, ``frames``, ``tensors``,
``pytree``, ``process_groups``, ``functional_collectives``, ``dcp``: private attributes of those.
``tests/torch_internals`` fails when torch changes one of them.

Every package may import this one; it imports ``errors`` only.
"""
