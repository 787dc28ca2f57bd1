"""A conversation: each turn starts from what the earlier ones left in the caches."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import Unpack

from selfspec.api.stream import Call, Generation, Stream
from selfspec.api.text import Prompt
from selfspec.config import GenerateOptions
from selfspec.decoding.engine import Engine
from selfspec.decoding.prefix import common
from selfspec.decoding.runtime import Asked, Runtime
from selfspec.decoding.sequence import DecodeState
from selfspec.model.kv_store import Lease


class Session:
    """Turns of one conversation; what earlier turns left in the caches is not run again.

    Survives an error in the middle of a round and a stream that was stopped.
    """

    def __init__(self, runtime: Runtime, call: Callable[[Prompt, GenerateOptions], Call]) -> None:
        """Empty at first; `call` sorts what a turn asks for."""
        self._runtime = runtime
        self._call = call
        self._state: DecodeState | None = None
        self._pinned: tuple[bool, int] | None = None
        self._stream: Stream | None = None
        self._draft_cache = runtime.draft_cache()

    def __repr__(self) -> str:
        """How much it keeps."""
        kept = 0 if self._state is None else len(self._state.committed(0))
        return f"<Session: {kept} tokens so far>"

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """The answer to `prompt`: the whole conversation so far and the new turn."""
        return self.stream(prompt, **options).drain()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """The same answer, piece by piece. Ends the stream of an earlier turn."""
        if self._stream is not None:
            self._stream.close()
        call = self._call(prompt, options)
        asked = call.request.only()
        shapes = (bool(call.speculation.pinned), call.speculation.pinned_rows)
        lease = self._prefix(asked) if shapes == self._pinned else None
        self._pinned = shapes
        running = Engine(self._runtime).add(
            asked, call.speculation, lease=lease, draft_cache=self._draft_cache
        )
        self._state = running.state
        self._stream = call.stream(running)
        return self._stream

    def _prefix(self, asked: Asked) -> Lease | None:
        """The lease, cut back to what it shares with the new prompt; at least one id is left."""
        if self._state is None or self._state.pad or asked.pad:
            return None
        shared = common(self._state.committed(0), asked.ids[0, :-1].tolist())
        self._state.lease.truncate(shared)
        return self._state.lease
