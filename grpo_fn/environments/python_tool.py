"""Python as a tool: a program that the policy wrote, run in the sandbox, answered with what it printed."""

from grpo_fn.core.problem import Program
from grpo_fn.rewards.code import Runner


def python(code: str, *, run: Runner, max_output: int) -> str:
    """Run a Python program and read what it prints. Only the standard library is there; nothing is kept between runs.

    Args:
        code: the program
        run: runs a program: `sandbox.run_program` with its knobs.
        max_output: characters of what it printed that are shown, the last ones.

    Returns:
        What it printed; why it failed, where it did.

    Raises:
        ValueError: for a program without anything in it.
    """
    if not code.strip():
        raise ValueError("got an empty program, wanted one that prints its result")
    # One test that always holds: that it is proven says that the program ran to its end and is still there.
    ran = run(Program((code,), "", ("assert True",), ()))
    printed = tail(ran.printed, max_output)
    if all(ran.verdicts) and ran.proven:
        return printed or "(the program printed nothing)"
    return f"error: {ran.reason}" + (f"\n{printed}" if printed else "")


def tail(printed: str, max_output: int) -> str:
    """The end of what a program printed, without white space at either end.

    Args:
        printed: all of it.
        max_output: characters that are left of it, at most.

    Returns:
        The text.
    """
    text = printed.strip()
    return text[max(0, len(text) - max_output) :]
