"""Objects with a hidden state as environments: our state is their reset and actions, and leads to the same place."""

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
from gymnasium_fakes import Broken, Corridor, Drifting, Unbounded, hide
from hypothesis import given
from profiles import profile

from grpo_fn import testing
from grpo_fn.core.environment import Message, play_script
from grpo_fn.core.problem import Problem
from grpo_fn.shell.environments import sessions
from grpo_fn.shell.environments.sessions import named_action, seed_only, show_field, show_observation, text_action
from grpo_fn.shell.reward_workers.worker_pool import EnvironmentPool

PROBLEM = Problem(0, "Walk.", "", {})
WALK = st.sampled_from(["forward", "I go BACK", "forward, not back", "nowhere"]).map(
    lambda text: Message("assistant", text)
)
KNOBS = {
    "make": Corridor,
    "read_action": partial(named_action, actions={"forward": 1, "back": -1}),
    "show": show_observation,
    "reset_arguments": seed_only,
    "opening": "{prompt} You are at {observation}.",
    "max_turns": 6,
    "max_sessions": 2,
}


def corridor(**knobs):
    return sessions.gymnasium_environment(**KNOBS | knobs)


def says(text):
    return Message("assistant", text)


def test_an_episode_walks_to_the_end():
    start, steps = play_script(corridor(), PROBLEM, [says("forward")] * 6, 3)
    end = len(steps)
    assert 2 <= end <= 4
    assert start.messages == (Message("user", f'Walk. You are at {{"place": 0, "end": {end}}}.'),)
    assert [step.reward for step in steps] == [0.0] * (end - 1) + [1.0]
    assert [step.done for step in steps] == [False] * (end - 1) + [True]
    assert steps[0].messages == (Message("user", f'{{"place": 1, "end": {end}}}'),)
    assert steps[-1].state["actions"] == [1] * end


def test_no_action_is_an_observation_and_leaves_the_object_where_it_is():
    before = Corridor.opened
    _, (none, forward) = play_script(corridor(), PROBLEM, [says("nowhere"), says("forward")], 3)
    error = (Message("user", "error: got no action, expected one of forward, back"),)
    assert (none.messages, none.reward, none.done) == (error, 0.0, False)
    assert '"place": 1' in forward.messages[0].content
    assert Corridor.opened == before + 1


def test_a_deterministic_class_is_fit_for_a_run_and_pure_in_its_arguments():
    with profile(max_examples=8):
        testing.check_environment(replace(corridor(), pure=True), messages=WALK, max_turns=6)


@given(st.lists(WALK, min_size=1, max_size=6), st.integers(0, 2**62), st.integers(1, 3))
def test_a_step_from_a_stored_state_is_that_of_the_session_at_hand(messages, key, max_sessions):
    start, steps = play_script(corridor(max_sessions=max_sessions), PROBLEM, messages, key)
    states = [start.state, *(step.state for step in steps)]
    for turn, step in enumerate(steps):
        assert corridor().step(states[turn], messages[turn], 0) == step


def test_sessions_are_kept_up_to_the_limit_and_closed():
    running = Corridor.running
    environment = corridor(max_sessions=2)
    starts = [environment.start(PROBLEM, key) for key in (0, 1, 2, 2)]  # two that begin alike have a session each
    assert Corridor.running == running + 2
    before = Corridor.opened
    environment.step(starts[3].state, says("forward"), 0)
    assert Corridor.opened == before  # it is at hand
    environment.step(starts[0].state, says("forward"), 0)
    assert Corridor.opened == before + 1
    assert Corridor.running == running + 2
    ended = corridor(max_turns=1)
    ended.step(ended.start(PROBLEM, 0).state, says("forward"), 0)
    assert Corridor.running == running + 2


def test_sessions_that_look_alike_are_known_by_their_actions():
    environment = corridor(show=hide, max_sessions=3)
    ahead = environment.start(PROBLEM, 7).state
    environment.step(environment.start(PROBLEM, 7).state, says("back"), 0)
    done = False
    while not done:
        ahead, _, reward, done, *_ = environment.step(ahead, says("forward"), 0)
    assert reward == 1.0


def test_an_object_that_does_not_depend_on_its_actions_alone_is_a_failure():
    environment = corridor(make=Drifting)
    after = environment.step(environment.start(PROBLEM, 0).state, says("forward"), 0).state
    with pytest.raises(RuntimeError, match=r"another answer from the same 1 actions.*expected a session that depends"):
        corridor(make=Drifting).step(after, says("forward"), 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Broken, r"step: got .*, expected \(observation, reward, terminated, truncated, info\)"),
        (Unbounded, "step: got the reward nan, expected a finite number"),
    ],
)
def test_an_answer_of_another_shape_is_refused_and_the_session_closed(make, said):
    environment = corridor(make=make)
    state, running = environment.start(PROBLEM, 0).state, make.running
    with pytest.raises(ValueError, match=said):
        environment.step(state, says("forward"), 0)
    assert make.running == running - 1


def test_actions_and_observations_as_text():
    assert text_action(says("all of it"), field="code") == {"code": "all of it"}
    assert show_field({"text": "a", "n": 1}, field="n") == "1"
    assert show_observation("as it is") == "as it is"
    assert show_observation({1, 2}) == "{1, 2}"
    with pytest.raises(ValueError, match="observation: got the fields a, b, expected text"):
        show_field({"a": 1, "b": 2}, field="text")


def test_an_environment_of_gymnasium_plays_in_workers():
    pytest.importorskip("gymnasium", reason="NOT TESTED without gymnasium: a class of its own")
    lake = corridor(
        make=partial(sessions.make_registered, name="FrozenLake-v1"),
        read_action=partial(named_action, actions={"left": 0, "down": 1, "right": 2, "up": 3}),
        opening="You are on field {observation}.",
    )
    script = [says(text) for text in ("right", "fly", "down", "right", "down", "left")]
    start, steps = play_script(lake, PROBLEM, script, 11)
    assert start.messages[0].content == "You are on field 0."
    assert len({step.messages[0].content for step in steps if step.messages}) > 1
    with EnvironmentPool(lake, workers=2, deadline=60.0, memory_mb=4096) as pool:  # whichever worker is free
        state = pool.start(PROBLEM, 11).result().state
        assert state == start.state
        for message, step in zip(script, steps, strict=False):
            answer = pool.step(state, message, 0).result()
            assert (answer.messages, answer.reward, answer.done) == (step.messages, step.reward, step.done)
            state = answer.state


def test_a_knob_that_could_not_mean_anything_is_refused():
    with pytest.raises(ValueError, match="max_sessions: got 0, expected at least 1"):
        corridor(max_sessions=0)
    pytest.importorskip("gymnasium", reason="NOT TESTED without gymnasium: its registry")
    with pytest.raises(ValueError, match="name: got 'Nowhere-v1': "):
        sessions.make_registered(name="Nowhere-v1")
