"""What stands around an engine: prompts and weights out, rows and episodes back; in which order a GPU's is woken."""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from environment_fakes import THREE_TURNS
from episode_fakes import Here, Late, environments
from fakes import MODELS, VOCABULARY, problem, tokenizer
from hypothesis import assume, given, settings
from policies import local
from torch import Tensor, nn

from grpo_fn.core import prng
from grpo_fn.core.batch import check_rollout
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.sampling import categorical, greedy, gumbel_max, nucleus
from grpo_fn.core.types import Rollout
from grpo_fn.rewards.combine import completions_of
from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.sampler.interface import (
    FixedWeights,
    SamplerContext,
    SamplerOptions,
    rank_share,
)
from grpo_fn.shell.vllm import colocated as vllm_engine
from grpo_fn.shell.vllm.colocated import BATCHED, TAGS, ColocatedEngine, EngineOptions
from grpo_fn.shell.vllm.engine import (
    COMPILE_THREADS,
    SEEDS,
    DueRequests,
    EngineCompletion,
    GenerationRequest,
    OnAnswer,
    OnTurn,
    SamplingParams,
    StaleEngine,
    import_vllm,
    row_seeds,
    sampling_params,
)
from grpo_fn.shell.vllm.fingerprint import HEAD, NOTHING, weight_fingerprint
from grpo_fn.shell.vllm.vllm_sampler import VllmSampler, colocated_sampler, end_tokens, export_weights
from grpo_fn.shell.world import World, alone

CPU = torch.device("cpu")
KEY = prng.key(5, device="cpu")
MODEL = MODELS["qwen2_tied"](VOCABULARY)
POSITIONS = MODEL.config.max_position_embeddings
EXAMPLES = settings.default.max_examples
DRAW = partial(categorical, temperature=1.0)
OPTIONS = {"token_sampler": DRAW, "encode": encode_prompt, "max_new_tokens": 6, "stop": (), "max_rows": 8}
KNOBS = {
    **{"max_model_len": None, "tensor_parallel": 1},
    **{"gpu_memory_utilization": 0.3, "kv_cache_bytes": 2**26, "enforce_eager": True, "generate_timeout": 60.0},
}
ENGINE = EngineOptions(**KNOBS, max_rows=8, detokenize=False)
pytestmark = pytest.mark.timeout(60)
prompts = st.lists(st.text("aT 7\né", min_size=1, max_size=9), min_size=1, max_size=4)


class Engine:
    """Answers from the seed alone, and notes what it is asked."""

    ranks, overlaps, repeatable, mixes = 2, True, False, True

    def __init__(self) -> None:
        self.calls_of_generate: list[tuple[list[GenerationRequest], dict[str, Any]]] = []
        self.pushed: list[tuple[int, dict[str, Tensor]]] = []
        self.calls: list[str] = []
        self.complaints = ["one"]

    def generate(
        self, requests: Sequence[GenerationRequest], *, params: SamplingParams, on_answer: OnAnswer | None = None
    ) -> list[list[EngineCompletion]]:
        self.calls_of_generate.append(([*requests], {**params}))
        answers = [[self.answer(request, seed) for seed in request.seeds] for request in requests]
        if on_answer is None:
            return answers
        places = [(i, j) for i, row in enumerate(answers) for j in range(len(row))]
        for i, j in random.Random(len(places)).sample(places, len(places)):
            on_answer(i, j, answers[i][j])
        return answers

    def generate_turns(self, due: DueRequests, *, params: SamplingParams, on_turn: OnTurn) -> None:
        calls = self.calls_of_generate
        while requests := [*due(len(calls), False)]:
            calls.append(([request for _, request in requests], {**params}))
            for b, request in random.Random(len(requests)).sample(requests, len(requests)):
                on_turn(b, len(calls), self.answer(request, *request.seeds))

    @staticmethod
    def answer(request: GenerationRequest, seed: int) -> EngineCompletion:
        most = request.max_tokens
        tokens = [(seed + 7 * i) % (VOCABULARY - 1) for i in range(1 + seed % most)]
        return EngineCompletion(tokens, [-token / 4 for token in tokens], len(tokens) < most, 0)

    def push_weights(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        self.pushed.append((version, dict(weights)))

    def rest(self) -> None:
        self.calls.append("rest")

    def figures(self) -> dict[str, float]:
        return {"engine/x": 1.0}

    def close(self) -> None:
        self.calls.append("close")


def context(**changes: Any) -> SamplerContext:
    given = {"folder": "/nowhere", "config": MODEL.config, "dtype": torch.float32, "world": alone(CPU)}
    return SamplerContext(**{**given, "adapters": None, "full_model": lambda: MODEL, **changes})


def sampler(engine: Any = None, **changes: Any) -> VllmSampler:
    fields = {"tokenizer": tokenizer(), **OPTIONS, "max_model_len": None, "ends": [VOCABULARY - 1]}
    return VllmSampler(**{**fields, "engine": engine or Engine(), "context": context(), **changes})


def problems(texts: Sequence[str]) -> list:
    return [problem(100 + i, text) for i, text in enumerate(texts)]


# -- rows


@given(texts=prompts, group_size=st.integers(1, 4))
def test_every_row_is_the_answer_to_its_own_seed(texts: list[str], group_size: int) -> None:
    asking = sampler()
    rollout = asking.sample(problems(texts), group_size, key=KEY)
    check_rollout(rollout)
    seeds = row_seeds(KEY, [100 + i for i in range(len(texts))], group_size)
    for b in range(len(texts) * group_size):
        ids = encode_prompt(tokenizer(), texts[b // group_size])
        answer = Engine.answer(GenerationRequest((), (), 6), seeds[b // group_size][b % group_size])
        end = len(ids) + len(answer.tokens)
        assert rollout.tokens[b, :end].tolist() == ids + answer.tokens
        assert rollout.mask[b].nonzero()[:, 0].tolist() == [*range(len(ids), end)]
        assert rollout.logp_sampled[b, len(ids) : end].tolist() == answer.logp
        assert not rollout.logp_sampled[b][~rollout.mask[b]].any()
        assert bool(rollout.truncated[b]) == (not answer.stopped)
        assert rollout.text[b] == tokenizer().decode(answer.tokens, skip_special_tokens=True)
        assert set(rollout.tokens[b, end:].tolist()) <= {tokenizer().eos_token_id}


@given(texts=prompts, group_size=st.integers(1, 4), ranks=st.integers(1, 3))
def test_the_ranks_of_an_engine_report_every_row_once_as_the_rollout_has_it(texts, group_size, ranks) -> None:
    reported: list[list[tuple[Problem, Completion]]] = []
    asked = problems(texts)
    for rank in range(ranks):
        reported.append([])
        place = alone(CPU)
        place.rank = rank
        one = sampler(
            context=context(world=place), on_completions=lambda *rows: reported[-1].extend(zip(*rows, strict=True))
        )
        one.engine.ranks = ranks
        rollout = one.sample(asked, group_size, key=KEY)
    rows = [problem for problem in asked for _ in range(group_size)]
    right = [*zip(rows, completions_of(rollout), strict=True)]
    for rank in range(ranks):
        assert sorted(reported[rank], key=repr) == sorted(right[rank_share(len(right), rank, ranks)], key=repr)


@given(texts=prompts, group_size=st.integers(1, 3), total=st.integers(20, 40))
def test_no_row_is_longer_than_the_total_and_one_cut_by_it_is_truncated(texts, group_size, total) -> None:
    lengths = [len(encode_prompt(tokenizer(), text)) for text in texts]
    assume(max(lengths) < total)
    engine = Engine()
    rollout = sampler(engine, max_total_tokens=total).sample(problems(texts), group_size, key=KEY)
    ((requests, _),) = engine.calls_of_generate
    most = [min(6, total - n) for n in lengths]
    assert [request.max_tokens for request in requests] == most
    assert torch.equal(rollout.truncated, rollout.mask.sum(-1) >= torch.tensor(most).repeat_interleave(group_size))


def test_the_engine_gets_ends_limits_and_how_to_draw() -> None:
    engine = Engine()
    params = {"temperature": 1.0, "ignore_eos": True, "stop_token_ids": [3, 9]}
    asking = sampler(engine, ends=[3, 9])
    stopping = replace(asking, token_sampler=greedy, stop=("\n",))
    stops = {"stop": ["\n"], "include_stop_str_in_output": True}
    for each, expected in ((asking, params), (stopping, {**params, **stops, "temperature": 0.0})):
        each.sample(problems(["a"]), 1, key=KEY)
        assert engine.calls_of_generate[-1][1] == expected


def test_a_model_folder_names_the_ends(tmp_path: Path) -> None:
    model = MODELS["qwen2_tied"](VOCABULARY)
    model.generation_config.eos_token_id = [11, 5]
    hf.export(model, tokenizer(), tmp_path / "model")
    assert end_tokens(context(folder=str(tmp_path / "model")), tokenizer()) == [5, 11, VOCABULARY - 1]


def test_a_missing_vllm_is_refused_with_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"got no vllm .* pip install 'grpo-fn\[vllm\]'"):
        colocated_sampler(context(), SamplerOptions(tokenizer=tokenizer(), **OPTIONS), **KNOBS)


def test_a_prompt_that_leaves_no_space_is_refused_by_number() -> None:
    exact = sampler(encode=lambda tokenizer, text: [1] * len(text), max_model_len=20)
    exact.sample(problems(["7" * 14]), 1, key=KEY)
    with pytest.raises(ValueError, match=r"problem 100 with 15 prompt .* expected at most 20 positions"):
        exact.sample(problems(["7" * 15]), 1, key=KEY)


# -- weights


def test_every_load_is_a_version_for_every_sampler_and_calls_reach_the_engine() -> None:
    engine = Engine()
    asking = sampler(engine)
    for each in (asking, replace(asking, token_sampler=greedy), asking):
        each.load(FixedWeights(MODEL, alone(CPU)))
    assert [version for version, _ in engine.pushed] == [0, 1, 2]
    sent = engine.pushed[0][1]
    assert torch.equal(sent[HEAD], MODEL.model.embed_tokens.weight)
    assert sent.keys() == MODEL.state_dict().keys()
    asking.rest(), asking.close()
    assert engine.calls == ["rest", "close"]
    assert asking.figures() == {"engine/x": 1.0}
    assert (asking.ranks, asking.overlaps, asking.repeatable, asking.mixes) == (2, True, False, True)


# -- the engine in the process, without vLLM


class LLM:
    """Notes what is asked of it, in order. It holds what it is given, but for the names in `loses`."""

    def __init__(self, **made_with: Any) -> None:
        self.made_with, self.calls, self.loses = made_with, [], set()
        self.held = sum(map(weight_fingerprint, MODEL.state_dict().values()), NOTHING)
        done = SimpleNamespace(shutdown=partial(self.calls.append, "shutdown"))
        client = SimpleNamespace(engine_core=SimpleNamespace(model_executor=done, scheduler=done))
        client._finalizer = SimpleNamespace(detach=lambda: None)
        self.llm_engine = SimpleNamespace(engine_core=client)
        self.wake_up = lambda tags: self.calls.append(f"wake {' '.join(tags)}")
        self.sleep = lambda level: self.calls.append(f"sleep {level}")
        self.reset_prefix_cache = lambda: self.calls.append("reset") or True

    def apply_model(self, f: Callable[..., Any]) -> list[Any]:
        return [True if f is vllm_engine.has_head else self.held]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        given = [(name, x) for name, x in kwargs["weights_iterator"] if name not in self.loses]
        self.held = sum((weight_fingerprint(x) for _, x in given), NOTHING)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> ColocatedEngine:
    """An engine that believes to be on a GPU."""
    for name in ("group_of_one", "restore_generators"):
        monkeypatch.setattr(vllm_engine, name, lambda _: nullcontext())
    monkeypatch.setattr(vllm_engine, "import_vllm", lambda knob: SimpleNamespace(LLM=LLM))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return ColocatedEngine(context(world=alone(torch.device("cuda"))), ENGINE)


def weights() -> Iterator[tuple[str, Tensor]]:
    return iter(MODEL.state_dict().items())


class Stepping:
    """vLLM's own engine: every step it has got one more token for each request, which wants as many as its seed."""

    def __init__(self) -> None:
        self.expected: dict[str, int] = {}
        self.steps = 0

    def add_request(self, name: str, prompt: dict[str, Any], params: SimpleNamespace) -> None:
        self.expected[name] = params.seed

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        logp = SimpleNamespace(logprobs=[-1.0] * self.steps, token_ids=[*range(self.steps)])
        done = SimpleNamespace(finish_reason="stop", token_ids=logp.token_ids, logprobs=logp)
        read = {"outputs": [done], "finished": True, "prompt_token_ids": [1], "num_cached_tokens": 0}
        ended = [name for name, seed in self.expected.items() if seed == self.steps]
        return [SimpleNamespace(request_id=name, **read) for name in ended]


def test_an_answer_is_reported_in_the_step_that_ends_it(
    on_cuda: ColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, on_answer = Stepping(), []
    on_cuda.llm.llm_engine = engine
    monkeypatch.setattr(ColocatedEngine, "_params", lambda self, params, seed: SimpleNamespace(seed=seed))
    requests = [GenerationRequest((1,), (5, 2), 9), GenerationRequest((1, 2), (2, 1), 9)]
    answers = on_cuda.generate(requests, params={}, on_answer=lambda *answer: on_answer.append((engine.steps, *answer)))
    places = [(1, 1, 1), (2, 0, 1), (2, 1, 0), (5, 0, 0)]
    assert on_answer == [(step, i, j, answers[i][j]) for step, i, j in places]
    assert all(len(answers[i][j].tokens) == step for step, i, j in places)


def test_a_gpu_engine_sleeps_and_is_woken_around_its_weights(on_cuda: ColocatedEngine) -> None:
    on_cuda.push_weights(weights(), version=0)
    assert on_cuda.llm.calls == ["reload_weights", "reset"]
    on_cuda.llm.calls.clear()
    on_cuda.rest()
    on_cuda.rest()
    assert on_cuda.llm.calls == ["sleep 2"]
    with pytest.raises(RuntimeError, match="got an engine at rest"):
        on_cuda.generate([GenerationRequest((1,), (1,), 9)], params={})
    on_cuda.push_weights(weights(), version=1)
    assert on_cuda.llm.calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset"]
    on_cuda.close()
    on_cuda.close()
    assert on_cuda.llm is None


def test_after_a_push_that_failed_only_what_still_sleeps_is_woken(on_cuda: ColocatedEngine) -> None:
    on_cuda.rest()
    with pytest.raises(ValueError, match=r"push: got no .* \(\d+ missing\), expected every weight"):
        on_cuda.push_weights(iter([]), version=0)
    assert on_cuda.asleep == [TAGS[1]]
    on_cuda.llm.calls.clear()
    on_cuda.push_weights(weights(), version=1)
    assert on_cuda.llm.calls == ["reload_weights", "wake kv_cache", "reset"]
    assert on_cuda.ready


@pytest.mark.parametrize("known", [True, False])
def test_weights_lost_on_the_way_make_it_stale_unless_its_layout_could_never_be_recognised(on_cuda, known) -> None:
    """An engine that held something else than its folder from the first is left to the probe."""
    on_cuda._in_folder = lambda: on_cuda._opened if known else NOTHING
    on_cuda.llm.loses = {"model.norm.weight"}
    with pytest.raises(StaleEngine, match="weights of version 4: got") if known else nullcontext():
        assert on_cuda.push_weights(weights(), version=4) is None
    assert on_cuda.ready is not known
    assert known or on_cuda.figures()["engine/verified"] == 0.0
    on_cuda.llm.loses = set()
    assert on_cuda.push_weights(weights(), version=5) is not None
    assert on_cuda.figures()["engine/verified"] == 1.0


def test_arguments_on_cpu_and_gpu_differ_in_memory_sleep_and_whole_prompts_alone() -> None:
    on_cpu, on_gpu = ENGINE.arguments(context()), ENGINE.arguments(context(world=alone(torch.device("cuda:0"))))
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": BATCHED}
    assert {k: v for k, v in on_cpu.items() if k not in on_gpu} == {"kv_cache_memory_bytes": 2**26, **whole}
    longer = replace(ENGINE, max_model_len=BATCHED + 7).arguments(context())
    assert longer["max_num_batched_tokens"] == BATCHED + 7
    only = {k: v for k, v in on_gpu.items() if k not in on_cpu}
    assert only == {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True}
    assert on_cpu["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(ValueError, match="got cuda:1, expected cuda:0"):
        ENGINE.check(context(world=alone(torch.device("cuda:1"))))
    with pytest.raises(ValueError, match="tensor_parallel: got 2 for 1 ranks, expected a divisor"):
        replace(ENGINE, tensor_parallel=2).check(context())


def test_a_deadline_is_more_than_0_and_less_than_other_ranks_wait() -> None:
    with pytest.raises(ValueError, match=r"generate_timeout: got .* expected more than 0"):
        replace(ENGINE, generate_timeout=0.0).check(context())
    world = World.__new__(World)  # of two ranks that were never brought together
    world.rank, world.size, world.device, world.deadline = 0, 2, CPU, 600.0
    replace(ENGINE, generate_timeout=599.0).check(context(world=world))
    with pytest.raises(ValueError, match=r"generate_timeout: got 600 s .* expected less than the 600 s"):
        replace(ENGINE, generate_timeout=600.0).check(context(world=world))


def test_generators_and_threads_are_left_as_they_were() -> None:
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with vllm_engine.restore_generators(CPU), vllm_engine.restore_thread_count():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        setter(threads + 1)
        torch.set_num_threads = print
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert (torch.set_num_threads, torch.get_num_threads()) == (setter, threads)


# -- episodes


@settings(max_examples=max(5, EXAMPLES // 4))
@given(texts=prompts, group_size=st.integers(1, 3), overlaps=st.booleans())
def test_every_turn_is_asked_for_with_the_row_so_far_and_its_own_seed(texts, group_size, overlaps) -> None:
    engine, reported = Engine(), []
    engine.ranks, engine.overlaps = 1, overlaps
    one = sampler(
        engine,
        environments=environments(tokenizer(), max_turn_tokens=5),
        **{"max_new_tokens": 12, "max_total_tokens": 60},
        on_completions=lambda *rows: reported.extend(zip(*rows, strict=True)),
    )
    asked = problems(texts)
    rollout = one.sample(asked, group_size, key=KEY)
    check_rollout(rollout)
    rows = [tuple(tokens.tolist()) for tokens in rollout.tokens]
    requests = [request for call, _ in engine.calls_of_generate for request in call]
    assert len({request.seeds for request in requests}) == len(requests) == sum(map(len, rollout.turns))
    for request in requests:  # what a row was when a turn was asked for is how it begins
        assert any(row[: len(request.prompt)] == request.prompt for row in rows)
        assert 1 <= request.max_tokens <= 5
    right = [*zip([p for p in asked for _ in range(group_size)], completions_of(rollout), strict=True)]
    assert sorted(reported, key=repr) == sorted(right, key=repr)
    same(replace(one, on_completions=None).sample(asked, group_size, key=KEY), rollout)


# -- options and seeds


temperatures = st.floats(0.01, 2.0)
uids = st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True)


@given(temperature=temperatures, top_k=st.integers(0, 99), top_p=st.floats(0.1, 1.0))
def test_a_function_of_ours_becomes_its_knobs_and_nothing_else(temperature: float, top_k: int, top_p: float) -> None:
    assert sampling_params(partial(partial(categorical), temperature=temperature)) == {"temperature": temperature}
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    assert sampling_params(partial(nucleus, **knobs)) == knobs
    assert sampling_params(greedy) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (partial(torch.random.fork_rng, enabled=True), "token_sampler: got fork_rng, .* vLLM draws itself"),
        (partial(gumbel_max, temperature=1.0), "token_sampler: got gumbel_max, expected sampling.greedy"),
        *((partial(categorical, temperature=t), "one that vLLM draws at, 0.01 to 2") for t in (0.0, 0.0099, 2.001)),
    ],
)
def test_functions_and_temperatures_that_vllm_draws_otherwise_are_refused(function, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampling_params(function)


@given(seed=st.integers(0, 2**64 - 1), uids=uids, group_size=st.integers(1, 5))
def test_a_rows_seed_is_that_of_its_own_key(seed: int, uids: list[int], group_size: int) -> None:
    key = prng.key(seed, device="cpu")
    seeds = row_seeds(key, uids, group_size)
    assert [len(of_each) for of_each in seeds] == [group_size] * len(uids)
    for uid, of_each in zip(uids, seeds, strict=True):
        assert row_seeds(key, [uid], group_size) == [of_each]
        assert row_seeds(key, [uid], group_size + 2)[0][:group_size] == of_each
        for g, one in enumerate(of_each):
            assert one == int(prng.randint(prng.fold_in(key, uid, g), low=0, high=SEEDS))
            assert 0 <= one < 2**31


@pytest.mark.parametrize("before", [None, "5"])
def test_the_trainers_compile_threads_are_what_they_were_before_vllm(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"import os\nos.environ[{COMPILE_THREADS!r}] = '1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")  # which it sets, put back afterwards
    monkeypatch.delenv(COMPILE_THREADS, raising=False)
    if before is not None:
        monkeypatch.setenv(COMPILE_THREADS, before)
    assert import_vllm("sampler").__file__ == str(tmp_path / "vllm" / "__init__.py")
    assert os.environ.get(COMPILE_THREADS) == before
    monkeypatch.delitem(sys.modules, "vllm")


# -- weights that are sent


HOW = LoRA(rank=2, alpha=6.0, dropout=0.0, targets="all-linear")


def of(model: nn.Module, **knobs) -> SamplerContext:
    return context(config=model.config, full_model=partial(hf.empty_model, model.config), **knobs)


def adapted(name: str, seed: int) -> nn.Module:
    """Adapters that do something."""
    model = lora.attach(MODELS[name](VOCABULARY), HOW)
    lora.reset(model, key=KEY, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, x in model.named_parameters():
            if key.endswith(lora.B):
                x.copy_(torch.randn(x.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_model_takes_weights_in_the_dtype_of_the_computation_and_a_tied_head_alone_comes_twice(name, dtype):
    model = MODELS[name](VOCABULARY)
    other = hf.empty_model(model.config).to_empty(device="cpu")
    pairs = list(export_weights(local(model), of(model, dtype=dtype)))
    sent = dict(pairs)
    assert HEAD in sent
    assert {x.dtype for x in sent.values()} == {dtype}
    assert len(pairs) == len(sent) == len(hf.named_tensors(model)) + model.config.tie_word_embeddings
    other.load_state_dict({k: v for k, v in sent.items() if k in other.state_dict()})
    assert set(other.state_dict()) <= sent.keys()
    assert all(torch.equal(sent[key], weight.to(dtype)) for key, weight in model.state_dict().items())


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=5)
@given(seed=st.integers(0, 99))
def test_adapters_are_merged_under_plain_names(name, seed):
    model = adapted(name, seed)
    plain = MODELS[name](VOCABULARY)
    sent = dict(export_weights(local(model), of(model, adapters=HOW)))
    assert sent.keys() >= plain.state_dict().keys()
    assert not [key for key in sent if "lora" in key or "base_layer" in key]
    plain.load_state_dict({k: v for k, v in sent.items() if k in plain.state_dict()})
    ids = torch.arange(10)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_weight_is_gathered_when_its_turn_comes():
    """And let go before the next: the whole model is never there twice."""
    model = MODELS["qwen3_untied"](VOCABULARY)
    policy = local(model)
    going = export_weights(policy, of(model))
    next(going)
    with torch.no_grad():
        for x in model.parameters():
            x.fill_(3.0)
    assert all(bool((x == 3.0).all()) for _, x in going)


# -- episodes of engines that decode others while environments work


TURN = 4  # tokens of every turn
ROWS = 4


class Even(Engine):
    """Turns of `TURN` tokens, from the seed alone."""

    ranks = 1

    @staticmethod
    def answer(request: GenerationRequest, seed: int) -> EngineCompletion:
        tokens = [(seed + 7 * i) % (VOCABULARY - 1) for i in range(min(TURN, request.max_tokens))]
        return EngineCompletion(tokens, [-token / 4 for token in tokens], True, 0)


class Stepped(Even):
    """An engine in this process: a step draws a token of every request, and calls `before` with its number first."""

    overlaps, repeatable, batch_invariant = False, True, False

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.before = before
        self.drawn: list[list[int]] = []  # rows that each step drew a token of

    def generate_turns(self, due: DueRequests, *, params: SamplingParams, on_turn: OnTurn) -> None:
        running: dict[int, list[Any]] = {}  # the answer, and tokens still to be drawn
        while (requests := due(len(self.drawn), bool(running))) or running:
            for b, request in requests:
                assert b not in running
                answer = self.answer(request, *request.seeds)
                running[b] = [answer, len(answer.tokens)]
            self.before(len(self.drawn))
            self.drawn.append([*running])
            for b, state in [*running.items()]:
                state[1] -= 1
                if not state[1]:
                    del running[b]
                    on_turn(b, len(self.drawn), state[0])


def asking(engine: Engine, caller: Any, answer_steps: int | None, max_rows: int = ROWS) -> VllmSampler:
    of = environments(tokenizer(), caller, answer_steps=answer_steps, max_turn_tokens=TURN + 1)
    return sampler(engine, environments=of, max_new_tokens=40, max_total_tokens=200, max_rows=max_rows)


def sampled(*how: Any) -> Rollout:
    """One sample of each problem, with three turns."""
    rollout = asking(*how).sample([problem(100 + i, "a7") for i in range(ROWS)], 1, key=KEY)
    check_rollout(rollout)
    assert [len(turns) for turns in rollout.turns] == [3] * ROWS
    return rollout


def same(got: Rollout, expected: Rollout) -> None:
    assert got.turns == expected.turns
    assert all(torch.equal(a, b) for a, b in zip(got[:4], expected[:4], strict=True))


@pytest.mark.parametrize(
    ("answer_steps", "repeatable", "batch_invariant"), [(None, True, False), (2, False, False), (2, True, True)]
)
def test_rows_are_decoded_to_their_ends_while_the_environment_of_one_works(
    answer_steps, repeatable, batch_invariant
) -> None:
    """Where rows go on as answers come: the slow one's first turn is answered when the others' episodes are over."""
    late = Late(slow=[100])
    engine = Stepped(lambda step: late.release() if step == 3 * TURN - 1 else None)  # the last step of the others
    engine.repeatable, engine.batch_invariant = repeatable, batch_invariant
    rollout = sampled(engine, late, answer_steps)
    assert engine.drawn[:TURN] == [[0, 1, 2, 3]] * TURN
    assert engine.drawn[TURN : 3 * TURN] == [[1, 2, 3]] * (2 * TURN), "the engine waited, or the slow row did not"
    assert engine.drawn[3 * TURN : 4 * TURN] == [[0]] * TURN
    same(rollout, sampled(Stepped(), Here(THREE_TURNS), 2))


def first_turn_of(row: int, tokens: int) -> Callable[[GenerationRequest, int], EngineCompletion]:
    """Answers as `Even`, but the first turn of a row is shorter, so that the others decode when it waits."""
    calls = iter(range(10**6))
    return lambda request, seed: Even.answer(
        request._replace(max_tokens=tokens) if next(calls) == row else request, seed
    )


@pytest.mark.parametrize("answer_steps", [0, 1, 2, 7])
def test_rows_go_on_after_a_counted_number_of_steps_however_late_answers_are(answer_steps: int) -> None:
    late = Late(slow=[101]) if answer_steps else Here(THREE_TURNS, delays=[0.01])  # with 0 it is waited for at once
    engine, plain = Stepped(lambda step: late.release() if answer_steps else None), Stepped()
    for one in (engine, plain):
        one.answer = first_turn_of(1, TURN - 2)
    same(sampled(engine, late, answer_steps), sampled(plain, Here(THREE_TURNS), answer_steps))
    assert engine.drawn == plain.drawn, "how late an answer is has changed what is decoded together"
    assert engine.drawn[:2] == [[0, 1, 2, 3]] * 2
    # It meets the others in mid-turn: rows at different turns in one engine.
    together = min(answer_steps, 2)
    assert engine.drawn[2:4] == [[0, 2, 3]] * together + [[0, 2, 3, 1]] * (2 - together)


@settings(max_examples=max(5, settings.default.max_examples // 10), deadline=None)
@given(
    delays=st.lists(st.floats(0.0, 0.004), min_size=1, max_size=5),
    answer_steps=st.sampled_from([None, 0, 2]),
    overlaps=st.booleans(),
    width=st.integers(1, 5),
)
def test_the_order_of_answers_changes_no_row(delays, answer_steps, overlaps, width) -> None:
    """Of engines that draw a function of the seed; nor does the number of threads."""
    engine = Even() if overlaps else Stepped()
    got = sampled(engine, Here(THREE_TURNS, delays=delays), answer_steps, width)
    same(got, sampled(Stepped(), Here(THREE_TURNS), 2))


def test_on_servers_a_row_whose_environment_works_keeps_no_thread() -> None:
    """One turn at once, and the first row's answer comes when all others are over."""
    late = Late(slow=[100])
    engine, requests = Even(), []

    def answer(request: GenerationRequest, seed: int) -> EngineCompletion:
        requests.append(request)
        if len(requests) == 1 + 3 * (ROWS - 1):
            late.release()
        return Even.answer(request, seed)

    engine.answer = answer
    same(sampled(engine, late, 2, 1), sampled(Stepped(), Here(THREE_TURNS), 2))


@pytest.mark.parametrize("engine", [Even(), Stepped()], ids=["servers", "in the process"])
def test_seconds_in_which_nothing_is_drawn_are_counted_and_a_failure_ends_the_call(engine: Engine) -> None:
    caller = Late([])
    caller.here.delays = [0.05]
    sampled(engine, caller, 2)
    assert 0.075 <= caller.waits["time/environment_wait"] < 5.0  # twice, of all rows at once, once nothing is drawn
    caller.step = lambda state, message, key: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sampled(engine, caller, 2)


def test_an_engine_of_several_ranks_counts_steps_and_observes_the_same() -> None:
    engine = Stepped()
    engine.ranks = 2
    with pytest.raises(ValueError, match="got talk, which is not pure, with an engine of 2 ranks"):
        sampler(engine, environments=environments(tokenizer(), pure=False))
    with pytest.raises(ValueError, match=r"answer_steps: got None with an engine of 2 ranks, expected a number"):
        asking(engine, Here(THREE_TURNS), None)


@pytest.mark.parametrize(
    ("answer_steps", "batch_invariant", "repeatable"), [(2, False, True), (None, False, False), (None, True, True)]
)
def test_rows_repeat_unless_they_go_on_as_answers_come_and_depend_on_those_beside_them(
    answer_steps, batch_invariant, repeatable
) -> None:
    engine = Stepped()
    engine.batch_invariant = batch_invariant
    assert asking(engine, Here(THREE_TURNS), answer_steps).repeatable is repeatable


@pytest.mark.parametrize(
    ("device", "asked", "found"),
    [("cpu", "1", (True, False)), ("cuda", "1", (True, True)), ("cuda", "0", (False,) * 2)],
)
def test_vllm_repeats_on_the_cpu_and_is_batch_invariant_on_cuda_where_asked(device, asked, found, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)
    engine = object.__new__(ColocatedEngine)
    engine.world = SimpleNamespace(device=torch.device(device))
    assert (engine.repeatable, engine.batch_invariant) == found
