"""``fs.compile``: a whole training step, recorded once as one graph and then run without Python's eager dispatch.

``compile`` calls a step, keeps its recordings and runs their graphs, by Python or by a compiler of torch; ``signature``
tells which calls share one, and what a step reaches besides its arguments; ``recording`` traces the eager program, lazy
gathers and all, into a graph of torch operators and recorded collectives (Note [Recorded] in
communication/recorded.py), and reads it as a schedule. Imports ``training`` and what is below it; imported by programs
only.
"""
