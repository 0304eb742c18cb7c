"""A maze in words: the policy names a direction each turn, and reads where it stands and which ways are open."""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step
from grpo_fn.core.problem import Problem

DIRECTIONS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
_WORD = re.compile(r"north|east|south|west", re.IGNORECASE)


def environment(*, cost: float) -> Environment:
    """The environment of `mazes.task`. It has no limit of its own: the run's limit on turns ends an episode.

    So a state is a place, however and whenever it was reached.

    Args:
        cost: what a move that does not reach the exit is worth, with a minus sign.

    Returns:
        The environment.

    Raises:
        ValueError: for a cost below 0.
    """
    if not cost >= 0:
        raise ValueError(f"cost: got {cost}, wanted at least 0")
    return Environment(start=start, step=partial(step, cost=cost), pure=True)


def start(problem: Problem, key: int) -> Start:
    """The question and the first place.

    Args:
        problem: `meta["maze"]` is the map, a text for each row: `#` is wall, `S` the start, `E` the exit.
        key: not read.

    Returns:
        The state: the map and the place, row and column from 0; the messages.
    """
    maze = list(problem.meta["maze"])
    row, column = _find(maze, "S")
    state = {"maze": maze, "row": row, "column": column}
    return Start(state, (Message("user", f"{problem.prompt}\n{_describe(maze, row, column)}"),))


def step(state: Mapping[str, PlainData], message: Message, key: int, *, cost: float) -> Step:
    """The next place; the end, and a reward of 1, at the exit. The move is the last direction in the message.

    Args:
        state: as `start` or the last step returned it.
        message: of the policy.
        key: not read.
        cost: what a move that does not reach the exit is worth, with a minus sign.

    Returns:
        The step; a wall or a message without a direction leaves the place as it is.
    """
    maze, row, column = state["maze"], state["row"], state["column"]
    named = _WORD.findall(message.content)
    if not named:
        said = f"got no direction, wanted one of {', '.join(DIRECTIONS)}"
        return Step(state, (Message("user", said),), -cost, False)
    down, right = DIRECTIONS[named[-1].lower()]
    if maze[row + down][column + right] == "#":
        return Step(state, (Message("user", f"A wall. {_describe(maze, row, column)}"),), -cost, False)
    row, column = row + down, column + right
    after = {**state, "row": row, "column": column}
    if maze[row][column] == "E":
        return Step(after, (), 1.0, True)
    return Step(after, (Message("user", _describe(maze, row, column)),), -cost, False)


def open_ways(maze: Sequence[str], row: int, column: int) -> list[str]:
    """The directions without a wall."""
    return [name for name, (down, right) in DIRECTIONS.items() if maze[row + down][column + right] != "#"]


def exit_directions(maze: Sequence[str], row: int, column: int) -> list[str]:
    """The directions in which the exit lies as the crow flies."""
    exit_row, exit_column = _find(maze, "E")
    down, right = exit_row - row, exit_column - column
    lies = zip(DIRECTIONS, (down < 0, right > 0, down > 0, right < 0), strict=True)
    return [name for name, is_there in lies if is_there]


def _find(maze: Sequence[str], mark: str) -> tuple[int, int]:
    return next((row, line.index(mark)) for row, line in enumerate(maze) if mark in line)


def _describe(maze: Sequence[str], row: int, column: int) -> str:
    """The place, the exit's place relative to it, and the open ways."""
    aims = exit_directions(maze, row, column)
    return f"The exit is {' and '.join(aims)}. Open: {', '.join(open_ways(maze, row, column))}."
