"""The page of the learning signal as a person meets it: in a real browser, with eyes, keys and a pointer."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from browser.chrome import Chrome
from signal_steps import HOSTILE, looked_at, step

from grpo_fn.lab import token_page
from grpo_fn.lab.token_page import TokenReport

PROMPTS = ["Tom has 12 apples. <b>How many</b>?\n", "He buys 30 more.  And now?"]
TOKENS = "document.querySelectorAll('#rows .t[data-i]')"
ORDER = "return [...document.querySelectorAll('.row')].filter(r => !r.hidden).map(r => r.dataset.influence)"
FOCUSED = """
const token = document.activeElement, row = token.closest(".row");
return [token.dataset.i, row ? [...document.querySelectorAll(".row")].indexOf(row) : -1]
"""
COLOURS = f"""return [...{TOKENS}].map(token => {{
  const style = getComputedStyle(token);
  return [style.backgroundColor, style.boxShadow, style.textDecorationStyle, style.outlineWidth];
}})"""
TIP = """
const tip = document.querySelector("#tip"), box = tip.getBoundingClientRect();
const lines = [...tip.querySelectorAll("tr")].map(tr => [...tr.children].map(td => td.textContent));
return tip.hidden ? null : {what: tip.querySelector(".what").textContent, ...Object.fromEntries(lines),
  inside: box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight}
"""
# The least contrast of any token with what it lies on, its own translucent colour over the card's (WCAG 2.1).
CONTRAST = """
const bits = colour => colour.match(/[\\d.]+/g).map(Number);
const light = rgb => { const [r, g, b] = rgb.map(x => x / 255).map(
  x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
return Math.min(...[...document.querySelectorAll(".t")].map(token => {
  const [r, g, b, a = 1] = bits(getComputedStyle(token).backgroundColor);
  const card = bits(getComputedStyle(token.closest(".row, .legend")).backgroundColor);
  const under = [r, g, b].map((x, i) => a * x + (1 - a) * card[i]);
  const both = [light(under), light(bits(getComputedStyle(token).color).slice(0, 3))].sort((x, y) => y - x);
  return (both[0] + .05) / (both[1] + .05);
}))
"""


@pytest.fixture(scope="module")
def shown() -> TokenReport:
    return looked_at(*step(PROMPTS, [HOSTILE[:7], HOSTILE[7:]]))


@pytest.fixture(scope="module")
def page(shown: TokenReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "signal.html"
    path.write_bytes(token_page.token_page(shown, title="Step 3 of </title>", note="<i>said</i>").encode())
    return path


@pytest.fixture
def window(chrome: Chrome, page: Path) -> Iterator[Chrome]:
    """The page, opened; whatever a test did there, nothing failed and nothing was asked for."""
    chrome.open(page)
    yield chrome
    assert chrome.logged("browser") == []
    assert chrome.requested() == {page.as_uri(): None}


def learning(shown: TokenReport) -> list:
    return [token for row in shown.rows for token in row.tokens if token.signal is not None]


def test_every_token_is_there_and_hostile_texts_are_texts(window: Chrome, shown: TokenReport) -> None:
    assert len(learning(shown)) > 5000
    assert window.run(f"return {TOKENS}.length") == len(learning(shown))
    assert window.run("return window.owned === undefined && document.title") == "Step 3 of </title>"
    assert window.run("return document.querySelectorAll('.row script, .row img, .row b b, iframe, link').length") == 0
    texts = window.run("return [...document.querySelectorAll('.row .tokens')].map(x => x.textContent)")
    assert sum("<script>document.title = 'owned'; window.owned = 1</script>" in text for text in texts) == 1
    assert "<b>How many</b>?" in window.run("return document.querySelector('#rows').textContent")
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out


def test_colours_go_by_sign_and_size(window: Chrome, shown: TokenReport) -> None:
    seen = [
        (
            [float(x) for x in background[background.index("(") + 1 : -1].replace(",", " ").replace("/", " ").split()],
            rest,
        )
        for background, *rest in window.run(COLOURS)
    ]
    strengths = []
    for token, (colour, (shadow, decoration, _)) in zip(learning(shown), seen, strict=True):
        red, _, blue, alpha = [*colour, 1.0][:4]
        if token.signal == 0:
            assert alpha == 0
            assert shadow == "none"
        else:
            assert (blue > red) == (token.signal < 0)
            assert alpha > 0.05
            assert shadow.endswith("inset")
            # The line is above where the token is pushed up and below where it is pushed down.
            assert (" -" in shadow) == (token.signal > 0)
        strengths.append((abs(token.signal), alpha))
        assert (decoration == "dotted") == (token.figures["clip_low"] + token.figures["clip_high"] > 0)
    strengths.sort()
    assert all(a <= b + 0.006 for (_, a), (_, b) in pairwise(strengths))  # 8 bits of alpha
    assert strengths[-1][1] == pytest.approx(0.62, abs=0.005)


def test_rows_are_sorted_and_grouped_on_demand(window: Chrome, shown: TokenReport) -> None:
    by_influence = [f"{row.influence:.6g}" for row in shown.rows]
    assert window.run(ORDER) == by_influence
    window.run("document.querySelector('#group').click()")
    groups = window.run(
        "return [...document.querySelectorAll('.group')].map(g => [...g.querySelectorAll('.row')].map("
        "r => [r.dataset.prompt, Number(r.dataset.influence)]))"
    )
    assert [len({p for p, _ in group}) for group in groups] == [1, 1]
    assert all([x for _, x in group] == sorted((x for _, x in group), reverse=True) for group in groups)
    weights = [sum(x for _, x in group) for group in groups]
    assert weights == sorted(weights, reverse=True)
    assert window.run("return [...document.querySelectorAll('.row .prompt')].every(x => !x.checkVisibility())")
    window.run("document.querySelector('#group').click()")
    assert window.run(ORDER) == by_influence


def test_the_filter_leaves_the_rows_that_have_every_word(window: Chrome, shown: TokenReport) -> None:
    window.press("/")
    window.press(*"TWO spaces")
    expected = [
        row for row in shown.rows if "two  spaces" in "".join(t.text for t in row.tokens).replace("two ", "two  ")
    ]
    assert len(expected) == 1
    window.wait("return document.querySelector('#found').textContent === arguments[0]", f"1 of {len(shown.rows)} rows")
    assert window.run(ORDER) == [f"{row.influence:.6g}" for row in expected]
    window.run("document.querySelector('#group').click()")
    assert window.run("return [...document.querySelectorAll('.group')].filter(g => g.checkVisibility()).length") == 1


def test_keys_go_from_token_to_token_and_each_says_its_figures(window: Chrome, shown: TokenReport) -> None:
    window.run("document.querySelector('#by-row').focus()")
    window.press("Tab")
    first, tokens = shown.rows[0], shown.rows[0].tokens
    strongest = max(range(len(tokens)), key=lambda i: abs(tokens[i].signal))
    assert window.run(FOCUSED) == [str(strongest + 1), 0]
    check_tip(window.run(TIP), first, strongest)
    for key, i in [("ArrowRight", strongest + 1), ("ArrowLeft", strongest), ("End", len(tokens) - 1), ("Home", 0)]:
        window.press(key)
        assert window.run(FOCUSED) == [str(i + 1), 0]
        check_tip(window.run(TIP), first, i)
    assert window.run("return document.activeElement.getAttribute('aria-describedby')") == "tip"
    window.press("ArrowLeft")  # there is none before the first
    assert window.run(FOCUSED) == ["1", 0]
    window.press("ArrowDown")
    assert window.run(FOCUSED)[1] == 1
    window.press("Tab")
    assert window.run(FOCUSED)[1] == 2  # one stop a row
    window.press("Escape")
    assert window.run(TIP) is None


def check_tip(tip: dict, row, i: int) -> None:
    token = row.tokens[i]
    assert tip["inside"]
    assert tip["what"] == token.text
    assert tip["token"] == f"{i + 1} of {len(row.tokens)}"
    assert tip["dlogp"].replace("\u00a0", " ") == f"{token.signal:+.3g}, pushed {'up' if token.signal < 0 else 'down'}"
    figures = token.figures
    assert tip["ratio"] == f"{figures['ratio']:.3g}"
    assert tip["KL to the reference, nats"] == f"{figures['kl']:.3g}"
    assert tip["entropy, nats"] == f"{figures['entropy']:.3g}"
    assert tip["advantage"] == f"{figures['adv']:.3g}"
    assert (tip["clipped"] == "no") == (figures["clip_low"] + figures["clip_high"] == 0)
    assert tip["reward of sample"].startswith(f"{row.reward:.2f} (correct {row.parts['correct']:.2f}, boxed ")


@pytest.mark.parametrize("dark", [False, True])
def test_every_token_can_be_read_in_light_and_dark(chrome: Chrome, page: Path, dark: bool) -> None:
    chrome.open(page, dark=dark)
    ground = chrome.run("return getComputedStyle(document.body).backgroundColor")
    assert (int(ground.split("(")[1].split(",")[0]) < 60) == dark
    assert chrome.run(CONTRAST) >= 4.5


def test_the_pages_own_policy_stops_a_script_that_was_put_into_it(chrome: Chrome, page: Path, tmp_path: Path) -> None:
    """The last line of defence, in case something is ever written unescaped."""
    spoilt = tmp_path / "spoilt.html"
    evil = '<script>window.owned = 1</script><img src="http://x.invalid/a.png" onerror="window.owned = 1">'
    spoilt.write_text(page.read_text().replace("</main>", f"</main>{evil}"))
    chrome.open(spoilt)
    assert chrome.run("return document.images.length") == 1
    assert chrome.run("return window.owned === undefined")
    assert "Content Security Policy" in " ".join(entry["message"] for entry in chrome.logged("browser"))
    assert chrome.requested() == {spoilt.as_uri(): None, "http://x.invalid/a.png": "csp"}
