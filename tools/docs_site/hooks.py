# Copyright (c) the d2_memfit developers.
"""Make a site of docs/: pages from elsewhere in the repository, and links that work there.

mkdocs calls these functions (https://www.mkdocs.org/dev-guide/plugins/#events). The files under
docs/ are written for a code host, where links lead to any file of the repository. On the site,
links to pages lead to pages, and other files are named by their path.
"""

import os
import re
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages of the reference: a package, and those of its modules whose names users import.
PACKAGES: dict[str, tuple[str, ...]] = {
    "d2_memfit": ("testing",),
    "d2_memfit.engine": ("build", "checkpoint", "ending", "evaluating", "hooks", "launch"),
    "d2_memfit.planner": ("device", "estimate", "plan"),
    "d2_memfit.job": (),
    "d2_memfit.techniques": ("registry", "technique"),
}

# Pages by their place in the repository.
PAGES = {
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
    "README.md": "README.md",  # that of docs/ is the start page
    **{str(p.relative_to(ROOT)): p.name for p in (ROOT / "docs").glob("*.md")},
    **{
        f"projects/{p.parent.name}/README.md": f"projects/{p.parent.name}.md"
        for p in (ROOT / "projects").glob("*/README.md")
    },
}
ORIGINS = {page: origin for origin, page in PAGES.items()}

_CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\(([^)\s#]+)(#[^)\s]+)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for origin, page in PAGES.items():
        if not origin.startswith("docs/") and page != "README.md":
            files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    for package, modules in PACKAGES.items():
        content = f"# {package}\n\n::: {package}\n"
        for module in modules:
            heading = "options: {show_root_heading: true, show_root_full_path: true}"
            content += f"\n::: {package}.{module}\n    {heading}\n"
        files.append(File.generated(config, f"api/{package}.md", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrite the links of a page, but for those in its code. Searches find CHANGELOG last."""
    if page.file.src_uri == "CHANGELOG.md":
        page.meta["search"] = {"boost": 0.1}
    rewrite = partial(rewrite_link, page=page.file.src_uri)
    parts = _CODE.split(markdown)
    return "".join(part if i % 2 else _LINK.sub(rewrite, part) for i, part in enumerate(parts))


def rewrite_link(match: "re.Match[str]", page: str) -> str:
    """The link as the site has it; the path of a file that is no page, in place of a link."""
    text, target, anchor = match.groups()
    origin = PurePosixPath(ORIGINS.get(page, page))
    path = os.path.normpath(origin.parent / target)
    if "://" in target:
        return match[0]
    if path in PAGES:
        relative = os.path.relpath(PAGES[path], PurePosixPath(page).parent)
        anchor = "" if path == "README.md" else anchor or ""  # the start page has other headings
        return f"[{text}]({relative}{anchor})"
    if path.startswith("docs/") or not (ROOT / path).exists():
        return match[0]  # a file of the site, or one that mkdocs will miss
    name = text.strip("`")
    return f"`{path}`" if path.endswith(name) else f"{text} (`{path}`)"
