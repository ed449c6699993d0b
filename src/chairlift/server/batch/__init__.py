"""OpenAI's batch files, answered by an engine in this process through the server's own application."""
