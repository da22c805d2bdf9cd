"""Private APIs of torch and optree, each in one place, with the reason.

``autograd``: derivatives, in the graph of autograd and at the levels of ``torch.func``.
``tensors``: what holds tensors and moves them. ``satellites``: what features alone need; the core does not import it.

A name that torch removes fails at import or as an ``AttributeError``. Where torch could change the meaning of a name,
the comment at its use says what would be wrong. ``tests/torch_internals`` and the tests of what uses it fail then.
Every package may import this one; it imports no other, only ``running``.
"""
