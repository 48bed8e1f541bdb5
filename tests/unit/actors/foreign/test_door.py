"""The door over HTTP, with servers of this process that are lost at any time: its client sees no error."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import orjson
import pytest
from aiohttp import web

from actors.foreign import door_requests, kept_weights
from actors.foreign.door_http import DoorHttp
from actors.foreign.door_requests import DoorRequests
from actors.foreign.door_servers import DoorServers
from actors.foreign.kept_weights import KeptWeights
from actors.rollout import request_loop
from launcher.base.errors import RequestFailed, WeightsRefused
from launcher.base.messages import ServerState
from launcher.config.schema import RolloutConfig, RunConfig
from launcher.run_files.run_keys import ServerKeys
from tests.support.foreign.counting_server import CountingServer, completion
from tests.support.machine import scaled
from tests.support.worlds.door import until
from tests.support.worlds.foreign import give, remove

IDS = [2, 7, 1]
pytestmark = pytest.mark.timeout(120)


class Door:
    def __init__(self, folder, *, count=1, stream_interval=1, request_timeout=30.0):
        self.kept = KeptWeights(folder / "kept")
        rollout = RolloutConfig(request_timeout=request_timeout, stream_interval=stream_interval)
        config = RunConfig(experiment_name="door", rollout=rollout)
        self.servers = DoorServers(config, ServerKeys(api="a", admin="b"), self.kept)
        self.told = []
        self.silences = []
        self.requests = DoorRequests(self.servers, config.rollout, lambda *event: self.silences.append(event))
        self.http = DoorHttp(self.servers, self.requests, self.kept, told=self.told.append)
        self.count = count

    async def __aenter__(self):
        await self.http.open("127.0.0.1", self.count)
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.http.close()
        await self.servers.close()

    async def post(self, path, body, *, address=0):
        async with self.session.post(f"http://{self.http.addresses[address]}{path}", json=body) as response:
            kind = response.headers["Content-Type"]
            return response.status, await (response.json() if kind.startswith("application/json") else response.text())

    def generate(self, tokens=40, **more):
        sampling = {"max_new_tokens": tokens, "temperature": 0.0}
        body = {"input_ids": IDS, "sampling_params": sampling, "return_logprob": True, **more}
        return asyncio.create_task(self.post("/generate", body))

    async def work_off(self):
        """Until the door has done what it can do at once: these take turns of the same loop, one after the other."""
        for _ in range(20):
            async with self.session.get(f"http://{self.http.addresses[0]}/health") as response:
                await response.read()

    async def holds(self, asked):
        """The request has arrived, goes to no server, and is not answered."""
        turns = self.servers.pool.turns
        await until(lambda: turns or asked.done())
        await self.work_off()
        return [turn.server for turn in turns] == [None] and not asked.done()

    async def serve(self, *servers, state=ServerState.READY):
        await self.servers.pool.update([server.info(state) for server in servers])


async def in_the_midst(server):
    """Of an answer, some parts of which have been sent: a loop that is late is late for both."""
    before = server.generated
    await until(lambda: server.generated >= before + 10)


def whole(answer, tokens=40):
    status, body = answer
    scored = [one[1] for one in body["meta_info"]["output_token_logprobs"]]
    return status == 200 and body["output_ids"] == completion(IDS, tokens) == scored


async def test_a_request_waits_for_a_server_and_one_that_is_cut_is_continued_elsewhere(tmp_path):
    async with Door(tmp_path) as door, CountingServer(token_s=0.01) as first, CountingServer("server-1") as second:
        asked = door.generate()
        assert await door.holds(asked), "it is parked"
        await door.serve(first)
        await in_the_midst(first)
        await first.kill()
        await until(lambda: door.requests.counts.moved)
        await door.serve(second)
        assert whole(await asked)
        (continued,) = (body for body in second.bodies if "input_ids" in body)
        assert len(continued["input_ids"]) > len(IDS), "what had arrived was not generated again"
        assert (door.requests.counts.moved, door.requests.counts.continued) == (1, 1)
        seen = door.requests.completions
        assert (seen.completions, seen.tokens, seen.cut, seen.scored) == (1, 40, 1, 40), "it is one, of both servers"
        assert seen.logprob == pytest.approx(-sum(completion(IDS, 40)) / 1000)


@pytest.mark.slow
async def test_a_completion_of_a_silent_server_moves_with_the_tokens_that_had_arrived(tmp_path):
    """Without a connection that breaks it waited until its server was found dead."""
    async with Door(tmp_path) as door, CountingServer(token_s=0.01) as first, CountingServer("server-1") as second:
        await door.serve(first)
        for _ in range(3):  # from which its pace is known
            assert whole(await door.generate())
        asked = door.generate()
        await in_the_midst(first)
        await door.serve(second)
        first.token_s = 3600.0
        assert whole(await asked)
        (continued,) = (body for body in second.bodies if "input_ids" in body)
        assert len(continued["input_ids"]) > len(IDS), "what had arrived was not generated again"
    assert [event[:2] for event in door.silences] == [("hedge.began", "server-0")]
    assert (door.requests.counts.moved, door.requests.counts.continued) == (1, 1)


async def test_a_completion_that_ends_before_a_part_of_it_would_be_sent_is_not_streamed(tmp_path):
    async with Door(tmp_path, stream_interval=40) as door, CountingServer(token_s=0.01) as first:
        async with CountingServer("server-1", token_s=0.01) as second:
            await door.serve(first)
            asked = door.generate()
            await until(lambda: first.in_flight)
            await first.kill()
            await door.serve(second)
            assert whole(await asked)
            asked = door.generate()
            await in_the_midst(second)
            await door.post("/abort_request", {"abort_all": True})
            _, aborted = await asked
            assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
            assert aborted["output_ids"] == completion(IDS, 40)[: len(aborted["output_ids"])] != []
        assert [body["stream"] for body in [*first.bodies, *second.bodies] if "input_ids" in body] == [False] * 3


async def test_what_comes_as_a_whole_shows_no_silence_of_its_server(tmp_path, monkeypatch):
    """Its tokens are not heard as they are made: a server with one long answer under way got no other request."""
    monkeypatch.setattr(request_loop, "TICK_S", 0.001)
    monkeypatch.setattr(request_loop, "silent_servers", lambda looks, config: dict.fromkeys(looks, "no tokens"))
    async with Door(tmp_path) as door, CountingServer(token_s=0.01) as first, CountingServer("server-1") as second:
        await door.serve(first, second)
        status, _ = await door.generate(sampling_params={"max_new_tokens": 40, "stop": ["\n"]})
        assert status == 200
        assert first.generated
        assert door.silences == []
        assert {server.state for server in door.servers.pool.servers()} == {ServerState.READY}


async def test_what_can_not_be_continued_is_asked_again_as_a_whole(tmp_path):
    async with Door(tmp_path) as door, CountingServer(token_s=0.01) as first, CountingServer("server-1") as second:
        await door.serve(first)
        sampling = {"max_new_tokens": 40, "n": 1, "stop": ["no such"]}
        asked = door.generate(sampling_params=sampling)
        await until(lambda: first.in_flight)
        await first.kill()
        await door.serve(second)
        assert whole(await asked)
        assert [body["input_ids"] for body in second.bodies if "input_ids" in body] == [IDS]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/update_weights_from_disk", "/abort_request"])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{{"sampling_params": {{"max_new_tokens": {long}}}}}', "sampling_params.max_new_tokens"),
        ('{{"input_ids": [1, -{long}]}}', "input_ids[1]"),
        ('{{"text": "a \\"{{", "rid": {long}}}', "rid"),
    ],
)
async def test_a_number_that_no_reader_takes_is_refused_by_its_field(tmp_path, path, body, field):
    """Python converts 4,300 digits at most: the servers answered with 500, and each was asked again."""
    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)
        given = body.format(long="1" * 5000)
        async with door.session.post(f"http://{door.http.addresses[0]}{path}", data=given) as response:
            said = await response.text()
        assert response.status == 400
        assert f'"{field}: ' in said
        assert "5,000 digits" in said
        assert len(said) < 300
        assert not server.bodies, "no server was asked"


async def test_many_digits_in_a_text_are_no_number(tmp_path):
    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)
        assert whole(await door.generate(rid="1" * 5000))


async def test_a_pause_ends_what_runs_and_holds_what_comes_and_a_restarted_door_is_still_paused(tmp_path):
    async with CountingServer(token_s=0.01) as server:
        async with Door(tmp_path) as door:
            await door.serve(server)
            asked = door.generate()
            await in_the_midst(server)
            assert (await door.post("/pause_generation", {}))[0] == 200
            _, aborted = await asked
            begun = aborted["output_ids"]
            assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(begun) < 40
            assert begun == completion(IDS, 40)[: len(begun)]
            held = door.generate()
            assert await door.holds(held)
            assert not server.in_flight
            ports = door.http.addresses
            held.cancel()
        async with Door(tmp_path) as door:
            assert door.http.addresses == ports
            await door.serve(server)
            held = door.generate()
            assert await door.holds(held)
            assert (await door.post("/continue_generation", {}))[0] == 200
            assert whole(await held)


async def test_a_pause_that_aborts_nothing_cuts_what_runs_and_it_is_continued_afterwards(tmp_path):
    async with CountingServer(token_s=0.01) as server, Door(tmp_path) as door:
        await door.serve(server)
        asked = door.generate()
        await in_the_midst(server)
        assert (await door.post("/pause_generation", {"mode": "retract"}))[0] == 200
        await until(lambda: not server.in_flight)
        assert not asked.done()
        assert (await door.post("/continue_generation", {}))[0] == 200
        assert whole(await asked)
        assert door.requests.counts.continued == 1, "what had arrived was not generated again"


async def test_a_disk_that_stalls_delays_the_order_that_is_written_down_and_nobody_else(tmp_path, monkeypatch):
    """The door answered nothing meanwhile, and the Coordinator took it for hung."""
    disk, write, began = threading.Event(), kept_weights.replace_file, []

    def stalled(path, data, **how):
        began.append(path)
        disk.wait(scaled(20.0))
        write(path, data, **how)

    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)
        monkeypatch.setattr(kept_weights, "replace_file", stalled)
        orders = []
        for order in ("pause", "continue", "pause"):
            orders.append(asyncio.create_task(door.post(f"/{order}_generation", {})))
            await until(lambda: began)
            await door.work_off()
            assert not any(order.done() for order in orders)
        orders[0].cancel()  # its client goes away, and the order stays
        await asyncio.gather(orders[0], return_exceptions=True)
        await door.work_off()
        assert len(began) == 1
        disk.set()
        assert [(await order)[0] for order in orders[1:]] == [200, 200]
        assert door.kept.state.paused == "abort", "in the order in which they came"
        held = door.generate()
        assert await door.holds(held)
        held.cancel()


async def test_a_pause_that_comes_while_the_door_resumes_is_in_force(tmp_path):
    """The end of the pause before undid it, and the door's file said that it was paused."""
    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)
        await door.post("/pause_generation", {})
        async with door.servers.pool._changed:  # as one of many requests that have just been woken
            ending = asyncio.create_task(door.post("/continue_generation", {}))
            await until(lambda: door.kept.state.paused == "")
            pausing = asyncio.create_task(door.post("/pause_generation", {}))
            await until(lambda: door.kept.state.paused == "abort")
            await door.work_off()
            assert not ending.done()
        assert [(await ending)[0], (await pausing)[0]] == [200, 200]
        held = door.generate()
        assert await door.holds(held)
        held.cancel()


async def test_a_server_is_admitted_although_the_trainer_ends_all_requests_meanwhile(tmp_path):
    async with Door(tmp_path) as door, CountingServer(token_s=0.02) as server:
        admitting = asyncio.create_task(door.servers.admit(server.info()))
        await until(lambda: server.in_flight)
        assert (await door.post("/abort_request", {"abort_all": True}))[0] == 200
        assert await admitting is None
        (admitted,) = door.servers.pool.servers()
        assert admitted.state is ServerState.READY


async def test_a_request_that_was_cut_ends_at_a_pause_with_what_had_arrived(tmp_path):
    async with Door(tmp_path) as door, CountingServer(token_s=0.01) as server:
        await door.serve(server)
        asked = door.generate()
        await in_the_midst(server)
        await server.kill()
        await until(lambda: door.requests.counts.moved)
        await door.post("/pause_generation", {})
        status, answer = await asked
        assert status == 200
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"]


async def test_an_update_is_answered_when_a_replacement_has_loaded_it(tmp_path):
    async with Door(tmp_path, count=2) as door, CountingServer() as server:
        server.load_s = 30.0
        await door.serve(server)
        source = give(tmp_path / "update", 1)
        order = {"model_path": str(source), "abort_all_requests": True}
        asked = [asyncio.create_task(door.post("/update_weights_from_disk", order, address=i)) for i in (0, 1)]
        await until(lambda: "/update_weights_from_disk" in server.asked)
        await server.kill()
        await door.serve(server, state=ServerState.DEAD)
        await door.work_off()
        assert not any(one.done() for one in asked)
        async with CountingServer(generation=1, version=1) as again:
            await door.serve(again, state=ServerState.STALE)
            assert await door.servers.admit(again.info()) is None, "nobody to compare with"
            for one in asked:
                expected = {"success": True, "message": "Succeeded to update model weights."}
                assert await one == (200, {**expected, "num_paused_requests": 0})
            assert door.servers.version == 1, "one update, whoever asks for it"
            remove(source)
            assert (await door.post("/update_weights_from_disk", order))[0] == 200, "asked once more"
            assert whole(await door.generate())


async def test_no_version_counts_before_the_servers_are_being_sent_it(tmp_path):
    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)
        take, seen = door.kept.take_weights, []

        def taken(source):
            version = take(source)
            seen.append((door.servers.version, door.servers.is_publishing))  # as the Coordinator may see it now
            return version

        door.kept.take_weights = taken
        weights = give(tmp_path / "update", 1)
        assert (await door.post("/update_weights_from_disk", {"model_path": str(weights)}))[0] == 200
        assert seen == [(1, True)], "else it takes every server for one with old weights"
        assert not door.servers.is_publishing


async def test_servers_that_wait_for_new_weights_do_not_keep_these_from_being_written(tmp_path):
    """The loop has few threads of its own: as many servers as these held all of them, and waited for one."""
    async with Door(tmp_path) as door, CountingServer() as server:
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            door.servers.is_publishing = True
            admitting = asyncio.create_task(door.servers.admit(server.info()))
            await until(door.servers.pool.servers)
            await asyncio.to_thread(door.kept.has, tmp_path)
            assert not admitting.done()
            door.servers.is_publishing = False
            assert await admitting is None


async def test_a_late_server_gets_the_newest_from_what_was_kept_and_a_wrong_one_no_traffic(tmp_path):
    async with Door(tmp_path) as door, CountingServer() as first, CountingServer("server-1") as late:
        await door.serve(first)
        source = give(tmp_path / "update", 1)
        assert (await door.post("/update_weights_from_disk", {"model_path": str(source)}))[0] == 200
        remove(source)
        await door.serve(late, state=ServerState.STALE)
        with pytest.raises(WeightsRefused, match="answers with weight version 0, not 1"):
            await door.servers.admit(late.info())
        assert await door.servers.send_weights(late.info()) == 1
        assert await door.servers.admit(late.info()) == 0.0, "as those of the first"
        assert {one.name for one in door.servers.pool.servers() if one.state is ServerState.READY} == {
            "server-0",
            "server-1",
        }


async def test_one_whose_log_probs_are_far_from_another_s_gets_no_traffic_and_keeps_no_version(tmp_path):
    async with Door(tmp_path) as door, CountingServer() as first, CountingServer("server-1") as wrong:
        wrong.shift = 0.5
        await door.serve(first)
        with pytest.raises(WeightsRefused, match=r"server-1 says .* 0\.5 from those of server-0"):
            await door.servers.admit(wrong.info(ServerState.STALE))
        states = {one.name: (one.state, one.weight_version) for one in door.servers.pool.servers()}
        assert states == {"server-0": (ServerState.READY, 0), "server-1": (ServerState.STALE, None)}


async def test_the_trainer_s_end_of_all_requests_spares_no_server_the_comparison(tmp_path):
    async with Door(tmp_path) as door, CountingServer(token_s=0.02) as first, CountingServer("server-1") as wrong:
        wrong.shift = 0.5
        await door.serve(first)
        admitting = asyncio.create_task(door.servers.admit(wrong.info(ServerState.STALE)))
        await until(lambda: first.in_flight)
        await door.post("/abort_request", {"abort_all": True})
        with pytest.raises(WeightsRefused, match=r"0\.5 from those of server-0"):
            await admitting


async def test_only_the_first_connection_that_breaks_before_a_token_is_not_waited_after(monkeypatch):
    """A server that answers its probe and breaks the request again was asked in a circle, without a wait."""
    waited, lost = [], RequestFailed("it ended its answer early", kind="truncated")

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(door_requests.asyncio, "sleep", sleep)
    request = door_requests._Whole(None, "POST", "/encode", b"")
    for _ in range(3):
        await request.failed(lost)
    request.note_tokens()
    await request.failed(lost)
    assert waited == [door_requests.AGAIN_S] * 2


class CuttingServer(CountingServer):
    """It breaks off every answer of more than one token: the pool's probe is answered. `door`: what hears of another
    incarnation at each of the first `deaths`; with `deaths` None none ends."""

    door, deaths, cut = None, None, 0

    async def generate(self, request, body):
        if body["sampling_params"]["max_new_tokens"] == 1 or self.cut == self.deaths:
            return await super().generate(request, body)
        self.cut += 1
        if self.deaths is not None:
            self.generation += 1
            await self.door.serve(self)
        request.transport.abort()
        return web.Response()


@pytest.mark.parametrize("more", [{}, {"sampling_params": {"max_new_tokens": 40, "stop": ["no such"]}}])
async def test_a_living_server_that_breaks_off_every_answer_is_told_at_last(tmp_path, monkeypatch, more):
    """It answered each probe, and was asked again for ever: its client waited for its own limit without a word."""
    monkeypatch.setattr(door_requests, "AGAIN_S", 0.0)
    async with Door(tmp_path) as door, CuttingServer() as server:
        await door.serve(server)
        async with asyncio.timeout(scaled(20.0)):
            status, said = await door.generate(**more)
        assert status == 502
        assert said["error"]["message"].startswith("server-0: POST http://127.0.0.1:")
        assert said["error"]["message"].endswith(("the connection broke off", "the answer broke off"))
        assert server.cut == 5, "rollout.request_retries more than two: at the first break it may have ended"
        await until(lambda: not sum(door.servers.pool.in_flight().values()))  # the pool's probe too


@pytest.mark.parametrize("more", [{}, {"sampling_params": {"max_new_tokens": 40, "stop": ["no such"]}}])
async def test_however_often_a_server_is_lost_is_not_the_client_s_to_see(tmp_path, monkeypatch, more):
    monkeypatch.setattr(door_requests, "AGAIN_S", 0.0)
    async with Door(tmp_path) as door, CuttingServer() as server:
        server.door = door
        server.deaths = 9
        await door.serve(server)
        assert whole(await door.generate(**more))
        assert server.cut == 9


async def test_one_that_hangs_is_not_waited_for_where_another_can_be_compared_with(tmp_path):
    """They were asked one after another, each for rollout.request_timeout."""
    async with (
        Door(tmp_path, request_timeout=3600.0) as door,
        CountingServer(token_s=3600.0) as hangs,
        CountingServer("server-1") as other,
        CountingServer("server-2") as server,
    ):
        await door.serve(hangs, other)
        async with asyncio.timeout(scaled(20.0)):
            assert await door.servers.admit(server.info(ServerState.STALE)) == 0.0
        await until(lambda: not hangs.in_flight)


async def test_one_that_can_not_be_asked_now_says_nothing_about_another(tmp_path):
    async with Door(tmp_path) as door, CountingServer() as lost, CountingServer("server-1") as server:
        await door.serve(lost)
        await lost.kill()
        assert await door.servers.admit(server.info(ServerState.STALE)) is None


async def test_refusals_reach_the_client_and_weights_come_from_the_disk_alone(tmp_path):
    async with Door(tmp_path) as door, CountingServer() as server:
        health = f"http://{door.http.addresses[0]}/health"
        async with door.session.get(health) as response:
            assert response.status == 503, "no server has answered yet"
        await door.serve(server)
        await door.servers.serves()
        assert await door.generate(tokens=501) == (400, {"error": {"message": "too many"}})
        status, told = await door.post("/init_weights_update_group", {})
        assert status == 400
        assert "weight_update_mode=disk" in told["message"]
        assert door.told == ["/init_weights_update_group"]
        status, told = await door.post("/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")})
        assert (status, told["success"]) == (400, False)
        assert "nowhere" in told["message"]
        assert (await door.post("/v1/models", {}))[1] == "server-0 /v1/models"
        assert server.authorizations["/v1/models"] == "Bearer a", "never the admin's"
        await server.kill()
        async with door.session.get(health) as response:
            assert response.status == 200, "a server that is lost is not the client's to see"


@pytest.mark.parametrize("more", [{}, {"sampling_params": {"max_new_tokens": 40, "stop": ["no such"]}}])
@pytest.mark.parametrize("status", [500, 429])
async def test_a_failure_of_every_server_at_every_try_is_told_as_what_it_is(tmp_path, monkeypatch, status, more):
    """The door asked again for ever, twice a second, and its client waited for its own limit without a word."""
    monkeypatch.setattr(door_requests, "AGAIN_S", 0.0)
    async with Door(tmp_path) as door, CountingServer() as first, CountingServer("server-1") as second:
        first.status = second.status = status
        await door.serve(first, second)
        async with asyncio.timeout(scaled(20.0)):
            said = await door.generate(**more)
        assert said == (status, {"error": {"message": "server-0 is broken"}}) or said == (
            status,
            {"error": {"message": "server-1 is broken"}},
        )
        tries = [len(one.bodies) for one in (first, second)]
        assert tries == [2, 2], "rollout.request_retries more than one, and not the same server again"
        assert not sum(door.servers.pool.in_flight().values())


EMPTY = CountingServer().event(IDS, [], 0, None)


@pytest.mark.parametrize(
    "says",
    [
        b"no JSON",
        b"[]",
        b'data: {"meta_info": {}}\n\n',
        b"data: " + orjson.dumps(EMPTY) + b"\n\ndata: no JSON\n\n",  # no tokens have come
    ],
)
async def test_an_answer_that_is_none_at_every_try_is_told_and_counts_against_its_server(tmp_path, monkeypatch, says):
    """The door asked again for ever, twice a second."""
    monkeypatch.setattr(door_requests, "AGAIN_S", 0.0)
    async with Door(tmp_path, stream_interval=1) as door, CountingServer() as server:
        server.says = says
        await door.serve(server)
        async with asyncio.timeout(scaled(20.0)):
            status, said = await door.generate(stream=False)
        assert status == 502
        assert said["error"]["message"].startswith("server-0: http://127.0.0.1:")
        assert len(server.bodies) == 4, "rollout.request_retries more than one"
        (known,) = door.servers.pool.servers()
        assert known.state is ServerState.STALE, "the Coordinator looks whether it can still generate"
        assert "answered 200 with something else" in known.reason
        assert not sum(door.servers.pool.in_flight().values())


@pytest.mark.parametrize("more", [{}, {"sampling_params": {"max_new_tokens": 40, "stop": ["no such"]}}])
async def test_an_answer_that_is_late_at_every_try_is_told_and_its_server_goes_on(tmp_path, monkeypatch, more):
    monkeypatch.setattr(door_requests, "AGAIN_S", 0.0)
    async with Door(tmp_path, request_timeout=0.2) as door, CountingServer(token_s=3600.0) as server:
        await door.serve(server)
        async with asyncio.timeout(scaled(20.0)):
            status, said = await door.generate(**more)
        assert status == 504
        assert said["error"]["message"].startswith("server-0: POST http://127.0.0.1:")
        assert said["error"]["message"].endswith("/generate: no answer within 0.2 s")
        assert len(server.bodies) == 4
        assert [one.state for one in door.servers.pool.servers()] == [ServerState.READY], "it may only be busy"


@pytest.mark.parametrize("more", [{}, {"sampling_params": {"max_new_tokens": 40, "stop": ["no such"]}}])
async def test_a_failure_of_one_server_is_not_the_client_s_to_see(tmp_path, monkeypatch, more):
    monkeypatch.setattr(door_requests, "AGAIN_S", 0.0)
    async with Door(tmp_path) as door, CountingServer() as first, CountingServer("server-1") as second:
        first.status = 500
        await door.serve(first, second)
        assert whole(await door.generate(**more))
        assert len(first.bodies) == 1


async def test_failures_are_counted_anew_once_tokens_have_come(tmp_path, monkeypatch):
    monkeypatch.setattr(door_requests, "AGAIN_S", 0.0)
    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)
        server.breaks_after = 5
        assert whole(await door.generate()), "eight failures, each after five tokens"
        assert len(server.bodies) == 8


async def test_why_every_server_refuses_new_weights_is_known_until_one_has_them(tmp_path):
    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)

        async def refuse(*_, **__):
            raise WeightsRefused("server-0: size mismatch")

        publish = door.servers.publisher.publish
        door.servers.publisher.publish = refuse
        updating = asyncio.create_task(door.servers.update(give(tmp_path / "update", 1)))
        await until(lambda: door.servers.waits_for)
        assert "size mismatch" in door.servers.waits_for
        assert not updating.done()
        await publish(1)
        await updating
        assert door.servers.waits_for == ""


async def test_a_client_that_goes_away_leaves_nothing_in_flight(tmp_path):
    async with Door(tmp_path) as door, CountingServer(token_s=0.05) as server:
        await door.serve(server)
        asked = door.generate()
        await until(lambda: server.in_flight)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: not server.in_flight and not sum(door.servers.pool.in_flight().values()))


async def test_orders_wait_for_no_room_that_requests_hold_which_wait_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr("actors.foreign.door_http.MOST_BYTES", 10)
    async with Door(tmp_path) as door, CountingServer() as server:
        await door.serve(server)
        await door.servers.serves()
        assert (await door.post("/pause_generation", {"mode": "in_place"}))[0] == 200
        asked = [door.generate(), door.generate()]
        await until(lambda: door.http._budget._turn.locked())
        async with door.session.get(f"http://{door.http.addresses[0]}/health") as response:
            assert response.status == 200
        assert (await door.post("/abort_request", {"rid": "nobody's"}))[0] == 200
        assert (await door.post("/continue_generation", {}))[0] == 200
        assert all([whole(await one) for one in asked])
