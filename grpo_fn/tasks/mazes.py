"""Mazes, made on the spot: every two places of a square grid are joined by one way.

A maze is the spanning tree of least weight of a grid whose edges have random weights, with a start and an exit.
"""

from collections.abc import Sequence
from functools import partial
from math import cos, pi, prod

from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import Task, drawn_task

Edge = tuple[tuple[int, int], tuple[int, int]]


def task(*, side: int, show_map: bool, test_size: int) -> Task:
    """Mazes of side x side places, `test_size` of them held out.

    Args:
        side: places in a row.
        show_map: whether the prompt shows the map.
        test_size: held-out problems.

    Returns:
        The task; `meta["maze"]` is the map, a text for each row: `#` is wall, `S` the start, `E` the exit; the answer
        is the shortest way, as directions.

    Raises:
        ValueError: for a side below 2, or a test_size that leaves less than half to train on.
    """
    if side < 2:
        raise ValueError(f"side: got {side}, wanted at least 2")
    places = side * side
    contents = _spanning_trees(side) * places * (places - 1)
    make = partial(_problem, side, show_map)
    return drawn_task(make, _maze, width=len(_edges(side)) + 2, contents=contents, test_size=test_size)


def shortest_way(maze: Sequence[str]) -> list[str]:
    """The directions from the start to the exit, a breadth-first search."""
    start = next((row, line.index("S")) for row, line in enumerate(maze) if "S" in line)
    ways: dict[tuple[int, int], list[str]] = {start: []}
    frontier = [start]
    while frontier:
        row, column = frontier.pop(0)
        if maze[row][column] == "E":
            return ways[row, column]
        for name, (down, right) in {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}.items():
            there = (row + down, column + right)
            if maze[there[0]][there[1]] != "#" and there not in ways:
                ways[there] = [*ways[row, column], name]
                frontier.append(there)
    raise ValueError("got a maze whose exit cannot be reached, wanted one with a way")


def _maze(problem: Problem) -> tuple[str, ...]:
    return problem.meta["maze"]


def _problem(side: int, show_map: bool, draw: Sequence[float]) -> Problem:
    places = [(row, column) for row in range(side) for column in range(side)]
    start = int(draw[0] * len(places))
    end = (start + 1 + int(draw[1] * (len(places) - 1))) % len(places)  # never the same again
    grid = [["#"] * (2 * side + 1) for _ in range(2 * side + 1)]
    for row, column in places:
        grid[2 * row + 1][2 * column + 1] = " "
    for (row, column), (low, right) in _least_tree(side, draw[2:]):
        grid[row + low + 1][column + right + 1] = " "
    for (row, column), mark in ((places[start], "S"), (places[end], "E")):
        grid[2 * row + 1][2 * column + 1] = mark
    maze = tuple("".join(line) for line in grid)
    shown = "\n".join(("", *maze)) if show_map else ""
    prompt = f"Find the way out of the maze. Each turn, name a direction: north, east, south or west.{shown}"
    return Problem(0, prompt, " ".join(shortest_way(maze)), {"maze": maze})


def _edges(side: int) -> list[Edge]:
    right = [((row, column), (row, column + 1)) for row in range(side) for column in range(side - 1)]
    down = [((row, column), (row + 1, column)) for row in range(side - 1) for column in range(side)]
    return right + down


def _least_tree(side: int, weights: Sequence[float]) -> list[Edge]:
    """Kruskal's algorithm: the lightest edges that close no circle."""
    root = {(row, column): (row, column) for row in range(side) for column in range(side)}

    def find(place: tuple[int, int]) -> tuple[int, int]:
        while root[place] != place:
            place = root[place]
        return place

    tree = []
    for _, (one, other) in sorted(zip(weights, _edges(side), strict=True)):
        if find(one) != find(other):
            root[find(one)] = find(other)
            tree.append((one, other))
    return tree


def _spanning_trees(side: int) -> int:
    """Spanning trees of the grid: the product of its Laplacian's eigenvalues but 0, over its places (Kirchhoff)."""
    angles = [(i, j) for i in range(side) for j in range(side) if (i, j) != (0, 0)]
    return round(prod(4 - 2 * cos(pi * i / side) - 2 * cos(pi * j / side) for i, j in angles) / side**2)
