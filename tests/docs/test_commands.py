"""Every command of the README, the docs and the recipes is executed: ours made small, of others what is ours in it.

How a command is made small is in desk.py, what is done with which program in rules.py: a program that has no rule there
fails here, and so does a block that is not shell and does not say what it is. Nothing needs a network or a browser.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from docs.desk import Things
from docs.pages import ROOT, Command, blocks, commands, first, pages, pipelines, shell, unfenced
from hypothesis import given
from hypothesis import strategies as st

from docs import desk, foreign, rules
from grpo_fn import sandbox

ALL = [each for page in pages() for each in commands(page)]
FIRST = {each.text: each for each in reversed(ALL)}  # a line that stands on several pages is done once
# Later commands of a page do not wait for these. Flags are read by the tool's own parser all the same.
SLOW = {
    "python tools/tables docs/algorithms/bias.md": "some 40 s; tests/algo/test_bias_table.py measures some of it",
    "python tools/tables docs/tasks/procedural.md": "minutes; tests/tasks/test_tasks_procedural.py measures some of it",
    "OMP_NUM_THREADS=1 python experiments/vmap_sweep/idea.py --repeats 5": "6 s",
}


def marked(each: Command) -> object:
    return pytest.param(each, id=f"{each.page}:{each.line}", marks=pytest.mark.xdist_group("commands"))


@pytest.fixture(scope="session")
def done(things: Things, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Command], None]:
    """Do a command after those of its page that leave something for it, each once; raises what went wrong."""
    places: dict[str, rules.Place] = {}
    outcomes: dict[tuple[str, str], BaseException | None] = {}

    def attempt(each: Command) -> BaseException | None:
        try:
            rules.do(each.text, places[each.page])
        except (Exception, pytest.skip.Exception) as error:
            return error
        return None

    def do(expected: Command) -> None:
        if expected.page not in places:
            folder, text = tmp_path_factory.mktemp("page"), (ROOT / expected.page).read_text()
            (folder / "notes").mkdir()
            places[expected.page] = rules.Place(desk.desk(things, folder / "desk", text), things, folder / "notes")
            for name, source in modules(text).items():
                (folder / "desk" / name).write_text(source)
        for each in commands(ROOT / expected.page):
            key = each.page, each.text
            if key not in outcomes and (each == expected or leaves_something(each)):
                outcomes[key] = attempt(each)
            if each == expected:
                break
        if (error := outcomes[expected.page, expected.text]) is not None:
            raise error

    return do


def leaves_something(each: Command) -> bool:
    """Whether a later command of its page may look at what it has made."""
    own = re.fullmatch(r"python \w+\.py", each.text) is not None
    return each.text not in SLOW and (own or any(f"--{flag}" in each.text for flag in ("run_dir", "out", "signal")))


def modules(text: str) -> dict[str, str]:
    """From name to text: Python and gin that a page says is in a file of the reader's, `with this in mine.py`."""
    lines = text.splitlines()
    found = [block for block in blocks(text) if block.language in ("python", "gin")]
    named = [
        (re.search(r"this in `(\w+\.(?:py|gin))`", " ".join(lines[max(0, b.line - 4) : b.line - 1])), b) for b in found
    ]
    return {name[1]: "\n".join(block.lines) + "\n" for name, block in named if name}


@pytest.mark.slow
@pytest.mark.parametrize("each", [marked(each) for each in FIRST.values()])
def test_it_does_what_the_page_says(each: Command, done: Callable[[Command], None]) -> None:
    if "--reward code" in each.text and not any(sandbox.available().values()):
        pytest.skip(f"NOT TESTED: no sandbox on this machine: {sandbox.available()}")
    if first(each.text) == "make" and shutil.which("make") is None:
        pytest.skip("NOT TESTED: no make on this machine")
    done(each)


@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize("said", [said for said in SLOW if "--" in said])
def test_the_flags_of_slow_ones_are_those_of_the_tool(said: str, things: Things, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    place = rules.Place(desk.desk(things, tmp_path / "desk", said), things, tmp_path / "notes")
    (((stage,),),) = [pipelines(said)]
    rules.flags_alone(stage.argv[1:], place, place.site(stage.env, Path("/dev/null"), place.notes / "out"))


# -- the pages are read as they are meant


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_shell_has_commands(page: Path) -> None:
    found = {each.line for each in commands(page)} | {each.line for each in ALL if each.block}
    texts = {each.text for each in commands(page)}
    for block in blocks(page.read_text()):
        if shell(block):
            lines = range(block.line, block.line + len(block.lines))
            assert found & {*lines} or any(" ".join(line.split()) in texts for line in block.lines), block


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_what_they_are(page: Path) -> None:
    """An indented block is shell; a block in another language has no commands."""
    assert [*unfenced(page.read_text())] == []


def test_there_are_as_many_as_one_sees() -> None:
    """The pages that everybody reads first, counted another way: lines of theirs that begin with python or make."""
    for name in (
        "README.md",
        "docs/running/engines.md",
        "docs/install.md",
        "docs/monitoring/evaluation.md",
        "docs/rewards/score.md",
    ):
        seen = [line.strip() for line in (ROOT / name).read_text().splitlines()]
        seen = [line for line in seen if line.startswith(("python -m ", "python tools/", "make ", "pip install "))]
        assert len(seen) >= 2
        texts = [each.text for each in commands(ROOT / name)]
        assert all(any(text.startswith(line.rstrip(" \\|")) for text in texts) for line in seen), name


def test_what_is_named_in_the_tables_exists() -> None:
    assert {*SLOW} <= {*FIRST}
    assert all((ROOT / name).exists() for name in (*rules.TOOLS, *rules.BROWSER))
    assert all(why for _, why in foreign.FOREIGN.values())


words = st.text("abc./-", min_size=1, max_size=6).filter(lambda word: word.strip("./-") and word not in ("-m", "-c"))


@given(st.lists(words, min_size=1, max_size=4), st.sampled_from(["    {}\n", "```sh\n{}\n```\n", "text `{}` text\n"]))
def test_a_command_is_found_wherever_it_stands(
    tmp_path_factory: pytest.TempPathFactory, given_words: list[str], form: str
) -> None:
    said = " ".join(["python", *given_words])
    page = tmp_path_factory.getbasetemp() / "page.md"
    page.write_text(f"Title\n\n{form.format(said)}\nEnd.\n")
    assert [each.text for each in commands(page)] == [said]
    page.write_text(f"Title\n\n```gin\n{said}\n```\n")
    assert commands(page) == []
    assert [line for _, line in unfenced(page.read_text())] == [said]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("trainer --go", "no rule for trainer"),
        ("python tools/no_such.py", "expected a file that there is"),
        ("python -m no_such", "no rule for python -m no_such"),
        ("python -m grpo_fn.run --gin_flie run/arithmetic.gin", "ended with 2"),
        ("python -m grpo_fn.run --gin_file run/no_such.gin", "ended with 2"),
        ("python -m grpo_fn.lab.sweep --out x --girds SEED=0", "ended with 2"),
        ("pip install -e '.[no_such]'", "expected extras of"),
        ("pip install 'torch==1.0.*'", "expected torch"),
        ("kubectl apply -f tools/launch/no_such.yaml", "no_such"),
        ("python tools/bench --no_such", "ended with 2"),
    ],
)
@pytest.mark.xdist_group("commands")
def test_a_wrong_command_is_found(said: str, complaint: str, things: Things, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    place = rules.Place(desk.desk(things, tmp_path / "desk", said), things, tmp_path / "notes")
    with pytest.raises((AssertionError, OSError)) as raised:
        rules.do(said, place)
    assert complaint in str(raised.value)
