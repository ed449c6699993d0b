"""`python -m chairlift` is `chairlift`."""

from chairlift.cli import main

main()
