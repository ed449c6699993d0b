"""Pictures and tables from events."""
