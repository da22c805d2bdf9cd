"""``fs.visualize``: which rank holds which part of which parameter, for the terminal, notebooks and files.

``visualize``: the picture of a layout; ``text_table``: it in characters; ``svg``: it as SVG, and elements of SVG as
text, which the pictures of the documentation use too. Imports ``layout`` and ``errors``; imported by programs only.
"""
