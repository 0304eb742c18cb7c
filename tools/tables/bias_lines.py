"""A line of a table of docs/algorithms/bias.md, from expected updates and true gradients."""

from torch import Tensor

EXACT = 1e-12


def measured(got: Tensor, wanted: Tensor) -> tuple[float, float, float]:
    """Scale: the projection on the true gradient, in units of it. Error: the distance from it, likewise. Cosine."""
    along, length = (got * wanted).sum(), wanted.norm()
    return float(along / length**2), float((got - wanted).norm() / length), float(along / (length * got.norm()))


def line(name: str, figures: list[tuple[float, float, float]]) -> str:
    """The means of scale, error and cosine, and the worst error and cosine."""
    scale, error, cosine = zip(*figures, strict=True)
    means = [sum(values) / len(values) for values in (scale, error, cosine)]
    errors = ("0" if x < EXACT else f"{x:.2g}" for x in (means[1], max(error)))
    return f"| {name} | {means[0]:.2f} | {' | '.join(errors)} | {means[2]:.3f} | {min(cosine):.3f} |"
