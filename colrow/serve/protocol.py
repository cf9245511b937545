"""Protocol: OpenAI's request bodies, checked, as requests to the engine. Fields that would change the answer and are not supported are
refused; others (`user`, `metadata`) are ignored."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError
from pydantic_core import PydanticCustomError

from ..engine.prompts import check_text, encode, has_template
from ..engine.request import Request
from ..engine.settings import Sampling
from ..errors import UserError
from .messages import Ready

MOST_CHOICES = 128
MOST_LOGPROBS = 20


class Refused(Exception):
    """A request that cannot be answered: HTTP status, words, and OpenAI's `type`, `param` and `code`."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")


def _no_bool(value: Any) -> Any:
    """`value`, unless it is true or false, which are numbers to Python and none to the API."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "true and false are no numbers")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]


class _Body(BaseModel):
    """What chat and plain completions share. `extra` fields are looked at by `_refuse_unsupported`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    logit_bias: dict[int, Float] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = False

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Int | None = Field(None, ge=0)
    max_completion_tokens: Int | None = Field(None, ge=0)
    logprobs: bool | None = False
    top_logprobs: Int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class TextBody(_Body):
    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    max_tokens: Int | None = Field(16, ge=0)
    echo: bool | None = False
    logprobs: Int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: Int | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that are not supported, and the values that ask for nothing
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "json_schema"), (None,)
    ),
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids"), (None, [])),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "truncate_prompt_tokens": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
}


def parse(kind: type[_Body], data: Any) -> Any:
    """`data` as a `kind`. Refused, naming the field, where it is none."""
    if not isinstance(data, dict):
        raise Refused("the body must be a JSON object")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise Refused(f"{param or 'the body'}: {first['msg']}", param=param) from None
    for name, value in (body.model_extra or {}).items():
        if value not in NEUTRAL.get(name, (value,)):
            only = "" if name not in ("response_format", "tool_choice") else f"; without {name} the answer is plain text"
            raise Refused(f"{name} is not supported{only}", param=name, code="unsupported_parameter")
    if isinstance(body, TextBody) and body.best_of not in (None, body.n):
        raise Refused("best_of is not supported beyond n", param="best_of", code="unsupported_parameter")
    return body


def chat_prompt(body: ChatBody, tokenizer: Any) -> list[int]:
    """The conversation's token ids."""
    if not has_template(tokenizer):
        raise Refused("the model has no chat template; use /v1/completions", param="messages")
    messages = [{**message, "content": _content(message, at)} for at, message in enumerate(body.messages)]
    try:
        return encode(tokenizer, messages)
    except UserError as error:
        raise Refused(str(error), param="messages") from None


def _content(message: dict[str, Any], at: int) -> str:
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise Refused(f"messages[{at}] needs a role", param="messages")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise Refused(f"messages[{at}]: the content must be text", param="messages")
    return "".join(part["text"] for part in parts)


def text_prompts(body: TextBody, tokenizer: Any) -> list[list[int]]:
    """The prompts' token ids: one or several texts, or one or several lists of ids."""
    given: Any = body.prompt
    prompts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not prompts:
        raise Refused("there is no prompt", param="prompt")
    try:
        return [list(tokenizer(check_text(text))["input_ids"]) if isinstance(text, str) and text else list(text) for text in prompts]
    except UserError as error:
        raise Refused(str(error), param="prompt") from None


def requests(body: ChatBody | TextBody, prompts: Sequence[Sequence[int]], ready: Ready, seconds: float) -> list[Request]:
    """`n` requests for each prompt, in order. Without a seed each request gets one of its own; the choices of one differ by one.

    Refused for prompts that are empty, too long (no room for one new token where one is wanted) or have ids that the model has not.
    """
    limit, vocab = ready.context, ready.vocab
    if ready.starts and isinstance(body, TextBody) and body.echo and body.logprobs is not None:
        raise Refused("this model reads prompts with an encoder, so their tokens have no log-probabilities", param="echo")
    wanted = body.max_completion_tokens if isinstance(body, ChatBody) and body.max_completion_tokens is not None else body.max_tokens
    if len(prompts) * body.n > MOST_CHOICES * 8:
        raise Refused(f"at most {MOST_CHOICES * 8} sequences a request", param="n")
    out = []
    for ids in prompts:
        if not ids:
            raise Refused("the prompt is empty", param="prompt" if isinstance(body, TextBody) else "messages")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise Refused(f"token ids must lie in [0, {vocab})", param="prompt")
        room = ready.room(len(ids))
        if room < 0 or (room == 0 and wanted != 0):
            words = f"the model's maximum context length is {limit} tokens, and the prompt has {len(ids)}"
            raise Refused(words + ("" if room < 0 else ", which leaves no room for an answer"), code="context_length_exceeded")
        most = room if wanted is None else min(wanted, room)
        try:
            request = _request(body, tuple(ids), most, vocab, seconds)
        except UserError as error:
            raise Refused(str(error)) from error
        out += [replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + at)) for at in range(body.n)]
    return out


def _request(body: ChatBody | TextBody, ids: tuple[int, ...], most: int, vocab: int, seconds: float) -> Request:
    given = {"temperature": 1.0 if body.temperature is None else body.temperature}
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    given |= {name: value for name in names if (value := getattr(body, name)) is not None}
    given["top_k"] = max(int(given.get("top_k", 0)), 0)  # -1 is what some clients send for no limit
    seed = secrets.randbits(32) if body.seed is None else body.seed
    bias = tuple((body.logit_bias or {}).items())
    if any(not 0 <= token < vocab for token, _ in bias):
        raise Refused(f"logit_bias: token ids must lie in [0, {vocab})", param="logit_bias")
    if isinstance(body, ChatBody):
        logprobs, prompt_logprobs = ((body.top_logprobs or 0) if body.logprobs else None), None
    else:
        logprobs, prompt_logprobs = body.logprobs, body.logprobs if body.echo else None
    return Request(
        id=0,
        ids=ids,
        sampling=Sampling(**given, seed=seed),  # type: ignore[arg-type]  # checked by Sampling
        max_new_tokens=most,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seconds=seconds,
    )
