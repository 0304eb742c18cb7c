"""The engine in the training process, the real one: it samples from the weights that it was last given, and says so."""

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from engines import ENDS, POSITIONS, Case, asked, case, colocated, completions, refill, seat_of, small
from fakes import VOCABULARY, tokenizer
from hypothesis import given, settings
from policies import mesh_of_one
from torch.distributed.fsdp import fully_shard

from grpo_fn.core import prng
from grpo_fn.core.batch import check_rollout
from grpo_fn.core.sampling import categorical, greedy, nucleus
from grpo_fn.shell.vllm.colocated import BATCHED
from grpo_fn.shell.vllm.engine import StaleEngine
from grpo_fn.shell.vllm.fingerprint import HEAD
from grpo_fn.shell.vllm.vllm_sampler import export_weights

pytestmark = pytest.mark.xdist_group("vllm")
EXAMPLES = settings.default.max_examples
FEW = settings(max_examples=max(3, EXAMPLES // 25))
KEY = prng.key(5, device="cpu")
CLOSE = 1e-4  # nats; float32 through two layers gives 2e-5
BLOCK = 128  # tokens of a cached prefix in vLLM's CPU build
prompts = st.lists(st.text("aT 7\né", min_size=1, max_size=9), min_size=1, max_size=4)
LONG = "Tom has 12 apples. He buys 30 more. " * 9


@pytest.fixture(scope="module", params=["qwen2 tied", "llama untied"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, tied = request.param.split()
    with case(name, tmp_path_factory.mktemp(name) / "model", tied=tied == "tied") as made:
        yield made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One model, for what has nothing to do with which it is; its engine knows the tokenizer."""
    with case("qwen2", tmp_path_factory.mktemp("plain") / "model", tied=True, stop=("no such text",)) as made:
        yield made._replace(sampler=replace(made.sampler, stop=()))


# -- it samples from the policy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@FEW
@given(texts=prompts, seed=st.integers(1, 99))
def test_logp_sampled_is_the_policys(one: Case, temperature: float, texts: list[str], seed: int) -> None:
    one.renewed(seed)
    token_sampler = partial(categorical, temperature=temperature)
    rollout = replace(one.sampler, token_sampler=token_sampler).sample(asked(texts), 3, key=KEY)
    check_rollout(rollout)
    assert one.gap(rollout, temperature) < CLOSE


def test_a_prompt_longer_than_a_cached_block_is_read_anew_after_a_push(one: Case) -> None:
    assert len(tokenizer()(LONG)["input_ids"]) > BLOCK
    for seed in (1, 2, 1):
        one.renewed(seed)
        assert one.gap(one.sampler.sample(asked([LONG]), 2, key=KEY)) < CLOSE


def test_greedy_follows_the_weights_and_is_that_of_transformers(one: Case) -> None:
    likeliest, seen = replace(one.sampler, token_sampler=greedy), []
    for seed in (3, 4):
        one.renewed(seed)
        rollout = likeliest.sample(asked(["Tom has", LONG]), 1, key=KEY)
        seen.append(completions(rollout))
        for text, found in zip(["Tom has", LONG], completions(rollout), strict=True):
            ids = torch.tensor([tokenizer()(text)["input_ids"]])
            whole = one.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=ENDS
            )
            assert found == whole[0, ids.shape[1] :].tolist()
        assert one.gap(rollout) < CLOSE  # under the plain softmax, as the local sampler's
    assert seen[0] != seen[1]


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (20, 0.8)])
def test_a_cut_distribution_is_the_local_samplers(plain: Case, top_k: int, top_p: float) -> None:
    plain.renewed(5)
    token_sampler = partial(nucleus, temperature=0.8, top_k=top_k, top_p=top_p)
    rollout = replace(plain.sampler, token_sampler=token_sampler).sample(asked(["Tom", "7 + 7"]), 8, key=KEY)
    with torch.no_grad():
        logits = plain.model(rollout.tokens).logits
    # The probability of a token is the measure of the u that lead to it: found by drawing at very many.
    u = (torch.arange(4096) + 0.5) / 4096
    for row, column in rollout.mask.nonzero()[::5].tolist():
        drawn, logp = token_sampler(logits[row, column - 1].expand(len(u), -1), u)
        hit = (drawn == rollout.tokens[row, column]).nonzero()
        assert len(hit), "a token that the cut leaves out"
        assert abs(float(logp[hit[0, 0]] - rollout.logp_sampled[row, column])) < CLOSE


def test_tokens_come_as_often_as_their_probability_says(plain: Case) -> None:
    plain.renewed(6)
    n = 2000
    single = replace(plain.sampler, max_new_tokens=1, max_rows=n)
    rollout = single.sample(asked(["Tom has"]), n, key=KEY)
    start = len(tokenizer()("Tom has")["input_ids"])
    with torch.no_grad():
        p = torch.softmax(plain.model(rollout.tokens[:1, :start]).logits[0, -1].double(), -1)
    drawn = torch.bincount(rollout.tokens[:, start], minlength=VOCABULARY).double()
    common = p * n >= 5
    got, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (drawn, p * n))
    chi2, freedom = float(((got - expected) ** 2 / expected).sum()), len(got) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5


# -- rows


@FEW
@given(texts=prompts, cut=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_a_row_does_not_depend_on_what_else_is_asked_for(plain: Case, texts: list[str], cut: int, seed: int) -> None:
    key = prng.key(seed, device="cpu")
    problems = asked(texts)
    whole = plain.sampler.sample(problems, 3, key=key)
    parts = [plain.sampler.sample(part, 3, key=key) for part in (problems[:cut], problems[cut:]) if part]
    assert completions(whole) == [row for part in parts for row in completions(part)]
    torch.testing.assert_close(
        whole.logp_sampled[whole.mask], torch.cat([p.logp_sampled[p.mask] for p in parts]), rtol=0, atol=CLOSE
    )


def test_the_same_twice_and_group_members_apart(plain: Case) -> None:
    texts = ["Tom has", "a", LONG]
    plain.renewed(7)
    first = plain.sampler.sample(asked(texts), 4, key=KEY)
    plain.sampler.load(plain.policy())  # an empty cache again
    second = plain.sampler.sample(asked(texts), 4, key=KEY)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.logp_sampled, second.logp_sampled)
    rows = completions(first)
    assert all(len({tuple(row) for row in rows[i : i + 4]}) > 1 for i in range(0, 12, 4))
    assert completions(plain.sampler.sample(asked(texts, first=200), 4, key=KEY)) != rows
    assert completions(plain.sampler.sample(asked(texts), 4, key=prng.key(6, device="cpu"))) != rows


def test_more_prompts_than_are_read_at_once_are_drawn_as_each_alone(plain: Case) -> None:
    """With prompts that are read in two parts, seeded requests end vLLM 0.32 on CPU."""
    texts = [f"{i:02} {'7' * 97}" for i in range(64)]
    assert sum(len(tokenizer()(text)["input_ids"]) for text in texts) > BATCHED
    plain.renewed(15)
    rollout = plain.sampler.sample(asked(texts), 1, key=KEY)
    assert plain.gap(rollout) < CLOSE
    alone = plain.sampler.sample(asked(texts[40:41], first=140), 1, key=KEY)
    assert completions(rollout)[40] == completions(alone)[0]


def test_completions_end_where_the_local_sampler_ends_them(plain: Case) -> None:
    """At the tokens that end one, which are part of it, or at the limit: a last token that ends is no truncation."""
    rollout = plain.sampler.sample(asked(["Tom", "a b", "7"]), 24, key=KEY)
    rows = completions(rollout)
    ended = [row[-1] in ENDS for row in rows]
    assert rollout.truncated.tolist() == [not end for end in ended]
    assert {True, False} == {*ended}
    assert not any(token in ENDS for row in rows for token in row[:-1])
    assert all(len(row) == 8 for row, end in zip(rows, ended, strict=True) if not end)
    assert rollout.text == tuple(tokenizer().batch_decode(rows, skip_special_tokens=True))


def test_a_stop_string_ends_a_row_and_stays_in_it(plain: Case) -> None:
    free = plain.sampler.sample(asked(["Tom", "a b", "7"]), 8, key=KEY)
    ascii = [text for text in free.text if len(text) > 4 and text[2:4].isascii()]
    stops = tuple({text[2:4] for text in ascii[::2]})
    stopped = replace(plain.sampler, stop=stops).sample(asked(["Tom", "a b", "7"]), 8, key=KEY)
    for whole, found, truncated in zip(completions(free), completions(stopped), stopped.truncated, strict=True):
        texts = [tokenizer().decode(whole[: n + 1], skip_special_tokens=True) for n in range(len(whole))]
        at = next((n for n, text in enumerate(texts) if any(s in text for s in stops)), None)
        assert found == (whole if at is None else whole[: at + 1])
        assert not truncated if at is not None else bool(truncated) == (whole[-1] not in ENDS)
    assert len({*map(len, completions(stopped))}) > 1


def test_stop_strings_need_an_engine_that_knows_them(one: Case) -> None:
    with pytest.raises(ValueError, match=r"got .* for an engine without tokenizer"):
        replace(one.sampler, stop=("x",)).sample(asked(["Tom"]), 1, key=KEY)


def test_a_row_may_be_as_long_as_the_model_allows(plain: Case) -> None:
    longest = POSITIONS - plain.sampler.max_new_tokens
    rollout = plain.sampler.sample(asked(["7" * longest]), 1, key=KEY)
    assert rollout.tokens.shape[1] <= POSITIONS
    with pytest.raises(
        ValueError, match=f"got problem 100 with {longest + 1} prompt tokens .* expected at most {POSITIONS}"
    ):
        plain.sampler.sample(asked(["7" * (longest + 1)]), 1, key=KEY)


# -- pushes


def test_the_engine_holds_the_weights_that_were_sent(one: Case) -> None:
    refill(one.model, 8)
    held = one.sampler.engine.push_weights(export_weights(one.policy(), one.context), version=77)
    assert held is not None


def without(name: str) -> Callable[..., Any]:
    """A reload that loses a tensor on the way."""

    def reload(real: Callable[..., Any], method: str, kwargs: dict[str, Any]) -> Any:
        kept = ((n, x) for n, x in kwargs["weights_iterator"] if n != name)
        return real(method, kwargs={"weights_iterator": kept})

    return reload


@pytest.mark.parametrize("end", ["embed_tokens.weight", HEAD, "0.self_attn.k_proj.weight"])
def test_a_tensor_that_is_lost_on_the_way_is_noticed(one: Case, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one.renewed(1)
    engine = one.sampler.engine
    lost = next(name for name in engine.shapes if name.endswith(end))
    monkeypatch.setattr(engine.llm, "collective_rpc", partial(without(lost), engine.llm.collective_rpc))
    if engine.tied and end == "embed_tokens.weight":  # nothing is lost: the head comes, and they share their storage
        one.renewed(2)
        assert one.gap(one.sampler.sample(asked(["Tom"]), 2, key=KEY)) < CLOSE
        return
    with pytest.raises(StaleEngine, match=r"weights of version \d+: got \w+-\w+ in the engine after \w+-\w+ was sent"):
        one.renewed(2)
    with pytest.raises(RuntimeError, match="expected a push first"):
        one.sampler.sample(asked(["Tom"]), 1, key=KEY)
    monkeypatch.undo()
    one.renewed(2)
    assert one.gap(one.sampler.sample(asked(["Tom"]), 2, key=KEY)) < CLOSE


@pytest.mark.parametrize("fault", ["unknown", "missing", "shape"])
def test_pushes_of_wrong_names_or_shapes_are_refused(plain: Case, fault: str) -> None:
    refill(plain.model, 9)
    weights = dict(export_weights(plain.policy(), plain.context))
    some = "model.layers.1.mlp.up_proj.weight"
    odd = {
        "unknown": [*weights.items(), ("model.layers.9.mlp.up_proj.weight", weights[some])],
        "missing": [(name, x) for name, x in weights.items() if name != some],
        "shape": [(name, x.T if name == some else x) for name, x in weights.items()],
    }[fault]
    with pytest.raises(ValueError, match=r"push: got .*up_proj"):
        plain.sampler.engine.push_weights(iter(odd), version=1)
    with pytest.raises(RuntimeError, match="expected a push first"):
        plain.sampler.sample(asked(["Tom"]), 1, key=KEY)
    plain.renewed(10)
    assert plain.gap(plain.sampler.sample(asked(["Tom"]), 2, key=KEY)) < CLOSE


def test_fifty_pushes_hold_no_more_memory_than_ten(plain: Case) -> None:
    process, size = psutil.Process(), sum(p.numel() * 4 for p in plain.model.parameters())
    for seed in range(10):
        plain.renewed(seed)
    gc.collect()
    before = process.memory_info().rss
    for seed in range(50):
        plain.renewed(seed)
    gc.collect()
    assert process.memory_info().rss - before < 5 * size


def test_minus_zero_is_as_good_as_zero(plain: Case) -> None:
    """The packed layout does not distinguish them, and they compute the same."""
    refill(plain.model, 11)
    with torch.no_grad():
        plain.model.model.layers[0].mlp.up_proj.weight[:7] = -0.0
    held = plain.sampler.engine.push_weights(export_weights(plain.policy(), plain.context), version=3)
    assert held is not None


# -- living together


def test_a_policy_in_parts_is_gathered_on_the_way(plain: Case) -> None:
    """FSDP2 finds the process group of the engine, or the engine that of FSDP2: it is one group."""
    divided = small("qwen2", tied=True)
    refill(divided, 12)
    mesh = mesh_of_one()
    for layer in divided.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(divided, mesh=mesh)
    other = plain._replace(model=divided)
    plain.sampler.load(other.policy())
    refill(plain.model, 12)
    assert plain.gap(plain.sampler.sample(asked(["Tom", LONG]), 2, key=KEY)) < CLOSE


def test_nothing_else_of_the_process_is_disturbed(plain: Case, tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        # Not Python's: beartype draws from it in every test (tests/shell/vllm/test_vllm_sampler.py looks at that one).
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()

    model = small("llama", tied=True)
    context = seat_of(model, tmp_path / "model", dtype=torch.float32)
    before, threads, group = state(), torch.get_num_threads(), dist.group.WORLD
    with closing(colocated(context)) as other:
        other.load(plain._replace(model=model).policy())
        other.sample(asked(["Tom"]), 2, key=KEY)
        other.rest()
    assert state() == before
    assert torch.get_num_threads() == threads
    assert dist.group.WORLD is group
    plain.renewed(1)
    assert plain.gap(plain.sampler.sample(asked(["Tom"]), 2, key=KEY)) < CLOSE
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    compiled = torch.compile(torch.sin, backend=counting)
    compiled(torch.ones(3))
    assert COMPILED, "torch.compile does nothing any more"


COMPILED: list[int] = []


def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    COMPILED.append(len(inputs))
    return graph.forward


def test_the_deadline_names_what_is_unfinished_and_leaves_nothing_behind(
    plain: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.renewed(13)
    engine = plain.sampler.engine
    monkeypatch.setattr(engine, "options", replace(engine.options, generate_timeout=1e-6))
    with pytest.raises(TimeoutError, match="got 6 of 6 requests unfinished after 0 s, expected all within 1e-06"):
        plain.sampler.sample(asked(["Tom", "a"]), 3, key=KEY)
    monkeypatch.undo()
    assert not plain.sampler.engine.llm.llm_engine.has_unfinished_requests()
    assert plain.gap(plain.sampler.sample(asked(["Tom", "a"]), 3, key=KEY)) < CLOSE


def test_an_engine_at_rest_waits_for_a_push(plain: Case) -> None:
    plain.sampler.rest()
    with pytest.raises(RuntimeError, match="got an engine at rest"):
        plain.sampler.sample(asked(["Tom"]), 1, key=KEY)
    plain.renewed(14)
    plain.sampler.sample(asked(["Tom"]), 1, key=KEY)


def test_before_any_push_it_holds_the_folders_weights(tmp_path: Path) -> None:
    with case("gemma2", tmp_path / "model", tied=True) as made:  # a tied model without a head of its own
        assert made.gap(made.sampler.sample(asked(["Tom"]), 2, key=KEY)) < CLOSE
        made.renewed(1)
        assert made.gap(made.sampler.sample(asked(["Tom"]), 2, key=KEY)) < CLOSE


def test_half_precision_is_held_bit_for_bit(tmp_path: Path) -> None:
    with case("qwen2", tmp_path / "model", tied=False, dtype=torch.bfloat16) as made:
        refill(made.model, 1)
        held = made.sampler.engine.push_weights(export_weights(made.policy(), made.context), version=0)
        assert held is not None
        assert made.gap(made.sampler.sample(asked(["Tom"]), 2, key=KEY)) < 0.5


def test_a_model_that_vllm_does_not_open_is_refused(tmp_path: Path) -> None:
    model = small("qwen2", tied=True, num_attention_heads=4)  # heads 16 wide, which its CPU attention does not have
    context = seat_of(model, tmp_path / "model", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"heads 16 wide, expected one that vLLM opens on CPU: 32, 64"):
        colocated(context)
