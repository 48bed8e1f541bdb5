"""Who is let in, what may be asked, and that an answer holds what is on the disk and nothing else."""

import asyncio
import json
import threading

import pytest
from aiohttp.test_utils import TestClient, TestServer

from launcher.html_report.page import policy, render_page
from launcher.run_files.control_requests import wanted
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths, login_name
from scripts.watch_page import server as server_module
from scripts.watch_page.server import HEADERS, WatchServer
from tests.support.hostile_text import BIDI
from tests.support.long_run import LongRun
from tests.support.report_parts import facts_in

TOKEN = "a-token"
RUN = "ann/long/t0"
HOSTILE = f"<img src=x onerror=alert(1)></script>{BIDI}"


@pytest.fixture(scope="module")
def fileroot(tmp_path_factory):
    root = tmp_path_factory.mktemp("watched")
    for trial, seed in (("t0", 1), ("t1", 2)):
        paths = RunPaths(fileroot=root, user="ann", experiment_name="long", trial_name=trial)
        LongRun(paths, steps=120, incidents=4, attempts=2, seed=seed).write()
    return root


def asked(fileroot, *requests):
    """The answers, one after the other, each as (status, headers, content)."""

    async def ask():
        client = TestClient(TestServer(WatchServer(fileroot, TOKEN).application()))
        async with client:
            found = []
            for method, path, given in requests:
                headers = {"Authorization": f"Bearer {TOKEN}", **given.get("headers", {})}
                headers = {key: value.replace("PORT", str(client.port)) for key, value in headers.items() if value}
                async with client.request(method, path, headers=headers, data=given.get("data")) as answer:
                    found.append((answer.status, answer.headers, await answer.text()))
            return found

    return asyncio.run(ask())


def got(fileroot, path, **given):
    ((status, _, content),) = asked(fileroot, ("GET", path, given))
    return status, json.loads(content)


ROUTES = ["/runs", f"/facts?run={RUN}", f"/samples?run={RUN}"]


@pytest.mark.parametrize("path", [*ROUTES, "/none", "/static/page.js"])
@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer other", f"Bearer {TOKEN}x", "Bearer tök"])
def test_nothing_of_a_run_is_told_without_the_token(fileroot, path, given):
    ((status, _, content),) = asked(fileroot, ("GET", path, {"headers": {"Authorization": given}}))
    assert status == 401
    assert json.loads(content).keys() == {"error"}
    assert "open the link" in content
    assert "long" not in content


@pytest.mark.parametrize("host", ["evil.test", "evil.test:80", "127.0.0.1.evil.test", "localhost@evil.test", "[", ""])
@pytest.mark.parametrize("path", ["/", *ROUTES])
def test_another_name_for_this_machine_is_refused(fileroot, host, path):
    """DNS rebinding: a page of evil.test whose name means 127.0.0.1 by now."""
    ((status, _, content),) = asked(fileroot, ("GET", path, {"headers": {"Host": host or "x"}}))
    assert status == 403
    assert "127.0.0.1 and localhost only" in content


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:9999", "[::1]:1"])
def test_loopback_by_any_of_its_names_is_served_also_through_a_tunnel(fileroot, host):
    ((status, _, _),) = asked(fileroot, ("GET", "/runs", {"headers": {"Host": host}}))
    assert status == 200


@pytest.mark.parametrize("origin", ["", "null", "http://evil.test", "http://127.0.0.1:1", "https://127.0.0.1:PORT"])
def test_no_other_page_may_ask_a_run(fileroot, origin):
    data = json.dumps({"run": RUN, "what": "stop"})
    ((status, _, content),) = asked(fileroot, ("POST", "/ask", {"headers": {"Origin": origin}, "data": data}))
    assert status == 403
    assert "another page" in content


@pytest.mark.parametrize("path", ["/", "/none", *ROUTES])
def test_every_answer_has_the_policy(fileroot, path):
    ((_, headers, _),) = asked(fileroot, ("GET", path, {}))
    assert headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")


def test_the_page_is_that_of_the_report_without_facts(fileroot):
    ((status, headers, content),) = asked(fileroot, ("GET", "/", {"headers": {"Authorization": ""}}))
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert content.encode() == render_page(None)
    assert facts_in(content.encode()) is None
    assert HEADERS["Content-Security-Policy"].startswith(policy(is_served=True))


def test_the_runs_of_the_fileroot(fileroot):
    status, said = got(fileroot, "/runs")
    assert status == 200
    assert {one["run"] for one in said["runs"]} == {"ann/long/t0", "ann/long/t1"}
    assert {one["live"] for one in said["runs"]} == {False}


def test_a_page_asks_for_what_is_new_only(fileroot):
    _, whole = got(fileroot, f"/facts?run={RUN}")
    assert whole["status"][0] == "FINISHED"
    assert len(whole["incidents"]) == 4
    assert len(whole["curves"]["x"]) == 120
    assert {lane["name"] for lane in whole["lanes"]} == {"run", "server-0", "server-1", "incidents"}
    had = f"generation={whole['generation']}&facts={whole['facts']}&since=117&width=1"
    (_, _, first), (_, _, again) = asked(
        fileroot, ("GET", f"/facts?run={RUN}", {}), ("GET", f"/facts?run={RUN}&{had}", {})
    )
    assert json.loads(again)["curves"]["x"] == [117.0, 118.0, 119.0]
    assert "incidents" not in json.loads(again)
    assert len(again) < len(first) / 5


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/facts?run=ann/long/none", "there is no run 'ann/long/none'"),
        ("/facts", "there is no run ''"),
        ("/facts?run=../../../etc", "there is no run"),
        (f"/facts?run={RUN}&first=x", "first='x' is no integer from 0"),
        (f"/facts?run={RUN}&width=0", "width='0' is no integer from 1"),
        (f"/facts?run={RUN}&last=99999999999999999999", "is no integer"),
        (f"/samples?run={RUN}&step=-1", "step='-1' is no integer"),
    ],
)
def test_what_can_not_be_is_refused_in_one_message(fileroot, path, said):
    status, content = got(fileroot, path)
    assert status == 400
    assert said in content["error"]
    assert content["hint"]


@pytest.mark.parametrize("path", ROUTES[1:])
def test_a_run_is_looked_for_beside_the_loop(fileroot, monkeypatch, path):
    """On a file system that answered late, nobody else was answered either."""
    threads, find = [], server_module.run_of

    def found(*named):
        threads.append(threading.current_thread())
        return find(*named)

    monkeypatch.setattr(server_module, "run_of", found)
    assert got(fileroot, path)[0] == 200
    assert threading.main_thread() not in threads != []


def test_what_others_wrote_is_text(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="e", trial_name="t")
    LongRun(paths, steps=60, incidents=2).write()
    events = [
        json.loads(line) | {"reason": HOSTILE, "doing": HOSTILE} for line in paths.events.read_text().splitlines()
    ]
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    paths.config.write_text(json.dumps({HOSTILE: HOSTILE}))
    ((_, headers, content),) = asked(tmp_path, ("GET", "/facts?run=ann/e/t", {}))
    assert headers["Content-Type"].startswith("application/json")
    assert "<img src=x" in json.loads(content)["incidents"][0]["what"]
    assert "<img src=x" in "".join(json.loads(content)["settings"])
    assert not {*BIDI} & {*content}


def test_what_has_no_utf8_and_what_can_not_be_read(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="e", trial_name="t")
    LongRun(paths, steps=60, incidents=2).write()
    with paths.metrics.open("a") as file:
        file.write('{"global_step": 60, "half\\ud800": 1.5, "huge": 1e400}\n')
    status, said = got(tmp_path, "/facts?run=ann/e/t")
    assert status == 200
    assert said["last_step"] == 60
    assert any(key.startswith("half") for key in said["curves"]["series"])
    assert said["curves"]["series"]["huge"]["not_finite"] == 1
    paths.metrics.unlink()
    paths.metrics.mkdir()
    status, said = got(tmp_path, "/facts?run=ann/e/t")
    assert status == 400
    assert f"{paths.metrics} can't be read" in said["error"]


# ── the operator's buttons ──


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A live run of this user, as far as the server can see."""
    monkeypatch.setattr(server_module, "is_live", lambda paths: True)
    paths = RunPaths(fileroot=tmp_path, user=login_name(), experiment_name="e", trial_name="t")
    LongRun(paths, steps=60, incidents=2).write()
    ServerKeys.make(paths.keys)
    return paths


def post(paths, what, **more):
    data = {"run": f"{paths.user}/e/t", "what": what, **more}
    given = {"headers": {"Origin": "http://127.0.0.1:PORT"}, "data": json.dumps(data)}
    ((status, _, content),) = asked(paths.fileroot, ("POST", "/ask", given))
    return status, json.loads(content)


@pytest.mark.parametrize(("what", "wish"), [("pause", "pause"), ("resume", "run"), ("stop", "stop")])
def test_a_button_writes_the_request_that_run_control_would(mine, what, wish):
    status, said = post(mine, what, reason="lunch")
    entry = wanted(mine)
    assert (status, entry.wish, entry.reason) == (200, wish, "lunch")
    assert said["asked"] == entry.description
    assert login_name() in entry.by


def test_a_server_more_than_there_are(mine):
    mine.now.write_text(
        json.dumps(
            {"attempt": 1, "beat": 1, "host": "h", "pid": 1, "address": "local", "is_detached": False, "elapsed_s": 1.0}
            | {"status": None, "evals": []}
            | {"servers": [{"name": f"server-{at}", "index": at, "generation": 0, "state": "READY"} for at in (0, 1)]}
        )
    )
    assert post(mine, "add_server")[0] == 200
    assert wanted(mine).servers == 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON"),
        ('{"run": "x"}', "no JSON"),
        ('{"run": "x", "what": "rm"}', "'rm' can't be asked"),
    ],
)
def test_a_request_that_is_none(mine, data, said):
    given = {"headers": {"Origin": "http://127.0.0.1:PORT"}, "data": data}
    ((status, _, content),) = asked(mine.fileroot, ("POST", "/ask", given))
    assert status == 400
    assert said in content
    assert wanted(mine) is None


def test_a_run_that_is_over_is_not_asked(mine, monkeypatch):
    monkeypatch.setattr(server_module, "is_live", lambda paths: False)
    status, said = post(mine, "pause")
    assert status == 400
    assert "is not running" in said["error"]
    assert wanted(mine) is None


def test_a_question_by_get_changes_nothing(mine):
    ((status, _, _),) = asked(mine.fileroot, ("GET", f"/ask?run={mine.user}/e/t&what=stop", {}))
    assert status == 405
    assert wanted(mine) is None
