"""LaTeX of tables: text that stays text, blocks, bold type, and a document that compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from records import record

from tbbn.bench.report.latex import escape, title
from tbbn.bench.report.table import Table
from tbbn.bench.report.tables import blocks_table

HOSTILE = (
    r"\input{/etc/passwd}",
    "$x$ & 50 %",
    '<b>"q"</b>',
    "}\\end{table}",
    "Åé 汉 ±",
    "[1cm]",
    "*",
    "a^b~c|d#e_f\x07",
)


def cells(line: str) -> list[str]:
    """The cells of a row, as LaTeX divides it."""
    assert line.endswith(r" \\")
    return re.split(r"(?<!\\)&", line[:-3])


def check(text: str, columns: int) -> None:
    """What a compiler would refuse: unbalanced braces, too many cells, an odd dollar, a sign no font has."""
    depth = 0
    for sign in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if sign == "{" else -1
        assert depth >= 0
    assert depth == 0
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert rows and all(len(cells(row)) == columns for row in rows)
    assert all(len(re.findall(r"(?<!\\)\$", line)) % 2 == 0 for line in text.splitlines())
    commands = set(re.findall(r"\\([A-Za-z]+)", text))
    assert commands <= {
        "begin", "end", "toprule", "midrule", "bottomrule", "centering", "caption", "textbf", "pm", "mathrm",
        "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar",
    }, commands  # fmt: skip


def hostile_table() -> Table:
    rows = tuple((name, "1.0 ± 0.5") for name in HOSTILE)
    return Table(
        ("A_f^w %", "F_text"), rows, caption=" ".join(HOSTILE), blocks=(0, 2), bold=frozenset({(1, 0), (2, 1)})
    )


def test_hostile_names_stay_text() -> None:
    text = hostile_table().render("tex")
    check(text, 2)
    assert r"\textbackslash{}input\{/etc/passwd\}" in text
    assert "Åé U+6C49 $\\pm$" in text, "letters with accents stay, others are spelt out"
    assert "\n{}[1cm] &" in text and "\n{}* &" in text, "no argument of the line end before"


def test_metrics_are_formulas() -> None:
    assert title("A_f %") == r"$A_f$ \%" and title("A_a^w") == "$A_a^w$" and title("F paper") == "$F$ paper"
    assert title("F_text %") == r"$F_{\mathrm{text}}$ \%" and title("A_f task-IL %") == r"$A_f$ task-IL \%"
    assert title("FM %") == r"FM \%" and title("After") == "After" and title("A_F") == r"A\_F"


def test_a_sign_after_another() -> None:
    assert escape(r"\\") == r"\textbackslash{}\textbackslash{}"


def test_blocks_bold_type_and_caption() -> None:
    records = [record([[1.0], [0.5, 0.9]], norm__name=n, method__name=m) for m in ("ft", "er") for n in ("bn", "tbbn")]
    records[1].accuracy[1][0] = 0.6
    text = blocks_table(records, ("final_accuracy",)).render("tex")
    check(text, 4)
    assert text.splitlines() == [
        r"\begin{table}[t]",
        r"\centering",
        r"\caption{digits: mean $\pm$ standard deviation over seeds, in percent. The best mean of each block is bold.}",
        r"\begin{tabular}{llrr}",
        r"\toprule",
        r"method & norm & seeds & $A_f$ \% \\",
        r"\midrule",
        r"ft & bn & 1 & 70.0 \\",
        r" & tbbn & 1 & \textbf{75.0} \\",
        r"\midrule",
        r"er & bn & 1 & \textbf{70.0} \\",
        r" & tbbn & 1 & \textbf{70.0} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "% A_f = (1/T) sum_i a[T,i]",
        "% a[t,i]: accuracy on task i after learning task t, among all classes seen so far. ±: standard deviation over seeds.",
    ]


def test_only_a_table_of_many_columns_is_made_as_wide_as_the_text() -> None:
    nine, ten = (Table(tuple("abcdefghij"[:n]), (("1",) * n,)).render("tex").split("\n") for n in (9, 10))
    assert nine[0].startswith(r"\begin{tabular}") and nine[-1] == r"\end{tabular}"
    assert ten[0] == r"\resizebox{\linewidth}{!}{%" and ten[1].startswith(r"\begin{tabular}") and ten[-1] == "}"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_the_tables_compile(tmp_path: Path) -> None:
    records = [record([[1.0], [0.5, 0.9]], sizes=[3, 1], data__name=name) for name in HOSTILE]
    wide = Table(tuple("abcdefghij"), (tuple("1" * 10),), caption="Ten columns")
    body = "\n\n".join([hostile_table().render("tex"), blocks_table(records).render("tex"), wide.render("tex")])
    preamble = r"\documentclass{article}\usepackage{booktabs,graphicx}\usepackage[landscape,a3paper]{geometry}"
    (tmp_path / "t.tex").write_text(preamble + "\n\\begin{document}\n" + body + "\n\\end{document}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "passwd" not in "".join(re.findall(r"\(([^()\s]+)", done.stdout)), "no file was read"


def test_accents_of_latin_1_are_letters_and_all_other_signs_are_spelt_out() -> None:
    assert escape("àÉñüÿÅ") == "àÉñüÿÅ"
    # No letter with an accent, one of another font, a fraction, a space of its own width.
    assert [escape(sign) for sign in "ßøő½²汉\u00a0"] == [
        "U+00DF", "U+00F8", "U+0151", "U+00BD", "U+00B2", "U+6C49", "U+00A0",
    ]  # fmt: skip
