"""Tables as LaTeX with booktabs rules. Text from records is escaped, so that it is never a command."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Sequence

from tbbn.bench.report.columns import METRIC

_ESCAPED = {
    "\\": r"\textbackslash{}",
    **{sign: "\\" + sign for sign in "&%#_${}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",  # \textquotedbl is not in every font
    "±": r"$\pm$",
    "−": "$-$",
}


_WIDE = 9  # more columns do not fit the text width of most papers


def escape(text: str) -> str:
    """Escape text for LaTeX. Characters that a font may lack are replaced by their code points.

    >>> escape("50 % of $x_1$"), escape("汉")
    ('50 \\\\% of \\\\$x\\\\_1\\\\$', 'U+6C49')
    """
    return "".join(_ESCAPED.get(sign, sign if _is_plain(sign) else f"U+{ord(sign):04X}") for sign in text)


def _is_plain(sign: str) -> bool:
    """Whether every font has the character: ASCII, or a Latin letter with an accent."""
    return sign.isascii() or (sign <= "ÿ" and unicodedata.decomposition(sign)[:1].isdigit())


def title(text: str) -> str:
    """The title of a column; a metric at its beginning becomes a formula.

    >>> title("A_f %"), title("F_text"), title("A_f^w paper")
    ('$A_f$ \\\\%', '$F_{\\\\mathrm{text}}$', '$A_f^w$ paper')
    """
    match = METRIC.match(text)
    if match is None:
        return escape(text)
    letter, below, above = match.groups()
    index = "" if below is None else f"_{below}" if len(below) == 1 else rf"_{{\mathrm{{{below}}}}}"
    return f"${letter}{index}{f'^{above}' if above else ''}$" + escape(text[match.end() :])


def render(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str,
    caption: str = "",
    blocks: Collection[int] = (),
    bold: Collection[tuple[int, int]] = (),
) -> str:
    """A ``tabular``, inside a ``table`` if there is a caption. A rule precedes each row in ``blocks`` except row 0.

    A table with many columns is scaled to the text width with graphicx.
    """
    lines = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", _line(map(title, header)), r"\midrule"]
    for i, row in enumerate(rows):
        if i and i in blocks:
            lines.append(r"\midrule")
        cells = (rf"\textbf{{{escape(c)}}}" if (i, j) in bold else escape(c) for j, c in enumerate(row))
        lines.append(_line(cells))
    lines += [r"\bottomrule", r"\end{tabular}"]
    if len(header) > _WIDE:
        lines = [r"\resizebox{\linewidth}{!}{%", *lines, "}"]
    if not caption:
        return "\n".join(lines)
    return "\n".join([r"\begin{table}[t]", r"\centering", rf"\caption{{{escape(caption)}}}", *lines, r"\end{table}"])


def _line(cells: Iterable[str]) -> str:
    joined = " & ".join(cells)
    # After a line end \\, LaTeX would parse a bracket or a star as its argument.
    return "{}" * joined.startswith(("[", "*")) + joined + r" \\"
