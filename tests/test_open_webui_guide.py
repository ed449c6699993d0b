from __future__ import annotations

import re
from pathlib import Path

from tools.open_webui import FOR_ONE_RUN, SETTINGS

GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "open-webui.md"


def test_the_guide_has_the_settings_that_the_tool_runs_with() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    shown = {name: value.strip("'") for name, value in re.findall(r"^export ([A-Z_]+)=(.*)$", text, re.MULTILINE)}
    del shown["OPENAI_API_BASE_URL"]
    assert shown == SETTINGS
    assert {name for name in FOR_ONE_RUN if f"`{name}=" in text} == {"OFFLINE_MODE", "WEBUI_AUTH"}
