"""Answers OpenAI's batch files with an engine in this process, through the application of the server."""
