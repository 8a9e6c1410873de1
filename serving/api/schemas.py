"""What clients send: pydantic models with examples, from which the OpenAPI document is made. Unknown fields are refused.

A misspelt `session_id` that is silently ignored would lose a conversation, so every field must be known; those of OpenAI that
change nothing here are accepted and ignored (`Ignored`), those that would change the answer are refused unless at their default.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from serving.sessions.records import MAX_RETAIN, MAX_TTL

LARGEST = 2**63 - 1
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}$"
Name = Annotated[str, StringConstraints(pattern=NAME)]
Version = Annotated[int, Field(ge=0, le=LARGEST)]
Position = Annotated[int, Field(ge=0, le=2**62)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=4_000_000)]


def _utf8(text: str) -> str:
    text.encode()  # JSON can spell half a surrogate pair, which is no text
    return text


Text = Annotated[str, AfterValidator(_utf8)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(_utf8)]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Ignored(BaseModel):
    """Fields of OpenAI that change nothing here."""

    user: Any = Field(None, description="Ignored.")
    metadata: Any = Field(None, description="Ignored.")
    store: Any = Field(None, description="Ignored.")
    service_tier: Any = Field(None, description="Ignored.")


class StreamOptions(Body):
    """Of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send one more event, with the number of tokens, before [DONE].")
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class SamplingFields(BaseModel):
    """How tokens are drawn; what is left out comes from the session, else from the service."""

    temperature: float | None = Field(None, ge=0, le=100, description="0 takes the likeliest token; higher is wilder.")
    top_p: float | None = Field(None, gt=0, le=1, description="Draw from the likeliest tokens of this probability.")
    top_k: int | None = Field(None, ge=0, le=2**31, description="Draw from the k likeliest tokens only (0: all).")
    min_p: float | None = Field(None, ge=0, le=1, description="Leave out tokens below this share of the likeliest one.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Above 1: the last 256 tokens come less.")

    def sampling(self) -> dict[str, Any]:
        """Those that were given."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Generation(Body, Ignored, SamplingFields):
    """What both kinds of completion take."""

    model: Text | None = Field(
        None, max_length=256, description="A served model's id; with a session, the session's own is used."
    )
    session_id: Name | None = Field(
        None, description="Append to this session's memory and go on from there (or the header X-Session-Id)."
    )
    expected_version: Version | None = Field(None, description="Refuse (409) unless the session is at this version.")
    stream: bool | None = Field(None, description="Send tokens as server-sent events as they come.")
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(None, description="Strings that end the text.")
    seed: int | None = Field(None, ge=0, le=LARGEST, description="Of the draws; the same request with it gives the same text.")
    n: int | None = Field(None, ge=1, le=16, description="Answers to generate; with a session only 1.")
    presence_penalty: float | None = Field(None, ge=0, le=0, description="Not supported: must be 0.")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="Not supported: must be 0.")
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(None, description="Not supported: must be empty.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(Generation):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "demo", "prompt": "The whale", "max_tokens": 40},
                {"model": "demo", "prompt": " and then", "session_id": "ada", "stream": True, "max_tokens": 40},
            ]
        }
    )
    prompt: Text | TokenIds | Annotated[list[Text], Field(min_length=1, max_length=16)] = Field(
        "", description="Text or token ids; a list of texts gives an answer to each. With a session: what is new."
    )
    max_tokens: int | None = Field(None, ge=1, le=LARGEST, description="Most tokens to generate.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Log-probabilities of so many of the likeliest tokens.")
    echo: Literal[False] | None = Field(None, description="Not supported.")
    best_of: Literal[1] | None = Field(None, description="Not supported: must be 1.")
    suffix: None = Field(None, description="Not supported.")


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=256)]
    name: Any = Field(None, description="Ignored.")
    refusal: None = None

    @property
    def text(self) -> str:
        """Its text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "demo", "messages": [{"role": "user", "content": "Call me"}], "max_tokens": 40}]
        }
    )
    messages: list[Message] = Field(
        min_length=1,
        max_length=4096,
        description="With a session: the new ones. Those it has may stand before them if unchanged.",
    )
    max_tokens: int | None = Field(None, ge=1, le=LARGEST, description="Most tokens to generate.")
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST, description="The same by its newer name.")
    logprobs: bool | None = Field(None, description="Whether to return log-probabilities.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Of how many of the likeliest tokens.")


class CreateSession(Body, SamplingFields):
    """POST /v1/sessions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "ada", "model": "demo", "temperature": 0.7}]})
    id: Name | None = Field(None, description="Its name; left out, one is made.")
    model: Text | None = Field(None, max_length=256, description="A served model's id (default: the first).")
    seed: int = Field(0, ge=0, le=LARGEST)
    keep_history: bool = Field(False, description="Also keep every token ever read (grows): needed to move to another model.")
    retain: int = Field(1, ge=0, le=MAX_RETAIN, description="Old segment boundaries that can be gone back to.")
    ttl: float | None = Field(None, gt=0, le=MAX_TTL, description="Seconds after its last change until it may be removed.")


class AppendRequest(Body):
    """POST /v1/sessions/{id}/append."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "Call me Ishmael."}]})
    text: Text | None = None
    ids: TokenIds | None = None
    expected_version: Version | None = None
    stream: bool = Field(False, description="Send progress as server-sent events.")

    @model_validator(mode="after")
    def _one(self) -> "AppendRequest":
        if (self.text is None) == (self.ids is None):
            raise ValueError("give either text or ids")
        return self


class ForkRequest(Body):
    """POST /v1/sessions/{id}/fork."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "ada-2"}]})
    id: Name | None = Field(None, description="Name of the new session; left out, one is made.")
    position: Position | None = Field(None, description="Up to here (default: all).")


class RollbackRequest(Body):
    """POST /v1/sessions/{id}/rollback."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})
    position: Position | None = Field(None, description="A retained position (default: the start of the last turn).")
    expected_version: Version | None = None


class MigrateRequest(Body):
    """POST /v1/sessions/{id}/migrate."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "demo"}]})
    model: Text = Field(max_length=256, description="The model to read the kept history under.")
    expected_version: Version | None = None


# --- answers -------------------------------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


class SessionObject(BaseModel):
    """A session."""

    id: str
    object: Literal["session"] = "session"
    model: str | None = Field(description="The served model it belongs to; null where that is not served any more.")
    fingerprint: str
    version: int
    position: int = Field(description="Tokens read so far.")
    turn: int = Field(description="Where the last turn started.")
    boundary: int
    tail: int = Field(description="Tokens that are read again to resume it.")
    retained: list[list[int]] = Field(description="Positions that can be gone back to, as ranges.")
    bytes: int
    busy: bool
    seed: int
    sampling: dict[str, Any]
    keep_history: bool
    parent: str | None
    created: int
    updated: int
    expires: int | None


class SessionList(BaseModel):
    """Some sessions."""

    object: Literal["list"] = "list"
    data: list[SessionObject]
    has_more: bool
    next: str | None = Field(description="Give this as `after` for the next ones.")


class Deleted(BaseModel):
    """A session is gone."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


class ModelObject(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pmi"
    fingerprint: str
    segment: int
    vocabulary: int


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class SessionMark(BaseModel):
    """Where a session stands after an answer."""

    id: str
    version: int | None
    position: int


class UsageObject(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    replayed_tokens: int = Field(0, description="Read again to resume the session: at most a segment.")


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: UsageObject
    seed: int
    session: SessionMark | None = None


class ChatCompletion(Completion):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"  # type: ignore[assignment]


class Appended(BaseModel):
    """The answer of append."""

    object: Literal["session.appended"] = "session.appended"
    id: str
    session: SessionMark
    usage: UsageObject
