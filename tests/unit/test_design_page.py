"""docs/design.md and its picture against the code: rooms, files, promises."""

import configparser
import re
from collections import Counter

from launcher.config.compose import REPOSITORY

PAGE = (REPOSITORY / "docs" / "design.md").read_text()
FILE = re.compile(r"`((?:launcher|actors|scripts|conf)/[\w/]+\.(?:py|css|yaml))`")


WALKS = ("A prompt", "A SIGKILL of a server", "A reward collapse")
COUNTS = re.compile(r"a prompt (\d+), a killed server (\d+), a collapse (\d+)\.")
REFERS = re.compile(r"as in steps? (\d+)(?: to (\d+))? of a (prompt|SIGKILL)")


def layers(contract):
    contracts = configparser.ConfigParser(comment_prefixes=(";",))
    contracts.read(REPOSITORY / ".importlinter")
    return contracts[f"importlinter:contract:{contract}"]["layers"].split()


def test_every_file_that_the_page_names_exists():
    named = set(FILE.findall(PAGE))
    assert len(named) > 100
    assert [name for name in sorted(named) if not (REPOSITORY / name).is_file()] == []


def steps_of(walk):
    text = PAGE.partition(f"\n### {walk}\n")[2].partition("\n### ")[0]
    return dict(re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", text, re.MULTILINE | re.DOTALL))


def files_of(step):
    """Those that it names, and those of the steps to which it refers."""
    named = set(FILE.findall(step))
    for first, last, where in REFERS.findall(" ".join(step.split())):
        (walk,) = (name for name in WALKS if where in name)
        for number in range(int(first), int(last or first) + 1):
            named |= files_of(steps_of(walk)[str(number)])
    return named


def test_the_walks_pass_as_many_files_as_the_page_says():
    passed = [len(set().union(*map(files_of, steps_of(walk).values()))) for walk in WALKS]
    assert passed == [int(count) for count in COUNTS.search(PAGE).groups()]


def test_the_picture_has_every_room_and_no_other():
    picture = (REPOSITORY / "docs" / "rooms.svg").read_text()
    drawn = re.findall(r'class="n">(\w+)<', picture)
    assert sorted(drawn) == sorted([*layers("launcher"), *layers("actors")])


def test_every_promise_that_the_code_cites_is_on_the_page():
    sources = [
        path.read_text() for folder in ("launcher", "actors", "scripts") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    cited = {number for text in sources for number in re.findall(r"\bP(\d{1,2})\b", text)}
    explained = set(re.findall(r"^\| P(\d+) \|", PAGE, re.MULTILINE))
    assert explained == {str(number) for number in range(1, 13)}
    assert {number for number in cited if int(number) <= 12} <= explained


def test_every_room_says_what_it_is_for():
    for package in ("launcher", "actors"):
        for folder in {path.parent for path in (REPOSITORY / package).rglob("*.py")} - {REPOSITORY / package}:
            assert (folder / "__init__.py").read_text().startswith('"""'), folder


def test_no_two_classes_have_one_name():
    files = [path for package in ("launcher", "actors", "scripts") for path in (REPOSITORY / package).rglob("*.py")]
    classes = Counter(name for path in files for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE))
    assert {name for name, count in classes.items() if count > 1} == set()
