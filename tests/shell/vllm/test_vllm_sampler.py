"""What stands around an engine: prompts out, rows back, versions counted; and in which order a GPU's is woken."""

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
from episode_fakes import environments
from fakes import MODELS, VOCABULARY, problem, tokenizer
from hypothesis import assume, given, settings
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.batch import check_rollout
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.sampling import categorical, greedy
from grpo_fn.rewards.combine import completions_of
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.sampler.interface import (
    FixedWeights,
    SamplerContext,
    SamplerOptions,
    rank_share,
)
from grpo_fn.shell.vllm import colocated as vllm_engine
from grpo_fn.shell.vllm.colocated import BATCHED, TAGS, ColocatedEngine, EngineOptions
from grpo_fn.shell.vllm.engine import (
    DueRequests,
    EngineCompletion,
    GenerationRequest,
    OnAnswer,
    OnTurn,
    SamplingParams,
    StaleEngine,
    row_seeds,
)
from grpo_fn.shell.vllm.fingerprint import HEAD, NOTHING, weight_fingerprint
from grpo_fn.shell.vllm.vllm_sampler import VllmSampler, colocated_sampler, end_tokens
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


def colocated(**changes: Any) -> VllmSampler:
    asks = {name: changes.pop(name, value) for name, value in OPTIONS.items()}
    return colocated_sampler(context(), SamplerOptions(tokenizer=tokenizer(), **asks), **{**KNOBS, **changes})


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
    assert [request.max_tokens for request in requests] == [min(6, total - n) for n in lengths]
    drawn = rollout.mask.sum(-1)
    length = torch.tensor(lengths).repeat_interleave(group_size)
    assert (drawn + length <= total).all()
    assert torch.equal(rollout.truncated, drawn >= torch.minimum(torch.tensor(6), total - length))


def test_the_engine_gets_ends_limits_and_how_to_draw() -> None:
    engine = Engine()
    params = {"temperature": 1.0, "ignore_eos": True, "stop_token_ids": [3, 9]}
    asking = sampler(engine, ends=[3, 9])
    asking.sample(problems(["a"]), 1, key=KEY)
    assert engine.calls_of_generate[-1][1] == params
    replace(asking, token_sampler=greedy, stop=("\n",)).sample(problems(["a"]), 1, key=KEY)
    stops = {"stop": ["\n"], "include_stop_str_in_output": True}
    assert engine.calls_of_generate[-1][1] == {**params, **stops, "temperature": 0.0}


def test_a_model_folder_names_the_ends(tmp_path: Path) -> None:
    model = MODELS["qwen2_tied"](VOCABULARY)
    model.generation_config.eos_token_id = [11, 5]
    hf.export(model, tokenizer(), tmp_path / "model")
    assert end_tokens(context(folder=str(tmp_path / "model")), tokenizer()) == [5, 11, VOCABULARY - 1]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"token_sampler": partial(categorical, temperature=3.0)}, "temperature: got 3.0"),
        ({}, r"got no vllm .* pip install 'grpo-fn\[vllm\]'"),
    ],
)
def test_bad_knobs_and_no_vllm_are_refused_before_an_engine_is_started(knobs, said, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=said):
        colocated(**knobs)


def test_a_prompt_that_leaves_no_space_is_refused_by_number() -> None:
    exact = sampler(encode=lambda tokenizer, text: [1] * len(text), max_model_len=20)
    exact.sample(problems(["7" * 14]), 1, key=KEY)
    with pytest.raises(ValueError, match=r"problem 100 with 15 prompt .* expected at most 20 positions"):
        exact.sample(problems(["7" * 15]), 1, key=KEY)


# -- weights


def test_every_load_is_a_version_for_every_sampler() -> None:
    engine = Engine()
    asking = sampler(engine)
    likeliest = replace(asking, token_sampler=greedy)
    for each in (asking, likeliest, asking):
        each.load(FixedWeights(MODEL, alone(CPU)))
    assert [version for version, _ in engine.pushed] == [0, 1, 2]
    sent = engine.pushed[0][1]
    assert torch.equal(sent[HEAD], MODEL.model.embed_tokens.weight)
    assert sent.keys() == MODEL.state_dict().keys()


def test_calls_and_figures_of_the_engine_pass_through_the_sampler() -> None:
    engine = Engine()
    asking = sampler(engine)
    asking.rest()
    asking.close()
    assert engine.calls == ["rest", "close"]
    assert asking.figures() == {"engine/x": 1.0}
    assert (asking.ranks, asking.overlaps, asking.repeatable, asking.mixes) == (2, True, False, True)
    assert asking.complaints == ["one"]


# -- the engine in the process, without vLLM


class LLM:
    """Notes what is asked of it, in order. It holds what it is given, but for the names in `loses`."""

    def __init__(self, **made_with: Any) -> None:
        self.made_with, self.calls, self.loses = made_with, [], set()
        self.held = sum(map(weight_fingerprint, MODEL.state_dict().values()), NOTHING)
        done = SimpleNamespace(shutdown=partial(self.calls.append, "shutdown"))
        core = SimpleNamespace(model_executor=done, scheduler=done)
        client = SimpleNamespace(engine_core=core, _finalizer=SimpleNamespace(detach=lambda: None))
        self.llm_engine = SimpleNamespace(engine_core=client)

    def apply_model(self, f: Callable[..., Any]) -> list[Any]:
        return [True if f is vllm_engine.has_head else self.held]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        given = [(name, x) for name, x in kwargs["weights_iterator"] if name not in self.loses]
        self.held = sum((weight_fingerprint(x) for _, x in given), NOTHING)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> ColocatedEngine:
    """An engine that believes to be on a GPU."""
    for name in ("group_of_one", "restore_generators"):
        monkeypatch.setattr(vllm_engine, name, lambda _: nullcontext())
    monkeypatch.setattr(vllm_engine, "import_vllm", lambda knob: SimpleNamespace(LLM=LLM))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = context(world=alone(torch.device("cuda")))
    return ColocatedEngine(made, ENGINE)


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
        return [self.output(name, seed) for name, seed in self.expected.items() if seed == self.steps]

    def output(self, name: str, seed: int) -> SimpleNamespace:
        tokens = [*range(seed)]
        logp = SimpleNamespace(logprobs=[-1.0] * seed, token_ids=tokens)
        done = SimpleNamespace(finish_reason="stop", token_ids=tokens, logprobs=logp)
        read = {"prompt_token_ids": [1], "num_cached_tokens": 0}
        return SimpleNamespace(request_id=name, outputs=[done], finished=True, **read)


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


def test_stale_weights_are_reported_with_version_and_numbers(on_cuda: ColocatedEngine) -> None:
    on_cuda._in_folder = lambda: on_cuda._opened
    on_cuda.llm.loses = {"model.norm.weight"}
    with pytest.raises(StaleEngine, match="weights of version 4: got"):
        on_cuda.push_weights(weights(), version=4)
    assert not on_cuda.ready
    on_cuda.llm.loses = set()
    assert on_cuda.push_weights(weights(), version=5) is not None
    assert on_cuda.figures()["engine/verified"] == 1.0


def test_a_layout_that_cannot_be_recognised_is_left_to_the_probe(on_cuda: ColocatedEngine) -> None:
    """An engine that held something else than its folder from the first is not called stale for it."""
    on_cuda._in_folder = lambda: NOTHING
    on_cuda.llm.loses = {"model.norm.weight"}
    assert on_cuda.push_weights(weights(), version=4) is None
    assert on_cuda.ready
    assert on_cuda.figures()["engine/verified"] == 0.0


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
def test_every_turn_is_asked_for_with_the_row_so_far_and_a_seed_of_its_own(texts, group_size, overlaps) -> None:
    engine, reported = Engine(), []
    engine.ranks, engine.overlaps = 1, overlaps
    one = sampler(
        engine,
        environments=environments(tokenizer(), max_turn_tokens=5),
        max_new_tokens=12,
        max_total_tokens=60,
        on_completions=lambda *rows: reported.extend(zip(*rows, strict=True)),
    )
    asked = problems(texts)
    rollout = one.sample(asked, group_size, key=KEY)
    check_rollout(rollout)
    rows = {
        tuple(row[: int(keep.nonzero()[-1]) + 1].tolist()): turns
        for row, keep, turns in zip(rollout.tokens, rollout.mask, rollout.turns, strict=True)
    }
    requests = [request for call, _ in engine.calls_of_generate for request in call]
    assert len(requests) == sum(map(len, rollout.turns))
    for request in requests:  # what a row was when a turn was asked for is how it begins
        assert any(row[: len(request.prompt)] == request.prompt for row in rows)
        assert 1 <= request.max_tokens <= 5
    assert len({request.seeds for request in requests}) == len(requests)
    right = [*zip([p for p in asked for _ in range(group_size)], completions_of(rollout), strict=True)]
    assert sorted(reported, key=repr) == sorted(right, key=repr)
    again = replace(one, on_completions=None).sample(asked, group_size, key=KEY)
    assert again.turns == rollout.turns
    assert torch.equal(again.tokens, rollout.tokens)
