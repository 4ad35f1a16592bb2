"""The bodies of requests: what the endpoint reads, what has no effect, and what it refuses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from parallel_models import SamplingOptions
from rl_train.gateway.errors import ApiError, invalid, unsupported

# Fields that change no token, in all dialects.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"}
_WITHOUT_EFFECT |= {"prompt_cache_retention", "priority", "cache_salt", "skip_special_tokens", "detokenize"}
_WITHOUT_EFFECT |= {"routed_experts_prompt_start", "cache_control", "inference_geo"}
# Fields that are accepted with these values alone, which are the same as no value. None is no value in all fields.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("functions", "bad_words", "mcp_servers"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "output_config", "reasoning"), ({},)),
    **dict.fromkeys(("parallel_tool_calls", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("echo", "add_special_tokens", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("continue_final_message", "background", "thread"), (False,)),
    **dict.fromkeys(("prompt_logprobs", "structured_outputs", "reasoning_effort", "features", "chat_template"), ()),
    **dict.fromkeys(("kv_transfer_params", "container", "context_management", "conversation"), ()),
    **dict.fromkeys(("max_tool_calls", "prompt"), ()),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "function_call": ("none", "auto"),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
}

# The fix for fields about thoughts, in place of a value that is accepted.
_OF_THOUGHTS = ("reasoning", "reasoning_effort", "thinking")
_DECIDES = "leave it out: the chat template decides whether the policy thinks, and max_new_tokens for how long"

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
Ids = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]


class Sampled(BaseModel):
    """How a client asks for tokens to be drawn."""

    model_config = ConfigDict(extra="forbid")

    n: Annotated[Count, Field(le=128)] | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Share | None = None
    max_tokens: Count | None = None
    seed: Annotated[int, Field(strict=True)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: Flag = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self, sampling: SamplingOptions) -> list[str]:
        """Return the options of this request that the run overrides, as it draws all tokens in one way.

        Raises:
            ApiError: The tokens that end a response are not those of the run.
        """
        if self.ignore_eos or not {*(self.stop_token_ids or ())} <= {*sampling.stop_ids}:
            ends = list(sampling.stop_ids)
            raise unsupported(
                "stop_token_ids",
                f"the run ends responses at the tokens {ends}; leave out stop_token_ids and ignore_eos",
            )
        run: dict[str, Any] = {
            "temperature": (sampling.temperature,),
            "top_p": (sampling.top_p,),
            "top_k": (sampling.top_k, 0, -1) if sampling.top_k is None else (sampling.top_k,),
            "min_p": (sampling.min_p,),
        }
        values = {name: getattr(self, name) for name in run}
        return [name for name, value in values.items() if value is not None and value not in run[name]]


class StreamOptions(BaseModel):
    """The options of a stream: whether it ends with the usage, and whether it is padded."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Flag = False
    include_obfuscation: Flag = False


class Named(Sampled):
    """A request that names the model."""

    model: str
    stream: Flag | None = None
    stream_options: StreamOptions | None = None


class Answered(Named):
    """A request for completions; `return_token_ids` and `return_tokens_as_token_ids` are vLLM's."""

    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None


class ChatBody(Answered):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    max_completion_tokens: Count | None = None
    logprobs: Flag | None = None


class ResponsesBody(Named):
    """The body of `/v1/responses`."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    max_output_tokens: Count | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    n: Literal[1] | None = None


class MessagesBody(Named):
    """The body of Anthropic's `/v1/messages`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Count
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    n: Literal[1] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """See `Sampled`."""
        return super().stops + tuple(self.stop_sequences or ())


class CompletionBody(Answered):
    """The body of `/v1/completions`: one prompt, as a text or as token ids."""

    prompt: Annotated[str, Field(min_length=1)] | Ids
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


class GenerateParameters(Sampled):
    """The field "sampling_params" of `GenerateBody`."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateBody(BaseModel):
    """The body of vLLM's `/inference/v1/generate`."""

    model_config = ConfigDict(extra="forbid")

    token_ids: Ids
    sampling_params: dict[str, Any]
    model: str | None = None
    stream: Literal[False] | None = None


class RewardBody(BaseModel):
    """The body of `/v1/reward`: a number that is finite in fp32."""

    reward: Annotated[Number, Field(ge=-3e38, le=3e38)]


Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body], values: Any, place: str = "") -> Body:
    """Return a body from JSON values.

    Args:
        kind: The class of the body.
        values: The values.
        place: The field of a request that has the values, with a dot; empty for the request itself.

    Raises:
        ApiError: A field is unknown, has a wrong value, or asks for what the endpoint does not offer.
    """
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(values).__name__}")
    values = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT and value is not None}
    for name in [name for name in values if name in _NEUTRAL and name not in kind.model_fields]:
        value = values.pop(name)
        if isinstance(value, dict):
            value = {key: entry for key, entry in value.items() if entry is not None}
        if value not in _NEUTRAL[name]:
            allowed = "".join(f"give {neutral!r}, or " for neutral in _NEUTRAL[name])
            fix = _DECIDES if name in _OF_THOUGHTS else f"{allowed}leave it out"
            raise unsupported(place + name, f"{place}{name}={value!r:.100} is not offered here; {fix}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        mistake, *further = error.errors()
        name = place + ".".join(map(str, mistake["loc"][:1]))
        if mistake["type"] == "missing":
            raise invalid(name, f"{name} is missing") from None
        if mistake["type"] == "extra_forbidden":
            message = f"{name} is no field that this endpoint knows; leave it out"
            raise ApiError(400, message, name, "unknown_parameter") from None
        # A field of several types has a message for each.
        messages = [mistake["msg"], *(other["msg"] for other in further if other["loc"][:1] == mistake["loc"][:1])]
        shown = "; or ".join(dict.fromkeys(messages))
        raise invalid(name, f"{name}={values[mistake['loc'][0]]!r:.100}: {shown}") from None
