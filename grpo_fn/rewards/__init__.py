"""Text to a number: what is right, what is well formed, and how the parts add up."""
