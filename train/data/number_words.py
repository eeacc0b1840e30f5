"""Numbers as English words."""

from __future__ import annotations

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
MOST = 99
"""Largest number that is spelled out, and with "minus" the lowest."""


def spoken_number(number: int) -> str:
    """Spell out a number from -99 to 99: "minus eighteen", "thirty six"."""
    tens, ones = divmod(abs(number), 10)
    words = NUMBERS[abs(number)] if abs(number) < len(NUMBERS) else f"{TENS[tens - 2]} {NUMBERS[ones] if ones else ''}".rstrip()
    return f"minus {words}" if number < 0 else words
