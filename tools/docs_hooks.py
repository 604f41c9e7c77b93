"""Hooks of mkdocs: the examples become pages, the results travel along, and pages that ``nav`` does not name are listed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Add the pages that are not in ``nav`` under a heading of their own."""
    listed = set(_pages(config.nav))
    others = sorted(page.name for page in Path(config.docs_dir).glob("*.md") if page.name not in listed)
    if others:
        config.nav.append({"More": others})
    return config


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(entry)]


def on_files(files: Files, *, config: Any) -> Files:
    for script in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{script.stem}.md", content=example_page(script)))
    for file in sorted((ROOT / "results").glob("*.*")):
        files.append(File.generated(config, f"results/{file.name}", abs_src_path=str(file)))
    return files


def example_page(script: Path) -> str:
    """A page with a script's docstring as its text, and the rest as code."""
    text = script.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, prose = docstring.partition("\n")
    code = text.split('"""', 2)[2].strip()
    return f'# {title.rstrip(".")}\n\n{prose.strip()}\n\n```python title="examples/{script.name}"\n{code}\n```\n'


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave ``docs/`` lead to what :func:`on_files` added; of any other the text stays."""
    return _OUTSIDE.sub(_inside, markdown)


def _inside(link: re.Match[str]) -> str:
    picture, text, path = link.groups()
    if re.fullmatch(r"examples/\w+\.py", path):
        return f"[{text}]({path.removesuffix('.py')}.md)"
    if re.fullmatch(r"results/[^/]+\.\w+", path):
        return f"{picture}[{text}]({path})"
    return f"[{text}](index.md)" if path == "README.md" else text
