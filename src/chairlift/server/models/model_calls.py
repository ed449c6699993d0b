"""ModelCalls: gives calls to the models that they name, and remembers which calls waited for a model to be loaded."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from chairlift.errors import ChairliftError, DeadlineError
from chairlift.server.access.call import Call
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.served_model import ModelLease, ServedModel

MAX_WAITS: Final = 4096


@dataclass(slots=True)
class ModelWait:
    """The wait of a call until its model was loaded.

    Attributes:
        began, ended: in seconds of the monotonic clock; `ended` is None while it waits.
        error: why the call ended without a model.
    """

    call_id: str
    tenant: str
    model: ServedModel
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    error: str | None = None

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    def describe(self) -> str:
        """One sentence with the reason of the wait."""
        name = self.model.name
        if self.error is not None:
            return f"The call waited {self.seconds:.1f} s for model {name!r}, and ended with: {self.error}"
        if self.ended is not None:
            return f"The call waited {self.seconds:.1f} s until model {name!r} was loaded."
        if self.model.state == "loading":
            return f"The call has waited for {self.seconds:.1f} s: model {name!r} is being loaded."
        if self.model.is_leaving:
            return f"The call has waited for {self.seconds:.1f} s: model {name!r} makes room for another one first."
        return f"The call has waited for {self.seconds:.1f} s: model {name!r} waits for its turn and for memory."


class ModelCalls:
    """Gives calls the models that they name. A call waits until its model is loaded."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._waits: OrderedDict[str, ModelWait] = OrderedDict()

    def waiting(self) -> list[ModelWait]:
        """The calls that wait now, the oldest first."""
        return [wait for wait in self._waits.values() if wait.ended is None]

    def find_wait(self, call_id: str) -> ModelWait | None:
        """The wait of a call; None if it did not wait for a model, or too long ago."""
        return self._waits.get(call_id)

    @asynccontextmanager
    async def lease(self, id_prefix: str, body: object, call: Call) -> AsyncIterator[ModelLease]:
        """Use the model that a body selects, after it has been loaded.

        Args:
            id_prefix: the beginning of the id of the call, if it waits.
            body: a valid body, which may have the fields `model`, `request_id` and `timeout`.

        Raises:
            UnknownModelError, ModelNotAllowedError, ModelLoadFailedError: the model cannot be used.
            DeadlineError: the timeout of the call has passed before the model was loaded.
        """
        model = self._manager.find(getattr(body, "model", None), call.key)
        lease = self._manager.try_acquire(model) or await self._wait(model, id_prefix, body, call)
        try:
            yield lease
        finally:
            lease.close()

    async def _wait(self, model: ServedModel, id_prefix: str, body: object, call: Call) -> ModelLease:
        request_id = getattr(body, "request_id", None) or uuid.uuid4().hex
        call.request_id = request_id
        wait = ModelWait(f"{id_prefix}{request_id}", call.key.tenant, model)
        self._waits[wait.call_id] = wait
        while len(self._waits) > MAX_WAITS:
            self._waits.popitem(last=False)
        timeout: float | None = getattr(body, "timeout", None)
        if timeout is not None and timeout <= 0:
            timeout = None
        try:
            async with asyncio.timeout(timeout):
                return await self._manager.acquire(model)
        except TimeoutError:
            wait.error = f"the timeout of {timeout:g} s has passed while model {model.name!r} was not loaded"
            raise DeadlineError(wait.error) from None
        except ChairliftError as error:
            wait.error = error.text(is_admin=call.key.is_admin)
            raise
        except BaseException as error:
            wait.error = str(error) or "the client disconnected"
            raise
        finally:
            wait.ended = time.monotonic()
            call.model_seconds = wait.seconds
