"""A real server of openenv-core: count to a number. `python openenv_server_program.py PORT`."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Add(Action):
    number: int


class Count(Observation):
    text: str


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count, self.goal = 0, 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count, self.goal = 0, random.Random(seed).randint(5, 9)
        return Count(text=f"count to {self.goal}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.number == 13:
            raise RuntimeError("out of order")
        self.count += random.getrandbits(20) if action.number == 7 else action.number
        return Count(text=f"at {self.count}", done=self.count >= self.goal, reward=float(self.count == self.goal))

    @property
    def state(self):
        return State(step_count=self.count)


if __name__ == "__main__":
    app = create_fastapi_app(Counting, Add, Count, max_concurrent_envs=3)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
