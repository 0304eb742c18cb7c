"""Dedicated servers, real ones: two are started for this file with tools/launch/vllm_server.sh, and are killed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2
import psutil
import pytest
import torch
from episode_fakes import Here, environments
from episodes_of_engines import CALCULATOR, RESULT, calls_the_calculator, problems
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from grpo_fn.core import prng
from grpo_fn.core.batch import check_rollout
from grpo_fn.core.sampling import categorical
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.sampler.interface import SamplerContext, SamplerOptions
from grpo_fn.shell.vllm import vllm_servers, vllm_transfer
from grpo_fn.shell.vllm.client import Server, Unreachable
from grpo_fn.shell.vllm.engine import GenerationRequest
from grpo_fn.shell.vllm.vllm_sampler import VllmSampler
from grpo_fn.shell.vllm.vllm_servers import DedicatedEngine
from grpo_fn.shell.world import World

ROOT = Path(__file__).parents[2]
START = 300.0  # seconds that a server may take to start where other work goes on; alone it takes 30 to 50
TEMPERATURE = 0.7
PARAMS = {"temperature": TEMPERATURE, "ignore_eos": True}
LONG = tuple(i * 7 % 300 for i in range(300))  # two blocks of cached prefixes and a part of one
REQUESTS = [GenerationRequest((1, 2, 3), (5, 6, 2**31 - 1), 8), GenerationRequest(LONG, (7, 5), 8)]
CLOSE = 2e-5  # nats between log-probs of float32 from here and from there


def model(seed):
    """The smallest that vLLM takes, tied."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config).float().eval()


def weights(module):
    """As `export_weights` has them."""
    for name, weight in module.named_parameters():
        yield name, weight.detach()
        if name.endswith("embed_tokens.weight"):
            yield "lm_head.weight", weight.detach()


@torch.no_grad()
def own_logp(module, prompt, tokens):
    """What the module itself makes of a completion, `[T]`."""
    logits = module(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def gap(module, requests, answers):
    """The largest over all tokens."""
    pairs = [(request.prompt, one) for request, row in zip(requests, answers, strict=True) for one in row]
    return max(float((own_logp(module, p, a.tokens) - torch.tensor(a.logp)).abs().max()) for p, a in pairs)


class Process:
    """A server in its own process."""

    def __init__(self, folder, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.folder, self.log = f"http://127.0.0.1:{self.port}", folder, log
        self.start()

    def start(self):
        env = {**os.environ, "PYTHON": sys.executable, "PORT": str(self.port), "TRANSFER": "file"}
        env |= {"KV_CACHE_BYTES": str(2**26), "OMP_NUM_THREADS": "1"}
        command = [ROOT / "tools/launch/vllm_server.sh", self.folder, "--dtype", "float32"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def kill(self):
        """It and its workers, without a word."""
        if self.process.poll() is not None:
            return
        whole = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for one in whole:
            one.send_signal(signal.SIGKILL)
        self.process.wait(20)
        psutil.wait_procs(whole, 20)

    def wait(self):
        """Until the script says that it is ready."""
        end = time.monotonic() + START
        while f"vLLM server: ready on {self.url}" not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model(0).save_pretrained(folder / "model")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpo_fn.tiny_model",
            "--vocabulary",
            "300",
            "--out",
            folder / "made",
        ],
        check=True,
    )
    for one in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "made" / one).rename(folder / "model" / one)
    started = [Process(folder / "model", folder / f"{name}.log") for name in ("first", "second")]
    try:
        for one in started:
            one.wait()
        yield started
    finally:
        for one in started:
            one.kill()


CHUNK = 40_000  # bytes


@pytest.fixture(scope="module", autouse=True)
def small_and_quick():
    """Several chunks of the small model, and looks at servers that come soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_servers, "CHUNK_BYTES", CHUNK)
        patch.setattr(vllm_servers, "CHECK_SECONDS", 0.5)
        yield


def engine(processes, folder, **knobs):
    """An engine of these."""
    quick = {"request_seconds": 120.0, "server_timeout": START}
    return DedicatedEngine(
        World(0, 1, torch.device("cpu"), deadline=600.0),
        torch.float32,
        servers=[one.url for one in processes],
        transfer=partial(vllm_transfer.FileTransfer, folder=str(folder)),
        **{"pause": "wait", "max_requests": 16, **quick, **knobs},
    )


def running(processes, expected):
    """Wait until the servers are at work on so many completions."""
    end = time.monotonic() + 60
    while True:
        texts = [httpx2.get(f"{one.url}/metrics", timeout=30).text for one in processes]
        lines = [line for text in texts for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        if sum(float(line.split()[-1]) for line in lines) >= expected:
            return
        assert time.monotonic() < end, lines
        time.sleep(0.05)


def both_well(servers):
    """Wait until both servers are asked."""
    end = time.monotonic() + 60
    while servers.figures()["engine/servers"] < 2:
        assert time.monotonic() < end, servers.complaints
        time.sleep(0.2)


# Before `servers` begins to look after the same servers: what another run has given them it takes for old weights.
def test_a_swap_in_mid_decode_goes_on_with_the_new_weights(processes, tmp_path):
    old, new = model(1), model(2)
    requests = [GenerationRequest(LONG, (1, 2), 800)]
    with_keep = engine(processes, tmp_path, pause="keep")
    with_keep.push_weights(weights(old), version=1)
    found = []
    asking = partial(with_keep.generate, requests, params=PARAMS)
    thread = threading.Thread(target=lambda: found.extend(asking()))
    thread.start()
    running(processes, 2)
    with_keep.push_weights(weights(new), version=2)
    assert not found, "the swap came after the end"
    thread.join(120)
    ((*answers,),) = found
    for answer in answers:
        assert len(answer.tokens) == 800
        assert answer.oldest == 1
        said = torch.tensor(answer.logp)
        by_old = (own_logp(old, LONG, answer.tokens) - said).abs() < CLOSE * 10
        by_new = (own_logp(new, LONG, answer.tokens) - said).abs() < CLOSE * 10
        turn = int(by_old.int().cumprod(0).sum())
        assert 0 < turn < 800
        assert by_new[turn:].all(), "what comes after the swap is not the new weights' alone"
    assert gap(new, REQUESTS, with_keep.generate(REQUESTS, params=PARAMS)) < CLOSE
    with_keep.close()


@pytest.fixture(scope="module")
def servers(processes, tmp_path_factory):
    made = engine(processes, tmp_path_factory.mktemp("weights"))
    yield made
    made.close()


def test_tokens_and_log_probs_are_of_the_weights_pushed_last(servers):
    for version in (1, 2, 3):
        trained = model(version)
        assert servers.push_weights(weights(trained), version=version) is not None
        answers = servers.generate(REQUESTS, params=PARAMS)
        assert gap(trained, REQUESTS, answers) < CLOSE
        assert gap(model(version - 1), REQUESTS, answers) > 0.1
        assert {one.oldest for row in answers for one in row} == {version}
        assert all(len(one.tokens) == 8 and not one.stopped for row in answers for one in row)


def test_a_completion_depends_on_its_prompt_and_seed_alone(servers):
    servers.push_weights(weights(model(1)), version=4)
    together = servers.generate(REQUESTS, params=PARAMS)
    for request, row in zip(REQUESTS, together, strict=True):
        for seed, answer in zip(request.seeds, row, strict=True):
            ((alone,),) = servers.generate([request._replace(seeds=(seed,))], params=PARAMS)
            assert alone == answer
    assert len({tuple(one.tokens) for one in together[0]}) == 3


def test_the_token_that_stops_is_part_of_the_completion(servers):
    servers.push_weights(weights(model(1)), version=5)
    (plain,) = servers.generate([REQUESTS[0]], params=PARAMS)
    third = plain[0].tokens[2]
    (cut,) = servers.generate([REQUESTS[0]], params={**PARAMS, "stop_token_ids": [third]})
    assert cut[0].tokens == plain[0].tokens[: plain[0].tokens.index(third) + 1]
    assert cut[0].stopped


def test_an_update_that_broke_off_is_given_up_and_a_wrong_file_is_refused(processes, servers, tmp_path):
    import asyncio

    async def half():
        server = Server(processes[0].url, seconds=120.0, connections=4)
        transfer = vllm_transfer.FileTransfer(folder=str(tmp_path))
        parts = list(vllm_transfer.chunks(weights(model(9)), CHUNK))
        info, _ = transfer.meeting(server.url, 1)
        await server.post("/init_weight_transfer_engine", json={"init_info": info})
        await server.post("/pause", params={"mode": "keep"})
        await server.post("/start_weight_update")
        for part in parts[:2]:
            await server.post("/update_weights", json={"update_info": transfer.offer(part)})
        wrong = {**transfer.offer(parts[2]), "sha256": "0" * 64}
        with pytest.raises(Unreachable, match="hash"):
            await server.post("/update_weights", json={"update_info": wrong})
        await server.close()
        transfer.close()

    # Who looks after the servers would find one amid an update, give that up and bring the newest weights itself.
    swapping = servers._updater.swapping
    servers._run(swapping.acquire())
    try:
        asyncio.run(half())
    finally:
        servers._loop.call_soon_threadsafe(swapping.release)
    servers.push_weights(weights(model(3)), version=6)
    assert gap(model(3), REQUESTS, servers.generate(REQUESTS, params=PARAMS)) < CLOSE
    both_well(servers)
    assert gap(model(3), REQUESTS * 4, servers.generate(REQUESTS * 4, params=PARAMS)) < CLOSE


def prefix_hits(processes):
    """Tokens that the servers' prefix caches have given so far."""
    texts = [httpx2.get(f"{one.url}/metrics", timeout=30).text for one in processes]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert len(lines) == len(processes)
    return sum(float(line.split()[-1]) for line in lines)


def test_calculator_episodes_are_the_policys_and_read_what_a_server_has_read(processes, servers):
    trained, folder = model(7), processes[0].folder
    read = AutoTokenizer.from_pretrained(folder)
    world = World(0, 1, torch.device("cpu"), deadline=600.0)
    context = SamplerContext(
        folder=str(folder),
        config=trained.config,
        dtype=torch.float32,
        world=world,
        adapters=None,
        full_model=lambda: trained,
    )
    options = SamplerOptions(
        tokenizer=read,
        token_sampler=partial(categorical, temperature=TEMPERATURE),
        encode=encode_prompt,
        max_new_tokens=40,
        stop=(),
        max_rows=8,
    )
    engine = {"engine": servers, "context": context, "ends": [*range(0, 300, 3)], "max_model_len": None}
    asked, found = problems(short=2, long=2), []
    for version, delays in enumerate(([], [0.05, 0.0, 0.2, 0.01]), 100):
        servers.push_weights(weights(trained), version=version)  # nothing is cached
        before = prefix_hits(processes)
        of = environments(read, Here(CALCULATOR, delays), chat=calls_the_calculator(read), max_turn_tokens=12)
        sampler = VllmSampler(**vars(replace(options, environments=of)), **engine)
        found.append(sampler.sample(asked, 3, key=prng.key(5, device="cpu")))
        check_rollout(found[-1])
        later = sum(len(turns) - 1 for turns in found[-1].turns[6:])
        assert later > 3
        assert prefix_hits(processes) - before >= 128 * later, "a later turn was read anew"
    one, other = found
    assert other.turns == one.turns
    assert torch.equal(other.tokens, one.tokens)
    assert {turn.observation for turns in one.turns for turn in turns[:-1]} == {RESULT}
    for row, mask, said in zip(one.tokens.tolist(), one.mask, one.logp_sampled, strict=True):
        start = int(mask.int().argmax())
        own = own_logp(trained, row[:start], row[start:])
        assert not bool(mask[start : start + int(mask.sum()) + 1].all()), "expected an observation"
        assert float((own - said[start:])[mask[start:]].abs().max()) < CLOSE


def test_requests_of_a_killed_server_go_to_another_and_the_server_is_taken_back(processes, servers):
    trained = model(4)
    servers.push_weights(weights(trained), version=7)
    servers.figures()
    requests = [GenerationRequest((1, 2, 3), (1, 2, 3, 4), 400), GenerationRequest((4, 5), (5, 6), 400)]
    calm = servers.generate(requests, params=PARAMS)
    found = []
    thread = threading.Thread(target=lambda: found.extend(servers.generate(requests, params=PARAMS)))
    thread.start()
    running(processes, 6)
    processes[1].kill()
    thread.join(120)
    assert found == calm
    figures = servers.figures()
    assert figures["engine/servers"] == 1
    assert figures["engine/requests_retried"] >= 1
    assert any(processes[1].url in text for text in servers.complaints)

    processes[1].log.write_text("")
    processes[1].start()
    processes[1].wait()
    both_well(servers)
    processes[0].kill()  # now it has to answer itself, with the weights that were not pushed since
    assert servers.generate(requests, params=PARAMS) == calm
