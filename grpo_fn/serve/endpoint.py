"""What the routes do: a body becomes rows and texts for the decoding thread, and what comes of them an answer."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.core import prng
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.serve.request_body import SEEDS, GenerationBody, read_chat, read_completion
from grpo_fn.serve.response_body import Choice, PlacedToken, chat_body, completion_body, cut_at_stop, models_body
from grpo_fn.serve.streaming import (
    ChoiceProgress,
    Piece,
    Spelling,
    StreamHead,
    chat_events,
    completion_events,
    pieces_of,
    settled_text,
    tidies,
)
from grpo_fn.serve.tool_chat import calls_reader_of, encode_with_tools, read_answer, reader_for_tools
from grpo_fn.shell.episodes.tool_calls import ReadCalls
from grpo_fn.shell.model.hf import Encode, bare_prompt, encode_prompt
from grpo_fn.shell.model.token_scores import ScoredText, TokenScores
from grpo_fn.shell.serving.decode_service import DecodeService, QueuedText, QueueFull, ServiceClosed
from grpo_fn.shell.serving.decode_session import DecodeKnobs, DrawnRow, QueuedRow
from grpo_fn.shell.serving.http_endpoint import EventStream, HttpError, Json, Route
from grpo_fn.trainer.run import EVALUATION


def sample_key(seed: int, uid: int, g: int) -> Tensor:
    """The key of the g-th sample of problem `uid` in an evaluation with that seed, `[2]`."""
    evaluation = prng.fold_in(prng.key(seed, device="cpu"), EVALUATION)
    return prng.fold_in(prng.split(evaluation, 2)[1], uid, g)


class Served(NamedTuple):
    """What is served, and how."""

    service: DecodeService
    tokenizer: PreTrainedTokenizerBase
    encode: Encode  # of chat messages
    stop: tuple[str, ...]  # where a request names none
    name: str
    timeout: float  # seconds that a request may take


class AnswerShape(NamedTuple):
    """How a route shows what was drawn: in one piece, and as events."""

    body: Callable[[Sequence[Choice], GenerationBody, str, int], Json]
    events: Callable[[Iterator[Piece], StreamHead], Iterator[Json]]


class Endpoint:
    """The routes of an OpenAI-compatible server over one model."""

    def __init__(self, served: Served) -> None:
        self.served, self.created = served, int(time.time())
        self.spelling = Lock()  # a tokenizer is not made for two threads
        self.vocabulary = served.service.model.config.get_text_config().vocab_size

    def routes(self) -> dict[tuple[str, str], Route]:
        """(method, path) -> what answers."""
        return {
            ("GET", "/health"): self.health,
            ("GET", "/v1/models"): self.models,
            ("POST", "/v1/completions"): self.complete,
            ("POST", "/v1/chat/completions"): self.chat,
        }

    def health(self, body: Json) -> Json:
        """Whether requests are answered."""
        if not self.served.service.alive():
            raise HttpError("the decoding thread has ended", status=503)
        return {"status": "ok"}

    def models(self, body: Json) -> Json:
        """The one model."""
        return models_body(self.served.name, self.created, positions=self.served.service.positions)

    def complete(self, body: Json) -> Json | EventStream:
        """/v1/completions: prompts as they are, without a chat template."""
        asked = read_completion(body, self.served.name)
        return self.answer(asked, bare_prompt, AnswerShape(completion_body, completion_events))

    def chat(self, body: Json) -> Json | EventStream:
        """/v1/chat/completions: messages as the configuration encodes a prompt."""
        asked = read_chat(body, self.served.name)
        encode, read = self.served.encode, None
        if asked.tools is not None:
            reader = reader_for_tools(self.calls_reader(), asked.tools)
            encode = partial(encode_with_tools, tools=asked.tools)
            read = partial(read_answer, read_calls=reader, parallel=asked.parallel_calls) if asked.calls else None
        shape = AnswerShape(partial(chat_body, read=read), partial(chat_events, read=read))
        return self.answer(asked, encode, shape)

    def calls_reader(self) -> ReadCalls:
        """How calls of tools are read. Raises HttpError where tools cannot be offered."""
        encoder, _ = function_and_knobs(self.served.encode)
        if encoder is not encode_prompt:
            raise HttpError(
                f"tools: got some, wanted none where sections.Data.encode_prompt is {encoder.__module__}."
                f"{encoder.__name__}: only hf.encode_prompt has a place for them",
                param="tools",
            )
        with self.spelling:
            return calls_reader_of(self.served.tokenizer)

    def answer(self, asked: GenerationBody, encode: Encode, show: AnswerShape) -> Json | EventStream:
        """Draw, score and show. Raises HttpError."""
        until = time.monotonic() + self.served.timeout
        prompts = [self.encode(prompt, encode) for prompt in asked.prompts]
        limits = [self.limit(prompt, asked.max_tokens) for prompt in prompts]
        seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed
        each = [(i, g) for i in range(len(prompts)) for g in range(asked.n)]
        drawn = [DrawnRow([], [], False)] * len(each)
        knobs = DecodeKnobs(asked.temperature, asked.top_p, asked.top_k, self.stop(asked))
        rows = [QueuedRow(prompts[i], sample_key(seed, asked.uids[i], g), limits[i], knobs) for i, g in each]
        if asked.stream:
            head = StreamHead(model=self.served.name, seed=seed, prompts=prompts, asked=asked)
            return self.stream(rows, head, show, until)
        if asked.max_tokens != 0:
            drawn = self.wait_for(partial(self.served.service.draw, rows), [row.future for row in rows], until)
        scores = self.scores(asked, [prompts[i] for i, _ in each], drawn, until)
        with self.spelling:
            choices = [
                self.choice(asked, i, prompts[i], row, scored)
                for (i, _), row, scored in zip(each, drawn, scores, strict=True)
            ]
        return show.body(choices, asked, self.served.name, seed)

    def stream(self, rows: Sequence[QueuedRow], head: StreamHead, show: AnswerShape, until: float) -> EventStream:
        """Put the rows into the queue and show them as they are drawn. Raises HttpError where that is full."""
        inbox: SimpleQueue[ChoiceProgress] = SimpleQueue()
        followed = [
            replace(row, progress=lambda *new, place=place: inbox.put(ChoiceProgress(place, *new)))
            for place, row in enumerate(rows)
        ]
        self.enqueue(partial(self.served.service.draw, followed))
        for place, row in enumerate(followed):
            row.future.add_done_callback(lambda done, place=place: inbox.put(ChoiceProgress(place, [], [], done)))
        stop = self.stop(head.asked)
        held = () if head.asked.keep_stop else stop
        settle = partial(settled_text, stop=held, tidied=tidies(self.served.tokenizer))
        how = {"asked": head.asked, "stop": stop, "until": until, "result": lambda done: self.results([done])[0]}
        pieces = pieces_of(inbox, len(followed), **how, spelling=Spelling(self.spell, self.spell_token, settle))

        def cancel() -> None:
            for row in followed:
                row.future.cancel()

        return EventStream(show.events(pieces, head), cancel)

    def stop(self, asked: GenerationBody) -> tuple[str, ...]:
        """The texts that end a completion of a request."""
        return self.served.stop if asked.stop is None else asked.stop

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of drawn tokens, for a thread that does not hold the tokenizer."""
        with self.spelling:
            return self.served.tokenizer.decode(tokens, skip_special_tokens=True)

    def spell_token(self, token: int) -> str:
        """The text of a token alone, for a thread that does not hold the tokenizer."""
        with self.spelling:
            return self.token_text(token)

    # -- before

    def encode(self, prompt: str | list[int], encode: Encode) -> list[int]:
        """Token ids of a prompt. Raises HttpError for one that the model cannot read."""
        if isinstance(prompt, list):
            if odd := [token for token in prompt if not 0 <= token < self.vocabulary]:
                raise HttpError(
                    f"prompt: got token {odd[0]}, wanted ids from 0 to {self.vocabulary - 1}", param="prompt"
                )
            return prompt
        try:
            with self.spelling:
                ids = encode(self.served.tokenizer, prompt)
        except HttpError:
            raise
        except Exception as error:  # a chat template may raise anything, of its own kinds of errors, too
            raise HttpError(f"messages: {error}", param="messages") from error
        if not ids:
            raise HttpError("prompt: got one of no tokens, wanted at least one", param="prompt")
        return ids

    def limit(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """Most tokens behind the prompt. Raises HttpError where the server or the model has fewer."""
        most, there = self.served.service.max_tokens, self.served.service.positions
        if max_tokens is not None and max_tokens > most:
            raise HttpError(
                f"max_tokens: got {max_tokens}, wanted at most {most} (this server's --max_tokens)", param="max_tokens"
            )
        wanted = 1 if max_tokens is None else max_tokens
        if there is not None and len(prompt) + wanted > there:
            raise HttpError(
                f"got {len(prompt)} prompt tokens and {wanted} to be drawn, wanted at most {there} positions together",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if max_tokens is not None:
            return max_tokens
        return most if there is None else min(most, there - len(prompt))

    # -- meanwhile

    def wait_for(self, put: Callable[[], None], futures: Sequence[Future], until: float) -> list:
        """The results of what `put` puts into the queue. Raises HttpError where there are none by `until`."""
        self.enqueue(put)
        done, late = wait(futures, max(0.0, until - time.monotonic()), FIRST_EXCEPTION)
        for future in late:
            future.cancel()
        found = self.results([future for future in futures if future in done])
        if late:
            raise HttpError(
                f"got {len(done)} of {len(futures)} completions within {self.served.timeout:g} s, wanted all (this "
                "server's --timeout)",
                status=504,
            )
        return found

    def enqueue(self, put: Callable[[], None]) -> None:
        """Put something into the queue. Raises HttpError where it is full, or has ended."""
        try:
            put()
        except QueueFull as error:
            raise HttpError(str(error), status=429, code="queue_full") from error
        except ServiceClosed as error:
            raise HttpError(str(error), status=503) from error

    def results(self, done: Sequence[Future]) -> list:
        """What futures that are done have come to. Raises HttpError where the server is ending."""
        errors = [error for future in done if (error := future.exception()) is not None]
        if any(isinstance(error, ServiceClosed) for error in errors):
            raise HttpError("the server is ending, wanted the request before", status=503)
        if errors:
            raise errors[0]
        return [future.result() for future in done]

    def scores(
        self, asked: GenerationBody, prompts: Sequence[list[int]], drawn: Sequence[DrawnRow], until: float
    ) -> list[TokenScores | None]:
        """Of every completion what a pass over the text finds, where something else than the sampler's is wanted."""
        wanted = asked.alternatives is not None and (asked.echo or asked.alternatives > 0)
        if not wanted:
            return [None] * len(drawn)
        temperature = asked.temperature or 1.0  # greedy: log-probs are those of the plain softmax
        texts = []
        for prompt, row in zip(prompts, drawn, strict=True):
            ids, start = [*prompt, *row.tokens], 1 if asked.echo else len(prompt)
            texts.append(QueuedText(ScoredText(ids, start), temperature, asked.alternatives))
        return self.wait_for(partial(self.served.service.score, texts), [text.future for text in texts], until)

    # -- afterwards

    def choice(
        self, asked: GenerationBody, place: int, prompt: list[int], row: DrawnRow, scores: TokenScores | None
    ) -> Choice:
        """One completion, with its texts."""
        text = self.served.tokenizer.decode(row.tokens, skip_special_tokens=True)
        given = asked.prompts[place]
        echoed = given if isinstance(given, str) else self.served.tokenizer.decode(given)
        return Choice(
            text=text if asked.keep_stop else cut_at_stop(text, self.stop(asked)),
            echoed=echoed if asked.echo else "",
            prompt=prompt,
            tokens=row.tokens,
            stopped=row.stopped,
            scored=None if asked.alternatives is None else self.placed_tokens(asked, prompt, row, scores),
        )

    def placed_tokens(
        self, asked: GenerationBody, prompt: list[int], row: DrawnRow, scores: TokenScores | None
    ) -> list[PlacedToken]:
        """The tokens that are shown. A drawn one has the log-prob that it was drawn with."""
        ids = [*prompt, *row.tokens] if asked.echo else row.tokens
        logp: list[float | None] = [*row.logp]
        top: list = [None] * len(ids)
        if asked.echo:
            logp = [None, *scores.logp[: len(prompt) - 1], *row.logp]
        if scores is not None:
            top = ([None] if asked.echo else []) + scores.top
        placed = []
        for token, value, likeliest in zip(ids, logp, top, strict=True):
            named = None
            if likeliest is not None:
                named = [(self.token_text(each), value if each == token else found) for each, found in likeliest]
            placed.append(PlacedToken(self.token_text(token), value, named))
        return placed

    def token_text(self, token: int) -> str:
        """The text of a token alone."""
        return self.served.tokenizer.decode([token])
