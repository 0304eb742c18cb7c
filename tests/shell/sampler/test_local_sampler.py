"""Cached, batched, ragged decoding gives every row what a plain loop over that row alone gives."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial

import hypothesis.strategies as st
import pytest
import torch
from fakes import MODELS, VOCABULARY, problem, qwen2_tied, tokenizer
from hypothesis import assume, given, settings
from policies import local
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_fn.core import prng
from grpo_fn.core.batch import check_rollout
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.sampling import categorical, greedy, gumbel_max, gumbel_max_nucleus, nucleus, uniform_dtype
from grpo_fn.core.types import Batch, Rollout, Scores
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.optimizer import adamw
from grpo_fn.shell.sampler.local.decode_step import Stops
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, TokenSampler

EOS = VOCABULARY - 1
KEY = prng.key(5, device="cpu")
EXAMPLES = settings.default.max_examples
COSTLY = settings(max_examples=max(5, EXAMPLES // 5))
CHOICES: dict[str, TokenSampler] = {
    "greedy": greedy,
    "categorical": partial(categorical, temperature=0.4),
    "nucleus": partial(nucleus, temperature=0.8, top_k=20, top_p=0.9),
    "gumbel_max": partial(gumbel_max, temperature=0.4),
    "gumbel_max_nucleus": partial(gumbel_max_nucleus, temperature=0.8, top_k=20, top_p=0.9),
}
choices = st.sampled_from(list(CHOICES))
prompts = st.lists(st.text("aT 7\né", min_size=1, max_size=9), min_size=1, max_size=4)


@lru_cache(maxsize=8)
def model(name: str, ends: int) -> nn.Module:
    """A model for which `ends` token ids, besides EOS, end a completion: every so many rows end early."""
    made = MODELS[name](VOCABULARY)
    made.generation_config.eos_token_id = [EOS, *range(0, 2 * ends, 2)]
    return made


def sampler(ends: int = 40, name: str = "qwen2_tied", **knobs) -> LocalSampler:
    chosen = {
        "token_sampler": CHOICES["categorical"],
        "encode": encode_prompt,
        "max_new_tokens": 7,
        "stop": (),
        "max_rows": 64,
    }
    return LocalSampler(model=model(name, ends), tokenizer=tokenizer(), **{**chosen, **knobs})


def problems(texts: list[str]) -> list:
    return [problem(100 + i, text) for i, text in enumerate(texts)]


def completions(rollout: Rollout) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(rollout.tokens, rollout.mask, strict=True)]


def alone(s: LocalSampler, prompt: str, uid: int, g: int) -> tuple[list[int], list[float], bool]:
    """The plain loop: one row, the whole text through the model for every token, no cache, no padding."""
    dtype = uniform_dtype(s.token_sampler)
    u = prng.uniform(prng.fold_in(KEY, uid, g), s.max_new_tokens, dtype=dtype, low=0.0, high=1.0)
    ids, tokens, logps = encode_prompt(s.tokenizer, prompt), [], []
    ends = s.model.generation_config.eos_token_id
    for t in range(s.max_new_tokens):
        with torch.no_grad():
            logits = s.model(input_ids=torch.tensor([ids + tokens])).logits[:, -1]
        token, logp = s.token_sampler(logits, u[t : t + 1])
        tokens.append(int(token))
        logps.append(float(logp))
        if tokens[-1] in ends:
            return tokens, logps, False
    return tokens, logps, True


def assert_as_alone(s: LocalSampler, texts: list[str], rollout: Rollout) -> None:
    """Every row has the plain loop's tokens, log-probs and end."""
    group_size = len(rollout.tokens) // len(texts)
    for b, tokens in enumerate(completions(rollout)):
        p, g = divmod(b, group_size)
        expected, logps, truncated = alone(s, texts[p], 100 + p, g)
        assert tokens == expected
        assert bool(rollout.truncated[b]) is truncated
        got = rollout.logp_sampled[b][rollout.mask[b]]
        torch.testing.assert_close(got, torch.tensor(logps), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=max(8, EXAMPLES // 4))
@given(prompts, choices, st.integers(1, 3), st.integers(1, 12), st.sampled_from([1, 7]))
def test_every_row_is_the_plain_loops(name, texts, choice, group_size, max_rows, new):
    """So no row depends on its neighbours, their order, or how many are decoded at once."""
    s = sampler(name=name, token_sampler=CHOICES[choice], max_rows=max_rows, max_new_tokens=new)
    assert_as_alone(s, texts, s.sample(problems(texts), group_size, key=KEY))
    assert s.shared.engine is not None  # a fault of the slots would have the model decoded in its own cache


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=max(4, EXAMPLES // 8))
@given(texts=prompts, group_size=st.integers(1, 3), temperature=st.sampled_from([0.4, 1.0]))
def test_logp_sampled_is_the_policys_logp(name, temperature, texts, group_size):
    s = sampler(name=name, token_sampler=partial(categorical, temperature=temperature))
    rollout, scoring = s.sample(problems(texts), group_size, key=KEY), policy(s.model, temperature)
    assert rollout.logp_sampled.dtype == torch.float32
    gap = scoring.logp(rollout) - rollout.logp_sampled
    assert float(gap[rollout.mask].abs().max()) < 1e-4
    assert scoring.logprob_model.packs


def policy(module: nn.Module, temperature: float, lr: float = 0.1) -> FSDPPolicy:
    """The policy of the same module, which reads rows end to end."""
    optimizer = partial(adamw, lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    knobs = {"micro_tokens": 60, "min_micro_batches": 1, "max_grad_norm": 1.0, "logits_chunk_elements": 10**4}
    return local(module, temperature=temperature, optimizer=optimizer, packed=True, **knobs)


def test_sampling_neither_reads_nor_moves_the_global_generator():
    s = sampler()  # making its model draws
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = s.sample(problems(["Tom"]), 2, key=KEY)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(s.sample(problems(["Tom"]), 2, key=KEY).tokens, first.tokens)


# -- layout


@COSTLY
@given(prompts, st.integers(1, 4))
def test_rows_read_prompt_completion_padding(texts, group_size):
    s = sampler()
    rollout = s.sample(problems(texts), group_size, key=KEY)
    check_rollout(rollout)
    assert rollout.tokens.shape[0] == len(texts) * group_size
    ends, longest = set(s.model.generation_config.eos_token_id), 0
    for b, (row, mask) in enumerate(zip(rollout.tokens.tolist(), rollout.mask.tolist(), strict=True)):
        ids = encode_prompt(tokenizer(), texts[b // group_size])
        start, end = len(ids), len(ids) + sum(mask)
        longest = max(longest, end)
        assert row[:start] == ids
        assert mask == [start <= t < end for t in range(len(row))]
        assert set(row[end:]) <= {EOS}
        assert not ends & set(row[start : end - 1])
        assert bool(rollout.truncated[b]) is (row[end - 1] not in ends)
        assert sum(mask) == s.max_new_tokens or not rollout.truncated[b]
        assert rollout.text[b] == tokenizer().decode(row[start:end], skip_special_tokens=True)
        assert (rollout.logp_sampled[b][~rollout.mask[b]] == 0).all()
    assert rollout.tokens.shape[1] == longest


# -- ends


class Script:
    """A choice that has been made beforehand: the t-th token, for every row, whatever the logits."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def __call__(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        token = torch.full(u.shape, self.tokens.pop(0))
        return token, logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]


def scripted(tokens: list[int], **knobs) -> Rollout:
    s = sampler(ends=0, token_sampler=Script(tokens), **{"max_new_tokens": len(tokens), **knobs})
    return s.sample(problems(["Tom has"]), 1, key=KEY)


def test_eos_is_part_of_the_completion_but_not_of_the_text_and_an_end_on_the_last_token_too():
    for limit in (3, 4):
        rollout = scripted([65, 66, EOS, 67], max_new_tokens=limit)
        assert completions(rollout) == [[65, 66, EOS]]
        assert not rollout.truncated.any()
        assert rollout.text == (tokenizer().decode([65, 66]),)
    assert scripted([65, 66, EOS], max_new_tokens=2).truncated.all()


@pytest.mark.parametrize(("named", "last"), [([3, 8], EOS), ([3, 8], 3), ([3, 8], 8), (None, EOS), (3, EOS)])
def test_the_tokenizers_eos_and_every_end_of_the_generation_config_end_a_row(named, last):
    module = qwen2_tied(VOCABULARY)
    module.generation_config.eos_token_id = named
    s = replace(sampler(token_sampler=Script([65, last, 66]), max_new_tokens=3), model=module)
    assert completions(s.sample(problems(["a"]), 1, key=KEY)) == [[65, last]]


STOPS = ("\n\n", "END", "é", "…a", "has", "are there?", "}")


@given(
    st.lists(
        st.sampled_from(["a", "E", "END", "\n", "é", "…", "Tom has 12 apples.", " are", " there?", "}"]), min_size=1
    ),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True).map(tuple),
)
@COSTLY
def test_a_row_ends_with_the_first_token_that_completes_a_stop_string(words, stop):
    ids = tokenizer()("".join(words))["input_ids"][:20]
    texts = [tokenizer().decode(ids[: n + 1]) for n in range(len(ids))]
    hits = [n for n, text in enumerate(texts) if any(s in text for s in stop)]
    rollout = scripted(ids, stop=stop)
    expected = hits[0] + 1 if hits else len(ids)
    assert completions(rollout) == [ids[:expected]]
    assert rollout.truncated.tolist() == [not hits]
    assert rollout.text == (texts[expected - 1],)


# -- cost


several = st.lists(st.text("aT 7\né", min_size=3, max_size=9), min_size=1, max_size=4)


@COSTLY
@given(several, st.integers(1, 4), st.integers(1, 16))
def test_a_prompt_is_read_once_and_a_drawn_token_once_by_its_own_row(texts, group_size, max_rows):
    s = sampler(max_rows=max_rows)
    s.sample(problems(texts[:1]), 1, key=KEY)  # the first call asks the model whether it is fit
    rollout, shapes = watched(s, problems(texts), group_size)
    lengths = [len(encode_prompt(tokenizer(), text)) for text in texts]
    assert min(lengths) > 1  # otherwise reading a prompt could look like a step
    read, steps = ([shape for shape in shapes if (shape[1] == 1) is one] for one in (False, True))
    assert all(rows == 1 for rows, _ in read)
    assert sum(tokens for _, tokens in read) == sum(lengths)
    # No row reads the last token that it has drawn.
    assert sum(rows for rows, _ in steps) == int(rollout.mask.sum()) - len(rollout.mask)
    assert all(rows <= max_rows for rows, _ in steps)


def watched(s: LocalSampler, asked: list, group_size: int) -> tuple[Rollout, list[torch.Size]]:
    """A rollout, and the shapes that the model was shown for it."""
    shapes = []
    with s.model.register_forward_pre_hook(
        lambda m, a, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    ):
        return s.sample(asked, group_size, key=KEY), shapes


def test_two_threads_may_ask_at_once():
    """An evaluation does, while the next batch is sampled beside the training."""
    drawing, asked = sampler(max_new_tokens=20), problems(["a 7", "T", "7 7 a"])
    kinds = [drawing, replace(drawing, token_sampler=greedy)] * 3
    expected = [s.sample(asked, 4, key=KEY) for s in kinds[:2]] * 3
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda s: s.sample(asked, 4, key=KEY), kinds))
    for got, right in zip(found, expected, strict=True):
        assert torch.equal(got.tokens, right.tokens)
        assert torch.equal(got.logp_sampled, right.logp_sampled)


def test_an_update_of_the_policy_changes_the_samples_without_a_load():
    module = qwen2_tied(VOCABULARY)
    s = replace(sampler(ends=0), model=module)
    trained = policy(module, 0.4)
    before = s.sample(problems(["Tom has"]), 4, key=KEY)
    nothing = torch.zeros_like(before.logp_sampled)
    batch = Batch(before.tokens, before.mask, *([nothing] * 5), nothing.bool(), before.mask.long())
    scores, pullback = trained.vjp(batch)
    pullback(Scores(before.mask.float(), torch.zeros_like(scores.entropy)))  # makes what was sampled less likely
    trained.update()
    after = s.sample(problems(["Tom has"]), 4, key=KEY)
    assert completions(after) != completions(before)
    gap = trained.logp(after) - after.logp_sampled
    assert float(gap[after.mask].abs().max()) < 1e-4
    assert float(trained.logp(before).sum()) < float(scores.logp.sum())


# -- limits


@COSTLY
@given(prompts, st.integers(1, 3), st.integers(10, 20), st.integers(1, 4))
def test_no_row_is_longer_than_the_total_and_one_that_it_cuts_is_truncated(texts, group_size, total, max_rows):
    """A row is the one without the bound, cut where it meets it."""
    lengths, reported, asked = [len(encode_prompt(tokenizer(), text)) for text in texts], [], problems(texts)
    assume(max(lengths) < total)

    def on_completions(_: Sequence[Problem], completions: Sequence[Completion]) -> None:
        reported.extend((completion.length, completion.truncated) for completion in completions)

    bounded = sampler(max_rows=max_rows, max_total_tokens=total, on_completions=on_completions)
    whole, rollout = (s.sample(asked, group_size, key=KEY) for s in (sampler(), bounded))
    for b, (tokens, free) in enumerate(zip(completions(rollout), completions(whole), strict=True)):
        space = total - lengths[b // group_size]
        assert tokens == free[:space]
        assert bool(rollout.truncated[b]) == (len(free) > space or bool(whole.truncated[b]))
    drawn, truncated = rollout.mask.sum(-1).tolist(), rollout.truncated.tolist()
    assert sorted(reported) == sorted(zip(drawn, truncated, strict=True))


@pytest.mark.parametrize(
    ("knobs", "fits", "too_long", "said"),
    [
        ({"max_new_tokens": 60}, "a7a7", "a7a7a", "5 prompt tokens and max_new_tokens 60, expected at most 64"),
        ({"max_total_tokens": 5}, "a7a7", "a7a7a", "5 prompt tokens, expected fewer than max_total_tokens 5"),
        ({}, "a", "", "no tokens; expected at least one"),
    ],
)
def test_a_prompt_that_leaves_no_space_for_a_completion_names_its_problem(knobs, fits, too_long, said):
    s = sampler(**knobs)
    s.sample([problem(1, fits)], 2, key=KEY)
    with pytest.raises(ValueError, match=f"got problem 3 .*{said}"):
        s.sample([problem(2, "a"), problem(3, too_long)], 1, key=KEY)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        *(({name: 0}, f"{name}: got 0, expected at least 1") for name in ("max_new_tokens", "max_rows")),
        ({"stop": "END"}, "stop: got 'END', expected a tuple"),
        ({"stop": ("END", "")}, "expected a tuple of strings that are not empty"),
    ],
)
def test_knobs_that_could_not_mean_anything_are_refused(knobs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        sampler(**knobs)


# -- where a token may complete a stop string


COSTLY = settings(max_examples=max(10, settings.default.max_examples // 3))
letters = "ab \né…"


def pieced(words: tuple[str, ...]) -> PreTrainedTokenizerBase:
    """Of the SentencePiece kind: words with their space in front, and every byte; the first space is dropped."""
    pieces = [*(f"<0x{b:02X}>" for b in range(256)), *dict.fromkeys(w.replace(" ", "▁") for w in words)]
    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<0x00>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=1)
def bytewise() -> PreTrainedTokenizerBase:
    return tokenizer()


def everywhere(known: PreTrainedTokenizerBase, tokens: list[int], stop: tuple[str, ...]) -> int:
    """The first token after which a stop string is in the row's text, decoded whole after every token; 0: none."""
    for end in range(1, len(tokens) + 1):
        text = known.decode(tokens[:end], skip_special_tokens=True)
        if any(s in text for s in stop):
            return end
    return 0


def check(known: PreTrainedTokenizerBase, size: int, tokens: list[int], stop: tuple[str, ...], step: int) -> None:
    stops = Stops(known, stop, size)
    expected, found = everywhere(known, tokens, stop), 0
    for begin in range(0, len(tokens), step):  # as many at once as are drawn between two looks
        seen = tokens[: begin + step]
        (found,) = stops.stop_lengths([seen], [len(seen) - begin])
        if found:
            break
    assert found == expected


strings = st.lists(st.text(letters, min_size=1, max_size=3), min_size=1, max_size=3, unique=True).map(tuple)


@COSTLY
@given(st.data(), strings, st.integers(1, 5))
def test_stop_strings_spelt_by_bytes_and_words_end_a_row_where_looking_everywhere_finds_them(
    data: st.DataObject, stop: tuple[str, ...], step: int
) -> None:
    spelt = bytewise()(data.draw(st.text(letters + "Tom has", max_size=12)))["input_ids"]
    noise = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=8))
    check(bytewise(), VOCABULARY, data.draw(st.permutations(spelt + noise)), stop, step)


@COSTLY
@given(
    st.lists(st.text(letters, min_size=1, max_size=4), min_size=1, max_size=6).map(tuple),
    strings,
    st.lists(st.integers(0, 10**6), min_size=1, max_size=14),
    st.integers(1, 5),
)
def test_stop_strings_spelt_by_pieces_end_a_row_where_looking_everywhere_finds_them(
    words: tuple[str, ...], stop: tuple[str, ...], drawn: list[int], step: int
) -> None:
    known = pieced(words)
    high, spelt = len(known), "".join(words + stop)
    # Half of the pieces are words, half characters that the texts are made of, spelt by their bytes.
    pieces = [[256 + n % (high - 256)] if n % 2 else spelt[n // 2 % len(spelt)].encode() for n in drawn]
    check(known, high + 3, [token for piece in pieces for token in piece], stop, step)


def test_a_character_spelt_by_bytes_behind_another_one_is_a_stop_string() -> None:
    assert Stops(pieced(("a",)), ("é",), 300).stop_lengths([[*"…é".encode(), 256]], [6]) == [5]


def test_most_tokens_are_not_suspect() -> None:
    suspect = Stops(bytewise(), ("}",), VOCABULARY).suspect
    texts = [bytewise().decode([i]) for i in range(VOCABULARY)]
    assert all(bool(suspect[i]) is ("}" in text or "\N{REPLACEMENT CHARACTER}" in text) for i, text in enumerate(texts))
    assert not suspect[bytewise()("apples")["input_ids"]].any()


def test_tokens_that_the_tokenizer_does_not_know_are_suspect_and_all_are_if_spaces_are_tidied() -> None:
    for size in (VOCABULARY - 5, VOCABULARY + 5):
        suspect = Stops(bytewise(), ("}",), size).suspect
        assert len(suspect) == size
        assert suspect[VOCABULARY:].all()
    known = pieced((" a", " ."))
    known.clean_up_tokenization_spaces = True
    assert Stops(known, ("a.",), len(known)).suspect.all()
