"""What a command printed as its error is found again in its output."""

import pytest

from launcher.base.errors import ConfigError, printed_error

ERROR = ConfigError("chat.template: it says error: no tools", "leave it out")


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (f"note: error: 3\nerror: {ERROR}\n", (ERROR.message, ERROR.hint)),
        (f"error: of a library\n\nerror: {ERROR}", (ERROR.message, ERROR.hint)),
        ("error: two\n  a=1: 2\n  b=1: 2", ("two\n  a=1: 2\n  b=1: 2", "")),
        ("it went well, no error: 0\n", None),
        ("", None),
    ],
)
def test_the_error_is_the_last_one_that_begins_a_line(output, found):
    assert printed_error(output) == found
