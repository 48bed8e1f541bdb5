"""Looks for a notice that the machine is taken away: a file that appears, or a cloud's URL. Unknown is not a notice.

    404, FALSE, NONE, nothing scheduled        no notice
    TRUE, an AWS action, an Azure event        a notice
    no answer, any other status or text        unknown, told once

A thread of its own looks, at a URL for at most `ANSWER_S` each time, so that an address or a disk that hangs holds
nobody up.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from launcher.run_files.journal import Journal

ANSWER_S = 2.0
STUCK_S = 10.0
"""Of a look: a URL has answered by then or was given up, while a file's disk may never answer."""
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Without theirs, the metadata servers of Google and Azure refuse; any other server passes over them."""
AWS_TOKEN = "/latest/api/token"
AWS_PATH = "/latest/meta-data/"
AWS_SECONDS = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
TAKES_AWAY = frozenset({"preempt", "terminate", "stop", "hibernate"})


class UnreadableNotice(Exception):
    """What was found is neither a notice nor its absence."""


def is_notice(status: int, text: str) -> bool:
    """What a metadata server's answer says. Raises UnreadableNotice."""
    if status == httpx.codes.NOT_FOUND:
        return False
    said = text.strip()
    if status != httpx.codes.OK:
        raise UnreadableNotice(f"it answers with status {status}")
    if said.upper() in ("TRUE", "FALSE", "NONE"):
        return said.upper() == "TRUE"
    try:
        data = json.loads(said)
    except ValueError:
        data = None
    match data:
        case {"action": str(action)}:
            return action.lower() in TAKES_AWAY
        case {"Events": list(events)}:
            kinds = [event.get("EventType") for event in events if isinstance(event, dict)]
            return any(str(kind).lower() in TAKES_AWAY for kind in kinds)
    raise UnreadableNotice(f"it answers {said[:60]!r}, which is no notice that is known")


class NoticeWatch:
    """`seen_at`: when the notice was first seen (monotonic), None before."""

    def __init__(self, where: str, journal: Journal, *, interval_s: float) -> None:
        self._where = where
        self._journal = journal
        self._interval_s = interval_s
        self._has_told = False
        self._look_began: float | None = None  # None: none is under way
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="preemption-notice", daemon=True)
        self.seen_at: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Without waiting for a look under way."""
        self._ended.set()

    def look_for_notice(self) -> bool:
        """Raises UnreadableNotice where nobody can tell."""
        if urlsplit(self._where).scheme not in ("http", "https"):
            return self._look_at_file(Path(self._where).expanduser())
        try:
            with httpx.Client(timeout=ANSWER_S, headers=HEADERS, trust_env=False) as client:
                answer = client.get(self._where, headers=self._token(client))
                return is_notice(answer.status_code, answer.text)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreadableNotice(f"no answer: {type(error).__name__}") from error

    def _look_at_file(self, file: Path) -> bool:
        try:
            file.stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UnreadableNotice(error.strerror or str(error)) from error
        return True

    def _token(self, client: httpx.Client) -> dict[str, str]:
        """AWS wants one for its metadata, except where its first version is still allowed."""
        if not (url := httpx.URL(self._where)).path.startswith(AWS_PATH):
            return {}
        answer = client.put(url.copy_with(path=AWS_TOKEN), headers=AWS_SECONDS)
        return {"X-aws-ec2-metadata-token": answer.text} if answer.status_code == httpx.codes.OK else {}

    def _run(self) -> None:
        while not self._ended.is_set():
            self._look_began = time.monotonic()
            try:
                if self.look_for_notice():
                    self.seen_at = time.monotonic()
                    return
                self._has_told = False
            except UnreadableNotice as error:
                self._tell(str(error))
            finally:
                self._look_began = None
            self._ended.wait(self._interval_s)

    def tell_if_stuck(self) -> None:
        """Called again and again, on another thread than the one that looks."""
        began = self._look_began
        if began is not None and time.monotonic() - began > STUCK_S:
            self._tell(f"no answer for {STUCK_S:g} s")

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            reason = f"run.preemption_notice={self._where} can't be read, which is no notice: {why}"
            self._journal.record("notice.unreadable", reason=reason)
