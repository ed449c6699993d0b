"""Figures and tables of runs from their events. `figures` draws, `page` writes HTML, other modules prepare the data."""
