"""Which element of which parameter is on which rank: integers and trees, without communication.

``buffers``: ``Slot``, ``Buffer``, ``Unit``, and padding. ``layout``: ``Layout``, its ranks, and layouts of some of its
buffers. ``planning`` and ``units``: ``plan``, from a model to its layout. ``trees``: ``Sharded`` and ``Full``, whole
parameters to flat buffers and back, and the check that a tree fits a layout; ``validation``: the same for models and
gradients. ``precision``: the dtypes of a step. How a buffer is gathered and its gradient reduced is a ``Schedule`` of
``collectives``, one for each buffer and dtype.

Imports ``collectives``, ``mesh`` and below; imported by ``storage`` and above.
"""
