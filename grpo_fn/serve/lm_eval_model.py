"""lm-eval's interface over our model and sampler: `lm_eval.api.model.LM`, thin. Needs the package lm-eval.

`lm_eval_cli` runs lm-eval's own command with it; in a program: `simple_evaluate(model=GrpoFnLM("runs/x"))`.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from grpo_fn.config import load_config
from grpo_fn.serve.__main__ import serve_files
from grpo_fn.serve.endpoint import sample_key
from grpo_fn.serve.service import load_service
from grpo_fn.shell.model.token_scores import ScoredText
from grpo_fn.shell.serving.decode_service import QueuedText
from grpo_fn.shell.serving.decode_session import DecodeKnobs, QueuedRow

UNLIMITED_POSITIONS = 2048  # tokens of a text, where the model sets no limit: as lm-eval's other models
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class GrpoFnLM(TemplateLM):
    """A model of grpo_fn for lm-eval: log-probs of its own passes, completions of its local sampler.

    Texts that are longer than the model's positions lose tokens on the left, as with lm-eval's other models, and a
    warning says how many did.

    Args:
        model: a Hugging Face folder or hub name, a run folder, or DIR/checkpoints/step_N of one.
        gin_file: gin files, as for `python -m grpo_fn.serve`; empty: the run's, or engine/serve.gin.
        gin_param: bindings NAME=VALUE on top of them.
        max_rows: completions decoded at once.
        max_gen_toks: most tokens of a completion, where the task names no number.
        max_tokens: most that a task may name.
        seed: of drawn completions; greedy ones have none.
        timeout: seconds that one answer may take after the one before it.
        batch_size: lm-eval's, of no effect: `max_rows` is ours, and results do not depend on it.
        max_batch_size: as batch_size.
        device: as batch_size, for lm-eval names a GPU where none is asked for: sections.Compute.device is ours.
    """

    def __init__(
        self,
        model: str,
        *,
        gin_file: str | Sequence[str] = (),
        gin_param: str | Sequence[str] = (),
        max_rows: int = 64,
        max_gen_toks: int = 256,
        max_tokens: int = 2048,
        seed: int = 0,
        timeout: float = 3600.0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        files, params = ([x] if isinstance(x, str) else [*x] for x in (gin_file, gin_param))
        kwargs = load_config(files or serve_files(model), params, taker="grpo_fn.serve.service.serve").kwargs()
        loaded = load_service(
            model,
            compute=kwargs["compute"],
            sampling=kwargs["sampling"],
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_waiting=sys.maxsize,
        )
        self.name, self.service, self.tokenizer = model, loaded.service, loaded.tokenizer
        self.max_gen_toks, self.seed, self.timeout, self.cut = max_gen_toks, seed, timeout, 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def max_length(self) -> int:
        """Most tokens of a context and what follows it."""
        return self.service.positions or UNLIMITED_POSITIONS

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of requests is named after."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as text, by the tokenizer's template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, without special ones unless they are asked for."""
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-prob of every whole text, in nats; long ones in windows, each token predicted once."""
        windows, owners = [], []
        for place, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, found):
                windows.append((("", ""), *window))
                owners.append(place)
        totals = [0.0] * len(requests)
        for place, (logp, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[place] += logp
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows every context, up to its first stop string."""
        rows, stops, seen = [], [], Counter()
        for request in requests:
            context, given = request.args
            how = self._generation(given)
            until = handle_stop_sequences(how["until"], eos=self.tokenizer.eos_token)
            problem = (request.task_name, request.doc_id, request.idx)
            key = sample_key(self.seed, request.doc_id or 0, seen[problem])
            seen[problem] += 1  # repeats of a request are samples of one problem
            # End of sequence ends every row by itself; the others are looked for in the text.
            stop = tuple(text for text in until if text and text != self.tokenizer.eos_token)
            knobs = DecodeKnobs(how["temperature"], how["top_p"], how["top_k"], stop)
            prompt = self._fitting(self.tok_encode(context) or [self.prefix_token_id], how["max_gen_toks"])
            rows.append(QueuedRow(prompt, key, how["max_gen_toks"], knobs))
            stops.append(until)
        self.service.draw(rows)
        drawn = self._results([row.future for row in rows])
        texts = [self.tokenizer.decode(row.tokens, skip_special_tokens=True) for row in drawn]
        self._warn_of_cuts()
        return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Of each continuation its log-prob in nats, and whether greedy decoding would have written it."""
        texts = []
        for _, context, continuation in requests:
            ids = [*(context or [self.prefix_token_id]), *continuation]
            kept = ids[-self.max_length - 1 :]  # the last one is not read
            self.cut += len(kept) < len(ids)
            texts.append(QueuedText(ScoredText(kept, max(1, len(kept) - len(continuation))), 1.0, 1))
        self.service.score(texts)
        scores = self._results([text.future for text in texts])
        self._warn_of_cuts()
        found = []
        for (_, _, continuation), one in zip(requests, scores, strict=True):
            likeliest = [top[0][0] for top in one.top]
            found.append((sum(one.logp), likeliest == [*continuation]))
        return found

    def _generation(self, given: dict[str, Any]) -> dict[str, Any]:
        """A request's generation_kwargs, whole. Raises ValueError for what the sampler has not."""
        how = normalize_gen_kwargs(given, self.max_gen_toks)
        if odd := sorted(how.keys() - GENERATION):
            raise ValueError(
                f"generation_kwargs: got {', '.join(odd)}, wanted none but {', '.join(sorted(GENERATION))}"
            )
        if not 1 <= how["max_gen_toks"] <= self.service.max_tokens:
            raise ValueError(
                f"max_gen_toks: got {how['max_gen_toks']}, wanted 1 to max_tokens, {self.service.max_tokens}"
            )
        return {"until": None, "temperature": 0.0, "top_p": 1.0, "top_k": 0, **how}

    def _fitting(self, prompt: list[int], more: int) -> list[int]:
        """The end of a prompt that leaves so many tokens."""
        left = self.max_length - more
        if left < 1:
            raise ValueError(f"max_gen_toks: got {more}, wanted fewer than the model's {self.max_length} positions")
        self.cut += len(prompt) > left
        return prompt[-left:]

    def _results(self, futures: Sequence[Future]) -> list[Any]:
        """All results. Raises TimeoutError where one is late."""
        found = []
        for future in futures:
            try:
                found.append(future.result(self.timeout))
            except TimeoutError as error:
                raise self.service.worker.overdue(self.timeout) from error
        return found

    def _warn_of_cuts(self) -> None:
        if self.cut:
            print(
                f"grpo_fn: {self.cut} texts were longer than the model's {self.max_length} positions and lost tokens "
                "on the left",
                file=sys.stderr,
            )
        self.cut = 0
