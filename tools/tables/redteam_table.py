"""Attacks every reward and task of the package, and writes the tables of docs/rewards/redteam.md.

python tools/tables/redteam_table.py --data DIR              run every campaign and rewrite the tables in the page
python tools/tables/redteam_table.py --data DIR --only math  print the lines of the campaigns whose name holds a word

DIR has the folders gsm8k, math, mbpp, aime and amc with the published files. A table stands between
`<!-- campaigns of GROUP -->` and `<!-- end -->`; all other text of the page is written by hand. A judge is asked at
a server of this program's own, which quotes what it is to judge. A campaign without its data has a line that says so.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import quoting_judge

from grpo_fn.config import load_config
from grpo_fn.redteam import campaign
from grpo_fn.tasks import procedural

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "rewards" / "redteam.md"
TABLE = re.compile(r"^<!-- campaigns of (\w+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
HEAD = ("| reward | task | best without the answer | golds | attack | its text |", "|---|---|---|---|---|---|")
LONGEST = 60  # characters of a text in a table
BOX = "answer_of=@grpo_fn.rewards.format.last_box"
JUDGE = "reward/judge.gin"
TAGS = "tags=('think', 'answer')"
COSINE = (  # the numbers of Yeo et al. 2025, arXiv:2502.03373, table 1, with 512 tokens
    *("verdict=@grpo_fn.rewards.math.correct", "max_length=512", "right_empty=2.0", "right_full=1.0"),
    *("wrong_empty=-10.0", "wrong_full=0.0", "exceeded=-10.0"),
)


class Entry(NamedTuple):
    """A campaign: rewards on a task, or those of a run."""

    group: str  # the table that it stands in
    rewards: Sequence[str] = ()
    weights: Sequence[float] = ()
    knobs: Sequence[str] = ()
    task: str = ""
    task_knobs: Sequence[str] = ()
    gin_files: Sequence[str] = ()
    gin_params: Sequence[str] = ()
    label: str = ""  # of the task, where its name does not say all
    problems: int = 64
    pulls: int = 100
    data: Path | None = None  # without which it is not run
    absent: str = ""  # why it cannot be run anywhere

    def name(self) -> str:
        """What it is called."""
        reward = " + ".join(self.rewards) or "as configured"
        return f"{self.group}: {reward} on {self.label or self.task or ' + '.join(self.gin_files)}"


def flags() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of the data sets")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="campaigns whose name holds this; the page is left alone"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaigns, and rewrite the page or print lines."""
    asked = flags().parse_args(argv)
    lines: dict[str, list[str]] = {}
    for entry in entries(asked.data):
        if asked.only in entry.name():
            started = time.monotonic()
            line = skipped_line(entry, why) if (why := not_run(entry)) else table_line(entry, attacked(entry))
            lines.setdefault(entry.group, []).append(line)
            print(f"{entry.name()}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if asked.only:
        print(*[line for group in lines.values() for line in group], sep="\n")
    else:
        PAGE.write_text(with_tables(PAGE.read_text(), lines))
    return 0


def entries(data: Path) -> Iterator[Entry]:
    """Every campaign of the page."""
    yield from runs(data)
    yield from episodes(data)
    folders = {"arithmetic": (), **{name: (f"data={str(data / name)!r}",) for name in ("gsm8k", "math")}}
    for reward in ("math", "math_evaluated", "lenient"):
        for task, knobs in folders.items():
            yield Entry("rewards", [reward], task=task, task_knobs=knobs, data=data / task if knobs else None)
    gsm8k = partial(Entry, "rewards", task="gsm8k", task_knobs=folders["gsm8k"], data=data / "gsm8k")
    yield gsm8k(["grpo_fn.rewards.format.boxed"])
    yield gsm8k(["grpo_fn.rewards.format.answer_tags"], knobs=[TAGS])
    yield gsm8k(["grpo_fn.rewards.format.answer_tags_by_prompt"], knobs=[TAGS])
    yield gsm8k(["grpo_fn.rewards.length.soft_overlong_punishment"], knobs=["max_length=512", "cache_length=128"])
    yield gsm8k(["grpo_fn.rewards.length.repeated_ngrams"], knobs=["ngram=4", "max_penalty=1.0"])
    yield gsm8k(["grpo_fn.rewards.length.cosine_length"], knobs=COSINE)
    for reward in ("code", "share_of_tests"):
        for shown in (3, 1):
            knobs = (f"data={str(data / 'mbpp')!r}", f"shown_tests={shown}")
            label = f"mbpp, asserts shown: {shown}"
            numbers = {"problems": 32, "pulls": 20}
            yield Entry("rewards", [reward], task="mbpp", task_knobs=knobs, label=label, data=data / "mbpp", **numbers)
    for file, part in (("calculator", "used_tool"), ("calculator", "right_with_tool"), ("maze", "last_reward")):
        yield one_part(f"@episode.{part}", [f"run/{file}.gin"], [])
    judged = [f"DATA={str(data / 'gsm8k')!r}", f"JUDGE_MODEL={quoting_judge.MODEL!r}"]
    yield one_part("@judge.Judge()", ["run/gsm8k.gin", JUDGE], judged, data=data / "gsm8k", problems=16, pulls=20)
    for kind in procedural.kinds():
        if kind not in procedural.AUDIT_FAILURES:
            yield of_kind(kind)


def runs(data: Path) -> Iterator[Entry]:
    """The rewards and tasks of gin files, as configured."""
    names = {name: f"{name.upper()}={str(data / name)!r}" for name in ("gsm8k", "math")}
    places = {name: f"DATA={str(data / name)!r}" for name in ("gsm8k", "math", "mbpp")}
    run = partial(Entry, "runs")
    gsm8k = partial(run, data=data / "gsm8k")
    yield run(gin_files=["run/arithmetic.gin"])
    yield gsm8k(gin_files=["run/gsm8k.gin"], gin_params=[places["gsm8k"]])
    yield run(gin_files=["run/math.gin"], gin_params=[places["math"]], data=data / "math")
    yield gsm8k(gin_files=["run/gsm8k.gin", "task/gsm8k_math.gin"], gin_params=[*names.values()])
    tests = {"AIME24": "aime/aime24", "AIME25": "aime/aime25", "AMC23": "amc/amc23"}
    params = [f"{name}={str(data / f'{place}.jsonl')!r}" for name, place in tests.items()]
    yield run(gin_files=["run/gsm8k.gin", "task/competitions.gin"], gin_params=params, data=data / "aime")
    rows = data / "math" / "math500.jsonl"
    yield run(gin_files=["run/gsm8k.gin", "task/rows.gin"], gin_params=[f"DATA={str(rows)!r}"], data=rows)
    hub = "nvidia/OpenMathInstruct-2 is on the hub alone; what is verified is the same as of task/rows.gin"
    yield run(gin_files=["run/math.gin", "task/openmath.gin"], absent=hub)
    given = [places["gsm8k"], "DEMONSTRATIONS='not read'"]
    yield gsm8k(gin_files=["run/gsm8k.gin", "algo/chord.gin", "task/demonstrations.gin"], gin_params=given)
    yield run(gin_files=["run/gsm8k.gin", "task/procedural.gin"])
    yield run(gin_files=["run/procedural.gin"])
    small = partial(run, data=data / "mbpp", problems=32, pulls=20)
    yield small(gin_files=["run/mbpp_code.gin"], gin_params=[places["mbpp"]])
    yield run(gin_files=["experiments/custom_reward/run.gin"])


def episodes(data: Path) -> Iterator[Entry]:
    """The runs whose rewards are of episodes."""
    run = partial(Entry, "episodes")
    for name in ("calculator", "guess", "maze"):
        yield run(gin_files=[f"run/{name}.gin"])
    for name, of in (("python_tool", "gsm8k"), ("mbpp_retry", "mbpp")):
        params = [f"DATA={str(data / of)!r}"]
        yield run(gin_files=[f"run/{name}.gin"], gin_params=params, data=data / of, problems=16, pulls=20)


def one_part(part: str, files: Sequence[str], params: Sequence[str], **more: Any) -> Entry:
    """The campaign against one reward alone on the task of a run."""
    alone = [f"combine.combine.parts=[{part}]", "combine.combine.weights=[1.0]"]
    return Entry("rewards", gin_files=files, gin_params=[*params, *alone], **more)


def of_kind(kind: str) -> Entry:
    """The campaign of a kind of procedural problems."""
    knobs = [f"weights={{{kind!r}: 1}}", f"levels=[{procedural.DEFAULT_LEVEL}]", "test_size=16", "accept=[]"]
    template = "template='{question}\\nPut your final answer within \\\\boxed{}.'"
    reward = "grpo_fn.rewards.procedural.procedural_correct"
    return Entry(
        "kinds",
        [reward],
        knobs=[BOX],
        task="grpo_fn.tasks.procedural.task",
        task_knobs=[*knobs, template],
        label=kind,
        problems=16,
        pulls=20,
    )


def attacked(entry: Entry) -> campaign.Campaign:
    """What a campaign found."""
    if JUDGE in entry.gin_files:
        with quoting_judge.quoting_judge() as endpoint:
            return attacked_run(entry, [f"JUDGE_ENDPOINT={endpoint!r}"])
    if entry.gin_files:
        return attacked_run(entry, [])
    return campaign.attack_named(
        rewards=entry.rewards,
        weights=entry.weights,
        reward_knobs=entry.knobs,
        task=entry.task,
        task_knobs=entry.task_knobs,
        problems=entry.problems,
        pulls=entry.pulls,
        workers=2,
    )


def attacked_run(entry: Entry, more: Sequence[str]) -> campaign.Campaign:
    """What a campaign against a run found."""
    asked = campaign.AttackRequest(" + ".join(entry.gin_files), entry.problems, entry.pulls)
    params = [*entry.gin_params, *more]
    config = load_config(entry.gin_files, params, taker="grpo_fn.redteam.campaign.attack_run")
    return campaign.attack_run(asked, **config.kwargs())


def not_run(entry: Entry) -> str:
    """Why a campaign cannot be run here; "" where it can."""
    if entry.data is not None and not entry.data.exists():
        return f"{entry.data} is not there"
    return entry.absent


def skipped_line(entry: Entry, why: str) -> str:
    """The line of a campaign that is not run."""
    task = entry.label or entry.task or " + ".join(entry.gin_files)
    return f"| {' + '.join(entry.rewards) or '-'} | {task} | not run: {why} | | | |"


def table_line(entry: Entry, found: campaign.Campaign) -> str:
    """A campaign's line of its table."""
    best = found.found[0]
    everything = len({round(one.score, 6) for one in found.found}) == 1
    attack, text = ("any", "") if everything else (best.which.attack, campaign.shown_text(best.text, LONGEST))
    reward = found.reward.removeprefix("grpo_fn.rewards.")
    return f"| `{reward}` | {entry.label or found.task} | {best.score:.3f} | {found.gold:.3f} | {attack} | {text} |"


def with_tables(page: str, lines: dict[str, list[str]]) -> str:
    """The page with these lines, by group. Raises ValueError for a table that the page has no place for."""
    places = [found[1] for found in TABLE.finditer(page)]
    if sorted(places) != sorted(lines):
        raise ValueError(f"{PAGE}: got places for {', '.join(places)}, wanted them for {', '.join(lines)}")
    return TABLE.sub(
        lambda found: "\n".join([f"<!-- campaigns of {found[1]} -->", *HEAD, *lines[found[1]], "<!-- end -->"]), page
    )


if __name__ == "__main__":
    sys.exit(main())
