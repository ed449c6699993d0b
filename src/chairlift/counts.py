"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: float, unit: str) -> str:
    """A number with its unit: 1 -> "1 token", 2 -> "2 tokens". The plural of the unit ends in s."""
    return f"{number:.15g} {unit}{'' if number == 1 else 's'}"


def are(number: float) -> str:
    """The verb after a number: "is" for 1, else "are"."""
    return "is" if number == 1 else "are"
