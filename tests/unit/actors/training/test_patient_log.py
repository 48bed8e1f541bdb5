"""What the trainer's log says of the lines that it could not take, and that only a disk is blamed for them."""

import logging

import pytest

from actors.training.patient_log import PatientFileHandler


@pytest.fixture
def logs(tmp_path):
    handler = PatientFileHandler(tmp_path / "later" / "trainer.log")
    logger = logging.Logger("patient")
    logger.addHandler(handler)
    yield logger, handler, tmp_path / "later" / "trainer.log"
    handler.close()


def test_lines_that_a_disk_refused_are_counted_and_said(logs):
    logger, handler, path = logs
    logger.warning("one")
    logger.warning("two")
    assert handler.lost == 2
    path.parent.mkdir()
    logger.warning("three")
    assert handler.lost == 0
    assert path.read_text() == "three\n2 lines of this log were lost: the disk refused them\n"


def test_a_line_that_can_not_be_made_is_not_blamed_on_the_disk(logs, capsys):
    logger, handler, path = logs
    path.parent.mkdir()
    logger.warning("%d steps", "many")
    logger.warning("after")
    assert handler.lost == 0
    assert path.read_text() == "after\n"
    assert "TypeError" in capsys.readouterr().err, "a defect is shown as any other handler shows it"
