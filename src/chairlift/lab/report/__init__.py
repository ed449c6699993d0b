"""Figures and tables from events: data preparation in modules of their own, drawing in `figures`, HTML in `page`."""
