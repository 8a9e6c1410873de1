"""What the routes share: the models, the store, who may do what, and requests turned into turns."""

import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from lm.errors import UserError
from lm.generation.sampling import Sampling
from serving.api.chat import Delta, Past, recognise
from serving.api.errors import ApiError, as_api_error
from serving.api.http import ClientGoneError
from serving.api.plan import Plan
from serving.api.schemas import AppendRequest, ChatRequest, CompletionRequest, Generation
from serving.api.turns import Attempt, Piece, Served, Turn, Turns, aside
from serving.auth import Keys, Tenant
from serving.config import Limits, ServeConfig
from serving.limits import Limiter
from serving.metrics import Metrics
from serving.sessions.base import BaseStore
from serving.sessions.errors import BusyError, StoreError
from serving.sessions.store import LOCAL, Session

LAST_SECONDS = 2.0
"""Before a replica that stops is killed, its streams are told how to go on."""
LONG_TEXT = 100_000
"""Characters from which on a text is tokenised in a thread."""


@dataclass
class Caller:
    """Who asks, and how."""

    tenant: str
    limits: Limits
    request: Request
    key: str | None = None
    retry: bool = False
    asks: tuple[Session, Attempt] | None = None
    """A turn of this session, once that is known."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the log line of this request says."""
        return self.request.state.facts


class Service:
    """One ingress."""

    def __init__(
        self, config: ServeConfig, store: BaseStore, models: Sequence[Served], limiter: Limiter, metrics: Metrics,
        keys: Keys | None = None,
    ) -> None:  # fmt: skip
        self.config, self.store, self.limiter, self.metrics, self.keys = config, store, limiter, metrics, keys
        self.models = {served.client.info.fingerprint: served for served in models}
        if len(self.models) < len(models):
            names = ", ".join(served.client.info.name for served in models)
            raise UserError(
                f"models {names}: two have the same weights; sessions belong to weights, so serve these under one name"
            )
        self.asked: float | None = None
        """When somebody last asked for this replica's health (perf_counter)."""
        self.turns = Turns(store, self.models, config.engine.lease, metrics)

    # --- who ---------------------------------------------------------------------------------------------------

    def tenant(self, key: str | None) -> Tenant:
        """Whose key it is; without keys everyone is the same tenant."""
        if self.keys is None:
            return Tenant(LOCAL)
        found = self.keys.tenant(key or "")
        if found is None:
            what = "no API key was given" if key is None else "this API key is not known"
            raise ApiError(401, "invalid_api_key", f"{what}; send one as `Authorization: Bearer pmi-...`")
        return found

    def caller(self, request: Request, key: str | None = None) -> Caller:
        """The caller of a request that has passed the front."""
        tenant: Tenant = request.state.tenant
        count = request.headers.get("x-stainless-retry-count", "0")
        limits = self.config.limits if tenant.limits is None else _joined(self.config.limits, tenant.limits)
        return Caller(tenant.id, limits, request, key, count.isdecimal() and len(count) < 6 and int(count) > 0)

    # --- models ------------------------------------------------------------------------------------------------

    def model(self, name: str | None) -> Served:
        """A served model by name or fingerprint (None: the first)."""
        for served in self.models.values():
            if served.open and name in (None, served.client.info.name, served.client.info.fingerprint):
                return served
        names = ", ".join(served.client.info.name for served in self.models.values() if served.open)
        raise ApiError(404, "model_not_found", f"model {name!r} is not served; there is {names or 'none'}", "model")

    def model_of(self, session: Session) -> Served:
        """The model of a session; 409 with the choices there are if it is gone."""
        served = self.models.get(session.settings.model)
        if served is not None:
            return served
        base = f"/v1/sessions/{session.id}"
        choices = [
            {"action": "export", "method": "GET", "path": f"{base}/memory"},
            {"action": "delete", "method": "DELETE", "path": base},
        ]
        if session.settings.keep_history:
            choices.insert(0, {"action": "migrate", "method": "POST", "path": f"{base}/migrate"})
        what = "migrate it to another model, export it or delete it" if session.settings.keep_history else (
            "export it or delete it (it cannot be migrated: its history was not kept)"
        )  # fmt: skip
        raise ApiError(
            409, "session_model_retired",
            f"session {session.id!r} belongs to model {session.settings.model}, which is not served any more; {what}",
            choices=choices,
        )  # fmt: skip

    # --- requests to turns -------------------------------------------------------------------------------------

    async def complete(self, caller: Caller, body: CompletionRequest, session_id: str | None) -> list[Turn]:
        """The turns of a completion: one, or without a session one for each prompt and choice."""
        session = await self.session(caller, body, session_id)
        known = await self._known(caller, body, "completion", session, body.expected_version)
        if known is not None:
            return [known]
        served = self.model(body.model) if session is None else self.model_of(session)
        given = body.prompt
        prompts: list[Any] = given if isinstance(given, list) and given and isinstance(given[0], str) else [given]
        count = len(prompts) * (body.n or 1)
        if count > 16:
            raise ApiError(400, "invalid_value", f"{len(prompts)} prompts with n={body.n}: at most 16 answers", "n")
        if session is not None and count != 1:
            raise ApiError(
                400, "invalid_value", f"{len(prompts)} prompts: a turn of a session has one; fork it for more", "prompt"
            )
        if caller.key is not None and count != 1:
            raise ApiError(400, "invalid_value", f"Idempotency-Key with {count} answers: only one can be kept", "Idempotency-Key")
        ids = [await self.encode(served, prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
        plans = [self._plan("completion", served, x, body, body.max_tokens, session, caller) for x in ids]
        return await self._start(caller, body, plans, session, body.logprobs, body.n or 1)

    async def chat(self, caller: Caller, body: ChatRequest, session_id: str | None) -> list[Turn]:
        """The turns of a chat completion."""
        session = await self.session(caller, body, session_id)
        known = await self._known(caller, body, "chat", session, body.expected_version)
        if known is not None:
            return [known]
        served = self.model(body.model) if session is None else self.model_of(session)
        template = self.config.chat
        past = Past()
        if session is not None and session.position:
            said = await aside(self.turns.said, session)
            if said is not None:
                response, text, stopped = said
                chat = Plan.of(response).chat
                if chat:
                    past = Past(chat["count"], chat["digest"], text, stopped)
        delta = recognise(template, body.messages, past, session is None or not session.position)
        ids = await self.encode(served, delta.text)
        if caller.key is not None and (body.n or 1) != 1:
            raise ApiError(
                400, "invalid_value", f"Idempotency-Key with n={body.n}: only one answer can be kept", "Idempotency-Key"
            )
        tokens = body.max_completion_tokens or body.max_tokens
        plan = self._plan("chat", served, ids, body, tokens, session, caller, tuple(template.stop), delta)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return await self._start(caller, body, [plan], session, logprobs, body.n or 1)

    async def append(self, caller: Caller, body: AppendRequest, session: Session) -> Turn:
        """Text that is only read into a session."""
        known = await self._known(caller, body, "append", session, body.expected_version)
        if known is not None:
            return known
        served = self.model_of(session)
        ids = await self.encode(served, body.text) if body.text is not None else tuple(body.ids or ())
        if not ids:
            raise ApiError(400, "invalid_value", "there is nothing to append", "text")
        self._check_ids(served, ids, caller)
        plan = Plan("append", session.settings.model, ids, 0, Sampling())
        await self.admit(caller, len(ids))
        await self.check_room(caller)
        attempt = self._attempt(caller, body, "append", session)
        return self.noted(await self.turns.start(plan, session, attempt, True, progress=body.stream), caller)

    async def _known(self, caller: Caller, body: Any, kind: str, session: Session | None, version: int | None) -> Turn | None:
        """The turn that this request has started before. If there is none, its session must be at the version it expects."""
        if session is None:
            return None
        found, attempt = None, self._attempt(caller, body, kind, session)
        if caller.key is not None or caller.retry:
            found = await aside(self.turns.known, session, attempt)
        if found is not None:
            turn = self.turns.join(found)
            await self.admit(caller, turn.left)
            return self.noted(turn, caller)
        caller.asks = session, attempt
        if version is not None and version != session.version:
            raise ApiError(
                409, "version_conflict",
                f"session {session.id!r}: version {version} was expected, it is at {session.version}; read it again",
                "expected_version", version=session.version,
            )  # fmt: skip
        if session.owner is not None:  # said at once: the engine would say it too, but only when a lane is free
            raise BusyError(f"session {session.id!r} is busy with another request; try again when it has ended", 1.0)
        return None

    @asynccontextmanager
    async def refusals(self, caller: Caller) -> AsyncIterator[None]:
        """Where a refused turn repeats the text of one that was made shortly before, OpenAI's client must not send it again by
        itself: as a retry it could not be told from one of that turn, and would get its answer."""
        try:
            yield
        except Exception as error:
            if caller.asks is None or caller.key is not None or isinstance(error, ClientGoneError):
                raise
            problem = as_api_error(error)
            if problem.code == "internal_error":
                raise
            with suppress(StoreError):
                found = await aside(self.turns.known, *caller.asks)
                problem.final = found is not None and found.id != caller.facts.get("response")
            raise problem from error

    def noted(self, turn: Turn, caller: Caller) -> Turn:
        caller.facts["response"] = turn.id
        return replace(turn, pieces=self._counted(turn, caller))

    async def session(self, caller: Caller, body: Generation, header: str | None) -> Session | None:
        """The session that a request names, at the version that it expects."""
        if body.session_id is not None and header is not None and body.session_id != header:
            raise ApiError(400, "invalid_value", f"session_id {body.session_id!r}, but X-Session-Id {header!r}", "session_id")
        id = body.session_id or header
        if id is None:
            if body.expected_version is not None:
                raise ApiError(400, "invalid_value", "expected_version needs a session_id", "expected_version")
            return None
        caller.facts["session"] = id
        session = await aside(self.store.get, caller.tenant, id)
        if (body.n or 1) != 1:
            raise ApiError(400, "invalid_value", f"n={body.n}: with a session there is one answer; fork it for more", "n")
        return session

    def _plan(
        self, kind: str, served: Served, ids: tuple[int, ...], body: Generation, tokens: int | None, session: Session | None,
        caller: Caller, stop: tuple[str, ...] = (), delta: Delta | None = None,
    ) -> Plan:  # fmt: skip
        self._check_ids(served, ids, caller)
        limit = caller.limits.max_tokens
        if tokens is not None and tokens > limit:
            raise ApiError(400, "invalid_value", f"max_tokens {tokens}: at most {limit} are allowed", "max_tokens")
        defaults: dict[str, Any] = {"temperature": self.config.temperature}
        if session is not None:
            defaults |= dict(session.settings.sampling) | {"seed": session.settings.seed}
        elif body.seed is None:
            defaults["seed"] = secrets.randbits(62)
        if body.seed is not None:
            defaults["seed"] = body.seed
        sampling = Sampling(**(defaults | body.sampling())).checked()
        chat = {} if delta is None else {"count": delta.count, "digest": delta.digest}
        chosen = tokens or min(self.config.max_tokens, limit)
        fingerprint = served.client.info.fingerprint
        return Plan(kind, fingerprint, ids, chosen, sampling, (*body.stops, *stop), ids[-16:], chat=chat)

    async def _start(
        self, caller: Caller, body: Generation, plans: list[Plan], session: Session | None, logprobs: int | None, n: int
    ) -> list[Turn]:
        attempt = self._attempt(caller, body, plans[0].kind, session)
        await self.admit(caller, sum(len(plan.prompt) + plan.tokens for plan in plans) * n)
        if session is not None or (len(plans) * n == 1 and (body.stream or caller.key is not None)):  # what is recorded
            await self.check_room(caller)
        if len(plans) * n == 1:
            turn = await self.turns.start(plans[0], session, attempt, bool(body.stream), logprobs=logprobs)
            turns = [turn]
            if turn.joined and caller.limits.tokens_per_minute is not None:
                charged = len(plans[0].prompt) + plans[0].tokens
                await self.limiter.give_back(caller.tenant, caller.limits, charged - turn.left)
        else:
            turns = [
                await self.turns.start(plan, None, attempt, False, logprobs=logprobs, choice=choice)
                for plan in plans
                for choice in range(n)
            ]
        return [self.noted(turn, caller) for turn in turns]

    def _attempt(self, caller: Caller, body: Any, kind: str, session: Session | None) -> Attempt:
        asked = body.model_dump(mode="json", exclude={"stream", "stream_options", "session_id", "user", "metadata"})
        text = json.dumps([kind, None if session is None else session.id, asked], sort_keys=True)
        return Attempt(caller.tenant, hashlib.sha256(text.encode()).hexdigest(), caller.key, caller.retry)

    async def encode(self, served: Served, text: str) -> tuple[int, ...]:
        """The ids of a text."""
        if len(text) < LONG_TEXT:
            return tuple(served.tokenizer.encode_prompt(text))
        return tuple(await aside(served.tokenizer.encode, text))

    def _check_ids(self, served: Served, ids: tuple[int, ...], caller: Caller) -> None:
        if len(ids) > caller.limits.prompt_tokens:
            raise ApiError(
                400, "prompt_too_long", f"a prompt of {len(ids):,} tokens: at most {caller.limits.prompt_tokens:,} are allowed; "
                "with a session it may be sent in parts", "prompt",
            )  # fmt: skip
        vocabulary = served.client.info.vocabulary
        if ids and max(ids) >= vocabulary:
            raise ApiError(400, "invalid_value", f"token id {max(ids)}: must be below {vocabulary}", "prompt")

    def leaving(self, began: float) -> bool:
        """Whether a stream that began then is about to be cut off, because this replica stops.

        Nothing tells a replica that it is draining, but Ray asks for its health only while it is not; a stream that began since
        was not sent to a replica that stops, so it is the controller that is silent.
        """
        scaling = self.config.scaling
        limit = max(scaling.drain - LAST_SECONDS, 3 * scaling.health_period)
        return (
            self.asked is not None
            and began < self.asked + scaling.health_period
            and time.perf_counter() - self.asked > limit
        )  # fmt: skip

    # --- limits and counting -----------------------------------------------------------------------------------

    async def admit(self, caller: Caller, tokens: int) -> None:
        """Take a request of so many tokens off the tenant's limits; 429 if there is not enough."""
        limits = caller.limits
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return
        refused = await self.limiter.take(caller.tenant, limits, tokens)
        if refused is not None:
            name, seconds = refused
            self.metrics("pmi_limited", tenant=caller.tenant, limit=name)
            allowed = getattr(limits, name)
            raise ApiError(
                429, "rate_limit_exceeded", f"{name}: {allowed:,} are allowed; try again in {seconds:.1f} s", retry=seconds
            )  # fmt: skip

    async def before_import(self, request: Request, size: int) -> None:
        """403 before the body of an import, of so many bytes (0: unknown), is read, if there is no room for it."""
        caller = self.caller(request)
        await self.check_room(caller)
        limit = caller.limits.stored_bytes
        if limit is not None and size > limit:  # whatever it replaces
            raise ApiError(403, "quota_exceeded", f"a file of {size:,} bytes: {limit:,} may be stored")

    async def check_room(self, caller: Caller, sessions: int = 0, size: int = 0) -> None:
        """403 if the tenant has used up its room, or has none for `size` more bytes, or would have too many sessions."""
        limits = caller.limits
        if limits.stored_bytes is None and (limits.sessions is None or not sessions):
            return
        usage = await aside(self.store.usage, caller.tenant)
        stored = usage.bytes + usage.response_bytes
        if limits.stored_bytes is not None and (stored >= limits.stored_bytes or stored + size > limits.stored_bytes):
            self.metrics("pmi_limited", tenant=caller.tenant, limit="stored_bytes")
            more = f" and {size:,} more were sent" if size > 0 else ""
            raise ApiError(
                403, "quota_exceeded", f"{stored:,} bytes are stored{more}, {limits.stored_bytes:,} are allowed; delete sessions"
            )
        if limits.sessions is not None and usage.sessions + sessions > limits.sessions:
            raise self._too_many(caller, usage.sessions)

    async def made(self, caller: Caller, session: Session) -> Session:
        """A session that was just made; taken back (403) if others, made at the same moment, have used up the room."""
        limit = caller.limits.sessions
        if limit is not None:
            usage = await aside(self.store.usage, caller.tenant)
            if usage.sessions > limit:
                await aside(self.store.delete, caller.tenant, session.id, session.version)
                raise self._too_many(caller, limit)
        return session

    def _too_many(self, caller: Caller, sessions: int) -> ApiError:
        self.metrics("pmi_limited", tenant=caller.tenant, limit="sessions")
        allowed = caller.limits.sessions
        return ApiError(403, "quota_exceeded", f"{sessions} sessions exist, {allowed} are allowed; delete some")

    async def _counted(self, turn: Turn, caller: Caller) -> AsyncGenerator[Piece]:
        """A turn's pieces, with their times and numbers noted."""
        info = self.models[turn.model].client.info
        last, count, begun, finished = 0.0, turn.had, False, False
        try:
            async with aclosing(turn.pieces) as pieces:
                async for piece in pieces:
                    now = time.perf_counter()
                    if piece.ids and not begun:
                        begun = True
                        self.metrics("pmi_first_token_seconds", now - caller.request.state.began, model=info.name)
                    elif piece.count > count and last:
                        self.metrics("pmi_token_seconds", (now - last) / (piece.count - count), model=info.name)
                    count, last, finished = max(count, piece.count), now, piece.finish is not None
                    yield piece
        except Exception as error:
            if begun:  # before the first token it is the request that fails, and is counted there
                self.note(as_api_error(error))
            raise
        finally:
            caller.facts.update(tokens_in=len(turn.plan.prompt), tokens_out=count, finished=finished)
            made = count - turn.had
            self.metrics("pmi_tokens_out", made, tenant=caller.tenant, model=info.name)
            if not turn.joined:
                self.metrics("pmi_tokens_in", len(turn.plan.prompt), tenant=caller.tenant, model=info.name)
            unused = turn.left - made
            if unused > 0 and caller.limits.tokens_per_minute is not None:
                await self.limiter.give_back(caller.tenant, caller.limits, unused)

    def note(self, error: ApiError) -> None:
        """Count an error."""
        self.metrics("pmi_errors", code=error.code)
        if error.status == 409:
            self.metrics("pmi_conflicts", code=error.code)


def _joined(default: Limits, own: Limits) -> Limits:
    return default.model_copy(update=own.model_dump(exclude_unset=True))
