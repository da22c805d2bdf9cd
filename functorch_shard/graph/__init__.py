"""``fs.compile``: a whole training step, recorded once as one graph and then run without Python's eager dispatch.

``compile`` calls a step and keeps its recordings; ``signature`` tells which calls share one, and what a step reaches
besides its arguments; ``recording`` traces the eager program, lazy gathers and all, into a graph of torch operators and
recorded collectives (Note [Recorded] in communication/recorded.py); ``backends`` run a graph; ``schedule`` reads it as
a table. Imports ``training`` and what is below it; imported by programs only.
"""
