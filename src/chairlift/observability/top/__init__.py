"""`chairlift top`: shows the state of a running server in a terminal."""
