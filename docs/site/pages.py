"""What the site has beside docs/: README as its first page, the pages and files that lie elsewhere in the checkout, and
a line in the navigation for each design note.

The documents are written for whoever reads them in the checkout. So links that lead out of docs/ are followed here: a
Markdown file becomes a page, any other file is put beside the pages, and the link is made to fit.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIRST_PAGE = "README.md"
PAGES_ELSEWHERE = (FIRST_PAGE, "CHANGELOG.md", "benchmarks/README.md")
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]+)?(?=[)\s])")
"""A link to a file, with or without a heading in it."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the design notes in the navigation, in the place that mkdocs.yml leaves for them."""
    notes: list[Any] = sorted(f"design/{note.name}" for note in (DOCS / "design").glob("*.md"))
    for part in config.nav or []:
        for title, pages in part.items():
            if title == "Explanation":
                pages.append({"Design notes": notes})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of docs/ and is a page, or what a page leads to."""
    for name in PAGES_ELSEWHERE:
        files.append(File.generated(config, place_of(ROOT / name), content=(ROOT / name).read_text(encoding="utf-8")))
    known = {file.src_uri for file in files}
    for document in [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES_ELSEWHERE)]:
        for target in targets_of(document):
            place = place_of(target)
            if target.is_file() and not target.is_relative_to(DOCS) and place not in known:
                known.add(place)
                files.append(File.generated(config, place, content=target.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make each link fit the place that its page and its target have in the site."""
    here = origin_of(page.file.src_uri)

    def fitted(link: re.Match[str]) -> str:
        target = (here.parent / link[2]).resolve()
        if not target.is_file():
            return link[0]  # the strict build names it
        place = posixpath.relpath(place_of(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{place}{link[3] or ''}"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(fitted, part) for part in parts)


def targets_of(document: Path) -> list[Path]:
    """The files that a document links to."""
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    return [(document.parent / link[2]).resolve() for link in LINK.finditer(text)]


def place_of(file: Path) -> str:
    """Where a file of the checkout is in the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = os.path.relpath(file, ROOT).replace(os.sep, "/")
    return {FIRST_PAGE: "index.md", "benchmarks/README.md": "benchmarks.md", "CHANGELOG.md": "changelog.md"}.get(
        name, name
    )


def origin_of(place: str) -> Path:
    """Which file of the checkout is at a place of the site."""
    elsewhere = {place_of(ROOT / name): ROOT / name for name in PAGES_ELSEWHERE}
    return elsewhere.get(place, DOCS / place)
