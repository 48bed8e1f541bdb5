"""What a person asks of a run is carried out also after an error that nobody foresaw."""

import asyncio

from actors.supervision import coordinator_actor
from actors.supervision.coordinator_actor import follow_requests
from launcher.run_files.control_requests import ControlRequest, RequestEntry
from launcher.run_files.journal import Journal, read_lines


class Asked:
    def __init__(self):
        self.holds, self.aborts = [], []

    def hold(self, reason):
        self.holds.append(reason)

    def abort(self, reason):
        self.aborts.append(reason)


async def test_an_unexpected_error_is_recorded_once_and_ends_no_later_request(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_actor, "REQUESTS_S", 0.0)
    path, coordinator, reads = tmp_path / "events.jsonl", Asked(), []

    def read():
        reads.append(1)
        if len(reads) <= 3:
            raise RecursionError("too deep")
        return RequestEntry(wish=ControlRequest.STOP, by="somebody")

    following = asyncio.create_task(follow_requests(coordinator, read, Journal(path, 1)))
    async with asyncio.timeout(10):
        while not coordinator.aborts:
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert coordinator.aborts[0] == "asked by somebody"
    assert [event["event"] for event in read_lines(path)] == ["request.failed"]
