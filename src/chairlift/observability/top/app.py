"""The terminal application: status of the engine, KV memory, unfinished requests and an explanation."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Footer, Static

from chairlift.observability.top.source import Snapshot, Source, SourceError
from chairlift.observability.top.text import COLUMNS, memory_bar, request_row, status_line

HINT = "Press Enter on a request to explain its wait."


class TopApp(App[None]):
    """A terminal application that reads and shows snapshots of a server.

    Args:
        interval: seconds between two snapshots.
    """

    CSS = """
    #status { height: auto; padding: 0 1; text-style: bold; }
    #memory { height: 2; margin: 1 1; }
    #requests { height: 1fr; }
    #why { height: auto; max-height: 12; padding: 0 1; border-top: solid $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("escape", "deselect", "Close explanation")]

    def __init__(self, source: Source, interval: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval = interval
        self._last: tuple[float, int] | None = None
        self._selected: str | None = None

    def compose(self) -> ComposeResult:
        yield Static("connecting ...", id="status", markup=False)
        yield Static("", id="memory", markup=False)
        yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
        yield Static(HINT, id="why", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        self.table.add_columns(*COLUMNS)
        self.table.focus()
        self.set_interval(self._interval, self.refresh_view)
        await self.refresh_view()

    async def on_unmount(self) -> None:
        await self._source.close()

    @property
    def table(self) -> DataTable[str]:
        return self.query_one("#requests", DataTable)

    async def refresh_view(self) -> None:
        """Read one snapshot and show it."""
        try:
            snapshot = await self._source.snapshot()
            lines = None if self._selected is None else await self._source.explain(self._selected)
        except SourceError as error:
            self.query_one("#status", Static).update(str(error))
            return
        self._show(snapshot)
        if lines is not None:
            self.query_one("#why", Static).update("\n".join([str(self._selected), *lines]))

    def _show(self, snapshot: Snapshot) -> None:
        engine = snapshot.engine
        self.query_one("#status", Static).update(status_line(engine, self._steps_per_s(engine["batch"])))
        self.query_one("#memory", Static).update(memory_bar(engine, max(10, self.size.width - 4)))
        table = self.table
        row, top = table.cursor_row, table.scroll_y
        table.clear()
        for request in snapshot.requests:
            table.add_row(*request_row(request), key=request["id"])
        if table.row_count:
            table.move_cursor(row=min(row, table.row_count - 1))
            table.scroll_to(y=top, animate=False)

    def _steps_per_s(self, batch: dict[str, int] | None) -> float | None:
        now, before = time.monotonic(), self._last
        self._last = None if batch is None else (now, batch["step"])
        if before is None or self._last is None or now <= before[0]:
            return None
        return max(0, self._last[1] - before[1]) / (now - before[0])

    async def on_data_table_row_selected(self, selected: DataTable.RowSelected) -> None:
        self._selected = selected.row_key.value
        await self.refresh_view()

    def action_deselect(self) -> None:
        """Close the explanation."""
        self._selected = None
        self.query_one("#why", Static).update(HINT)
