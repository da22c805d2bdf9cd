"""Which element of which parameter is on which rank: integers and trees, without communication.

``layout`` and ``buffers``: ``Layout``, ``Unit``, ``Buffer``, ``Slot``; ``parts``: layouts of some buffers, and
layouts as text. ``planning``, ``units`` and ``stacks``: ``plan``, from a model to its layout; ``placing``: where
parameters are in a buffer; ``validation``: what is refused. ``trees``: ``Sharded`` and ``Full``. ``packing``: named
tensors to flat buffers and back. ``precision``: the dtypes of a step. ``schedule``: the casts, divisions and
collectives that gather a buffer and reduce its gradient; Note [Schedule] there lists its interpreters. ``ranks``:
rank arithmetic, and the ranks that hold a tree. ``dtensor``: parameters that are DTensors over other axes.

Imports ``mesh`` and below; imported by ``collectives``, ``storage`` and above.
"""
