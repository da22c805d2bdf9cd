"""``fs.remat``: a part of a model whose derivatives save its inputs and run it again, under every transform.

``remat``: a call as a function of tensors, its random numbers, and what is refused; ``program``: the derivatives of
such a function, Note [Remat]. Imports ``training`` and what is below it; imported by programs only. The package is not
called ``remat``, because ``fs.remat`` is the function.
"""
