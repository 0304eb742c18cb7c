"""Objects of the shape of a gymnasium environment, found by name in workers."""

import random
import secrets


class Corridor:
    """Walk to the end, which lies where the seed says; the reward is 1 there."""

    opened = 0
    running = 0

    def __init__(self):
        type(self).opened += 1
        type(self).running += 1

    def reset(self, seed):
        self.place, self.end = 0, random.Random(seed).randint(2, 4)
        return {"place": 0, "end": self.end}, {}

    def step(self, action):
        self.place += action
        there = self.place == self.end
        return {"place": self.place, "end": self.end}, float(there), there, abs(self.place) > 5, {}

    def close(self):
        type(self).running -= 1


def hide(observation):
    """Every observation looks the same."""
    return "dark"


class Drifting(Corridor):
    """Takes steps of its own."""

    def step(self, action):
        self.place += secrets.randbits(40)
        return super().step(action)


class Broken(Corridor):
    """Its step returns too little."""

    def step(self, action):
        return super().step(action)[:4]


class Unbounded(Corridor):
    """Its reward is not a number."""

    def step(self, action):
        return ({}, float("nan"), False, False, {})
