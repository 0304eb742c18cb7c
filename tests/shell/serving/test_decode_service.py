"""Requests share a model and a thread, and none notices the others."""

import itertools
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from contextlib import closing

import hypothesis.strategies as st
import pytest
import torch
from fakes import MODELS, VOCABULARY, problem, qwen2_tied, tokenizer
from hypothesis import given, settings
from served import service
from torch import nn

from grpo_fn.core import prng
from grpo_fn.core import sampling as token_samplers
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.model.token_scores import ScoredText, score_texts
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.shell.serving import decode_service, decode_session
from grpo_fn.shell.serving.decode_service import DecodeService, QueuedText, QueueFull, ServiceClosed
from grpo_fn.shell.serving.decode_session import DecodeKnobs, DrawnRow, QueuedRow, ReportTokens

SECONDS = 30
FEW = settings(max_examples=max(4, settings.default.max_examples // 8))
HOT = DecodeKnobs(1.0, 1.0, 0, ())
rows = st.builds(
    lambda prompt, seed, limit, knobs: (prompt, prng.key(seed, device="cpu"), limit, knobs),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
    st.integers(0, 2**40),
    st.integers(1, 12),
    st.sampled_from(
        [
            *(DecodeKnobs(0.0, 1.0, 0, ()), HOT, DecodeKnobs(0.7, 0.9, 0, ()), DecodeKnobs(1.0, 1.0, 5, ())),
            DecodeKnobs(1.0, 1.0, 0, ("a",)),
        ]
    ),
)


@pytest.fixture(scope="module")
def shared() -> Iterator[DecodeService]:
    """In double precision: the sums of a batch are rounded by its size, and in single precision that changes a draw."""
    with closing(service(exact())) as one:
        yield one


def exact() -> nn.Module:
    """A model whose draws do not depend on how many rows are decoded at once."""
    return qwen2_tied(VOCABULARY).double()


def drawn(of: DecodeService, asked: list[tuple], apart: bool = False) -> list[DrawnRow]:
    """All rows together, or one after the other."""
    queued = [QueuedRow(*one) for one in asked]
    for one in [[row] for row in queued] if apart else [queued]:
        of.draw(one)
        wait([row.future for row in one], SECONDS)
    return [row.future.result(0) for row in queued]


def close_to(got: list[DrawnRow], wanted: list[DrawnRow]) -> bool:
    """Tokens and ends are the same; log-probs apart from rounding."""
    assert [(row.tokens, row.stopped) for row in got] == [(row.tokens, row.stopped) for row in wanted]
    gaps = [abs(a - b) for x, y in zip(got, wanted, strict=True) for a, b in zip(x.logp, y.logp, strict=True)]
    return max(gaps) < 1e-5


@FEW
@given(asked=st.lists(rows, min_size=1, max_size=9), random=st.randoms(use_true_random=False))
def test_a_rows_tokens_do_not_depend_on_what_is_asked_beside_it(shared: DecodeService, asked: list, random) -> None:
    alone = drawn(shared, asked, apart=True)
    assert close_to(drawn(shared, asked), alone)
    order = random.sample(range(len(asked)), len(asked))
    assert close_to(drawn(shared, [asked[i] for i in order]), [alone[i] for i in order])


@FEW
@given(asked=st.lists(rows, min_size=2, max_size=8), at=st.lists(st.integers(0, 6), min_size=8, max_size=8))
def test_rows_that_come_while_others_are_decoded_get_what_they_get_alone(
    shared: DecodeService, asked: list, at: list[int]
) -> None:
    """Each is put into the queue between two steps of those before it."""
    alone = drawn(shared, asked, apart=True)
    later = [QueuedRow(*one) for one in asked[1:]]
    coming, lock = list(zip(at, later, strict=False)), threading.Lock()
    steps = itertools.count()
    between = shared._between_steps

    def put(until: float) -> None:
        """Each once: the session goes on with other rows when the first has ended."""
        with lock:
            due = [row for when, row in coming if when <= until]
            coming[:] = [(when, row) for when, row in coming if when > until]
        for row in due:
            shared.draw([row])

    def arrive() -> None:
        put(next(steps))
        between()

    shared._between_steps = arrive
    try:
        (first,) = drawn(shared, asked[:1])
    finally:
        shared._between_steps = between
    put(math.inf)  # what was to come after the first row's end
    wait([row.future for row in later], SECONDS)
    assert close_to([first, *(row.future.result(0) for row in later)], alone)


def test_rows_do_join_a_session_that_is_going_on(shared: DecodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sessions as knobs, not as rows: without that the test above would prove nothing."""
    sessions = []
    begun = decode_service.DecodeSession

    def session(engine, first, **how):
        sessions.append(begun(engine, first, **how))
        return sessions[-1]

    monkeypatch.setattr(decode_service, "DecodeSession", session)
    late = QueuedRow([3, 4], prng.key(9, device="cpu"), 5, HOT)
    between, seen = shared._between_steps, []

    def arrive() -> None:
        if not seen:
            seen.append(shared.draw([late]))
        between()

    monkeypatch.setattr(shared, "_between_steps", arrive)
    drawn(shared, [([1, 2, 3], prng.key(1, device="cpu"), 12, HOT)])
    assert len(late.future.result(SECONDS).tokens) <= 5
    assert [len(one.rows) for one in sessions] == [2]


@pytest.mark.parametrize("name", list(MODELS))
def test_it_draws_what_the_local_sampler_draws(name: str) -> None:
    made = MODELS[name](VOCABULARY)
    texts = ["Tom has 12", "How", "a"]
    knobs = DecodeKnobs(0.8, 0.9, 20, ())
    sampler = LocalSampler(made, tokenizer(), knobs.token_sampler(), encode_prompt, 12, (), 64)
    key = prng.key(5, device="cpu")
    rollout = sampler.sample([problem(i, text) for i, text in enumerate(texts)], 2, key=key)
    asked = [
        (encode_prompt(tokenizer(), text), prng.fold_in(key, i, g), 12, knobs)
        for i, text in enumerate(texts)
        for g in (0, 1)
    ]
    with closing(service(made)) as one:
        got = drawn(one, asked)
    rows = zip(rollout.tokens, rollout.logp_sampled, rollout.mask, ~rollout.truncated, strict=True)
    wanted = [DrawnRow(t[m].tolist(), logp[m].tolist(), bool(stopped)) for t, logp, m, stopped in rows]
    assert close_to(got, wanted)
    assert knobs.token_sampler().func is token_samplers.nucleus


def test_a_model_that_is_not_decoded_in_slots_is_served_too(
    shared: DecodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [([i + 1, 7], prng.key(i, device="cpu"), 3 + i, HOT) for i in range(6)]
    wanted = drawn(shared, asked)
    monkeypatch.setattr(local_sampler, "decoding_unsupported_reason", lambda model, device: "of the test")
    with pytest.warns(RuntimeWarning, match="of the test"), closing(service(exact())) as one:
        assert close_to(drawn(one, asked), wanted)


# -- scores


@FEW
@given(
    texts=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=9), min_size=1, max_size=5),
    top=st.integers(0, 4),
    elements=st.sampled_from([1, 700, 10**6]),
)
@pytest.mark.parametrize(("name", "linear"), [("qwen2_tied", True), ("qwen3_untied", True), ("gemma2_capped", False)])
def test_scores_are_the_log_probs_of_the_plain_model(
    name: str, linear: bool, texts: list[list[int]], top: int, elements: int
) -> None:
    made = cached(name)
    got = score_texts(
        made,
        [ScoredText(ids, 1 + len(ids) // 2 - 1) for ids in texts],
        **{"temperature": 0.7, "top": top, "elements": elements, "linear": linear},
    )
    for ids, one in zip(texts, got, strict=True):
        start = 1 + len(ids) // 2 - 1
        with torch.no_grad():
            logp = torch.log_softmax(made(input_ids=torch.tensor([ids])).logits[0].float() / 0.7, -1)
        wanted = [float(logp[t - 1, ids[t]]) for t in range(start, len(ids))]
        assert one.logp == pytest.approx(wanted, abs=1e-5)
        assert [len(each) for each in one.top] == [top] * len(wanted)
        for t, each in zip(range(start, len(ids)), one.top, strict=True):
            values = [value for _, value in each]
            assert values == pytest.approx(logp[t - 1].topk(top).values.tolist(), abs=1e-5)
            assert values == sorted(values, reverse=True)


MADE: dict[str, nn.Module] = {}


def cached(name: str) -> nn.Module:
    return MADE.setdefault(name, MODELS[name](VOCABULARY))


def test_texts_are_scored_while_rows_are_decoded(shared: DecodeService) -> None:
    text = QueuedText(ScoredText([1, 2, 3], 1), 1.0, 0)
    between, asked = shared._between_steps, []

    def arrive() -> None:
        if not asked:
            asked.append(shared.score([text]))
        elif len(asked) == 1:
            asked.append(text.future.done())
        between()

    shared._between_steps = arrive
    try:
        drawn(shared, [([1, 2, 3], prng.key(1, device="cpu"), 12, HOT)])
    finally:
        shared._between_steps = between
    assert asked == [None, True]


# -- limits, failures and ends


@pytest.fixture
def held() -> Iterator[tuple[DecodeService, threading.Event]]:
    """A service that waits between two steps until the event is set."""
    with closing(service(max_waiting=3)) as one:
        go, between = threading.Event(), one._between_steps

        def waiting() -> None:
            while not go.wait(0.01) and not one.closed:
                pass
            between()

        one._between_steps = waiting
        yield one, go
        go.set()


def row(limit: int = 4, knobs: DecodeKnobs = HOT, progress: ReportTokens | None = None) -> QueuedRow:
    return QueuedRow([1, 2], prng.key(3, device="cpu"), limit, knobs, progress)


def begin(one: DecodeService) -> QueuedRow:
    """A row that is being decoded."""
    first = row()
    one.draw([first])
    end = time.monotonic() + SECONDS
    while one.rows:
        assert time.monotonic() < end
        time.sleep(0.005)
    return first


def test_the_queue_has_a_limit_and_takes_all_of_a_request_or_none(held) -> None:
    one, go = held
    first = begin(one)
    second = [row(), row()]
    one.draw(second)
    with pytest.raises(QueueFull, match="got 2 rows where 2 wait, wanted at most 3 together"):
        one.draw([row(), row()])
    second[0].future.cancel()
    third = [row(), row()]
    one.draw(third)
    go.set()
    wanted = first.future.result(SECONDS)
    assert close_to([each.future.result(SECONDS) for each in [second[1], *third]], [wanted] * 3)


def test_a_cancelled_row_frees_its_slot(held) -> None:
    one, go = held
    first = begin(one)
    assert first.future.cancel()
    later = row()
    one.draw([later])
    go.set()
    assert later.future.result(SECONDS).tokens
    with pytest.raises(CancelledError):
        first.future.result(0)


def test_the_end_is_the_error_of_all_that_waits(held) -> None:
    one, _ = held
    asked = [begin(one), row(), row(knobs=DecodeKnobs(0.0, 1.0, 0, ()))]
    one.draw(asked[1:])
    one.close()
    for each in asked:
        with pytest.raises(ServiceClosed):
            each.future.result(SECONDS)
    assert not one.alive()
    with pytest.raises(ServiceClosed, match="after the end"):
        one.draw([row()])


def test_a_failure_is_the_error_of_its_rows_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(service()) as one:
        wanted = drawn(one, [([1, 2], prng.key(3, device="cpu"), 4, HOT)])
        between = one._between_steps
        one._between_steps = lambda: 1 // 0
        failed = row(knobs=DecodeKnobs(0.5, 1.0, 0, ()))  # which cannot join the session before, if that still looks
        one.draw([failed])
        with pytest.raises(ZeroDivisionError):
            failed.future.result(SECONDS)
        one._between_steps = between
        assert drawn(one, [([1, 2], prng.key(3, device="cpu"), 4, HOT)]) == wanted
        bad = QueuedText(ScoredText([1, 2], 1), 1.0, -3)
        one.score([bad])
        with pytest.raises(RuntimeError, match="out of range"):
            bad.future.result(SECONDS)
        assert one.alive()


@pytest.mark.parametrize("knobs", [HOT, DecodeKnobs(0.0, 1.0, 0, ())])  # greedy: all of a prompt end at once
def test_a_prompt_is_read_once_for_all_rows_of_its_request(knobs: DecodeKnobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are more than can be decoded at once, and others come behind them."""
    read, really = [], decode_session.prefill_prompts

    def counted(model: nn.Module, prompts: list[list[int]], device: torch.device) -> tuple:
        read.extend(tuple(prompt) for prompt in prompts)
        return really(model, prompts, device)

    shares = [([5, 6, 7], 11), ([8, 9], 1), ([5, 6], 2), ([1, 2, 3, 4], 6)]
    asked = [
        (prompt, prng.key(seed, device="cpu"), 3 + seed % 9, knobs) for prompt, many in shares for seed in range(many)
    ]
    with closing(service(exact())) as one:
        alone = drawn(one, [([*prompt], *rest) for prompt, *rest in asked], apart=True)
        monkeypatch.setattr(decode_session, "prefill_prompts", counted)
        assert close_to(drawn(one, asked), alone)
    assert read == [tuple(prompt) for prompt, _ in shares]


def test_what_is_drawn_is_reported_as_it_is_drawn() -> None:
    """In order, each token once, and the log-probs that the row has at its end."""
    reported: list[tuple[list[int], list[float]]] = []
    with closing(service()) as one:
        followed = row(limit=12, progress=lambda *new: reported.append(new))
        one.draw([followed, row(limit=3)])
        whole = followed.future.result(SECONDS)
    assert len(reported) > 3
    assert all(tokens and len(tokens) == len(logp) for tokens, logp in reported)
    tokens, logp = (list(itertools.chain(*each)) for each in zip(*reported, strict=True))
    assert whole.tokens[: len(tokens)] == tokens
    assert whole.logp[: len(logp)] == logp
