"""The request and response bodies of the API. A field or value that is not implemented is rejected, never ignored.

Field names are those of OpenAI or Anthropic; fields that these do not have are marked as fields of vLLM or Chairlift.
"""
