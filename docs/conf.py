"""How the pages become a site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dist_core.version import __version__  # noqa: E402  # the path comes first

project = "Elastune"
author = "the Elastune authors"
project_copyright = "the Elastune authors, Apache License 2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinxcontrib.mermaid"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
# Docstrings mark code with single backticks too.
default_role = "code"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"Elastune {__version__}"
html_theme_options = {"navigation_with_keys": True}
