"""Which element of which parameter is on which rank: integers and trees, without communication.

``buffers``: ``Slot``, ``Buffer``, ``Unit``, and named tensors to flat buffers and back. ``layout``: ``Layout``, its
ranks, and layouts of some of its buffers. ``planning`` and ``units``: ``plan``, from a model to its layout. ``trees``:
``Sharded`` and ``Full``, and the check that one fits a layout; ``validation``: the same for models and gradients.
``precision``: the dtypes of a step. ``schedule``: the operations that gather a buffer and reduce its gradient; Note
[Schedule] there lists its interpreters.

Imports ``mesh`` and below; imported by ``collectives``, ``storage`` and above.
"""
