"""ModelCalls: gives calls to the models that they name, and remembers which calls waited for a model to be loaded."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from chairlift.errors import ChairliftError, DeadlineError, RequestError
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


class ModelSelection(msgspec.Struct):
    """The fields of a body that select its model, which may have values of any type."""

    model: Any = None
    request_id: Any = None
    timeout: Any = None

    @classmethod
    def of(cls, body: object) -> ModelSelection:
        """The fields of a valid body."""
        return cls(*(getattr(body, name, None) for name in cls.__struct_fields__))


class ModelCalls:
    """Gives calls the models that they name. A call waits until its model is loaded."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._waits: OrderedDict[str, ModelWait] = OrderedDict()

    @property
    def needs_fields(self) -> bool:
        """Whether the model of a body must be known before the body is prepared in a worker."""
        return len(self._manager.models) > 1

    def waiting(self) -> list[ModelWait]:
        """The calls that wait now, the oldest first."""
        return [wait for wait in self._waits.values() if wait.ended is None]

    def find_wait(self, call_id: str) -> ModelWait | None:
        """The wait of a call; None if it did not wait for a model, or too long ago."""
        return self._waits.get(call_id)

    def check(self, body: object, lease: ModelLease, call: Call) -> None:
        """Raise UnknownModelError or ModelNotAllowedError if a body does not name the model of the lease."""
        name = getattr(body, "model", None)
        if self._manager.find(name, call.key) is not lease.model:
            raise RequestError(f"model={name!r:.100} is given twice with different values: remove one", "model")

    @asynccontextmanager
    async def lease(self, id_prefix: str, selection: ModelSelection, call: Call) -> AsyncIterator[ModelLease]:
        """Use the model that a call selects, after it has been loaded.

        Args:
            id_prefix: the beginning of the id of the call, if it waits.

        Raises:
            UnknownModelError, ModelNotAllowedError, ModelLoadFailedError: the model cannot be used.
            DeadlineError: the timeout of the call has passed before the model was loaded.
        """
        name = selection.model if isinstance(selection.model, str) else None
        model = self._manager.find(name, call.key)
        lease = self._manager.try_acquire(model) or await self._wait(model, id_prefix, selection, call)
        try:
            yield lease
        finally:
            lease.close()

    async def _wait(self, model: ServedModel, id_prefix: str, selection: ModelSelection, call: Call) -> ModelLease:
        request_id = selection.request_id if isinstance(selection.request_id, str) else uuid.uuid4().hex
        call.request_id = request_id
        wait = ModelWait(f"{id_prefix}{request_id}", call.key.tenant, model)
        self._waits[wait.call_id] = wait
        while len(self._waits) > MAX_WAITS:
            self._waits.popitem(last=False)
        timeout = selection.timeout if isinstance(selection.timeout, int | float) and selection.timeout > 0 else None
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


def read_selection(body: bytes) -> ModelSelection:
    """Read the fields that select the model from a JSON body, in time proportional to its size.

    Raises:
        RequestError: the body is not a JSON object, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(body, type=ModelSelection)
    except msgspec.ValidationError:
        raise RequestError("the request body must be a JSON object") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply: use fewer levels") from None
    except UnicodeDecodeError:
        raise RequestError("the request body is not valid JSON: it is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
