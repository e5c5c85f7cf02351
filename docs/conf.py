"""The documentation as a site: `make docs` builds it into build/docs, offline."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

import cairn  # noqa: E402

project = "cairn"
copyright = "the authors of cairn, Apache-2.0"
version = release = cairn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "reference"]
exclude_patterns = ["_ext"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Blocks of another system's code, or of plain text.
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
# A name in backticks is code, in docstrings as in pages.
default_role = "code"

# Quoted text is often meant to be typed.
smartquotes = False

html_theme = "furo"
html_title = f"cairn {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"source_directory": "docs/"}
