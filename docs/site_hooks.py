"""Hooks of the site's build: each page is published as Markdown too, and index.md as llms.txt, which lists them."""

from __future__ import annotations

import shutil
from pathlib import Path


def on_post_build(config: dict[str, str]) -> None:
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for page in docs.rglob("*.md"):
        shutil.copyfile(page, site / page.relative_to(docs))
    shutil.copyfile(docs / "index.md", site / "llms.txt")
