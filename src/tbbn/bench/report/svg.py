"""A panel as SVG inside a page: its text and axes have the colour of the text around it, in a light and in a dark theme."""

from __future__ import annotations

import re
import warnings
from io import BytesIO
from xml.etree import ElementTree

from tbbn.bench.report.figures import Panel, matplotlib
from tbbn.errors import printable

_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_INK = "#0a0b0c"  # stands for the colour of the text, until the SVG is written
_STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": "#808080",
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's fonts
    "svg.hashsalt": "tbbn",  # the same page every time
}


def inline_svg(panel: Panel, name: str) -> str:
    """The panel as an ``<svg>`` element. ``name`` begins all its ids, which must differ between the pictures of a page."""
    written = BytesIO()
    with matplotlib().rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters missing from matplotlib's font; the reader's may have them
        panel.figure().savefig(written, format="svg", transparent=True)
    root = ElementTree.fromstring(written.getvalue())
    for unwanted in [child for child in root if child.tag == f"{{{_SVG}}}metadata"]:  # the date among it
        root.remove(unwanted)
    for element in root.iter():
        _adapt(element, name)
    del (
        root.attrib["width"],
        root.attrib["height"],
    )  # as wide as its place in the page, and no wider than is good to read
    root.attrib |= {
        "role": "img",
        "aria-label": printable(panel.title),
        "style": f"max-width: {7.5 * panel.width:.0f}rem",
    }
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _adapt(element: ElementTree.Element, name: str) -> None:
    """Ids with the name of the picture before them, and the page's colour in place of the ink."""
    if link := element.attrib.pop(_LINK, ""):
        element.attrib["href"] = link
    for key, value in element.attrib.items():
        if key == "id":
            element.attrib[key] = f"{name}-{value}"
        elif key == "href" and value.startswith("#"):
            element.attrib[key] = f"#{name}-{value[1:]}"
        else:
            element.attrib[key] = re.sub(r"url\(#", f"url(#{name}-", value).replace(_INK, "currentColor")
