"""How Sphinx builds these pages: ``sphinx-build -W docs site``, with ``pip install -e ".[docs]"``.

``-W`` makes every warning an error, so that a link to a page, a heading or a picture that is not there fails the build.
"""

from __future__ import annotations

import lightning_zero

project = "lightning_zero"
author = "the lightning_zero developers"
release = version = lightning_zero.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"lightning_zero {release}"
html_copy_source = False
