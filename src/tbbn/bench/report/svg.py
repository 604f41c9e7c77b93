"""Panels as inline SVG: their text and axes take the colour of the surrounding text, in light and dark themes."""

from __future__ import annotations

import re
import warnings
from io import BytesIO
from xml.etree import ElementTree

from tbbn.bench.report.figures import Panel, matplotlib
from tbbn.errors import printable

_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_INK = "#0a0b0c"  # placeholder for the colour of the text, replaced in the SVG
_STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": "#808080",
    "svg.fonttype": "none",  # text stays text, so that it can be searched and uses the page's fonts
    "svg.hashsalt": "tbbn",  # for reproducible ids
}


def inline_svg(panel: Panel, name: str) -> str:
    """The panel as an ``<svg>`` element. All its ids start with ``name``, so that they are unique in the page."""
    written = BytesIO()
    with matplotlib().rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters missing from matplotlib's font, which the reader's may have
        panel.figure().savefig(written, format="svg", transparent=True)
    root = ElementTree.fromstring(written.getvalue())
    for unwanted in [child for child in root if child.tag == f"{{{_SVG}}}metadata"]:  # includes the date
        root.remove(unwanted)
    for element in root.iter():
        _adapt(element, name)
    del (
        root.attrib["width"],
        root.attrib["height"],
    )  # as wide as its place in the page, up to the max-width below
    root.attrib |= {
        "role": "img",
        "aria-label": printable(panel.title),
        "style": f"max-width: {7.5 * panel.width:.0f}rem",
    }
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _adapt(element: ElementTree.Element, name: str) -> None:
    """Prefix ids and references with the name of the picture, and replace the placeholder colour."""
    if link := element.attrib.pop(_LINK, ""):
        element.attrib["href"] = link
    for key, value in element.attrib.items():
        if key == "id":
            element.attrib[key] = f"{name}-{value}"
        elif key == "href" and value.startswith("#"):
            element.attrib[key] = f"#{name}-{value[1:]}"
        else:
            element.attrib[key] = re.sub(r"url\(#", f"url(#{name}-", value).replace(_INK, "currentColor")
