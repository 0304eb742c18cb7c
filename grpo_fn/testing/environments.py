"""Properties of an environment that a run expects: two pure, total functions over plain data, whose episodes end."""

import copy
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import hypothesis.strategies as st
from hypothesis.strategies import SearchStrategy

from grpo_fn.core.environment import Environment, Message, Start, Step, ToolCall, play_script
from grpo_fn.core.problem import Problem
from grpo_fn.testing import texts
from grpo_fn.testing.harness import UNSHRUNK, check_claim, for_all, simplest_example

ROLES = ("system", "user", "tool")  # of observations
ELSEWHERE = 20  # episodes that are played again in another process
SECONDS_TO_START = 60.0  # of the other process

# In the other process: without torch, which takes seconds to import.
REPLAY = """
import json, pickle, sys
paths, data = pickle.load(sys.stdin.buffer)
sys.path[:] = paths
environment, episodes = pickle.loads(data)
from grpo_fn.core.environment import play_script
json.dump([play_script(environment, *episode) for episode in episodes], sys.stdout)
"""


class Script(NamedTuple):
    """An episode to be played: the problem, what the policy writes, and the key."""

    problem: Problem
    messages: tuple[Message, ...]
    key: int

    def __repr__(self) -> str:
        return f"Script({self.problem!r:.300}, {self.messages!r:.600}, key={self.key})"


def check_environment(
    environment: Environment,
    *,
    problems: SearchStrategy[Problem] | None = None,
    messages: SearchStrategy[Message] | None = None,
    hostile: Sequence[str] = texts.HOSTILE,
    max_turns: int | None,
    deadline: float = 5.0,
) -> None:
    """Check that an environment is fit for a run, whatever a model writes.

    Its functions answer with the right types, never raise, end the episode within `max_turns`, and keep a state that is
    plain data. One that says it is pure changes none of its arguments and answers the same again, from a state that was
    stored as JSON, and in another process under another hash seed.

    Args:
        environment: the environment, its knobs bound.
        problems: draws what it is asked about; None: `text_problems()`.
        messages: draws what a policy that knows the environment writes, besides prose and odd calls; None: nothing.
        hostile: texts tried besides, which break parsers.
        max_turns: turns within which every episode ends by itself; None: the environment leaves that to the run.
        deadline: seconds that one call may take.

    Raises:
        AssertionError: the environment is not fit; the message shows the episode.
    """
    asked = texts.text_problems() if problems is None else problems
    written = policy_messages() if messages is None else st.one_of(messages, policy_messages())
    scripts = episode_scripts(asked, written, max_turns or 6)
    takes_any_text(environment, simplest_example(asked), hostile, deadline)
    for holds in (
        types_are_right,
        state_is_plain,
        *((is_pure, goes_on_from_a_stored_state) if environment.pure else ()),
    ):
        for_all(scripts, partial(holds, environment), phases=UNSHRUNK)
    if max_turns is not None:
        long = episode_scripts(asked, written, max_turns, shortest=max_turns)
        for_all(long, partial(ends_within_its_limit, environment), phases=UNSHRUNK)
    if environment.pure:
        same_in_another_process(environment, scripts)


def policy_messages() -> SearchStrategy[Message]:
    """Messages of a policy: prose, numbers, and calls, well-formed or not, of tools that may not be there."""
    plain = st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False), texts.PROSE)
    names = st.one_of(st.sampled_from(["calculator", "python", "expression", "code"]), texts.PROSE)
    call = st.builds(ToolCall, names, st.dictionaries(names, st.one_of(plain, st.lists(plain, max_size=2)), max_size=2))
    content = st.one_of(texts.PROSE, st.integers(-100, 100).map(str), texts.gold_answers())
    calls = st.lists(call, max_size=2).map(tuple)
    return st.builds(Message, st.just("assistant"), content, st.just(""), calls, st.one_of(st.just(""), texts.PROSE))


def episode_scripts(
    problems: SearchStrategy[Problem], messages: SearchStrategy[Message], longest: int, *, shortest: int = 1
) -> SearchStrategy[Script]:
    """Scripts of episodes."""
    written = st.lists(messages, min_size=shortest, max_size=longest).map(tuple)
    drawn = st.tuples(problems, written, st.integers(0, 2**62))
    return drawn.map(lambda parts: Script(*parts))


def takes_any_text(environment: Environment, problem: Problem, hostile: Sequence[str], deadline: float) -> None:
    """Every hostile text, as a message, as a malformed call and as an argument of a call, is answered in time."""
    for text in hostile:
        calls = tuple(ToolCall(name, {name: text}) for name in ("calculator", text[:40]))
        written = (text, "", (), ""), ("", "", calls, ""), (text, "", (), text)
        for message in (Message("assistant", *fields) for fields in written):
            start = time.monotonic()
            _answers(environment, Script(problem, (message,), 0))
            seconds = time.monotonic() - start
            check_claim(seconds <= deadline, f"got {seconds:.1f} s on {text!r:.160}, expected at most {deadline}")


def types_are_right(environment: Environment, script: Script) -> None:
    """A Start with messages; Steps with a finite reward or None, and observations unless done."""
    start, steps = _answers(environment, script)
    check_claim(type(start) is Start, f"got {start!r:.200} from start, expected a Start")
    check_claim(len(start.messages) > 0, f"got no message from start on {script}, expected at least one")
    for step in steps:
        check_claim(type(step) is Step, f"got {step!r:.200} from step, expected a Step")
        check_claim(type(step.done) is bool, f"got done {step.done!r}, expected True or False")
        number = step.reward is None or (type(step.reward) in (int, float) and math.isfinite(step.reward))
        check_claim(number, f"got the reward {step.reward!r} on {script}, expected a finite number or None")
        expected = "no observation where done" if step.done else "an observation for the policy to read"
        check_claim(
            bool(step.messages) != step.done, f"got {len(step.messages)} messages on {script}, expected {expected}"
        )
    for message in (message for answer in (start, *steps) for message in answer.messages):
        known = type(message) is Message and message.role in ROLES and isinstance(message.content, str)
        check_claim(
            known, f"got the message {message!r:.200}, expected a Message of one of the roles {', '.join(ROLES)}"
        )


def state_is_plain(environment: Environment, script: Script) -> None:
    """Every state is what JSON gives back of it, so that its hash and what is stored of it are its own."""
    start, steps = _answers(environment, script)
    for answer in (start, *steps):
        try:
            again = json.loads(json.dumps(answer.state, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise AssertionError(f"got the state {answer.state!r:.300}, expected plain data: {error}") from error
        same = _same_data(again, answer.state)
        check_claim(same, f"got {again!r:.300} of the state {answer.state!r:.300} through JSON, expected it as it was")


def is_pure(environment: Environment, script: Script) -> None:
    """The same arguments get the same answer, and are left as they were."""
    kept = copy.deepcopy(script)
    start = environment.start(script.problem, script.key)
    _same(environment.start(script.problem, script.key), start, script, "from start again")
    state = start.state
    for turn, message in enumerate(script.messages, 1):
        before = copy.deepcopy(state)
        step = environment.step(state, message, script.key + turn)
        _same(state, before, script, "as the state that step was given, afterwards")
        _same(environment.step(state, message, script.key + turn), step, script, "from step again")
        if step.done:
            break
        state = step.state
    _same(script, kept, script, "of problem and messages afterwards")


def goes_on_from_a_stored_state(environment: Environment, script: Script) -> None:
    """From a state that went through JSON an episode goes on as from the state itself."""
    start, steps = _answers(environment, script)
    states = [start.state, *(step.state for step in steps)]
    for turn, (state, step) in enumerate(zip(states, steps, strict=False), 1):
        stored = json.loads(json.dumps(state))
        again = environment.step(stored, script.messages[turn - 1], script.key + turn)
        _same(again, step, script, "from the stored state")


def ends_within_its_limit(environment: Environment, script: Script) -> None:
    """An episode of as many messages as the limit is done."""
    _, steps = _answers(environment, script)
    said = f"got an episode that goes on after {len(steps)} turns on {script}, expected its end by then"
    check_claim(steps[-1].done, said)


def same_in_another_process(environment: Environment, scripts: SearchStrategy[Script]) -> None:
    """Another process, with other salted hashes, plays the same episodes."""
    drawn: list[Script] = []
    for_all(scripts, drawn.append, phases=UNSHRUNK)
    episodes = [tuple(script) for script in drawn[:ELSEWHERE]]
    try:
        data = pickle.dumps((environment, episodes))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"got {environment!r:.300}, expected functions that modules define: {error}") from error
    here = json.loads(json.dumps([play_script(environment, *episode) for episode in episodes]))
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", REPLAY],
            input=pickle.dumps((sys.path, data)),
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            timeout=SECONDS_TO_START,
            check=False,
        )
        check_claim(
            done.returncode == 0, f"got in another process: {done.stderr.decode()[-600:]}, expected the episodes"
        )
        there = json.loads(done.stdout)
        for script, expected, got in zip(drawn, here, there, strict=False):
            _same(got, expected, script, f"in another process with PYTHONHASHSEED={seed}")


# What holds of every environment, and of a pure one.
INVARIANTS: tuple[Callable[[Environment, Script], None], ...] = (
    *(types_are_right, state_is_plain, is_pure, goes_on_from_a_stored_state, ends_within_its_limit),
)


def _answers(environment: Environment, script: Script) -> tuple[Start, tuple[Step, ...]]:
    try:
        return play_script(environment, script.problem, script.messages, script.key)
    except Exception as error:
        raise AssertionError(f"got {error!r:.300} on {script}, expected an answer to any text") from error


def _same(got: Any, expected: Any, script: Script, where: str) -> None:
    check_claim(_same_data(got, expected), f"got {got!r:.400} {where} on {script}, expected {expected!r:.400}")


def _same_data(got: object, expected: object) -> bool:
    """Equal, and of the same types throughout: 1 is not True, and a list is no tuple."""
    return type(got) is type(expected) and repr(got) == repr(expected)
