"""The figures of a report, one module each. `draw(runs)` returns a Drawing, or an OmittedFigure with the reason."""
