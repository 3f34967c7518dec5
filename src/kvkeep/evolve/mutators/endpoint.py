"""Any server that speaks OpenAI's chat completions: a hosted one, Ollama, vLLM, llama.cpp, `transformers serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from kvkeep.evolve.mutators.prompting import Prompt
from kvkeep.evolve.mutators.protocol import MutatorError
from kvkeep.evolve.mutators.spend import Spend, estimated_tokens

if TYPE_CHECKING:
    import openai

KEY = "OPENAI_API_KEY"
BASE_URL = "OPENAI_BASE_URL"


@dataclass(frozen=True)
class Options:
    """Whom to ask, and how.

    Attributes:
        model: its name, as the server knows it.
        base_url: of the server, such as http://localhost:11434/v1; None for $OPENAI_BASE_URL, or OpenAI's own.
        temperature: of the answers; None leaves it to the server.
        max_tokens: of one answer, thinking included.
        max_tokens_name: how the server calls that; the newest models of OpenAI know `max_completion_tokens` only.
        timeout: seconds to wait for an answer, before it is asked for again.
        retries: how often it is asked for again after a timeout, a lost connection, or the status 408, 409, 429 or 5xx:
            after what `Retry-After` says, else after 0.5 s, doubled each time up to 8 s, less a random part.
        seeded: send a seed, drawn anew for each request, so that a server that heeds it repeats its answers.
        extra: more for the body of each request, such as {"reasoning_effort": "low"}.
    """

    model: str
    base_url: str | None = None
    temperature: float | None = 0.8
    max_tokens: int = 4096
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    timeout: float = 300.0
    retries: int = 4
    seeded: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        text: of the answer; empty where there is none.
        tokens: of prompt and completion, as the server says; estimated where it does not.
        cut_off: it ended because max_tokens were reached.
        failure: why there is no answer, in a word: timeout, connection, rate_limit, server_error, bad_request or
            bad_response; empty if there is one.
        note: the failure in words.
    """

    text: str = ""
    tokens: int = 0
    cut_off: bool = False
    failure: str = ""
    note: str = ""


class Endpoint:
    """Asks a server, several threads at a time if need be, within a spend.

    The key comes from the environment, `OPENAI_API_KEY`; servers of one's own take any.

    Args:
        options: whom to ask, and how.
        spend: what all requests together may take.

    Raises:
        MutatorError: the package `openai` is missing; no key for OpenAI's own server.
    """

    def __init__(self, options: Options, spend: Spend) -> None:
        self._openai = _import_openai()
        base_url = options.base_url or os.environ.get(BASE_URL) or None
        key = os.environ.get(KEY)
        if not key and base_url is None:
            raise MutatorError(
                expected=f"a base URL, or ${KEY} for OpenAI's own server",
                received="neither",
                remedy="name a server, such as http://localhost:11434/v1, or set the key",
            )
        self._options, self._spend = options, spend
        self._where = urlsplit(base_url).netloc if base_url else "api.openai.com"
        self._client = self._openai.OpenAI(
            api_key=key or "none", base_url=base_url, timeout=options.timeout, max_retries=options.retries
        )

    def ask(self, prompt: Prompt, seed: int) -> Answer:
        """An answer, or why there is none; it is not said to be any good.

        Raises:
            SpendLimitReached: it may take more tokens than are left.
            MutatorError: the server refuses the key, or does not know the model: asking again is of no use.
        """
        options = self._options
        asked = estimated_tokens(prompt.system + prompt.user)
        most = asked + options.max_tokens
        self._spend.reserve(most)
        used = 0
        try:
            answer = self._ask(prompt, seed, asked)
            used = answer.tokens
        finally:
            self._spend.settle(most, used)
        return answer

    def _ask(self, prompt: Prompt, seed: int, asked: int) -> Answer:
        options, sdk = self._options, self._openai
        optional: dict[str, Any] = {options.max_tokens_name: options.max_tokens}
        if options.temperature is not None:
            optional["temperature"] = options.temperature
        if options.seeded:
            optional["seed"] = seed
        try:
            completion = self._client.chat.completions.create(
                model=options.model,
                messages=[{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}],
                extra_body=options.extra or None,
                **optional,
            )
        except (sdk.AuthenticationError, sdk.PermissionDeniedError, sdk.NotFoundError) as error:
            raise self._refused(error) from error
        except sdk.APITimeoutError:
            most = asked + options.max_tokens  # it may have worked all the time that we waited in vain
            return Answer("", most, failure="timeout", note=f"{self._where}: no answer within {options.timeout:g} s")
        except sdk.APIConnectionError as error:
            return Answer(failure="connection", note=f"{self._where}: {error.__cause__ or error}")
        except sdk.RateLimitError as error:
            return Answer(failure="rate_limit", note=f"{self._where}: {_short(error)}")
        except sdk.APIStatusError as error:
            failure = "server_error" if error.status_code >= 500 else "bad_request"
            return Answer(failure=failure, note=f"{self._where}: {_short(error)}")
        except (sdk.OpenAIError, ValueError) as error:  # a body that is no JSON is a ValueError
            return Answer(failure="bad_response", note=f"{self._where}: {type(error).__name__}: {_short(error)}")
        return self._read(completion, asked)

    def _read(self, completion: Any, asked: int) -> Answer:
        """The SDK does not check what a server sends: any part may be missing, or be something else."""
        choices = getattr(completion, "choices", None)
        choice = choices[0] if isinstance(choices, list) and choices else None
        content = getattr(getattr(choice, "message", None), "content", None)
        text = content if isinstance(content, str) else ""
        tokens = getattr(getattr(completion, "usage", None), "total_tokens", None)
        if not isinstance(tokens, int) or tokens < 1:
            tokens = asked + estimated_tokens(text)
        if choice is None:
            return Answer(tokens=tokens, failure="bad_response", note=f"{self._where}: a completion without choices")
        return Answer(text, tokens, cut_off=getattr(choice, "finish_reason", None) == "length")

    def _refused(self, error: openai.APIStatusError) -> MutatorError:
        return MutatorError(
            expected=f"an answer of {self._options.model!r} at {self._where}",
            received=f"status {error.status_code}, {_short(error)}",
            remedy=f"check the model's name, the base URL (it usually ends in /v1) and ${KEY}",
        )


def _import_openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MutatorError(
            expected="the package openai, to ask a language model",
            received=f"{error}",
            remedy='pip install "kvkeep[evolve]"; the mutator `grammar` needs no language model',
        ) from error
    return openai


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + " [...]"
