"""``fs.init``: fill a model from the meta device, one unit in memory at a time, equally for any number of ranks.

``initialize`` calls resets, or a function of a module, on a copy of the model, whose tensors have memory while they are
used. Imported by programs only; imports ``sharding`` and what is below it. The package is not called ``init``, since
``fs.init`` is the function.
"""
