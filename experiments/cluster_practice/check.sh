#!/usr/bin/env bash
# Run the checks of README.md here, on CPU ranks over gloo; no GPU, no second machine.
#
#   experiments/cluster_practice/check.sh [strategies|offload|precision|resume|seeds|faults|launch ...]
#
# Without arguments all of them, one after the other. Environment: PYTHON (default .venv/bin/python, else python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi
fi

tests_of() { # what a check consists of
  case $1 in
    strategies) echo tests/shell/policy/test_fsdp_ranks.py ;;
    offload) echo tests/e2e/test_recipes.py::test_weights_that_lie_on_the_host_make_the_same_run ;;
    precision) echo tests/shell/policy/test_fsdp_ranks.py::test_half_precision_gradients_are_float32s_within_its_rounding \
      tests/shell/policy/test_fsdp_ranks.py::test_a_step_far_below_bfloat16s_spacing_is_not_lost \
      tests/shell/policy/test_fsdp_ranks.py::test_an_overflow_on_one_rank_is_skipped_on_all_and_counted ;;
    resume) echo tests/e2e/test_resume.py tests/e2e/test_ranks.py::test_five_and_five_steps_are_ten \
      tests/e2e/test_ranks.py::test_another_number_of_ranks_goes_on_with_the_same_tokens ;;
    seeds) echo tests/e2e/test_ranks.py::test_world_size_does_not_change_a_run ;;
    faults) echo tests/e2e/test_faults.py ;;
    launch) echo tests/launch ;;
    *) return 1 ;;
  esac
}

checks=("$@")
if ((!$#)); then checks=(strategies offload precision resume seeds faults launch); fi
for check in "${checks[@]}"; do
  tests_of "$check" >/dev/null || {
    echo "error: got check '$check', expected strategies, offload, precision, resume, seeds, faults or launch" >&2
    exit 2
  }
done
for check in "${checks[@]}"; do
  echo "== $check"
  # shellcheck disable=SC2046
  "$python" -m pytest -q $(tests_of "$check")
done
