"""Servers that fail in every way, at every call: no answer is lost, none is drawn from other weights than it says."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_stub import Stub, checksum, drawn

from grpo_fn.shell.reward_workers.reward_pool import ScoringInterrupted
from grpo_fn.shell.vllm import vllm_servers, vllm_transfer
from grpo_fn.shell.vllm.client import ServerCompletion
from grpo_fn.shell.vllm.engine import GenerationRequest, StaleEngine
from grpo_fn.shell.vllm.vllm_servers import DedicatedEngine
from grpo_fn.shell.world import World

PARAMS = {"temperature": 0.7}
REQUESTS = [
    GenerationRequest((1, 2, 3), (4, 5), 5),
    GenerationRequest((6,), (), 5),
    GenerationRequest((7, 8), (9, 4, 2**31 - 1), 5),
]
FAULTS = (500, 503, "drop", "hang", "half", "die")
SWAP = (
    *("/health", "/collective_rpc:grpo_described", "/weight_info", "/get_world_size", "/init_weight_transfer_engine"),
    *("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc:grpo_receipt"),
    *("/reset_prefix_cache", "/update_weight_version", "/resume"),
)


def weights(version):
    """A small model; the tied head is the embedding once more, and one tensor is larger than a chunk."""
    made = torch.Generator().manual_seed(version)
    embedding = torch.randn(20, 4, generator=made)
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", embedding
    yield "model.norm.weight", torch.randn(4, generator=made).to(torch.bfloat16)
    yield "model.layers.0.weight", torch.randn(6, 6, generator=made).T
    yield "model.layers.0.bias", torch.tensor([0.0, -0.0, 1.0])


def expected(version, requests=REQUESTS):
    """What every answer has to be, from either server."""
    sent = checksum(tensor for _, tensor in weights(version))
    return [[(drawn(sent, request.prompt, seed, 5), version) for seed in request.seeds] for request in requests]


def seen(answers):
    """Of answers, what `expected` has."""
    assert all(a.logp == [-t / 7 for t in a.tokens] and not a.stopped for row in answers for a in row)
    return [[(answer.tokens, answer.oldest) for answer in row] for row in answers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Several chunks of the few weights, and looks at servers that come soon."""
    monkeypatch.setattr(vllm_servers, "CHUNK_BYTES", 100)
    monkeypatch.setattr(vllm_servers, "CHECK_SECONDS", 0.02)


def engine(stubs, folder, **knobs):
    """An engine that is quick to give up."""
    return DedicatedEngine(
        knobs.pop("world", World(0, 1, torch.device("cpu"), deadline=30.0)),
        torch.float32,
        servers=knobs.pop("servers", [stub.url for stub in stubs]),
        transfer=partial(vllm_transfer.FileTransfer, folder=str(folder)),
        **{"pause": "wait", "request_seconds": 0.4, "server_timeout": 5.0, "max_requests": 3, **knobs},
    )


@pytest.fixture
def pushed(folder):
    """Two servers and an engine of them, which has given them version 0."""
    stubs = [Stub(), Stub()]
    servers = engine(stubs, folder)
    servers.push_weights(weights(0), version=0)
    yield *stubs, servers
    servers.close()
    for stub in stubs:
        stub.kill()


def answered(servers, version, requests=REQUESTS):
    """Whether every answer is drawn from that version of the weights, and says so."""
    return seen(servers.generate(requests, params=PARAMS)) == expected(version, requests)


def until(true, seconds=5.0):
    """Wait for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def test_answers_are_in_order_and_drawn_from_the_weights_last_pushed(pushed, folder):
    one, other, servers = pushed
    assert servers.figures()["engine/push_seconds"] > 0
    for version in (1, 7):
        held = servers.push_weights(weights(version), version=version)
        assert held == checksum(tensor for _, tensor in weights(version))
        assert answered(servers, version)
    counts = dict.fromkeys(("requests_retried", "servers_lost", "servers_recovered"), 0)
    figures = servers.figures()
    assert figures.pop("engine/push_seconds") > 0
    assert figures == {"engine/servers": 2, **{f"engine/{name}": n for name, n in counts.items()}}
    assert servers.figures()["engine/push_seconds"] == 0
    assert not servers.complaints
    assert all("/inference/v1/generate" in {path for path, _ in stub.calls} for stub in (one, other))
    assert servers.repeatable
    servers.close()
    assert not list(folder.iterdir())


def test_a_swap_is_in_order_and_nothing_computed_before_is_remembered(pushed):
    steps = [path for path, _ in pushed[0].calls if path in SWAP[5:]]
    assert [step for before, step in pairwise([None, *steps]) if step != before] == list(SWAP[5:])
    assert all(sent["mode"] == "wait" for path, sent in pushed[0].calls if path == "/pause")


def test_requests_that_begin_alike_go_to_the_server_that_has_read_it_unless_it_is_gone_or_far_busier(pushed):
    one, other, servers = pushed
    first, second = servers._router.servers
    for busy, least, chosen in ((8, 0, first), (9, 0, second), (18, 5, first), (19, 5, second)):
        first.busy, second.busy = busy, least
        assert servers._router._choose(4) is chosen
        assert servers._router._choose(None) is second
    first.busy = second.busy = 0
    requests = [r._replace(prefix=prefix) for r, prefix in zip(REQUESTS * 4, [5, 2] * 4, strict=False)]
    drawn = servers.generate(requests, params=PARAMS)
    for stub, prefix in ((one, 2), (other, 5)):
        asked = {tuple(sent["token_ids"]) for path, sent in stub.calls if path == "/inference/v1/generate"}
        assert asked == {request.prompt for request in requests if request.prefix == prefix and request.seeds}
    other.kill()
    assert servers.generate(requests, params=PARAMS) == drawn


def test_a_request_says_all_that_decides_the_tokens(pushed):
    *stubs, servers = pushed
    servers.generate([GenerationRequest((3, 1), (8,), 5)], params={**PARAMS, "stop_token_ids": [2]})
    (sent,) = [sent for stub in stubs for path, sent in stub.calls if path == "/inference/v1/generate"]
    params = {**PARAMS, "max_tokens": 5, "stop_token_ids": [2], "seed": 8, "n": 1, "logprobs": 0}
    assert sent == {"token_ids": [3, 1], "sampling_params": params}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("path", "fault"),
    [
        *(("/update_weights", "die"), ("/collective_rpc:grpo_receipt", 500), ("/pause", "hang"), ("/resume", "drop")),
        *((path, "die") for path in SWAP if path != "/update_weights"),
    ],
)
def test_a_server_that_fails_in_a_push_is_out_and_comes_back_with_the_new_weights(pushed, path, fault):
    one, other, servers = pushed
    for stub in (one, other):
        stub.label = "default" if path in ("/get_world_size", "/init_weight_transfer_engine") else stub.label
    one.faults[path] = fault
    servers.push_weights(weights(1), version=1)
    assert answered(servers, 1)
    if fault == "die":
        assert servers.figures()["engine/servers"] == 1
        one.start()
    until(lambda: any(one.url in text and "is out" in text for text in servers.complaints))  # a hang: in its own time
    until(lambda: servers._router.servers[0].live)
    assert not one.torn
    assert one.label == other.label
    assert one.weights == other.weights == checksum(tensor for _, tensor in weights(1))
    assert one.resting.is_set()
    assert answered(servers, 1)
    assert servers.figures()["engine/servers"] == 2
    assert any(one.url in text and "is back" in text for text in servers.complaints)


@pytest.mark.parametrize("fault", [503, "hang", "half"])
def test_requests_of_a_lost_server_are_answered_by_another_and_each_answer_is_reported_once(pushed, fault):
    one, _, servers = pushed
    one.faults["/inference/v1/generate"] = fault
    on_answer, thread, over = {}, threading.get_ident(), threading.Event()

    def note(i, j, answer):
        assert (i, j) not in on_answer
        assert threading.get_ident() != thread
        assert not over.is_set()  # it comes while the call goes on
        on_answer[i, j] = answer

    answers = servers.generate(REQUESTS, params=PARAMS, on_answer=note)
    over.set()
    assert seen(answers) == expected(0)
    assert on_answer == {(i, j): answer for i, row in enumerate(answers) for j, answer in enumerate(row)}
    figures = servers.figures()
    assert figures["engine/requests_retried"] >= 1
    assert figures["engine/servers_lost"] == 1
    assert any(one.url in text for text in servers.complaints)


def test_a_request_that_is_refused_and_a_reader_that_stops_end_the_whole_call(pushed):
    *stubs, servers = pushed

    def note(i, j, answer):
        raise ScoringInterrupted("asked to stop")

    with pytest.raises(ScoringInterrupted, match="asked to stop"):
        servers.generate(REQUESTS, params=PARAMS, on_answer=note)
    assert answered(servers, 0)
    for stub in stubs:
        stub.faults["/inference/v1/generate"] = 400
    with pytest.raises(RuntimeError, match="status 400"):
        servers.generate(REQUESTS, params=PARAMS)
    assert servers.figures()["engine/servers_lost"] == 0


def test_a_call_without_any_server_left_stops_and_names_all_of_them_and_what_waited(pushed):
    *stubs, servers = pushed
    servers._router.deadline = 0.5
    for stub in stubs:
        stub.kill()
    with pytest.raises(RuntimeError, match=r"none for 0\.5 s while 5 completions of 3 prompts waited") as drawing:
        servers.generate(REQUESTS, params=PARAMS)
    with pytest.raises(RuntimeError, match="while new weights waited") as pushing:
        servers.push_weights(weights(1), version=1)
    assert all(stub.url in str(caught.value) for stub in stubs for caught in (drawing, pushing))


@pytest.mark.parametrize(
    ("status", "why"), [(None, "bfloat16.*float32.*vllm_server.sh"), (401, "VLLM_API_KEY"), (404, "vllm_server.sh")]
)
def test_a_server_that_was_started_otherwise_is_refused_before_any_weights(folder, status, why):
    stubs = [Stub(), Stub()]
    servers = engine(stubs, folder)
    stubs[1].described["dtype"] = "bfloat16"
    if status:
        stubs[1].faults["/collective_rpc:grpo_described"] = status
    with pytest.raises(RuntimeError, match=f"{stubs[1].url}.*{why}"):
        servers.push_weights(weights(0), version=0)
    assert not any(path == "/update_weights" for path, _ in stubs[0].calls)
    servers.close()


def test_the_key_is_taken_from_the_environment(folder, monkeypatch):
    stub = Stub()
    stub.key = "secret"
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    servers = engine([stub], folder)
    servers.push_weights(weights(0), version=0)
    assert answered(servers, 0)
    servers.close()


def test_before_the_first_push_all_servers_are_waited_for_until_the_deadline(folder):
    stubs = [Stub(), Stub()]
    stubs[1].kill()
    servers = engine(stubs, folder, server_timeout=0.3)
    with pytest.raises(RuntimeError, match="got asked for completions before the first push"):
        servers.generate(REQUESTS, params=PARAMS)
    servers.push_weights(weights(0), version=0)
    assert servers.figures()["engine/servers"] == 1
    stubs[1].start()
    until(lambda: servers._router.servers[1].live)
    assert stubs[1].label == stubs[0].label
    servers.close()
    stubs[1].kill()
    stubs[0].faults["/collective_rpc:grpo_described"] = stubs[1].start  # the first look is over by then
    patient = engine(stubs, folder)
    patient.push_weights(weights(1), version=1)
    assert patient.figures()["engine/servers"] == 2
    patient.close()


def test_an_answer_is_as_old_as_its_oldest_token(pushed):
    router = pushed[2]._router
    names = [f"{router.newest.run}-{version}" for version in (3, 1, 2)]
    assert router._oldest(router.servers[0], ServerCompletion([], [], False, names), "") == 1


@pytest.mark.parametrize("what", ["received", "held"])
def test_weights_that_arrive_otherwise_stop_the_run(pushed, what):
    one, _, servers = pushed
    one.corrupt, servers._router.deadline = what, 0.2
    with pytest.raises(StaleEngine, match=one.url):
        servers.push_weights(weights(1), version=1)
    with pytest.raises(RuntimeError):
        servers.generate(REQUESTS, params=PARAMS)


def test_a_layout_in_which_nothing_was_ever_recognised_proves_nothing(pushed):
    pushed[0].corrupt = "hidden"
    assert pushed[2].push_weights(weights(1), version=1) is None


def test_weights_that_break_off_leave_no_server_that_draws_from_half_of_them(pushed):
    one, other, servers = pushed

    def broken():
        yield from list(weights(1))[:3]
        raise KeyError("a rank is gone")

    with pytest.raises(KeyError):
        servers.push_weights(broken(), version=1)
    assert one.label == other.label == "torn"
    assert one.resting.is_set()
    assert servers.figures()["engine/servers"] == 0
    servers.push_weights(weights(2), version=2)
    assert answered(servers, 2)


def test_a_server_that_the_trainer_cannot_send_to_is_dropped_amid_its_update(pushed, monkeypatch):
    one, other, servers = pushed
    lost = {one.url: "got no end to a broadcast"}
    monkeypatch.setattr(servers._transfer, "carry", lambda chunk, urls: lost if one.url in urls else {})
    servers.push_weights(weights(1), version=1)
    assert [any(path == "/abort_requests" for path, _ in stub.calls) for stub in (one, other)] == [True, False]
    assert answered(servers, 1)


def test_weights_and_updates_of_another_trainer_are_not_taken_for_ours(pushed):
    one, other, servers = pushed
    one.coming, one.label = [torch.ones(5)], "0000-3"  # which it left open
    one.resting.clear()
    servers.push_weights(weights(3), version=3)
    assert answered(servers, 3)
    one.label, one.weights = "ffffffff-0", (1, 2)
    other.kill()
    assert answered(servers, 3)


def test_many_threads_may_generate_while_weights_are_pushed(pushed):
    *_, servers = pushed
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(servers.generate, REQUESTS, params=PARAMS) for _ in range(12)]
        for version in range(1, 5):
            servers.push_weights(weights(version), version=version)
        found = [call.result(20) for call in calls]
    table = [[one for row in expected(version) for one in row] for version in range(5)]
    for answers in found:
        for place, (tokens, oldest) in enumerate(one for row in seen(answers) for one in row):
            assert table[oldest][place] == (tokens, oldest)


def test_closing_ends_what_is_under_way(folder):
    stub = Stub()
    servers = engine([stub], folder, request_seconds=60.0)
    servers.push_weights(weights(0), version=0)
    stub.resting.clear()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(servers.generate, REQUESTS, params=PARAMS)
        until(lambda: any(path == "/inference/v1/generate" for path, _ in stub.calls))
        servers.close()
        servers.close()
        with pytest.raises(BaseException):  # noqa: B017, PT011 whatever it is: it does not wait
            call.result(5)
    stub.kill()


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        *(({"pause": "abort"}, "'wait' or 'keep'"), ({"max_requests": 0}, "at least 1")),
        *(({"servers": ()}, "list of different addresses"), ({"servers": ("127.0.0.1:8000",)}, "expected an address")),
    ],
)
def test_knobs_that_make_no_sense_are_refused(folder, knobs, why):
    with pytest.raises(ValueError, match=why):
        engine([], folder, **{"servers": ("http://127.0.0.1:1",), **knobs})


def test_files_of_a_trainer_that_was_killed_are_swept(folder):
    left = folder / f"{vllm_transfer._mark(2**22 + 5)}-abc"
    left.mkdir()
    (left / "0.safetensors").write_bytes(b"x")
    transfer = vllm_transfer.FileTransfer(folder=str(folder))
    transfer.offer([("x", torch.ones(1))])
    assert not left.exists()
    transfer.close()


class Pair(World):
    """One of two ranks, as threads."""

    def __init__(self, rank, shared):
        super().__init__(0, 1, torch.device("cpu"), deadline=30.0)
        self.rank, self.size, self.shared = rank, 2, shared

    def agree(self, f, *, what):
        if self.main:
            self.shared.put(f())
        found = self.shared.get(timeout=10)
        self.shared.put(found)
        return found


def test_only_the_main_rank_sends_weights_and_every_rank_goes_through_them_and_draws(folder):
    stubs, shared = [Stub(), Stub()], queue.Queue()
    ranks = [engine(stubs, folder, world=Pair(rank, shared)) for rank in range(2)]
    for version in range(2):
        gathered = [iter([*weights(version)]) for _ in ranks]
        # Rank 0 first: what it leaves in the queue is what rank 1 gets.
        held = [rank.push_weights(mine, version=version) for rank, mine in zip(ranks, gathered, strict=True)]
        shared.get()
        assert held == [checksum(tensor for _, tensor in weights(version))] * 2
        assert [next(mine, None) for mine in gathered] == [None, None]
        assert all(answered(rank, version) for rank in ranks)
    assert sum(path == "/finish_weight_update" for path, _ in stubs[0].calls) == 2
    stubs[0].kill()
    assert answered(ranks[1], 1)
    stubs[0].start()
    until(lambda: ranks[1]._router.servers[0].live)  # rank 0 has given it the weights meanwhile
    assert stubs[0].weights == stubs[1].weights
    for rank in ranks:
        rank.close()


MOVES = st.lists(
    st.one_of(
        st.just(("push",)),
        st.just(("generate",)),
        st.tuples(st.just("kill"), st.integers(0, 1)),
        st.tuples(st.just("start"), st.integers(0, 1)),
        st.tuples(st.just("fault"), st.integers(0, 1), st.sampled_from(SWAP), st.sampled_from((500, "drop", "die"))),
        st.tuples(st.just("fault"), st.integers(0, 1), st.just("/inference/v1/generate"), st.sampled_from(FAULTS)),
    ),
    max_size=12,
)


@given(moves=MOVES)
@settings(max_examples=15)
def test_every_answer_is_of_the_newest_weights_whatever_happens_to_servers(moves, folder):
    stubs, version = [Stub(), Stub()], 0
    servers = engine(stubs, folder)
    servers.push_weights(weights(0), version=0)
    for stub in stubs:
        stub.supervised = True
    try:
        for move, *of in [*moves, ("push",), ("generate",)]:
            if move == "fault":
                which, path, fault = of
                stubs[which].faults[path] = fault
            elif move in ("kill", "start"):
                getattr(stubs[of[0]], move)()
            else:
                for stub in stubs:  # as its supervisor does
                    stub.start()
                if move == "push":
                    version += 1
                    servers.push_weights(weights(version), version=version)
                else:
                    assert answered(servers, version)
    finally:
        servers.close()
        for stub in stubs:
            stub.kill()


@given(sizes=st.lists(st.integers(0, 40), max_size=12), size=st.integers(1, 100))
def test_chunks_are_the_weights_in_order_and_none_is_larger_than_it_has_to_be(sizes, size):
    given = [(str(i), torch.zeros(n)) for i, n in enumerate(sizes)]
    parts = list(vllm_transfer.chunks(iter(given), size))
    assert [one for part in parts for one in part] == given
    for part in parts:
        held = [tensor.numel() * 4 for _, tensor in part]
        assert sum(held[:-1]) < size
        assert part is parts[-1] or sum(held) >= size
