"""Two tasks made on the spot, for models that learn in minutes: products for a calculator, and mazes.

Problems are made of uniform random numbers as they are drawn. What a problem asks is its content; the held-out contents
are the first that a fixed key draws, so that a larger `test_size` extends a smaller one.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import count
from math import cos, pi, prod

from torch import Tensor

from experiments.tiny.environments import DIRECTIONS
from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.arithmetic import block_uniforms
from grpo_fn.tasks.task import Task, check_index, frozen_key, generated_task

_SPLIT_SEED = 20_261_125  # decides what is held out, for every run and every seed alike
_ATTEMPTS = 1 << 33  # of the key's children: those from which a problem that is held out is drawn again
_LEAST = 2  # of the numbers of a product: with 1 it is none

Edge = tuple[tuple[int, int], tuple[int, int]]


def products(*, max_value: int, test_size: int) -> Task:
    """Problems `a*b+c` or `a*b-c` of numbers 2..max_value, never below zero; `meta["expression"]` is "34*57+88".

    Too much for a small model, nothing for a calculator.
    """
    if max_value < _LEAST + 1:
        raise ValueError(f"max_value: got {max_value}, expected at least {_LEAST + 1}")
    contents = 2 * (max_value - _LEAST + 1) ** 3
    make = partial(_product, max_value)
    return drawn_task(make, _expression, width=4, contents=contents, test_size=test_size)


def _expression(problem: Problem) -> str:
    return problem.meta["expression"]


def _product(max_value: int, draw: Sequence[float]) -> Problem:
    a, b, c = (_LEAST + int(u * (max_value - _LEAST + 1)) for u in draw[:3])
    sign = "+" if draw[3] < 0.5 or a * b < c else "-"
    expression, answer = f"{a}*{b}{sign}{c}", a * b + c if sign == "+" else a * b - c
    return Problem(0, f"What is {expression}?", str(answer), {"expression": expression})


def mazes(*, side: int, test_size: int) -> Task:
    """Mazes of side x side places, every two of which are joined by one way, each with a start and an exit.

    A maze is the spanning tree of least weight of a grid whose edges have random weights. `meta["maze"]` is the map, a
    text for each row: `#` is wall, `S` the start, `E` the exit; the answer is the shortest way, as directions.
    """
    if side < 2:
        raise ValueError(f"side: got {side}, expected at least 2")
    places = side * side
    contents = _spanning_trees(side) * places * (places - 1)
    return drawn_task(
        partial(_maze_problem, side), _maze, width=len(_edges(side)) + 2, contents=contents, test_size=test_size
    )


def shortest_way(maze: Sequence[str]) -> list[str]:
    """The directions from the start to the exit, a breadth-first search."""
    start = next((row, line.index("S")) for row, line in enumerate(maze) if "S" in line)
    ways: dict[tuple[int, int], list[str]] = {start: []}
    frontier = [start]
    while frontier:
        row, column = frontier.pop(0)
        if maze[row][column] == "E":
            return ways[row, column]
        for name, (down, right) in DIRECTIONS.items():
            place = (row + down, column + right)
            if maze[place[0]][place[1]] != "#" and place not in ways:
                ways[place] = [*ways[row, column], name]
                frontier.append(place)
    raise ValueError("got a maze whose exit cannot be reached, expected one with a way")


def _maze(problem: Problem) -> tuple[str, ...]:
    return problem.meta["maze"]


def _maze_problem(side: int, draw: Sequence[float]) -> Problem:
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
    prompt = "Find the way out of the maze. Each turn, name a direction: north, east, south or west."
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
    for _, (start, end) in sorted(zip(weights, _edges(side), strict=True)):
        if find(start) != find(end):
            root[find(start)] = find(end)
            tree.append((start, end))
    return tree


def _spanning_trees(side: int) -> int:
    """Spanning trees of the grid: the product of its Laplacian's eigenvalues but 0, over its places (Kirchhoff)."""
    angles = [(i, j) for i in range(side) for j in range(side) if (i, j) != (0, 0)]
    return round(prod(4 - 2 * cos(pi * i / side) - 2 * cos(pi * j / side) for i, j in angles) / side**2)


def drawn_task(
    make: Callable[[Sequence[float]], Problem],
    content: Callable[[Problem], Hashable],
    *,
    width: int,
    contents: int,
    test_size: int,
) -> Task:
    """The task of problems that `make` makes of `width` uniforms each; one with a held-out content is drawn again."""
    if not 1 <= test_size <= contents // 2:
        raise ValueError(f"test_size: got {test_size}, expected 1 to {contents // 2}, half of the {contents} contents")
    split = frozen_key(prng.key(_SPLIT_SEED, device="cpu"))
    test: dict[Hashable, Problem] = {}
    for index in count():
        problem = make(block_uniforms(split, width, index))
        test.setdefault(content(problem), problem)
        if len(test) == test_size:
            break
    train = partial(_train, make, content, width, frozenset(test))
    return generated_task(train, list(test.values()), contents - test_size)


def _train(
    make: Callable[[Sequence[float]], Problem],
    content: Callable[[Problem], Hashable],
    width: int,
    held_out: frozenset[Hashable],
    key: Tensor,
    index: int,
) -> Problem:
    check_index(index)
    frozen = frozen_key(key)
    for attempt in count():
        problem = make(block_uniforms(frozen, width, index))
        if content(problem) not in held_out:
            return problem._replace(uid=index)
        frozen = frozen_key(prng.fold_in(key, _ATTEMPTS + attempt))
