"""``fs.compile``: a whole training step, recorded once as one graph and then run without Python's eager dispatch.

``signature`` tells which calls share a recording; ``agreement``: that all ranks record the same collectives;
``recording`` traces the eager program, lazy gathers and all, into a graph of torch operators and recorded collectives
(Note [Recorded] in communication/recorded.py); ``assignments`` finds what the program assigned to variables outside of
it, which no graph does; ``simplification`` removes what has no effect; ``backends`` turn the
graph into something that runs; ``schedule`` reads it as a table, ``timeline`` draws that; ``compile`` puts them
together.
"""
