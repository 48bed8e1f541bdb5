"""The children of a process whose threads end while they are read."""

import pytest

from actors.processes import process_tree


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """The threads of process 7, in the order in which they are read."""
    monkeypatch.setattr(process_tree, "PROC", tmp_path)
    monkeypatch.setattr(process_tree, "identify", lambda pid: pid)
    names = []
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda folder: iter([folder / name for name in names]))

    def made(name, children=None):
        names.append(name)
        (tmp_path / "7" / "task" / name).mkdir(parents=True)
        if children is not None:
            (tmp_path / "7" / "task" / name / "children").write_text(children)

    return made


def test_a_thread_that_ends_hides_no_child_of_the_others(tasks):
    tasks("7", "11 12 ")
    tasks("8")
    tasks("9", "13 ")
    assert process_tree.children(7) == [11, 12, 13]


def test_a_process_that_has_ended_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(process_tree, "PROC", tmp_path)
    assert process_tree.children(7) == []
