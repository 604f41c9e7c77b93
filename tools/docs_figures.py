"""Draws the pictures of docs/idea.md: ``python tools/docs_figures.py``. ``tests/test_docs.py`` checks that they are current."""

from __future__ import annotations

from pathlib import Path

import torch

import tbbn

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
VALUES, N_CURRENT, PAST_TASKS = (0.0, 6.0, 2.0, 4.0), 2, 2  # of the example: current rows, then memory rows
COLOURS = ("#c2410c", "#c2410c", "#1d4ed8", "#1d4ed8")
LEFT, WIDTH, HEIGHT, ROW = 118, 640, 306, 78


def normalised(balanced: bool) -> list[float]:
    """The four rows after batch norm, or after TBBN."""
    x = torch.tensor(VALUES, dtype=torch.float64).unsqueeze(1)
    layer = tbbn.TaskBalancedBatchNorm1d(1, eps=1e-12, affine=False, dtype=torch.float64)
    if not balanced:
        return list(layer(x).flatten().tolist())
    with tbbn.balance(layer, current=N_CURRENT, memory=len(VALUES) - N_CURRENT, past_tasks=PAST_TASKS):
        return list(layer(x).flatten().tolist())


def four_rows() -> str:
    """The four rows as they come, after batch norm and after TBBN, as SVG."""
    lines = [
        ("input", VALUES, lambda v: v / 6 * 2.8 - 1.4, "{:g}"),
        ("batch norm", normalised(False), lambda v: v, "{:.2f}"),
        ("TBBN", normalised(True), lambda v: v, "{:.2f}"),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="15">',
        "<title>Four rows: input, after batch norm, after TBBN</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for i, (name, values, place, shown) in enumerate(lines):
        y = 52 + ROW * i
        parts.append(f'<text x="12" y="{y + 5}" fill="#111">{name}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y}" y2="{y}" stroke="#999"/>')
        for value, colour in zip(values, COLOURS, strict=True):
            x = LEFT + (WIDTH - 20 - LEFT) * (place(value) + 1.6) / 3.2
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="8" fill="{colour}"/>')
            parts.append(
                f'<text x="{x:.1f}" y="{y - 16}" fill="#111" text-anchor="middle">{shown.format(value)}</text>'
            )
    for i, (name, colour) in enumerate((("current rows", COLOURS[0]), ("memory rows", COLOURS[2]))):
        x = LEFT + 190 * i
        parts.append(f'<circle cx="{x + 8}" cy="{HEIGHT - 28}" r="8" fill="{colour}"/>')
        parts.append(f'<text x="{x + 24}" y="{HEIGHT - 23}" fill="#111">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    from tbbn.bench.report.figures import save_figure
    from tbbn.paper import toy

    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "four-rows.svg").write_text(four_rows())
    print(FOLDER / "four-rows.svg")
    print(save_figure(toy.figure(toy.toy()), FOLDER / "toy.png"))


if __name__ == "__main__":
    main()
