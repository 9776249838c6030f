"""What MkDocs is told beside mkdocs.yml: pages of files outside of docs/, links to them, and what is generated.

A page has ``<!-- generated: NAME -->`` where the site has what GENERATED makes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import command_page
import error_page
import format_page
import ledger_page
import service_page
from links import PAGES, ROOT, SOURCE, page_of, rewritten, targets
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml", ".proto": "protobuf", "": "text"}
#: of reStructuredText, in docstrings
_ROLE = re.compile(r":(?:meth|class|func|mod|attr|data):<code>(~?)([\w.]+)")


GENERATED = {
    "commands": command_page.page,
    "errors": error_page.page,
    "formats": format_page.page,
    "ledger": ledger_page.page,
    "services": service_page.page,
}
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """README and its neighbours are pages, and so is each file that a page links to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    for file in files.documentation_pages():
        if file.abs_src_path is not None:
            path = Path(file.abs_src_path)
            texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    named = {target for name, text in texts.items() for target in targets(text, name)}
    for target in sorted(named):
        page = page_of(target)
        if page.startswith(f"{SOURCE}/"):
            files.append(File.generated(config, page, content=_shown(target)))
    return files


def _shown(name: str) -> str:
    """A page of a file that is no Markdown of docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(name).suffix, "text")
    return f"# {name}\n\n````{language}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return _GENERATED.sub(lambda found: GENERATED[found[1]](), rewritten(markdown, page.file.src_uri))


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(lambda found: f"<code>{found[2].rpartition('.')[2] if found[1] else found[2]}", html)
