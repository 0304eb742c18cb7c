"""The environment of `tasks.mazes`, a maze in words: each turn the policy names a direction.

It reads where the exit lies and which ways are open. No torch: environments run in worker processes.
"""

import re
from collections.abc import Mapping, Sequence

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step
from grpo_fn.core.problem import Problem

DIRECTIONS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
ON_THE_WAY = -0.0  # reward of a move; its sign is in the tape of runs that were recorded
_WORD = re.compile(r"north|east|south|west", re.IGNORECASE)


def maze() -> Environment:
    """The environment: a reward of 1, and the end, at the exit. The run's limit on turns ends any other episode.

    So a state is a place, however and whenever it was reached.
    """
    return Environment(start=start, step=step, pure=True)


def start(problem: Problem, key: int) -> Start:
    """The question and the first place; `meta["maze"]` is the map: `#` is wall, `S` the start, `E` the exit."""
    maze = list(problem.meta["maze"])
    row, column = _find(maze, "S")
    state = {"maze": maze, "row": row, "column": column}
    return Start(state, (Message("user", f"{problem.prompt}\n{_describe(maze, row, column)}"),))


def step(state: Mapping[str, PlainData], message: Message, key: int) -> Step:
    """The next place. The move is the last direction in the message; a wall, or none, leaves the place as it is."""
    maze, row, column = state["maze"], state["row"], state["column"]
    directions = _WORD.findall(message.content)
    if not directions:
        answer = f"got no direction, expected one of {', '.join(DIRECTIONS)}"
        return Step(state, (Message("user", answer),), ON_THE_WAY, False)
    down, right = DIRECTIONS[directions[-1].lower()]
    if maze[row + down][column + right] == "#":
        return Step(state, (Message("user", f"A wall. {_describe(maze, row, column)}"),), ON_THE_WAY, False)
    row, column = row + down, column + right
    after = {**state, "row": row, "column": column}
    if maze[row][column] == "E":
        return Step(after, (), 1.0, True)
    return Step(after, (Message("user", _describe(maze, row, column)),), ON_THE_WAY, False)


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
