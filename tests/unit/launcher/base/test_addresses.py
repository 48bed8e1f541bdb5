"""A port that is found stays free until whoever asked for it listens there."""

import errno
import socket
from pathlib import Path

import pytest

from launcher.base import addresses
from launcher.base.addresses import ABOVE_RAY, USUALLY_GIVEN, free_port


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Has the kernel give ports from this one on."""

    def from_port(number):
        (tmp_path / "range").write_text(f"{number}\t60999\n")
        monkeypatch.setattr(addresses, "GIVEN", tmp_path / "range")

    return from_port


def drawn(monkeypatch, *numbers):
    left = list(numbers)
    monkeypatch.setattr("random.SystemRandom.randrange", lambda self, begin, end: left.pop(0))
    return left


def test_it_is_none_that_the_kernel_gives(given):
    given(ABOVE_RAY + 1000)
    found = {free_port("127.0.0.1", following=9) for _ in range(40)}
    assert len(found) > 1
    assert found <= set(range(ABOVE_RAY, ABOVE_RAY + 1000 - 9))


@pytest.mark.parametrize("begin", [1024, ABOVE_RAY + 2, None])
def test_where_the_kernel_gives_nearly_all_or_does_not_say_it_is_one_as_usual(given, begin, monkeypatch):
    """Of two ports both may be taken; and a kernel that says nothing isn't an address that can't be listened on."""
    given(begin) if begin else monkeypatch.setattr(addresses, "GIVEN", Path("/nowhere"))
    ends = []
    monkeypatch.setattr("random.SystemRandom.randrange", lambda self, first, end: ends.append(end) or first + 7)
    assert free_port("127.0.0.1") == ABOVE_RAY + 7
    assert ends == [USUALLY_GIVEN - 1]


def test_one_that_is_taken_or_followed_by_such_a_one_is_passed_over(monkeypatch):
    first = free_port("127.0.0.1", following=3)
    with socket.create_server(("127.0.0.1", first + 1)):
        left = drawn(monkeypatch, first, first + 2)
        assert free_port("127.0.0.1", following=2) == first + 2
        assert left == []
        drawn(monkeypatch, *[first + 1] * addresses.TRIES)
        with pytest.raises(OSError) as caught:
            free_port("127.0.0.1")
    assert caught.value.errno == errno.EADDRINUSE


def test_an_address_of_another_machine_is_told_at_once(monkeypatch):
    drawn(monkeypatch, ABOVE_RAY)
    with pytest.raises(OSError) as caught:
        free_port("203.0.113.1")
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_an_address_of_the_sixth_version():
    assert ABOVE_RAY <= free_port("::1") < USUALLY_GIVEN
