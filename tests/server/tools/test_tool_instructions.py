"""Tools and calls are written into messages for chat templates that do not read them."""

from __future__ import annotations

from chairlift.server.tools.tool_instructions import completed_tool


def test_a_tool_with_many_parameters_is_completed_in_linear_time() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {str(i): {} for i in range(200_000)}}},
    }
    properties = completed_tool(tool)["function"]["parameters"]["properties"]
    assert properties == {str(i): {"description": ""} for i in range(200_000)}
    assert tool["function"]["parameters"]["properties"]["0"] == {}
