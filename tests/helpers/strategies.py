"""Small tensors, drawn: those of the published test kit, under the name that the tests know."""

from grpo_fn.testing.strategies import finite_floats, groups, masks, tensors

__all__ = ["finite_floats", "groups", "masks", "tensors"]
