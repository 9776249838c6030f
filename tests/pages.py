"""README and docs/ as their readers have them: every code block, by what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """``kind``: python, yaml, sh, or text, which is a picture."""

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*pages: Path) -> list[Block]:
    """Of these pages, all by default, in order."""
    found = []
    for page in pages or PAGES:
        text = page.read_text()
        for match in _FENCED.finditer(text):
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found
