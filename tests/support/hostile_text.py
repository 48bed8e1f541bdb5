"""Text that commands a terminal, and what of it was obeyed."""

import re
import unicodedata

TITLE, CLEAR, LINK = "\x1b]0;owned\x07", "\x1b[2J\x1b[H", "\x1b]8;;http://evil.test\x1b\\here\x1b]8;;\x1b\\"
C1 = "\x9b2J\x9d0;owned\x9c\x85"
OVER = "\rFINISHED\b\b\x7f"
BIDI = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)))
UNSEEN = "\u200b\u200c\u2060\ufeff\u00ad\u2028\U000e0041"
MARKUP = "[bold red]loud[/] [link=http://evil.test]here[/link] :skull: [/nothing]"
HOSTILE = f"bad {TITLE}{CLEAR}{LINK}{C1}{OVER}{BIDI}{UNSEEN}{MARKUP} end"

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FROM_RICH = re.compile(r"\r(?=\x1b\[2K)|\x1b\[(?:[0-9;]*m|\?25[hl]|1A|2K)")
"""Colours, the cursor shown and hidden, moved, and a line cleared: what the panel itself is drawn with."""


def obeyed(printed: str, *, allowed: re.Pattern[str] = COLOUR) -> set[str]:
    """The characters in `printed` that a terminal would act on or not show, without those of `allowed`."""
    left = allowed.sub("", printed).replace("\r\n", "\n")
    return {letter for letter in left if letter not in "\n\t" and unicodedata.category(letter) in "Cc Cf Zl Zp Cs"}
