"""Guess the number and the maze: what the answers say is so, and the best way to play wins."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from profiles import profile, quarter

from grpo_fn import testing
from grpo_fn.core import prng
from grpo_fn.core.environment import Message
from grpo_fn.core.problem import Problem
from grpo_fn.environments import guess, maze
from grpo_fn.environments.script import play_script
from grpo_fn.tasks import mazes, secret_number

KEY = prng.key(3, device="cpu")
NUMBERS = secret_number.task(max_value=40, numbers=15, test_size=8)
MAZES = mazes.task(side=3, show_map=False, test_size=8)
number_problems = st.sampled_from([NUMBERS.train(KEY, index) for index in range(100)])
maze_problems = st.sampled_from([MAZES.train(KEY, index) for index in range(100)])


def says(*contents):
    return [Message("assistant", content) for content in contents]


# -- guess


@given(number_problems)
def test_halving_the_range_finds_any_number_in_the_logarithm_of_the_range(problem):
    play = guess.environment(max_guesses=4, cost=0.1)
    state, low, high = play.start(problem, 0).state, problem.meta["low"], problem.meta["high"]
    for _ in range(4):
        middle = (low + high) // 2
        state, messages, reward, done = play.step(state, Message("assistant", f"Is it {middle}?"), 0)
        if done:
            break
        assert (state["low"], state["high"]) == (
            (middle + 1, high) if messages[0].content == "higher" else (low, middle - 1)
        )
        assert reward == -0.1
        low, high = state["low"], state["high"]
    assert done
    assert reward == 1.0


@given(number_problems, st.lists(st.integers(-5, 60), min_size=5, max_size=5))
def test_an_answer_says_on_which_side_the_number_lies(problem, guesses):
    _, steps = play_script(guess.environment(max_guesses=5, cost=0.0), problem, says(*map(str, guesses)), 0)
    for number, step in zip(guesses, steps, strict=False):
        if step.done:
            assert (step.reward == 1.0) == (number == int(problem.answer))
        else:
            assert step.messages[0].content == ("higher" if number < int(problem.answer) else "lower")
            assert step.state["low"] <= int(problem.answer) <= step.state["high"]


def test_what_holds_no_number_is_answered_and_counts_as_a_guess():
    problem = Problem(0, "?", "7", {"low": 1, "high": 9})
    play = guess.environment(max_guesses=3, cost=0.5)
    start, steps = play_script(play, problem, says("no idea", "9" * 5000, "seven"), 0)
    assert start.messages == (Message("user", "?"),)
    assert [step.messages[0].content for step in steps[:2]] == ["got no number, wanted one from 1 to 9"] * 2
    assert [step.reward for step in steps] == [-0.5] * 3
    assert steps[2].done


def test_the_last_number_of_a_message_is_the_guess():
    problem = Problem(0, "?", "7", {"low": 1, "high": 9})
    (step,) = play_script(guess.environment(max_guesses=3, cost=0.0), problem, says("not 3, but 7!"), 0)[1]
    assert step.done
    assert step.reward == 1.0


# -- maze


@given(maze_problems)
def test_the_way_of_the_answer_leads_out_and_none_is_shorter(problem):
    way = problem.answer.split()
    play = maze.environment(cost=0.25)
    _, steps = play_script(play, problem, says(*way), 0)
    assert [step.reward for step in steps] == [-0.25] * (len(way) - 1) + [1.0]
    assert steps[-1].done
    assert not play_script(play, problem, says(*way[:-1]), 0)[1][-1:] or not steps[-2].done


@given(maze_problems, st.lists(st.sampled_from(list(maze.DIRECTIONS)), min_size=1, max_size=12))
def test_what_is_open_can_be_walked_and_a_wall_stops(problem, way):
    play = maze.environment(cost=0.0)
    state = play.start(problem, 0).state
    for name in way:
        row, column = state["row"], state["column"]
        opened = maze.open_ways(state["maze"], row, column)
        state, messages, _, done = play.step(state, Message("assistant", f"I go {name.upper()}"), 0)
        moved = (state["row"] - row, state["column"] - column)
        assert moved == (maze.DIRECTIONS[name] if name in opened else (0, 0))
        if done:
            assert state["maze"][state["row"]][state["column"]] == "E"
            break
        assert messages[0].content.startswith("A wall. ") == (name not in opened)


def test_two_ways_to_one_place_are_one_state():
    """Which is what turns are compared by where states repeat."""
    problem = Problem(0, "?", "", {"maze": ("#######", "#S   E#", "# # # #", "#     #", "#######")})
    play = maze.environment(cost=0.0)
    one = play_script(play, problem, says("south", "south", "east", "east"), 0)[1][-1]
    other = play_script(play, problem, says("east", "west", "nowhere", "east", "east", "south", "south"), 0)[1][-1]
    assert one.state == other.state
    assert not one.done


# -- the tasks behind them


@given(st.integers(2, 5), st.integers(0, 30))
@hypothesis_settings(max_examples=10)
def test_a_maze_joins_every_two_places_by_one_way(side, index):
    task = mazes.task(side=side, show_map=True, test_size=4)
    problem = task.train(KEY, index)
    grid = problem.meta["maze"]
    places = [(2 * row + 1, 2 * column + 1) for row in range(side) for column in range(side)]
    assert all(grid[row][column] in " SE" for row, column in places)
    doors = sum(line.count(" ") for line in grid) + 2 - len(places)
    assert doors == len(places) - 1  # a tree
    assert problem.prompt.endswith("\n".join(grid))
    assert len(problem.answer.split()) % 2 == 0


def test_the_number_of_mazes_is_that_of_the_spanning_trees_and_the_pairs_of_places():
    assert mazes.task(side=2, show_map=False, test_size=4).size == 4 * 4 * 3 - 4
    assert mazes.task(side=3, show_map=False, test_size=8).size == 192 * 9 * 8 - 8


def test_the_range_of_a_number_is_what_the_prompt_names():
    for index in range(50):
        problem = NUMBERS.train(KEY, index)
        low, high = problem.meta["low"], problem.meta["high"]
        assert 1 <= low <= int(problem.answer) <= high == low + 14 <= 40
        assert problem.prompt == f"I think of a number from {low} to {high}. Guess it."


# -- both are fit for a run


@pytest.mark.parametrize(
    ("environment", "problems", "messages", "max_turns"),
    [
        (guess.environment(max_guesses=4, cost=0.1), number_problems, st.integers(-3, 50).map(str), 4),
        (maze.environment(cost=0.1), maze_problems, st.sampled_from(list(maze.DIRECTIONS)), None),
    ],
)
def test_the_environment_is_fit_for_a_run(environment, problems, messages, max_turns):
    written = messages.map(lambda text: Message("assistant", text))
    with profile(max_examples=quarter()):
        testing.check_environment(environment, problems=problems, messages=written, max_turns=max_turns)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: guess.environment(max_guesses=0, cost=0.0), "got max_guesses 0 and cost 0.0, wanted"),
        (lambda: guess.environment(max_guesses=1, cost=-1.0), "got max_guesses 1 and cost -1.0, wanted"),
        (lambda: maze.environment(cost=-1.0), "cost: got -1.0, wanted at least 0"),
        (lambda: secret_number.task(max_value=5, numbers=6, test_size=1), "got numbers 6 and max_value 5, wanted"),
        (lambda: secret_number.task(max_value=5, numbers=5, test_size=3), "test_size: got 3, wanted 1 to 2"),
        (lambda: mazes.task(side=1, show_map=False, test_size=1), "side: got 1, wanted at least 2"),
        (lambda: mazes.shortest_way(["###", "#S#", "###", "#E#", "###"]), "cannot be reached"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
