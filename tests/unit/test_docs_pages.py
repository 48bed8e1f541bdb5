"""The pages for people: each is listed, the tests that they name exist, links lead somewhere."""

import re
from pathlib import Path

import pytest
import yaml

from launcher import __version__
from tests.support.worlds.pages import functions_of

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
NAMED = re.compile(r"\b(tests/[\w/]+\.py)\b(?:::(test_\w+))?")


def pages_of(nav):
    for entry in nav:
        match entry:
            case str():
                yield entry
            case dict():
                for value in entry.values():
                    yield from pages_of([value] if isinstance(value, str) else value)


def test_the_index_lists_every_page_once_with_a_line():
    """index.md is the site's llms.txt too."""
    lines = [line for line in (DOCS / "index.md").read_text().splitlines() if line.startswith("- [")]
    listed = [found[1] for line in lines if (found := re.fullmatch(r"- \[[^]]+\]\(([\w/]+\.md)\): \S.+", line))]
    assert len(listed) == len(lines)
    assert sorted(listed) == sorted(PAGES - {"index.md"})


def test_the_site_has_every_page_in_the_order_of_the_index():
    nav = list(pages_of(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]))
    assert nav == ["index.md", *re.findall(r"^- \[[^]]+\]\(([^)]+)\)", (DOCS / "index.md").read_text(), re.MULTILINE)]


def section_of(page, heading):
    """The text below a heading of the second level, up to the next one; "" where the page has no such heading."""
    text = (DOCS / page).read_text()
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


def rows_of(text):
    """The rows of the tables in a text, without their heads."""
    rows = re.sub(r"^\|.*\|\n\|[-| :]+\|$", "", text, flags=re.MULTILINE).splitlines()
    return [row for row in rows if row.startswith("| ")]


def test_every_test_that_a_page_names_exists():
    pages = [*DOCS.rglob("*.md"), *REPOSITORY.glob("*.md"), *(REPOSITORY / "tests").rglob("*.md")]
    named = {str(page.relative_to(REPOSITORY)): NAMED.findall(page.read_text()) for page in pages}
    assert len(named["docs/measurements.md"]) > 20
    assert [
        (page, path) for page, found in named.items() for path, _ in found if not (REPOSITORY / path).is_file()
    ] == []
    found = [(page, path, name) for page, all_ in named.items() for path, name in all_ if name]
    assert [one for one in found if one[2] not in functions_of(one[1])] == []


def test_each_promise_that_holds_names_a_test():
    rows = rows_of(section_of("measurements.md", "## Holds"))
    assert rows
    assert [row for row in rows if not NAMED.search(row)] == []


def test_each_line_of_the_public_reports_has_a_test():
    rows = rows_of((REPOSITORY / "tests" / "public_reports.md").read_text())
    assert rows
    named = [NAMED.search(row.rstrip(" |").rpartition("|")[2]) for row in rows]
    assert [row for row, found in zip(rows, named, strict=True) if found is None or found[2] is None] == []
    assert [found[0] for found in named if found and found[2] not in functions_of(found[1])] == []


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "tests/README.md",
        "tests/mutation/README.md",
        *(f"docs/{page}" for page in sorted(PAGES)),
    ],
)
def test_each_link_leads_somewhere(page):
    """A page of docs/ links to nothing outside docs/: the site has only these, and its build is strict."""
    path = REPOSITORY / page
    links = [link for link in LINK.findall(path.read_text()) if not link.startswith(("https://", "http://"))]
    assert [link for link in links if not (path.parent / link).exists()] == []
    if path.is_relative_to(DOCS):
        assert [link for link in links if not (path.parent / link).resolve().is_relative_to(DOCS)] == []


def test_the_citation_and_the_changelog_have_the_version():
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == __version__
    assert re.search(rf"^## {re.escape(__version__)}\b", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
