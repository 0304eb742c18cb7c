"""The task of no problems: for a configuration that needs a model's surroundings alone, as engine/serve.gin."""

from grpo_fn.tasks.task import Task, held_out_only


def task() -> Task:
    """The task that has no problems.

    Returns:
        The task; drawing from it raises ValueError.
    """
    return held_out_only(())
