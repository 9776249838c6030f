"""README and docs/ as their readers have them: every code block, by what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: their code is that of stateflow/examples, see tests/unit/project/test_writing_examples.py
OF_EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: how the title of a block ends that is of another system: readers see it, and no test runs it
NOT_EXECUTED = ": not executed here"
_FENCED = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """``kind``: python, yaml, sh; text, which is a picture; theirs, which is of another system."""

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*pages: Path) -> list[Block]:
    """Lists the code blocks of these pages in order; of all pages by default."""
    found = []
    for page in pages or PAGES:
        text = page.read_text()
        for match in _FENCED.finditer(text):
            kind = "theirs" if (match[2] or "").endswith(NOT_EXECUTED) else match[1]
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, kind, match[3]))
    return found
