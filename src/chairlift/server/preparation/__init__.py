"""Preparation of requests: converts the bytes of a body to the prompts and sampling parameters for the engine.

small body --> parsed and validated on the event loop --> planned on a thread ------------+
large body --> preparation worker (a process of its own): parsed, validated, planned -----+--> engine
"""
