"""AdapterSlots: gives each token of a batch the LoRA adapter of its request."""

from __future__ import annotations

import numpy as np

from chairlift.kernels.lora import LoraAdapters
from chairlift.outputs import NewRequest
from chairlift.worker.input_batch import InputBatch
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.step_extension import StepExtension


class AdapterSlots(StepExtension):
    """The slots of the adapters of the requests, which are in their rows."""

    def __init__(self, lora: LoraAdapters, rows: RequestRows) -> None:
        self._lora, self._rows = lora, rows

    def add(self, row: int, new: NewRequest) -> None:
        self._rows.lora_slots[row] = self._lora.slot_of(new.lora_id)

    def prepare(self, batch: InputBatch) -> None:
        num_tokens = np.diff(batch.token_end, prepend=0)
        self._lora.batch.set_slots(np.repeat(self._rows.lora_slots[batch.rows], num_tokens))
