"""python -m grpo_fn.serve.lm_eval_cli run --model grpo_fn ...: lm-eval's own command, which knows our model, too."""

import sys

MODEL = "grpo_fn"  # what --model names


def main() -> int:
    """Register the model and hand over to lm-eval; returns the exit code. Without lm-eval it is 2 and one line."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        print(f"error: got {error}, wanted the package lm-eval: pip install 'grpo-fn[lm_eval]'", file=sys.stderr)
        return 2
    import lm_eval.models  # noqa: F401  the others first: they are registered where none is there yet

    model_registry.register(MODEL, target="grpo_fn.serve.lm_eval_model:GrpoFnLM")
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
