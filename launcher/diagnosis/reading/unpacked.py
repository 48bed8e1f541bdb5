"""Takes off what a log is packed in, compression or an archive, and writes the kernel's own dates in full.

Each result is a file of plain lines in a scratch folder, with the name of the log itself; what is packed in nothing is
read where it lies. What a file is shows in its first bytes, never in its name. Lines in another encoding, or wrapped in
records, are refused with the command that turns them into plain lines.
"""

from __future__ import annotations

import bz2
import calendar
import codecs
import errno
import gzip
import lzma
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from launcher.base.errors import DataError, StorageError

ZIP = b"PK\x03\x04"
OPENERS: Mapping[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ": lzma.open,
    b"BZh": bz2.open,
    b"(\xb5/\xfd": lambda path: pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"),
}
SUFFIXES = (".gz", ".xz", ".bz2", ".zst", ".tgz")
TAR_AT, TAR = 257, b"ustar"
ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError)
"""NotImplementedError: packed in a way that is not known; RuntimeError: with a password."""
FROM_UTF_16 = ("in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE")
WRAPPED: Mapping[bytes, tuple[str, str]] = {
    codecs.BOM_UTF16_LE: FROM_UTF_16,
    codecs.BOM_UTF16_BE: FROM_UTF_16,
    b'{"log":': ("a container's log in JSON", "jq -rj .log FILE"),
    b'{"__': ("journald's JSON", "journalctl -o cat, of the kernel journalctl -k -o short-iso"),
    b"__CURSOR=": ("journald's export", "journalctl -o cat, of the kernel journalctl -k -o short-iso"),
}
"""How forms begin that are not read here, what each is called, and the command that writes its lines alone."""
MONTHS = b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
MONTH = rb"(?P<month>" + b"|".join(MONTHS) + rb") +(?P<day>\d+) (?P<clock>\d\d:\d\d:\d\d)"
DMESG = re.compile(rb"^\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) " + MONTH + rb" (?P<year>20\d\d)\] ?", re.MULTILINE)
SYSLOG = re.compile(rb"^" + MONTH + rb" (?=\S+ kernel: )", re.MULTILINE)
ZONES_S = 86_400
"""The clocks of two zones differ by at most a day: of a file changed today, a line may be of tomorrow."""
COPIED_BYTES = 2**20
HEAD_BYTES = 65536
LEFT_FREE, LOOK_AFTER = 2**30, 16 * 2**20
"""Bytes of the scratch folder's disk that are left to others, and how often it is looked at: a run may live there."""


class PackedError(DataError):
    """A log in a form that can't be unpacked here."""


Opener = Callable[[], IO[bytes] | None]
Member = tuple[str, int, float, Opener | None]
"""Of a file in an archive: its name, its unpacked bytes, its time, and what opens it once it is wanted: None for a link
or a device."""


def unpacked(path: Path, scratch: Path) -> tuple[Path, str]:
    """Where its plain lines are, and what is to be said of it. Raises DataError, StorageError, OSError."""
    note = ""
    try:
        head = head_of(path)
        for magic, opener in OPENERS.items():
            if head.startswith(magic):
                path, note = _decompressed(path, opener, scratch)
                head = head_of(path)
        if is_archive(path):  # its members are dated one by one: rewritten as lines, it would lose all behind the first
            return path, note
        if refused := next((said for mark, said in WRAPPED.items() if head.startswith(mark)), None):
            what, command = refused
            raise PackedError(f"{path} is {what}, whose lines are not read", f"give the lines alone: {command}")
        if pattern := next((one for one in (DMESG, SYSLOG) if one.search(head)), None):
            with path.open("rb") as source:
                path = _written(path, scratch, _redated(pattern, path.stat().st_mtime, source))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(path, scratch) from error
        raise
    return path, note


def _no_room(path: Path, scratch: Path) -> StorageError:
    return StorageError(f"{scratch.parent} has no room left to unpack {path}", "set TMPDIR to a folder with more room")


def is_archive(path: Path) -> bool:
    head = head_of(path)
    return head.startswith(ZIP) or head[TAR_AT : TAR_AT + len(TAR)] == TAR


def extracted(path: Path, scratch: Path, is_wanted: Callable[[str], bool]) -> tuple[Path, list[str]]:
    """The folder with those of an archive's files whose names are wanted, and the names of the others.

    Raises DataError where it is damaged or would write elsewhere, StorageError where there is no room.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    others = list[str]()
    try:
        for name, size, time_of, source in _of_zip(path) if head_of(path).startswith(ZIP) else _of_tar(path):
            if source is None or not is_wanted(Path(name).name):
                others.append(name)
                continue
            if shutil.disk_usage(scratch).free < size + LEFT_FREE:
                raise _no_room(path, scratch)
            made = (folder / name).resolve()
            if not made.is_relative_to(folder.resolve()):
                raise DataError(f"{path} would write elsewhere: {name}", "do not unpack it; ask whoever made it")
            _extract(source, made, time_of)
    except (*ARCHIVE_ERRORS, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        what = f"{path} is no archive that can be read: {error}"
        raise PackedError(what, "unpack it, and give the folder") from error
    return folder, others


def _of_tar(path: Path) -> Iterator[Member]:
    with tarfile.open(path) as archive:
        for one in archive:
            if not one.isdir():
                yield one.name, one.size, one.mtime, partial(archive.extractfile, one) if one.isreg() else None


def _of_zip(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for one in archive.infolist():
            if not one.is_dir():
                is_regular = stat.S_IFMT(one.external_attr >> 16) in (0, stat.S_IFREG)
                at = calendar.timegm((*one.date_time, 0, 0, 0))  # of some zone: it dates lines to the year alone
                yield one.filename, one.file_size, at, partial(archive.open, one) if is_regular else None


def _extract(opener: Opener, made: Path, time_of: float) -> None:
    """A regular file, with its time: no links, owners or modes. Not tarfile's own, whose filters 3.11.2 hasn't."""
    made.parent.mkdir(parents=True, exist_ok=True)
    source = opener()
    assert source is not None, "a regular file"
    with source, made.open("wb") as target:
        shutil.copyfileobj(source, target)
    os.utime(made, (time_of, time_of))


def head_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _decompressed(path: Path, opener: Callable[[Path], Any], scratch: Path) -> tuple[Path, str]:
    """A file that ends too early is read up to there, as a log that is being written is."""
    damage: list[str] = []

    def blocks() -> Iterator[bytes]:
        done = 0
        with opener(path) as source:
            try:
                while block := source.read1(COPIED_BYTES):  # `read` keeps nothing of what it has where the file ends
                    done += len(block)
                    yield block
            except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the disk's; those of the libraries have no number
                damage.append(f"only its first {done:,} bytes can be unpacked: {error}")

    made = _written(path, scratch, blocks())
    if damage and not made.stat().st_size:
        raise PackedError(f"{path} can't be unpacked: {damage[0]}", "copy it again")
    return made, "".join(damage)


def _redated(pattern: re.Pattern[bytes], changed: float, lines: Iterable[bytes]) -> Iterator[bytes]:
    """Dates without a year are no later than when the file was `changed`, in any zone."""
    newest = time.gmtime(changed + ZONES_S)

    def date(found: re.Match[bytes]) -> bytes:
        month, day = MONTHS.index(found["month"]) + 1, int(found["day"])
        is_later = (month, day) > (newest.tm_mon, newest.tm_mday)
        year = int(found["year"]) if pattern is DMESG else newest.tm_year - is_later
        return b"%04d-%02d-%02d %s " % (year, month, day, found["clock"])

    return (pattern.sub(date, line) for line in lines)


def _written(path: Path, scratch: Path, blocks: Iterable[bytes]) -> Path:
    """A new file with the name of `path` and its time, which dates without a year are of. Raises StorageError."""
    name = next((path.name.removesuffix(end) for end in SUFFIXES if path.name.endswith(end)), path.name)
    made = Path(tempfile.mkdtemp(dir=scratch)) / name
    unchecked = LOOK_AFTER
    with made.open("wb") as target:
        for block in blocks:
            target.write(block)
            unchecked += len(block)
            if unchecked >= LOOK_AFTER:
                unchecked = 0
                if shutil.disk_usage(scratch).free < LEFT_FREE:
                    raise _no_room(path, scratch)
    shutil.copystat(path, made)
    return made
