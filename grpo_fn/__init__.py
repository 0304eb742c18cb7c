"""GRPO and its relatives as pure functions, composed with torch.func and injected by gin."""
