"""Products and mazes: what a problem asks for is so, held-out ones are not trained on, and the best way out wins."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from profiles import profile, quarter

from experiments.tiny import environments, tasks
from grpo_fn import testing
from grpo_fn.core import prng
from grpo_fn.core.environment import Message, play_script
from grpo_fn.core.problem import Problem

KEY = prng.key(3, device="cpu")
PRODUCTS = tasks.products(max_value=99, test_size=16)
MAZES = tasks.mazes(side=3, test_size=8)
PLAY = environments.maze()
products = st.sampled_from([PRODUCTS.train(KEY, index) for index in range(100)])
mazes = st.sampled_from([MAZES.train(KEY, index) for index in range(100)])


def says(*contents):
    return [Message("assistant", content) for content in contents]


# -- products


@given(products)
def test_a_problem_asks_for_its_expression(problem):
    a, b, c = (int(n) for n in problem.meta["expression"].replace("*", " ").replace("+", " ").replace("-", " ").split())
    value = a * b + (c if "+" in problem.meta["expression"] else -c)
    assert str(value) == problem.answer
    assert value >= 0
    assert problem.prompt == f"What is {problem.meta['expression']}?"


def test_no_training_problem_asks_for_a_held_out_expression():
    small = tasks.products(max_value=4, test_size=20)  # 54 contents: draws meet held-out ones all the time
    held_out = {problem.meta["expression"] for problem in small.test}
    assert len(held_out) == 20
    trained = {small.train(KEY, index).meta["expression"] for index in range(300)}
    assert not trained & held_out
    assert small.train(KEY, 7) == small.train(KEY, 7)
    assert small.train(KEY, 7).uid == 7


# -- mazes


@given(mazes)
def test_the_way_of_the_answer_leads_out_and_none_is_shorter(problem):
    way = problem.answer.split()
    _, steps = play_script(PLAY, problem, says(*way), 0)
    assert [step.reward for step in steps] == [0.0] * (len(way) - 1) + [1.0]
    assert steps[-1].done
    assert not play_script(PLAY, problem, says(*way[:-1]), 0)[1][-1:] or not steps[-2].done


@given(mazes, st.lists(st.sampled_from(list(environments.DIRECTIONS)), min_size=1, max_size=12))
def test_open_ways_can_be_walked_and_a_wall_stops(problem, way):
    state = PLAY.start(problem, 0).state
    for name in way:
        row, column = state["row"], state["column"]
        opened = environments.open_ways(state["maze"], row, column)
        state, messages, _, done = PLAY.step(state, Message("assistant", f"I go {name.upper()}"), 0)
        moved = (state["row"] - row, state["column"] - column)
        assert moved == (environments.DIRECTIONS[name] if name in opened else (0, 0))
        if done:
            assert state["maze"][state["row"]][state["column"]] == "E"
            break
        assert messages[0].content.startswith("A wall. ") == (name not in opened)


def test_two_ways_to_one_place_are_one_state():
    """Which is what turns are compared by where states repeat."""
    problem = Problem(0, "?", "", {"maze": ("#######", "#S   E#", "# # # #", "#     #", "#######")})
    one = play_script(PLAY, problem, says("south", "south", "east", "east"), 0)[1][-1]
    other = play_script(PLAY, problem, says("east", "west", "nowhere", "east", "east", "south", "south"), 0)[1][-1]
    assert one.state == other.state
    assert not one.done


@given(st.integers(2, 5), st.integers(0, 30))
@hypothesis_settings(max_examples=10)
def test_a_maze_joins_every_two_places_by_one_way(side, index):
    problem = tasks.mazes(side=side, test_size=4).train(KEY, index)
    grid = problem.meta["maze"]
    places = [(2 * row + 1, 2 * column + 1) for row in range(side) for column in range(side)]
    assert all(grid[row][column] in " SE" for row, column in places)
    doors = sum(line.count(" ") for line in grid) + 2 - len(places)
    assert doors == len(places) - 1  # a tree
    assert len(problem.answer.split()) % 2 == 0


def test_the_number_of_mazes_is_that_of_the_spanning_trees_and_the_pairs_of_places():
    assert tasks.mazes(side=2, test_size=4).size == 4 * 4 * 3 - 4
    assert tasks.mazes(side=3, test_size=8).size == 192 * 9 * 8 - 8


def test_the_maze_is_fit_for_a_run():
    written = st.sampled_from(list(environments.DIRECTIONS)).map(lambda text: Message("assistant", text))
    with profile(max_examples=quarter()):
        testing.check_environment(PLAY, problems=mazes, messages=written, max_turns=None)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: tasks.products(max_value=9, test_size=0), "test_size: got 0, expected 1 to 512, half of the 1024"),
        (lambda: tasks.shortest_way(["###", "#S#", "###", "#E#", "###"]), "cannot be reached"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
