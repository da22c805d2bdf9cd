"""The documentation site: ``python -m sphinx -W -b html docs docs/_build`` builds it, without a network."""

from __future__ import annotations

import re
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import functorch_shard

project = "functorch_shard"
copyright = "the functorch_shard authors, BSD-3-Clause"  # noqa: A001  (Sphinx's name)
version = release = functorch_shard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
highlight_language = "text"  # of blocks that do not name theirs

autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
ALIASES = ["Functions", "Labels", "Precision", "Units", "Wrap"]
autodoc_type_aliases = {name: name for name in ALIASES}  # what they are is said of each argument
maximum_signature_line_length = 130  # of names in full, so of about 80 that are shown
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Cost"]

html_theme = "furo"
html_title = f"functorch_shard {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"

# Every other reference resolves: names of other packages have no page here, and type variables none anywhere.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|optree|collections|concurrent|datetime|typing|types|os|pathlib|numpy|contextlib)\b.*"),
    (r"py:.*", rf"(.*\.)?(T|Fn|Model|Tree|Tensor|Encoding|Kind|{'|'.join(ALIASES)})"),
]


def documented_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Any) -> Any:
    """Resolve a name by its end: ``Axis.issue`` or ``layout.trees.Sharded`` is documented where users import it."""
    if node.get("refdomain") != "py" or node["reftarget"].startswith(("torch.", "collections.")):
        return None
    objects = env.get_domain("py").data["objects"]
    parts = node["reftarget"].split(".")
    for first in range(len(parts)):
        end = ".".join(parts[first:])
        found = sorted((name for name in objects if f".{name}".endswith(f".{end}")), key=len)
        if found:
            entry = objects[found[0]]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, found[0])
    return None


def property_as_prose(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what precedes a colon in a property's first line for its type; an empty one changes nothing."""
    if what in ("attribute", "property") and lines:
        lines[0] = f": {lines[0]}"


def short_signature(*args: Any) -> tuple[str, str | None] | None:
    """Write any callable as ``Callable`` and an alias as its name; omit the fields of a class that nobody passes."""
    *_, signature, returned = args
    if signature is None or re.search(r"\b_\w+:", signature):
        return signature and ("", None)
    texts = [signature.replace("<factory>", "..."), returned or ""]
    texts = [text.replace("[[...], ~typing.Any]", "").replace("[[...], ", "[..., ") for text in texts]
    signature, returned = (re.sub(r"[~\w.]*TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in texts)
    return signature, returned or None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", short_signature)
    app.connect("autodoc-process-docstring", property_as_prose, priority=400)
    app.connect("missing-reference", documented_name)
