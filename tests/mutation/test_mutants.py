"""Small changes of the code are noticed: the mutants that matter are among those that are tried, and no other survives.

`python -m pytest --long tests/mutation` tries all of them: hours on two busy cores, a few minutes for most modules.
"""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import mutations
from tests.mutation.mutations import mutants
from tests.mutation.targets import TARGETS
from tests.mutation.verdicts import KNOWN, PAGE, Outcome, listed, page, write

REPOSITORY = Path(__file__).parents[2]


@functools.cache
def names_of(path):
    return mutations.names_of((REPOSITORY / path).read_text())


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("actors/rollout/request_loop.py", "part.weight_version != self._weight_version"),
        ("launcher/policy/plan.py", "or seen.ending is not None → seen.state is RunState.SHUTTING_DOWN"),
        ("launcher/policy/plan.py", "and _may_work(builder, other) → _may_work(builder, other)"),
        ("launcher/policy/admission.py", "min(rewards, default=None) → max(rewards, default=None)"),
        ("launcher/policy/admission.py", "_reject: 0 → -1"),
        ("actors/rollout/server_pool.py", "ServerPool.acquire: self.released += 1 → (removed)"),
        ("actors/data/prompt_queue.py", "and _are_ids(last) → _is_count(epoch)"),
        ("actors/training/step_loop.py", "self._queue.commit(batch.used_ids) → (removed)"),
        ("launcher/run_files/journal.py", "_append: os.fsync(fd) → (removed)"),
    ],
)
def test_the_changes_that_once_went_unnoticed_are_tried(path, change):
    assert [name for name in names_of(path) if change in name]


def test_each_module_and_each_test_file_that_is_to_notice_its_changes_is_there():
    named = {path for module, tests in TARGETS.items() for path in (module, *tests)}
    assert [path for path in sorted(named) if not (REPOSITORY / path).is_file()] == []


@pytest.mark.parametrize("path", TARGETS)
def test_no_change_is_listed_that_the_module_no_longer_has(path):
    assert {*listed(path)} <= {*names_of(path)}, KNOWN.name


def test_each_change_has_a_name_of_its_own_and_leaves_the_text_alone():
    body = ['"""One."""', "log.info(1)", "if a > 0 and b: g(f'{a + 1}')", "return a > 0"]
    source = "\n    ".join(["def f(a, b=1):", *body])
    found = [mutant.name for mutant in mutants(source, "f.py")]
    assert mutations.names_of(source) == found
    assert [mutant.name for mutant in mutants(source, "f.py", found[3:5])] == found[3:5]
    assert found == [
        "f: a > 0 and b → a > 0 or b",
        "f: a > 0 and b → b",
        "f: a > 0 and b → a > 0",
        "f: a > 0 → a >= 0",
        "f: a > 0 → a <= 0",
        "f: 0 → 1",
        "f: g(f'{a + 1}') → (removed)",
        "f: a > 0 → a >= 0 (2)",
        "f: a > 0 → a <= 0 (2)",
        "f: 0 → 1 (2)",
    ]


def test_the_page_keeps_what_it_says_of_a_module_that_was_not_run_again(tmp_path):
    shown = PAGE.read_text()
    assert page(tmp_path, shown) == shown
    path, killed = "launcher/policy/checkpoint_status.py", Outcome.KILLED
    write(path, tmp_path, {"a": killed, "b": killed, "c": Outcome.SURVIVED})
    changed = set(page(tmp_path, shown).splitlines()) - set(shown.splitlines())
    assert {line for line in changed if path in line} == {
        f"| `{path}` | 3 | 2 | 0 | 1 | 67% |",
        f"| `{path}` | `c` | not looked at |",
    }
    assert [line[:8] for line in changed if path not in line] == ["| all | "]


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("path", TARGETS)
def test_no_other_change_survives_than_those_that_are_listed_with_their_reason(path, tmp_path):
    command = [sys.executable, "-m", "tests.mutation", path, "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
