"""How the site is built: ``./task docs``.

The sources begin at the root of the checkout, not at this folder. So ARCHITECTURE.md and the decision records are pages
of the site as they are, and a relative link means the same there as in a checkout or on a forge.
"""

from __future__ import annotations

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = "Thermocline"
author = "the authors of Thermocline"
project_copyright = author

root_doc = "docs/index"
include_patterns = ["docs/**.md", "infra/**.md", "models/README.md", "*.md"]
# Folders that hold no pages, so that they are not walked through either.
exclude_patterns = [
    ".*",
    "bench",
    "build",
    "services",
    "shared",
    "tests",
    "thermocline",
    "tools",
    "models/thermocline-*",
]

extensions = ["myst_parser"]
# Every heading has the anchor that forges give it, so that a link to one is checked here and works there.
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = "Thermocline"
html_extra_path = ["site"]
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> dict[str, bool]:
    """Diagrams in Mermaid are shown as text: drawing them takes a script from elsewhere, and the site has none."""
    app.add_lexer("mermaid", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
