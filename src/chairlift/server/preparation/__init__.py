"""Preparation of requests: from the bytes of a body to the prompts and parameters that the engine runs.

small body --> parsed and validated on the event loop --> planned on a thread ------------+
large body --> preparation worker (a process of its own): parsed, validated, planned -----+--> engine
"""
