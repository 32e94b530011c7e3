"""Build the documents as a site, strictly: a link or an anchor that leads nowhere ends it.

    .venv/bin/python -m pip install mkdocs==1.6.1 mkdocs-material==9.8.1       # or scripts/setup.sh docs
    .venv/bin/python scripts/build_docs.py [--to FOLDER]                       # build/site/index.html; no network is used

The pages are those of the repository, at the same places, so that their links hold. Links to code become plain text: the
site has no code. The navigation is the index, docs/README.md: a document that does not stand there ends the build, too.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SINGLE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_ANYWHERE = ("http://", "https://", "mailto:")


def pages() -> list[Path]:
    """Return the pages of the site, relative to the repository."""
    found = [ROOT / name for name in SINGLE]
    found += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
    return [path.relative_to(ROOT) for path in found]


def stage(folder: Path) -> None:
    """Copy pages and pictures to `folder`. Raises ValueError with every link that leads nowhere."""
    shutil.rmtree(folder, ignore_errors=True)
    known, problems = set(pages()), list[str]()
    for page in pages():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_without_code_links(page, known, problems), encoding="utf-8")
    for picture in [*(ROOT / "docs").glob("*.png"), *(ROOT / "recipes").rglob("*.png")]:
        shutil.copy(picture, folder / picture.relative_to(ROOT))
    if problems:
        raise ValueError("\n".join(problems))


def _without_code_links(page: Path, known: set[Path], problems: list[str]) -> str:
    """Return the text of a page, in which links to what is no page are their texts."""

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if target.startswith(_ANYWHERE):
            return match[0]
        path = (ROOT / page.parent / target).resolve()
        if not path.exists():
            problems.append(f"{page}: {target} is not there")
        if path.is_dir() and (path / "README.md").relative_to(ROOT) in known:
            return f"[{match['text']}]({target.rstrip('/')}/README.md{match['anchor'] or ''})"
        return match[0] if path.suffix == ".png" or path.relative_to(ROOT) in known else match["text"]

    # What stands in a block of code is no link.
    parts = re.split(r"(^```.*?^```$)", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def navigation() -> list[Any]:
    """Return the navigation: the README, the groups of the index in its order, the recipes."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    groups: list[Any] = ["README.md", {"Documents": "docs/README.md"}]
    shown: set[Path] = {Path("README.md"), Path("docs/README.md")}
    for title, table in re.findall(r"^\*\*(.+?)\*\*\n(.*?)(?=^\*\*|\Z)", index, flags=re.MULTILINE | re.DOTALL):
        entries = [path for path in _linked(table) if path not in shown]
        shown |= set(entries)
        groups.append({title: [str(path) for path in entries if path.parts[0] != "recipes"]})
    recipes = [path for path in pages() if path.parts[0] == "recipes"]
    groups.append({"Recipes": [str(path) for path in recipes]})
    missing = [str(path) for path in pages() if path not in shown and path not in recipes]
    if missing:
        raise ValueError(f"docs/README.md does not name {', '.join(missing)}")
    return groups


def _linked(text: str) -> Iterator[Path]:
    for match in _LINK.finditer(text):
        path = (ROOT / "docs" / match["target"]).resolve()
        if path.suffix == ".md" and path.is_relative_to(ROOT):
            yield path.relative_to(ROOT)


def build(site: Path, staged: Path) -> list[str]:
    """Build the site from what is staged, and return the warnings of mkdocs."""
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    stage(staged)
    warnings: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler = Keeps(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(staged), site_dir=str(site), nav=navigation())
        mkdocs_build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    return warnings


def main() -> int:
    """Build the site. Returns 1 where anything leads nowhere."""
    parser = argparse.ArgumentParser(description="Build the documents as a site.")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="the folder of the site (build/site)")
    arguments = parser.parse_args()
    try:
        problems = build(arguments.to.resolve(), ROOT / "build" / "docs")
    except ImportError:
        problems = ["mkdocs is not installed: bash scripts/setup.sh docs"]
    except ValueError as error:
        problems = str(error).splitlines()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"written: {arguments.to / 'index.html'}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
