"""Links of a Markdown page, as GitHub's view has them, and what they are in the site.

A page links to files of the repository by relative paths. Those below ``docs/`` are pages of the site. Others become
pages: ``README.md`` as text, source code as a page that shows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
#: files outside of docs/ that are pages, and which
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SOURCE = "source"
_FENCE = re.compile(r"^(`{3,}).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?P<to>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


def place_of(page: str) -> str:
    """Where a page of the site is in the repository."""
    for file, name in PAGES.items():
        if page == name:
            return file
    return f"docs/{page}"


def page_of(file: str) -> str:
    """The page of the site that shows a file of the repository."""
    if file in PAGES:
        return PAGES[file]
    inside = PurePosixPath(file)
    if inside.is_relative_to("docs"):
        return str(inside.relative_to("docs"))
    return f"{SOURCE}/{file}.md"


def targets(text: str, file: str) -> Iterator[str]:
    """Files of the repository that the text of ``file`` links to."""
    for found in _links(text):
        if (named := _named(found["to"], file)) is not None:
            yield named


def rewritten(text: str, page: str) -> str:
    """The text of a page, with links as the site has them."""
    file = place_of(page)

    def link(found: re.Match[str]) -> str:
        named = _named(found["to"], file)
        if named is None:
            return found[0]
        to = os.path.relpath(page_of(named), PurePosixPath(page).parent)
        return f"]({to}{found['anchor'] or ''})"

    return _outside_fences(text, lambda part: _LINK.sub(link, part))


def _links(text: str) -> Iterator[re.Match[str]]:
    yield from _LINK.finditer(_FENCE.sub("", text))


def _named(to: str, file: str) -> str | None:
    """The file of the repository that a link of ``file`` names; of a directory its README. None: something else."""
    if _ELSEWHERE.match(to) or to.startswith("/"):
        return None
    named = os.path.normpath(PurePosixPath(file).parent / to)
    found = ROOT / named
    if found.is_dir() and (found / "README.md").is_file():
        return f"{named}/README.md"
    return named if found.is_file() else None


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
