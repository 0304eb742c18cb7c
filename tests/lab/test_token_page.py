"""What is shown of a token is the signal that it got in the step, and a page shows any text as text."""

import base64
import hashlib
import math
import re
import unicodedata
from html.parser import HTMLParser

import hypothesis.strategies as st
import pytest
import torch
from fakes import tokenizer
from hypothesis import assume, given
from signal_steps import CLIPPED, HOSTILE, UNMOVED, decode, looked_at, special, step
from steps import KEY, PRESETS, Step, learn, preset, rich_step, steps

from grpo_fn.algo.credit import ScoredStep, token_advantages
from grpo_fn.algo.step import Algorithm, Experience, learning_rows
from grpo_fn.core.batch import reweigh_groups
from grpo_fn.core.partials import needs
from grpo_fn.core.problem import Turn
from grpo_fn.core.types import Scores
from grpo_fn.lab import html_page as page
from grpo_fn.lab import token_page
from grpo_fn.lab.token_page import SCRIPT, token_texts

# -- the figures


def experience(how: Algorithm, taken: Step) -> tuple[Experience, Scores]:
    rows = {name: getattr(taken, name) for name in ("logp_old", "logp_ref", "logp_teacher", "energy")}
    scored = ScoredStep(taken.groups, {}, needs([*vars(how).values()]), UNMOVED, steps=0, results=rows)
    adv = token_advantages(scored, how.credit)
    batch = learning_rows(scored, adv, how, own_pass=False, key=KEY)
    logp = torch.where(batch.mask, taken.logp, 0.0)
    if how.reweighting is not None:
        batch = reweigh_groups(batch, logp, adv.shape[1], how.reweighting)
    return Experience(taken.groups, adv, batch), Scores(logp, -logp)


def letters(ids) -> str:
    return "".join(chr(97 + i) for i in ids)


@pytest.mark.parametrize(("name", "minibatches"), [*((name, 1) for name in PRESETS), ("grpo", 3), ("dapo", 3)])
def test_the_page_shows_the_signal_that_the_step_sends_back(name, minibatches):
    taken = rich_step(3, prompts=6)
    sent = learn(preset(name), taken, minibatches=minibatches, micro_tokens=20).signals.sum(0)
    seen, scores = experience(preset(name), taken)
    signal, figures = token_page.signal_of_step(
        seen.batch, scores, preset(name).objective, UNMOVED, minibatches=minibatches
    )
    shown = token_page.token_report(seen, signal, figures, letters, (), rows=len(sent))
    assert sent.any()
    for row in shown.rows:
        b = row.prompt * 6 + row.sample
        start = int(taken.groups.rollout.mask[b].nonzero()[0])
        for t, token in enumerate(row.tokens, start):
            assert (token.signal is not None) == bool(seen.batch.mask[b, t])
            if token.signal is not None:
                assert token.signal == pytest.approx(float(sent[b, t]), rel=1e-6, abs=1e-12)
                assert token.figures["adv"] == pytest.approx(float(seen.batch.adv[b, t]))
                assert token.figures["logp"] == pytest.approx(float(taken.logp[b, t]))
                assert token.id == int(taken.groups.rollout.tokens[b, t])


@given(st.sampled_from(PRESETS), st.data())
def test_rows_come_by_influence_and_add_up_to_the_step(name, data):
    taken = data.draw(steps(st.integers(1, 3)))
    seen, scores = experience(preset(name), taken)
    signal, figures = token_page.signal_of_step(seen.batch, scores, preset(name).objective, UNMOVED, minibatches=1)
    shown = token_page.token_report(seen, signal, figures, letters, (), rows=1000)
    influence = [row.influence for row in shown.rows]
    assert influence == sorted(influence, reverse=True)
    assert {(row.prompt, row.sample) for row in shown.rows} == {
        (p, g) for p in range(len(taken.groups.problems)) for g in range(taken.groups.reward.value.shape[1])
    }
    signals = [t.signal for row in shown.rows for t in row.tokens if t.signal is not None]
    sums = shown.sums
    assert sum(influence) == pytest.approx(sums.up + sums.down)
    assert -sum(x for x in signals if x < 0) == pytest.approx(sums.up)
    assert sum(x != 0 for x in signals) == sums.moved
    assert max(map(abs, signals), default=0.0) == pytest.approx(sums.largest)
    assert sums.learning == sum(row.learns for row in shown.rows)
    assert sums.sampled == int(taken.groups.rollout.mask.sum())
    clips = [sum(x for k, x in t.figures.items() if k.startswith("clip_")) for row in shown.rows for t in row.tokens]
    assert sums.clipped == sum(x > 0 for x in clips)
    assert all(
        not row.valid or row.reward == float(taken.groups.reward.value[row.prompt, row.sample]) for row in shown.rows
    )
    few = token_page.token_report(seen, signal, figures, letters, (), rows=2)
    assert few.rows == shown.rows[:2]
    assert few.sums == sums


@given(steps(st.integers(1, 3)))
def test_at_the_start_of_a_step_every_ratio_is_one_and_nothing_is_clipped(taken):
    seen, _ = experience(preset("grpo"), taken)
    signal, figures = token_page.signal_as_sampled(seen.batch, CLIPPED, UNMOVED, minibatches=1)
    assert "entropy" not in figures
    mask = seen.batch.mask
    assert (figures["ratio"][mask] == 1).all()
    assert not figures["clip_low"][mask].any()
    assert not figures["clip_high"][mask].any()
    assert signal.logp[~mask].eq(0).all()
    assert signal.logp[mask].isfinite().all()


# -- the text of a token


@given(st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_pieces_joined_are_the_text(text, data):
    ids = torch.tensor(token_ids(text)).tolist()
    assume(ids)
    start = data.draw(st.integers(0, len(ids) - 1))
    assume(not decode(ids[:start]).endswith("\ufffd"))
    found = token_texts(ids, start, decode)
    assert len(found) == len(ids) - start
    assert decode(ids[:start]) + "".join(found) == decode(ids)


def token_ids(text: str) -> list[int]:
    return tokenizer().encode(text)


# -- the page


class Reader(HTMLParser):
    """Reads the page: tags, attributes, scripts, and the text of every token."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[tuple[str, str]] = []
        self.tokens: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert len(found) == len(attrs)
        assert not [n for n in found if n.startswith("on") or n in ("src", "href", "srcdoc", "action")]
        self.tags.append((tag, found))
        if tag not in ("meta", "input"):
            self.open.append((tag, found.get("class", "")))
        if tag == "span" and "data-i" in found:
            self.tokens.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        inside = [tag for tag, _ in self.open]
        if "script" in inside:
            self.scripts[-1] += data
        elif "style" not in inside:
            self.text += data
            if any(kind.split(" ")[:1] == ["t"] for _, kind in self.open) and "tokens" in [k for _, k in self.open]:
                self.tokens[-1] += data


ALLOWED = {
    *{"html", "head", "meta", "title", "style", "body", "h1", "p", "dl", "div", "dt", "dd", "small", "span", "input"},
    *{"label", "output", "main", "article", "header", "b", "i", "script", "details", "summary"},
}


def written(text: str) -> str:
    """What of a text is in the page as text: all that has a shape, and what breaks or indents a line."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")  # controls, marks, unassigned, white space
    return "".join(c for c in text if c in " \n\t" or unicodedata.category(c) not in hidden)


@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.sampled_from([text for text in HOSTILE if len(text) < 1000]),
        ),
        min_size=2,
        max_size=2,
    ),
    st.text(),
)
def test_whatever_was_written_the_page_is_whole_and_only_its_own_script_is_in_it(texts, title):
    seen, scores = step([texts[1][:40] or "?"], [texts])
    shown = looked_at(seen, scores)
    html = token_page.token_page(shown, title=title, note=title)
    html.encode()
    reader = Reader(html)
    assert reader.open == []
    assert {tag for tag, _ in reader.tags} <= ALLOWED
    assert reader.scripts == [SCRIPT]
    there = [token for row in shown.rows for token in row.tokens if token.signal is not None]
    assert reader.tokens == [written(token.text) for token in there]
    for column in (found for _, found in reader.tags if found.get("class") == "column"):
        assert len(column["data-values"].split(" ")) in [len(row.tokens) for row in shown.rows]


def test_the_page_lets_its_own_script_run_and_asks_for_nothing():
    html = token_page.token_page(looked_at(*step(["a"], [["b", "c"]])), title="t", note="s")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"https?://|url\(|@import|<link|<img|<iframe", html)


@given(st.text(st.one_of(st.characters(), st.characters(categories=["Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"]))))
def test_all_that_cannot_be_seen_is_drawn(text):
    html = page.escape_visibly(text)
    html.encode()
    reader = Reader(f"<div>{html}</div>")
    assert reader.text == written(text)
    drawn = [found for tag, found in reader.tags if tag == "i"]
    hidden = [c for c in text if c not in " \n\t" and not written(c)]
    assert [f["data-c"] for f in drawn if f["class"] == "c"] == [page.control(c) for c in hidden]
    assert sum(f["class"] == "n" for f in drawn) == text.count("\n")
    assert sum(f["class"] == "tab" for f in drawn) == text.count("\t")


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_signal_that_is_not_finite_comes_first_and_spoils_no_other(odd):
    seen, scores = step(["a", "b"], [["some words", "other words"], ["third", "fourth"]])
    signal, figures = token_page.signal_of_step(seen.batch, scores, CLIPPED, UNMOVED, minibatches=1)
    before = token_page.token_report(seen, signal, figures, decode, special(), rows=9)
    last = before.rows[-1]
    b = last.prompt * 2 + last.sample
    t = int(seen.batch.mask[b].nonzero()[0])
    worse = signal._replace(logp=signal.logp.index_put((torch.tensor(b), torch.tensor(t)), torch.tensor(odd).double()))
    shown = token_page.token_report(seen, worse, figures, decode, special(), rows=9)
    assert (shown.rows[0].prompt, shown.rows[0].sample) == (last.prompt, last.sample)
    assert shown.sums.odd == 1
    assert math.isfinite(shown.sums.up + shown.sums.down + shown.sums.largest)
    html = token_page.token_page(shown, title="t", note="s")
    assert html.count('class="t odd') == 2  # the token, and the legend
    assert html.count("s:nan") + html.count("s:inf") == 0
    assert Reader(html).open == []


# -- episodes

SAID = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.sampled_from(HOSTILE[:4]))
TURNS = st.lists(
    st.builds(
        Turn,
        text=SAID,
        length=st.just(0),
        observation=SAID,
        reward=st.sampled_from([None, 0.0, 0.5]),
        state=st.just("s"),
        calls=st.integers(0, 2),
        error=SAID,
        limit=st.sampled_from(["", "turn_tokens"]),
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(TURNS, min_size=2, max_size=2))
def test_a_page_shows_every_turn_with_what_was_sampled_and_what_was_observed(episodes):
    shown = looked_at(*step(["a"], [episodes]))
    for row in shown.rows:
        spans = token_page.turn_spans(row)
        assert [turn._replace(length=0) for turn, *_ in spans] == episodes[row.sample]
        places = [i for _, wrote, read in spans for i in (*range(*wrote.indices(10**6)), *range(*read.indices(10**6)))]
        assert places == list(range(len(row.tokens)))
        for turn, wrote, read in spans:
            assert len(row.tokens[wrote]) == turn.length
            assert all(token.sampled for token in row.tokens[wrote])
            assert not any(token.sampled or token.figures for token in row.tokens[read])
            assert "".join(token.text for token in row.tokens[read]) in ("", f"\n{turn.observation}\n")
    html = token_page.token_page(shown, title="t", note="s")
    reader = Reader(html)
    assert reader.open == []
    assert {tag for tag, _ in reader.tags} <= ALLOWED
    assert reader.scripts == [SCRIPT]
    assert sum(found.get("class") == "turn" for _, found in reader.tags) == sum(map(len, episodes))
    there = [token for row in shown.rows for token in row.tokens if token.signal is not None]
    assert len(there) == sum("data-i" in found for tag, found in reader.tags if tag == "span")
