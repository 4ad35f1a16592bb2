"""`Rubric`: the file of a judge: the model that judges, the question about a response, and the score in its reply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import AfterValidator, BaseModel, Field, JsonValue, ValidationError, model_validator

from rl_train.options.fields import CONFIG, Count, Number
from rl_train.options.resolve import read_table
from rl_train.rewards.worker import Outcome, checked

# The name of a run's reference or teacher as a judge.
REFERENCE = "reference"
# Fields of a request that bound the tokens of a reply, in the protocol's order of age.
_LIMITS = ("max_tokens", "max_completion_tokens")
# The fields of a request that a model of the run takes, and the options of sampling.
_SAMPLING = dict.fromkeys(_LIMITS, "max_new_tokens") | {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")
}
# Values for a server alone.
_OF_SERVERS = ("key", "concurrent", "attempts")


def _pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must have one group, the score, and has {groups}")
    return text


def _url(text: str) -> str:
    _ = urlsplit(text).port  # ValueError for a wrong one
    if re.fullmatch(r"https?://[^/?#@]+(/[^?#]*)?", text) is None:
        raise ValueError(
            f"{text!r:.100} must be the base URL of a server, such as http://127.0.0.1:8000/v1; for a model of the run "
            f"leave url out, and give model the checkpoint folder or {REFERENCE!r}"
        )
    return text


def _template(text: str) -> Template:
    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text)
    except TemplateError as error:
        raise ValueError(f"must be a template of Jinja: {error}, line {getattr(error, 'lineno', 1)}") from None


def _checked_template(text: str) -> str:
    _template(text)
    return text


def _rising(bounds: list[float]) -> list[float]:
    if bounds[0] >= bounds[1]:
        raise ValueError(f"must be the lowest and the highest score, such as [0, 10], got {bounds}")
    return bounds


def _limited(values: dict[str, Any]) -> dict[str, Any]:
    if not values.keys() & set(_LIMITS):
        raise ValueError(f"must bound the tokens of a reply; add {' or '.join(_LIMITS)}")
    return values


class Rubric(BaseModel):
    """The values of a rubric's file; the text below a value says what it is.

    Templates have `prompt`, `response`, `answer` (the row's, where it has one) and `row`.
    """

    model_config = CONFIG

    url: Annotated[str, AfterValidator(_url)] | None = None
    """Base URL of a server that speaks OpenAI's protocol, such as http://127.0.0.1:8000/v1 (default: none)."""
    model: str
    """Name of the model at the server; without `url` a checkpoint folder, or "reference": the run's, or its teacher."""
    prompt: Annotated[str, AfterValidator(_checked_template)]
    """Template of the message to the judge."""
    system: Annotated[str, AfterValidator(_checked_template)] = ""
    """Template of a system message."""
    score: Annotated[str, AfterValidator(_pattern)]
    """Regular expression with one group; the group of the last match in a reply is the score."""
    range: Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(_rising)] | None = None
    """Lowest and highest score; the reward goes from 0 to 1 between them (default: the score is the reward)."""
    values: dict[str, Number] = Field(default_factory=dict)
    """Rewards of scores that are words, such as {correct = 1, wrong = 0}."""
    request: Annotated[dict[str, JsonValue], AfterValidator(_limited)] = Field(
        default_factory=lambda: dict[str, JsonValue](max_tokens=1024, temperature=0)
    )
    """Further fields of the request."""
    key: str = "OPENAI_API_KEY"
    """Environment variable with the key of the server."""
    concurrent: Count = 16
    """Maximum number of requests at a time."""
    attempts: Count = 4
    """Number of attempts where the server is busy, fails or is lost, with pauses of 1, 2, 4, ... seconds."""

    @model_validator(mode="after")
    def _of_the_run(self) -> Self:
        if self.url is not None:
            return self
        if unused := [name for name in _OF_SERVERS if name in self.model_fields_set]:
            raise ValueError(f"{', '.join(unused)} needs url, the server; a model of the run has no use for it")
        if refused := sorted(self.request.keys() - _SAMPLING.keys()):
            raise ValueError(f"request: a model of the run takes {', '.join(_SAMPLING)}, not {', '.join(refused)}")
        if self.request.keys() >= {*_LIMITS}:
            raise ValueError(f"request: {' and '.join(_LIMITS)} are the same limit; leave one of them out")
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the options with which a model of the run draws replies."""
        return {"temperature": 1.0} | {_SAMPLING[name]: value for name, value in self.request.items()}

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the rubric of a TOML or YAML file.

        Raises:
            ValueError: The file cannot be read, or a value is missing, unknown or wrong; names each.
        """
        try:
            return cls(**read_table(file))
        except ValidationError as error:
            mistakes = [f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()]
            raise ValueError(f"{file}: {'; '.join(mistakes)}".replace(": Value error, ", ": ")) from None

    @cached_property
    def _messages(self) -> list[tuple[str, Template]]:
        texts = {"system": self.system, "user": self.prompt}
        return [(role, _template(text)) for role, text in texts.items() if text]

    def body(self, prompt: Any, response: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request about a response.

        Raises:
            ValueError: A template uses a field that the row has not, or the checkpoint has no tokenizer.
        """
        if not isinstance(response, str):
            raise ValueError("judges read text, and the checkpoint has no tokenizer.json; copy that file beside it")
        values = {"answer": row["answer"]} if "answer" in row else {}
        try:
            messages = [
                {"role": role, "content": template.render(prompt=prompt, response=response, row=row, **values)}
                for role, template in self._messages
            ]
        except Exception as error:  # a template calls methods and filters of values
            raise ValueError(f"the rubric's template raised {type(error).__name__}: {error}") from None
        return {"model": self.model, "messages": messages, **self.request}

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row that the templates cannot read."""
        json.dumps(self.body("", "", row))

    def outcome(self, reply: str) -> Outcome:
        """Return the reward of a reply; an error where the reply has no score."""
        scores = re.findall(self.score, reply)
        if not scores:
            cut = "" if reply.strip() else ", perhaps since all tokens went into thoughts"
            return Outcome(0.0, f"got a reply without a score (score={self.score!r}){cut}: {reply!r:.200}")
        text = scores[-1].strip()
        outcome = checked(self.values.get(text, text))
        if outcome.error is not None:
            return Outcome(0.0, f"got the score {text!r:.50}, which is neither a number nor one of the rubric's values")
        if self.range is None or text in self.values:
            return outcome
        low, high = self.range
        if not low <= outcome.reward <= high:
            return Outcome(0.0, f"got the score {text}, which is outside of the rubric's range {low:g} to {high:g}")
        return Outcome((outcome.reward - low) / (high - low))
