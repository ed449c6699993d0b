"""The request and response bodies of the API. A field or value that is not implemented is rejected, never ignored.

Fields have OpenAI's or Anthropic's names; fields that these do not have are marked as fields of vLLM or Chairlift.
"""
