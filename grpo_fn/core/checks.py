"""Checks of numbers in a configuration, with messages that say got and wanted."""


class FunctionMisfit(ValueError):
    """A function of the configuration does not fit its knob: bad input, and one line, although a step has begun."""


def check_positive(**numbers: int) -> None:
    """Raise ValueError naming the first number below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")


def check_divides(prompts: int, minibatches: int) -> None:
    """Raise ValueError, with the nearest numbers that do, unless the prompts of a step split into whole minibatches."""
    if prompts % minibatches == 0:
        return
    below, above = prompts // minibatches * minibatches, -(-prompts // minibatches) * minibatches
    nearest = " or ".join(str(n) for n in (below, above) if n > 0)
    divisors = [m for m in range(1, prompts + 1) if prompts % m == 0]
    closest = min(divisors, key=lambda m: (abs(m - minibatches), m))
    raise ValueError(
        f"prompts {prompts} do not split into {minibatches} minibatches of whole groups: wanted prompts {nearest}, or "
        f"minibatches {closest}"
    )
