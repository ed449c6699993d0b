"""Constraints on answers as automata over tokens: what may come next, as one bit a token."""
