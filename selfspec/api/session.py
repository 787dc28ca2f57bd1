"""A conversation: each turn starts from what the earlier ones left in the caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Unpack

from selfspec.api.request import Request
from selfspec.api.stream import Generation, Stream
from selfspec.api.text import Prompt
from selfspec.config import GenerateOptions
from selfspec.decoding.drafters import DraftCache
from selfspec.decoding.sequence import DecodeState, shared_prefix
from selfspec.model.kv_store import Lease

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator


class Session:
    """Turns of one conversation; what earlier turns left in the caches is not run again.

    Survives an error in the middle of a round and a stream that was stopped.
    """

    def __init__(self, speculator: Speculator) -> None:
        """Empty at first."""
        self._speculator = speculator
        self._state: DecodeState | None = None
        self._pinned: tuple[bool, int] | None = None
        self._stream: Stream | None = None
        second = speculator.draft_model
        size = speculator.backbone.vocab_size
        self._draft_cache = None if second is None else DraftCache(second, size)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """The answer to `prompt`: the whole conversation so far and the new turn."""
        return self.stream(prompt, **options).drain()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """The same answer, piece by piece. Ends the stream of an earlier turn."""
        if self._stream is not None:
            self._stream.close()
        engine = self._speculator
        request, speculation, streamer = engine.request(prompt, options)
        request.require_one()
        shapes = (bool(speculation.pinned), speculation.pinned_rows)
        lease = self._prefix(request) if shapes == self._pinned else None
        self._pinned = shapes
        self._state = engine.state(request, speculation, 0, lease)
        self._stream = engine.start(
            request, speculation, 0, streamer, self._state, self._draft_cache
        )
        return self._stream

    def _prefix(self, request: Request) -> Lease | None:
        """The lease, cut back to what they share with the new prompt; at least one id is left."""
        if self._state is None or self._state.pad or request.pads[0]:
            return None
        self._state.lease.truncate(shared_prefix(self._state.ids[0], request.input_ids[0, :-1]))
        return self._state.lease
