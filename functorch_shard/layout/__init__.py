"""Which element of which parameter lies where: integers and trees, no communication of its own.

``layout``: ``Layout``, ``Unit``, ``Buffer``, ``Slot``. ``planning`` and ``units``: ``plan``, from a model to its
layout; ``sources`` and ``validation``: what it refuses. ``trees``: ``Sharded`` and ``Full``. ``packing``: named tensors
to flat buffers and back. ``element_bits``: random numbers of each element, whoever holds it. ``precision``: the dtypes
of a step. ``transfer_plan``: which elements move between two layouts. ``rank_trees``: trees as their ranks hold them.
``dtensor`` and ``dtensor_spec``: parameters that are DTensors over other axes.

Imports ``mesh`` and below; imported by ``collectives``, ``storage`` and above.
"""
